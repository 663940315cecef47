"""The training methods behind one small interface: what the loop does between a finished backward pass and the next rollout.

Belongs here: one class a method (LoGRA, dense AdamW), each turning gradients into a message for the rollout engine. The loop knows
only `Method`; a new method is a new class and an entry in `make_method`.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .config import ConfigError, DenseConfig, TrainConfig
from .kl import ProbeBatch, StepController, exact_kl
from .optim import LoGRA, MissingSketchError, NonFiniteError
from .ppo import sequence_logprobs
from .rollout import Rollouts, shared_prefix
from .sketch import select_targets
from .sync import Weights, full_state_bytes


@dataclass(frozen=True)
class Message:
    """What the engine gets after an update: bytes, and whether they are the full weights (`resync`) or an update (`sync`)."""

    data: bytes
    full: bool


class Method(Protocol):
    """observe -> (backward) -> propose -> scale -> apply, once per update; only `apply` changes weights, so an error before leaves them.

    observe: look at the batch before its gradient is taken, for a method whose projection depends on it.
    """

    weights: Weights
    version: int  # applied updates
    run_id: str

    def zero_grad(self) -> None: ...
    def observe(self, rollouts: Rollouts, pad_id: int) -> None: ...
    def grad_norm(self) -> float: ...
    def propose(self) -> Any: ...
    def scale(self, update: Any, probe: ProbeBatch, mismatch: float) -> float: ...
    def exact_kl(self, update: Any, probe: ProbeBatch, alpha: float) -> float | None: ...
    def apply(self, update: Any, alpha: float) -> Message: ...
    def metrics(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


def make_method(model: torch.nn.Module, cfg: TrainConfig) -> Method:
    """The method named by `cfg.method`, attached to `model`: all weights frozen but what it trains."""
    if cfg.method == "logra":
        return LograMethod(model, cfg)
    if cfg.method == "dense":
        return DenseMethod(model, cfg)
    raise ConfigError(f"method = {cfg.method!r}: allowed is logra, dense")


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recompute activations in backward. transformers does so in training mode only, where dropout would change the policy."""
    dropout = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    if dropout or getattr(model.config, "attention_dropout", 0):
        raise ConfigError(f"gradient_checkpointing: the model has dropout ({', '.join(dropout[:3]) or 'attention_dropout'}); set it to 0")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


class LograMethod:
    """Sketches, RowAdam or SGD on them, predicted-KL control; the message is the rounded factors and a seed."""

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        self.model, self.cfg = model, cfg
        self.optimizer = LoGRA(model, cfg.sketch, cfg.optim)
        self.weights = self.optimizer.weights
        self.controller = StepController(cfg.kl)

    @property
    def version(self) -> int:
        return self.optimizer.version

    @property
    def run_id(self) -> str:
        return self.optimizer.run_id

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def observe(self, rollouts: Rollouts, pad_id: int) -> None:
        """Activation-aware projection: score the first `sketch.scored_responses` responses without gradients, a microbatch at a time.

        TIS takes its old log-probs from the training forward, so this pass is extra: about a third of a training pass over those responses.
        """
        if self.cfg.sketch.projection != "activation":
            return
        count = min(self.cfg.sketch.scored_responses or len(rollouts), len(rollouts))
        for rows in torch.arange(count).split(self.cfg.ppo.microbatch):
            part = rollouts.select(rows.tolist())
            shared = 0 if self.cfg.gradient_checkpointing else shared_prefix(part.prompt_ids)
            padded = part.padded(pad_id, skip=shared)
            with self.optimizer.observe(padded["attention_mask"], shared):
                sequence_logprobs(self.model, padded, self.cfg.sampling.temperature, part.prompt_ids[0][:shared], self.cfg.ppo.logit_chunk)

    def grad_norm(self) -> float:
        """Frobenius norm over all sketches."""
        return self.optimizer.grad_norm()

    def propose(self):
        return self.optimizer.propose()

    def scale(self, update, probe: ProbeBatch, mismatch: float) -> float:
        before = self.controller.state_dict()
        try:
            self.controller.observe_mismatch(mismatch)  # of this batch: part of what this step may spend
            return self.controller.scale(self.model, update, probe)
        except BaseException:
            self.controller.load_state_dict(before)
            raise

    def exact_kl(self, update, probe: ProbeBatch, alpha: float) -> float:
        return exact_kl(self.model, update, probe, alpha, self.cfg.kl.temperature)

    def apply(self, update, alpha: float) -> Message:
        wire = self.optimizer.apply(update, alpha)
        return Message(wire.to_bytes(self.weights.fingerprint()), full=False)

    def metrics(self) -> dict[str, Any]:
        """q, alpha, budgets and predicted KL of the last update; an absent budget (no schedule) is None."""
        last = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in self.controller.last.items()}
        return last | {"mismatch_ema": self.controller.mismatch, "lr": self.optimizer.param_groups[0]["lr"]}

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])


def dense_lr(cfg: DenseConfig, update: int) -> float:
    """Learning rate of an update (counted from 1): linear warm-up, then cosine to final_fraction * lr at `horizon`, then flat."""
    if update <= cfg.warmup:
        return cfg.lr * update / cfg.warmup
    progress = min((update - cfg.warmup) / max(cfg.horizon - cfg.warmup, 1), 1.0)
    return cfg.lr * (cfg.final_fraction + (1 - cfg.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


class DenseMethod:
    """AdamW on the same target weights (METHOD section 6): no sketch, no KL control; the message is the full weights."""

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        self.model, self.cfg = model, cfg.dense
        self.version, self.run_id = 0, uuid.uuid4().hex
        layers = select_targets(model, cfg.sketch.targets)
        self.weights = Weights(layers)
        if self.weights.masters:
            raise ConfigError(f"method dense trains fp32 weights; {next(iter(self.weights.masters))!r} is not fp32")
        model.requires_grad_(False)
        self.parameters = {n: m.weight.requires_grad_(True) for n, m in layers.items()}
        d = cfg.dense
        self.optimizer = torch.optim.AdamW(self.parameters.values(), d.lr, (d.beta1, d.beta2), d.eps, d.weight_decay)
        self._last: dict[str, Any] = {}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def observe(self, rollouts: Rollouts, pad_id: int) -> None:
        """Nothing to find."""

    def grad_norm(self) -> float:
        """Frobenius norm over the gradients of all targets."""
        norms = [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def propose(self) -> None:
        """Checks only: AdamW computes its step when it takes it."""
        if missing := [n for n, p in self.parameters.items() if p.grad is None]:
            raise MissingSketchError(f"no gradient for {len(missing)} of {len(self.parameters)} targets ({', '.join(missing[:3])})")
        if bad := [n for n, p in self.parameters.items() if not torch.isfinite(p.grad).all()]:
            raise NonFiniteError(f"gradient of {', '.join(bad[:5])} holds NaN or infinity: nothing was changed")

    def scale(self, update, probe: ProbeBatch, mismatch: float) -> float:
        return 1.0

    def exact_kl(self, update, probe: ProbeBatch, alpha: float) -> None:
        return None

    def apply(self, update, alpha: float) -> Message:
        lr = dense_lr(self.cfg, self.version + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.zero_grad()
        self.version += 1
        self._last = {"lr": lr}
        return self._message()

    def _message(self) -> Message:
        return Message(full_state_bytes(self.weights, self.run_id, self.version), full=True)

    def metrics(self) -> dict[str, Any]:
        return {"q": None, "alpha": 1.0, "budget": None, "effective_budget": None, "predicted_kl": None} | self._last

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "run_id": self.run_id}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.run_id = state["version"], state["run_id"]
