"""The `logra` weight-transfer backend of vLLM: sketch updates go into a running engine, exactly and whole or not at all.

Belongs here: what runs inside each vLLM worker (`LoGRAEngine`) and the version guard. The weights themselves are in served.py, the
trainer's side in sender.py, rollouts in vllm_local.py, the entry point in plugin.py.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
import xxhash

from ..sync import Replica, SyncError, read_full_state
from ..variants.rounding import Stochastic
from ..weights import Masters

KNOWN = ("0.32",)
if ".".join(vllm.__version__.split(".")[:2]) not in KNOWN:
    raise ImportError(f"logra_core.engines.backend knows vLLM {', '.join(v + '.x' for v in KNOWN)}; installed is {vllm.__version__}")

from vllm.config import CompilationMode  # noqa: E402  (after the guard)
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .served import ServedWeights, locate  # noqa: E402

KINDS = ("update", "full", "abort")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: messages carry all they need."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One message. kind: update (SketchUpdate.to_bytes), full (full_state_bytes) or abort (drop what is staged, end the session).

    payload: the bytes, or their base64 for JSON; path: instead, a file that holds them and that the worker can read.
    """

    kind: str
    payload: bytes | str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: allowed is one of {', '.join(KINDS)}")
        if (self.payload is None) == (self.path is None) and self.kind != "abort":
            raise ValueError("a message needs either payload or path")

    def data(self) -> bytes:
        if self.path is not None:
            return Path(self.path).read_bytes()
        return base64.b64decode(self.payload, validate=True) if isinstance(self.payload, str) else bytes(self.payload)


class LoGRAEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Worker side. `update_weights` checks a message and stages it, `finish_weight_update` commits it; any refusal leaves all as it was."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        for what, value in (("tensor", parallel.tensor_parallel_size), ("pipeline", parallel.pipeline_parallel_size)):
            if value != 1:
                raise ValueError(f"{what}_parallel_size = {value}: the backend 'logra' serves whole layers only, allowed is 1")
        if vllm_config.lora_config is not None:
            raise ValueError("enable_lora: the backend 'logra' updates the weights themselves and knows no LoRA layers")
        compiled = vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)
        if device.type == "cpu" and compiled:
            # Packing makes new objects at every load, which a graph traced once may not see, and reading back would not notice.
            raise ValueError("on a CPU the backend 'logra' serves an eager model only: set enforce_eager (--enforce-eager)")
        self.replica: Replica | None = None
        self.staged: Callable[[], None] | None = None
        self._frozen: dict[str, str] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.staged = None

    def start_weight_update(self) -> None:
        self.staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class also waits for an accelerator, which a CPU has not

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check a message against what is served now, and keep it for `finish_weight_update`. Changes nothing."""
        already, self.staged = self.staged is not None, None
        if update_info.kind == "abort":
            raise SyncError("session ended on request; nothing was changed")
        if already:
            raise SyncError("a second message in one session: finish the first, or start again")
        try:
            data = update_info.data()
        except (OSError, ValueError) as error:
            raise SyncError(f"message cannot be read: {error}") from error
        self.staged = self._full(data) if update_info.kind == "full" else self._update(data)

    def finish_weight_update(self) -> None:
        commit, self.staged = self.staged, None
        if commit is None:
            raise SyncError("nothing to finish: no message arrived in this session")
        commit()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self.staged = None

    def status(self, digests: str = "") -> dict[str, Any]:
        """run_id, version, layers; digests "masters": their fingerprint, "served": also that of the weights as served."""
        r = self.replica
        found = {"run_id": r and r.run_id, "version": r.version if r else 0, "layers": len(r.weights.shapes) if r else 0}
        found["consistent"] = r is None or r.weights.consistent
        if digests and r:
            found["fingerprint"] = r.fingerprint()
        if digests == "served" and r:
            found["served"] = r.weights.served_fingerprint()
        return found

    def _update(self, data: bytes) -> Callable[[], None]:
        if self.replica is None:
            raise SyncError("this engine has no fp32 masters yet: send a full resync first")
        if not self.replica.weights.consistent:
            raise SyncError("an earlier failure could not be rolled back, so what is served is unknown: send a full resync")
        self._check_frozen()
        return self.replica.prepare(data)

    def _full(self, data: bytes) -> Callable[[], None]:
        header, state = read_full_state(data)
        replica = self.replica
        if replica is None or set(replica.weights.shapes) != set(state) or replica.weights.kind != header["weights"]:
            places = locate(self.model, list(state))
            if wrong := [f"{n}: {list(t.shape)}, expected {list(places[n].shape)}" for n, t in state.items() if tuple(t.shape) != places[n].shape]:
                raise SyncError("weight of the wrong shape: " + "; ".join(wrong[:5]))
            rounding = {made.kind: made for made in (Masters(), Stochastic())}.get(header["weights"])
            if rounding is None:
                raise SyncError(f"the trainer keeps its weights as {header['weights']!r}, which this engine does not know")
            replica = Replica(ServedWeights(self.model, self.model_config, list(state), rounding))
        if self._frozen:
            self._check_frozen()
        inner = replica.prepare_state(header, state)

        def commit() -> None:
            inner()
            self.replica = replica
            self._frozen = self._frozen or self._sum_frozen()

        return commit

    def _sum_frozen(self) -> dict[str, str]:
        trained = {f"{p.path}.weight" for p in self.replica.weights.layout.places.values()}
        rest = ((n, p.detach()) for n, p in self.model.named_parameters() if n not in trained and p.numel())
        return {n: xxhash.xxh3_128(p.contiguous().view(torch.uint8).cpu().numpy()).hexdigest() for n, p in rest}

    def _check_frozen(self) -> None:
        """Embeddings and norms are in no message: if they changed (sleep level 2 discards them), no message can make this engine right."""
        if changed := [n for n, value in self._sum_frozen().items() if self._frozen.get(n, value) != value]:
            raise SyncError(f"weights that do not train have changed in the engine ({', '.join(changed[:5])}): start it again")


class WorkerExtension:
    """For `worker_extension_cls`: adds one method to vLLM's worker, callable by name over `collective_rpc`."""

    def logra_status(self, digests: str = "") -> dict[str, Any]:
        return self.weight_transfer_engine.status(digests)
