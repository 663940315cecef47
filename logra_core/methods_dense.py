"""Dense AdamW on the target weights: as it is (the paper's baseline), or with its step under LoGRA's predicted-KL control.

Belongs here: what trains a full gradient, and the learning-rate schedule. The message to the rollout engine is the full weights.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any

import torch

from .config import AdamConfig, ConfigError, DenseConfig, NonFiniteError, TrainConfig
from .kl import ProbeBatch, StepController, exact_kl
from .methods import Message
from .optim import LARGEST, MissingSketchError
from .rollout import Rollouts
from .sketch import select_targets
from .sync import Weights, full_state_bytes


def dense_lr(cfg: AdamConfig, update: int) -> float:
    """Learning rate of an update (counted from 1): linear warm-up, then cosine to final_fraction * lr at `horizon`, then flat."""
    if update <= cfg.warmup:
        return cfg.lr * update / cfg.warmup
    progress = min((update - cfg.warmup) / max(cfg.horizon - cfg.warmup, 1), 1.0)
    return cfg.lr * (cfg.final_fraction + (1 - cfg.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


class DenseMethod:
    """AdamW on the same target weights (METHOD section 6): no sketch, no KL control; the message is the full weights."""

    section = "dense"  # of the configuration

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        self.model, self.cfg = model, getattr(cfg, self.section)
        self.version, self.run_id = 0, uuid.uuid4().hex
        layers = select_targets(model, cfg.sketch.targets)
        self.weights = Weights(layers)
        if self.weights.masters:
            raise ConfigError(f"method {cfg.method} trains fp32 weights; {next(iter(self.weights.masters))!r} is not fp32")
        model.requires_grad_(False)
        self.parameters = {n: p.requires_grad_(True) for n, p in self._choose(layers, cfg).items()}
        self.optimizer = self._make_optimizer()
        self._last: dict[str, Any] = {}

    def _choose(self, layers: dict[str, torch.nn.Linear], cfg: TrainConfig) -> dict[str, torch.nn.Parameter]:
        """What trains, by name."""
        return {n: m.weight for n, m in layers.items()}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        c = self.cfg
        return torch.optim.AdamW(self.parameters.values(), c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)

    def trained(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def observe(self, rollouts: Rollouts, pad_id: int) -> None:
        """Nothing to find."""

    def grad_norm(self) -> float:
        """Frobenius norm over the gradients of all that trains."""
        norms = [p.grad.norm() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def propose(self) -> Any:
        """Checks only: AdamW computes its step when it takes it."""
        if missing := [n for n, p in self.parameters.items() if p.grad is None]:
            raise MissingSketchError(f"no gradient for {len(missing)} of {len(self.parameters)} targets ({', '.join(missing[:3])})")
        self._refuse({n: p.grad for n, p in self.parameters.items()}, "gradient")

    @torch.no_grad()
    def _refuse(self, tensors: dict[str, torch.Tensor], what: str) -> None:
        if bad := [n for n, t in tensors.items() if not float(torch.linalg.vector_norm(t, math.inf)) <= LARGEST]:  # NaN reaches the norm
            raise NonFiniteError(f"{what} of {', '.join(bad[:5])} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed")

    def scale(self, update: Any, probe: ProbeBatch, mismatch: float) -> float:
        return 1.0

    def exact_kl(self, update: Any, probe: ProbeBatch, alpha: float) -> float | None:
        return None

    def apply(self, update: Any, alpha: float) -> Message:
        self._step(update, alpha)
        self.zero_grad()
        self.version += 1
        return self._message()

    def _step(self, update: Any, alpha: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self._last = {"lr": self._lr()}
        self.optimizer.step()

    def _lr(self) -> float:
        """Of the next update."""
        return dense_lr(self.cfg, self.version + 1)

    def _message(self) -> Message:
        return Message(full_state_bytes(self.weights, self.run_id, self.version), full=True)

    def metrics(self) -> dict[str, Any]:
        return {"q": None, "alpha": 1.0, "budget": None, "effective_budget": None, "predicted_kl": None} | self._last

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "run_id": self.run_id}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.run_id = state["version"], state["run_id"]


@dataclass(frozen=True, eq=False)
class DenseUpdate:
    """A proposed W ← W − α · factor of every target, factor [D, K] fp32. version: number of updates after it is applied."""

    version: int
    factors: dict[str, torch.Tensor]

    def basis(self, name: str, device: torch.device) -> None:
        """None: the factor is the whole change."""


def moments(g_DK: torch.Tensor, m_DK: torch.Tensor, v_DK: torch.Tensor, cfg: DenseConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's first and second moment after gradient g; the inputs are unchanged. torch.optim.AdamW's operations, so its bits."""
    return torch.lerp(m_DK, g_DK, 1 - cfg.beta1), (v_DK * cfg.beta2).addcmul_(g_DK, g_DK, value=1 - cfg.beta2)


def adamw(m_DK: torch.Tensor, v_DK: torch.Tensor, W_DK: torch.Tensor, step: int, lr: float, cfg: DenseConfig) -> torch.Tensor:
    """What AdamW subtracts from W [D, K] at step t (from 1) with the new moments: lr (m̂ / (√v̂ + ε) + weight_decay W)."""
    root_DK = (v_DK.sqrt() / math.sqrt(1 - cfg.beta2**step)).add_(cfg.eps)
    change_DK = torch.div(m_DK, root_DK, out=root_DK).mul_(lr / (1 - cfg.beta1**step))
    return change_DK.add_(W_DK, alpha=lr * cfg.weight_decay) if cfg.weight_decay else change_DK


class ControlledDenseMethod(DenseMethod):
    """AdamW whose step, of the size that its learning rate gives, is scaled by α to the KL budget of `cfg.kl`, as LoGRA's is.

    α ≤ kl.alpha_max (3): with a learning rate far above a plain run's (1e-4, say) the budget decides the size of every step, and the
    learning rate's schedule nothing. Moments advance at `apply` and do not depend on α. The proposal is one more value a weight.
    """

    def __init__(self, model: torch.nn.Module, cfg: TrainConfig) -> None:
        super().__init__(model, cfg)
        self.controller, self.temperature = StepController(cfg.kl), cfg.kl.temperature
        self._pending: DenseUpdate | None = None
        for p in self.parameters.values():  # as torch.optim.AdamW keeps them
            self.optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def propose(self) -> DenseUpdate:
        """AdamW's step as a function of gradients, moments and weights. Changes nothing.

        Raises: MissingSketchError: a target saw no backward. NonFiniteError: a gradient or a change is not finite, or above 1e18.
        """
        super().propose()
        changes = {}
        for name, p in self.parameters.items():
            made = moments(p.grad, *self._moments(p), self.cfg)
            changes[name] = adamw(*made, p, self.version + 1, self._lr(), self.cfg)
        self._refuse(changes, "change")
        self._pending = DenseUpdate(self.version + 1, changes)
        return self._pending

    def _moments(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.state[p]["exp_avg"], self.optimizer.state[p]["exp_avg_sq"]

    def scale(self, update: DenseUpdate, probe: ProbeBatch, mismatch: float) -> float:
        return self.controller.observe_and_scale(self.model, update, probe, mismatch)

    def exact_kl(self, update: DenseUpdate, probe: ProbeBatch, alpha: float) -> float:
        return exact_kl(self.model, update, probe, alpha, self.temperature)

    @torch.no_grad()
    def _step(self, update: DenseUpdate, alpha: float) -> None:
        if update is not self._pending:
            raise RuntimeError(f"not the update last proposed at version {self.version}; propose again")
        if not 0 <= alpha <= LARGEST:
            raise NonFiniteError(f"alpha = {alpha:g} is not finite or too large: nothing was changed")
        self._last = {"lr": self._lr()}
        for name, p in self.parameters.items():
            state = self.optimizer.state[p]
            state["exp_avg"], state["exp_avg_sq"] = moments(p.grad, *self._moments(p), self.cfg)
            state["step"] += 1
            p.sub_(update.factors[name], alpha=alpha)
        self._pending = None

    def metrics(self) -> dict[str, Any]:
        """q, alpha, budgets and predicted KL of the last update, and AdamW's own learning rate."""
        return self.controller.metrics() | self._last

    def state_dict(self) -> dict:
        return super().state_dict() | {"controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.controller.load_state_dict(state["controller"])
        self._pending = None
