"""Starts real processes that speak gloo, as torchrun would, out of a server that has imported everything; and what they run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["logra_core.rl.distributed", "reasoning_gym", "transformers.models.llama.modeling_llama"])
LIMIT = 240  # seconds for any launch


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Launch:
    """`world` processes that call `function(folder, *arguments)`, each with its rank in the environment and its errors in a file."""

    def __init__(self, world: int, function, folder: Path, *arguments) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        self.folder, port = folder, free_port()
        self.processes = [SERVER.Process(target=_run, args=(r, world, port, function, folder, *arguments)) for r in range(world)]
        for process in self.processes:
            process.start()

    def errors(self, rank: int) -> str:
        return (self.folder / f"errors-{rank}").read_text()

    def wait(self, ranks: list[int] | None = None, limit: float = LIMIT) -> list[int]:
        """Exit codes of some ranks (all); kills everything and fails if they take too long."""
        waited = self.processes if ranks is None else [self.processes[r] for r in ranks]
        end = time.monotonic() + limit
        for process in waited:
            process.join(max(0.0, end - time.monotonic()))
        late = [i for i, p in enumerate(self.processes) if p in waited and p.exitcode is None]
        if late:
            self.kill()
            raise AssertionError(f"ranks {late} did not end within {limit} s; " + "\n".join(self.errors(r)[-1500:] for r in late))
        return [p.exitcode for p in waited]

    def kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()

    def results(self) -> list:
        """What each rank's function returned; the launch must have gone well."""
        codes = self.wait()
        assert not any(codes), f"exit codes {codes}\n" + "\n".join(self.errors(r)[-3000:] for r, c in enumerate(codes) if c)
        return [torch.load(self.folder / f"result-{r}", weights_only=False) for r in range(len(self.processes))]


def _run(rank: int, world: int, port: int, function, folder: Path, *arguments) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout = open(os.devnull, "w")
    sys.stderr = open(folder / f"errors-{rank}", "w", buffering=1)
    torch.set_num_threads(1)
    try:
        torch.save(function(folder, *arguments), folder / f"result-{rank}")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
