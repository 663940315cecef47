"""The training methods behind one small interface: what the loop does between a finished backward pass and the next rollout.

Belongs here: the interface, and LoGRA behind it; dense AdamW is in methods_dense.py, LoRA and GaLore in methods_compare.py. Each turns gradients into a message for the rollout
engine. The loop knows only `Method`; a new method is a new class and an entry in `make_method`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .config import ConfigError, TrainConfig
from .kl import ProbeBatch, StepController, exact_kl
from .optim import LoGRA
from .ppo import sequence_logprobs
from .rollout import Rollouts, shared_prefix
from .sync import Weights


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

    def trained(self) -> list[torch.Tensor]: ...  # the tensors of the model that updates change
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
    from . import methods_compare, methods_dense  # they build on this file

    dense = methods_dense.ControlledDenseMethod if cfg.dense.kl_control else methods_dense.DenseMethod
    return {"dense": dense, "lora": methods_compare.LoRAMethod, "galore": methods_compare.GaLoreMethod}[cfg.method](model, cfg)


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

    def trained(self) -> list[torch.Tensor]:
        return [m.weight for m in self.weights.modules.values()]

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
        return self.controller.observe_and_scale(self.model, update, probe, mismatch)

    def exact_kl(self, update, probe: ProbeBatch, alpha: float) -> float:
        return exact_kl(self.model, update, probe, alpha, self.cfg.kl.temperature)

    def apply(self, update, alpha: float) -> Message:
        wire = self.optimizer.apply(update, alpha)
        return Message(wire.to_bytes(self.weights.fingerprint()), full=False)

    def metrics(self) -> dict[str, Any]:
        """q, alpha, budgets and predicted KL of the last update."""
        return self.controller.metrics() | {"lr": self.optimizer.param_groups[0]["lr"]}

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
