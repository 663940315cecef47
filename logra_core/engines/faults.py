"""Faults injected into a real vLLM worker, and a look at the bits it serves: for the tests and notebook 04, never in production.

Given to vLLM as `worker_extension_cls`, so the methods run in the worker's own process, called by name over `collective_rpc`.
"""

from __future__ import annotations

import os
import signal

import torch
from safetensors.torch import load_file

from .backend import WorkerExtension


class FaultyWorker(WorkerExtension):
    """What may be done to a worker."""

    def probe_served(self, path: str) -> dict:
        """Compare every served target weight, element by element, with the file (name -> [D, K])."""
        weights, expected = self.weight_transfer_engine.replica.weights, load_file(path)
        served = weights.layout.served()
        same = {n: bool(torch.equal(served[n], W_DK)) for n, W_DK in expected.items()}
        return {"layers": len(same), "names": sorted(weights.shapes) == sorted(expected), "differ": [n for n, ok in same.items() if not ok]}

    def probe_threads(self) -> int:
        """Threads that the worker computes with."""
        return torch.get_num_threads()

    def probe_kept(self) -> int:
        """Bytes that the worker keeps of the target layers beside what it serves."""
        weights = self.weight_transfer_engine.replica.weights
        held = [weights.masters, *vars(weights.layout).values()]
        return sum(t.nbytes for value in held if isinstance(value, dict) for t in value.values() if isinstance(t, torch.Tensor))

    def probe_fail_at(self, module: int, kill: bool = False) -> None:
        """The next publication raises when it reaches that module (counted from 0), and only then. With kill the process dies there."""
        weights = self.weight_transfer_engine.replica.weights.layout
        load, seen = weights._load, []

        def fails_once(place):
            seen.append(place.path)
            if len(seen) == module + 1:
                weights._load = load
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(f"worker failed at {place.path}")
            load(place)

        weights._load = fails_once

    def probe_drift(self, name: str) -> None:
        """Flip the last bit of one entry of a master, as a fault in memory would."""
        self.weight_transfer_engine.replica.weights.masters[name].view(torch.int32)[1, 2] ^= 1

    def probe_norm(self, factor: float) -> None:
        """Multiply a weight that no message carries by a power of two, which can be undone exactly."""
        with torch.no_grad():
            dict(self.model_runner.get_model().named_parameters())["model.norm.weight"].mul_(factor)
