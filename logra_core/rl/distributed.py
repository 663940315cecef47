"""The same run on several processes: `torchrun --nproc-per-node N -m logra_core.rl.train config.yaml [dotted.key=value ...]`.

Rank 0 alone holds the task, the graders, the rollout engine and the log; what it draws and grades goes to all. So a run does not depend on
how many ranks train it, and may go on with another number. Each rank trains on its share of the microbatches (dealt in turn: they are
sorted by length, so shares are alike) and probes its share of the probe responses. Every loss is divided by the tokens of the whole batch,
so gradients are summed over ranks. All ranks take a step or none does. On several nodes the run's folder must be shared.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engines.rollout import RolloutEngine, Rollouts
from ..kl import ProbeBatch, StepController
from ..optim import MissingSketchError, NonFiniteError
from ..parallel.distributed import ShardedLoGRA, ShardedWeights, SharedProbe, shard
from ..parallel.ranks import PeerError, Ranks, outside_launch, spare_devices
from ..settings import ConfigError
from ..sketch import select_targets
from ..sync import full_state_bytes
from . import checkpoint
from .engine import make_engine
from .methods import DenseMethod, LograMethod, Message, Method
from .settings import TrainConfig
from .tasks import Grade, make_task
from .trainer import Trainer


class ShardedLograMethod(LograMethod):
    """LoGRA over ranks; the message is made on rank 0."""

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig, ranks: Ranks) -> None:
        self.model, self.cfg, self.ranks = model, cfg, ranks
        self.optimizer = ShardedLoGRA(model, ranks, cfg.sketch, cfg.optim)
        self.weights = self.optimizer.weights
        self.controller = StepController(cfg.kl)

    def apply(self, update, alpha: float) -> Message:
        wire = self.optimizer.apply(update, alpha)
        fingerprint = self.weights.fingerprint()
        return Message(wire.to_bytes(fingerprint) if self.ranks.first else b"", full=False)


class ShardedDenseMethod(DenseMethod):
    """AdamW on this rank's rows; FSDP sums the gradients. The message is the full weights, put together on rank 0."""

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig, ranks: Ranks) -> None:
        super().__init__(model, cfg)
        self.ranks, self.weights = ranks, ShardedWeights(self.weights.modules, ranks)
        self.run_id = ranks.from_first(lambda: self.run_id)

    def grad_norm(self) -> float:
        own = [self.ranks.own_rows(p.grad).double().square().sum() for p in self.parameters.values() if p.grad is not None]
        return self.ranks.sum(float(sum(own))) ** 0.5

    def propose(self) -> None:
        """The checks of the single process, with one verdict for all ranks."""
        seen = {n: None if p.grad is None else bool(torch.isfinite(self.ranks.own_rows(p.grad)).all()) for n, p in self.parameters.items()}
        everyone = self.ranks.gather(seen)
        if missing := [n for n in seen if any(other[n] is None for other in everyone)]:
            raise MissingSketchError(f"no gradient for {len(missing)} of {len(seen)} targets ({', '.join(missing[:3])})")
        if bad := [n for n in seen if not all(other[n] for other in everyone)]:
            raise NonFiniteError(f"gradient of {', '.join(bad[:5])} holds NaN or infinity: nothing was changed")

    def load_state_dict(self, state: dict) -> None:
        optimizer = dict(state["optimizer"])
        optimizer["state"] = {i: {k: self._by_rows(v) for k, v in s.items()} for i, s in optimizer["state"].items()}
        super().load_state_dict(state | {"optimizer": optimizer})
        self.weights.changed()

    def _by_rows(self, value: torch.Tensor) -> torch.Tensor:
        return self.ranks.as_dtensor(self.ranks.own_rows(value).to(self.ranks.device, copy=True), len(value)) if value.dim() else value

    def _message(self) -> Message:
        self.weights.changed()
        self.weights.fingerprint()
        return Message(full_bytes(self.weights, self) or b"", full=True)


METHODS = {"logra": ShardedLograMethod, "dense": ShardedDenseMethod}


def full_bytes(weights: ShardedWeights, method: Method) -> bytes | None:
    """The full resync message, on rank 0; None on the others. Collective."""
    whole = weights.assembled()
    return None if whole is None else full_state_bytes(whole, method.run_id, method.version)


class DistributedTrainer(Trainer):
    """`Trainer` over the ranks of a torchrun launch; construct and run it on every rank."""

    def __init__(self, cfg: TrainConfig) -> None:
        if cfg.method not in METHODS:
            raise ConfigError(f"method = {cfg.method!r}: allowed under torchrun is {', '.join(METHODS)}; without it all methods train")
        if cfg.method == "dense" and cfg.dense.kl_control:
            raise ConfigError("dense.kl_control = True: allowed under torchrun is False; without it dense AdamW trains under KL control")
        self.ranks = Ranks(cfg.peer_timeout)
        super().__init__(cfg)
        self.share_prefix = False  # a pass of its own on some ranks only would set FSDP's collectives against each other
        self.quiet = not self.ranks.first

    def _before_loading(self) -> None:
        self.task = self.ranks.on_first(lambda: make_task(self.cfg.task))

    def _after_loading(self) -> None:
        cfg = self.cfg
        layers = select_targets(self.model, cfg.sketch.targets)
        self._frozen_digest = checkpoint.frozen_digest(self.model, [m.weight for m in layers.values()])  # what does not train is whole only now
        shard(self.model, self.ranks, cfg.compute_dtype)
        self.method = METHODS[cfg.method](self.model, cfg, self.ranks)
        self.engine = self.ranks.on_first(self._start_engine)

    def _start_engine(self) -> RolloutEngine:
        spare = spare_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        with outside_launch(spare):
            return make_engine(self.cfg)

    def run(self) -> dict[str, Any]:
        try:
            return super().run()
        except RuntimeError as error:
            if lost_peer(error):
                raise PeerError(
                    f"rank {self.ranks.rank} at version {self.method.version}: another rank died, or did not answer within {self.ranks.timeout:g} s "
                    f"(peer_timeout); the run goes on from its last checkpoint when started again ({str(error).splitlines()[0]})"
                ) from error
            raise

    def close(self) -> None:
        super().close()
        self.ranks.close()

    # ---- what rank 0 does for all

    def _find(self) -> Path | None:
        return self.ranks.from_first(super()._find)

    def _open_log(self, found: Path | None, done: int) -> None:
        parent = super()._open_log
        self.ranks.on_first(lambda: parent(found, done))

    def _resync(self) -> None:
        self.method.weights.fingerprint()  # known to all from here on
        data = full_bytes(self.method.weights, self.method)
        self.ranks.on_first(lambda: self.engine.resync(data))

    def _respond(self, update: int) -> tuple[Rollouts, list[Grade]]:
        parent = super()._respond
        return self.ranks.from_first(lambda: parent(update))

    def _send(self, message: Message) -> None:
        parent = super()._send
        self.ranks.on_first(lambda: parent(message))

    def _evaluate(self, update: int) -> None:
        parent = super()._evaluate
        self.ranks.on_first(lambda: parent(update))

    def _row(self, kind: str, **values: Any) -> dict[str, Any]:
        return super()._row(kind, **values) if self.ranks.first else {"kind": kind} | values

    def _summary(self) -> dict[str, Any]:
        return self.ranks.from_first(super()._summary)

    # ---- what each rank does its share of

    def _microbatches(self, rollouts: Rollouts, advantages: torch.Tensor, groups: list[list[int]]) -> list[tuple]:
        world, own = self.ranks.world, groups[self.ranks.rank :: self.ranks.world]
        made = [self._microbatch(rollouts, advantages, rows) for rows in own]
        if len(own) < -(-len(groups) // world):
            self._idle()
        everyone = self.ranks.gather(made)
        return [everyone[i % world][i // world] for i in range(len(groups))]

    def _idle(self) -> None:
        """A forward and a backward pass that add nothing, for company: FSDP's collectives take all ranks."""
        ids = torch.full((1, 2), self.pad_id, device=self.ranks.device)
        (self.model(input_ids=ids, use_cache=False).logits * 0).sum().backward()

    def _probe_of(self, rollouts: Rollouts, rows: list[int]) -> SharedProbe:
        own = rows[self.ranks.rank :: self.ranks.world]
        part: ProbeBatch | None = super()._probe_of(rollouts, own) if own else None
        return SharedProbe(part, self.ranks)

    # ---- checkpoints

    def _frozen(self) -> str:
        return self._frozen_digest

    def _load(self, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        loaded, error = None, None
        try:
            loaded = checkpoint.load(path, self.ranks.empty)
        except checkpoint.CheckpointError as raised:
            error = raised
        if problems := [p for p in self.ranks.gather(error and str(error)) if p]:
            raise error or checkpoint.CheckpointError(problems[0])
        return loaded

    def _write(self, update: int, state: dict[str, Any]) -> None:
        weights, ranks = self.method.weights, self.ranks
        made = ranks.from_first(lambda: checkpoint.begin(self.out / "checkpoint", update))
        rows = {n: ranks.as_dtensor(weights.stored(n), d) for n, (d, _) in weights.shapes.items()}
        noted = checkpoint.save_shards(made, rows, state)
        ranks.on_first(lambda: checkpoint.finish(made, noted))


def lost_peer(error: RuntimeError) -> bool:
    """Whether an error of torch says that another process is gone or silent."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
