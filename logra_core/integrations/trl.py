"""KL control inside somebody else's loop: a callback for transformers' `Trainer` and for TRL's trainers.

Such a loop calls `LoGRA.step()` and nothing else, so the step scale comes from `LoGRA.scale`. Contexts are those of the batch behind the
step: every training forward passes through a hook that keeps the first sequences with labelled tokens. Needs neither TRL nor accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from ..kl import ProbeBatch, StepController, exact_kl
from ..optim import LoGRA
from ..settings import ConfigError, KLConfig
from ..sync import SketchUpdate

LOGGED = ("alpha", "budget", "predicted_kl")
SAVED = "kl_control"


class KLControlCallback(TrainerCallback):
    """Scales every step of `logra` to its predicted-KL budget (METHOD section 4) while a trainer runs.

        logra = LoGRA(model, SketchConfig(rank=64), OptimConfig(update_ratio=1e-3))
        control = KLControlCallback(logra, KLConfig(schedule="constant", budget=1e-3))
        GRPOTrainer(model, ..., args=args, optimizers=(logra, None), callbacks=[control]).train()

    Args:
        logra: the optimizer the trainer was given. config: budget, estimator and `probe_responses`, the sequences of a prediction.
        probe: gives the contexts instead of the batch, for example fixed ones, or where the trainer hands the model no labels.
        exact: measure the exact KL of each step on these contexts too (two forward passes more), as `exact_kl` in `history`.

    The last update's values join the trainer's log as `kl/alpha`, `kl/budget` and `kl/predicted_kl`; `history` has one dict an update of
    this process. A learning-rate schedule cancels out of a controlled step (q grows with lr²), except where α_max binds: schedule the budget.
    No rollout mismatch is subtracted unless you feed `controller.observe_mismatch`. What the controller remembers is saved and restored
    with the optimizer's state, as `kl_control` of its parameter group.

    Raises:
        ConfigError: at the start of training, if the trainer steps another optimizer, samples at another temperature than the config's
            or runs several processes (each would find its own α); at a step, if no sequence with a label was seen since the last one.
        NonFiniteError: the prediction is not finite; the step is not taken.
    """

    def __init__(self, logra: LoGRA, config: KLConfig = KLConfig(), probe: Callable[[], ProbeBatch] | None = None, exact: bool = False) -> None:
        self.logra, self.controller, self.probe, self.exact = logra, StepController(config), probe, exact
        self.history: list[dict[str, Any]] = []
        self._rows: list[tuple[torch.Tensor, ...]] = []  # (ids, attention, response), each [T], of the batch at hand
        self._hook = None
        logra.register_state_dict_post_hook(lambda logra, made: made["param_groups"][0].update({SAVED: self.controller.state_dict()}))

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if inner is not self.logra:
            raise ConfigError(f"the trainer steps a {type(inner).__name__}, not this callback's LoGRA: pass optimizers=(logra, None)")
        if args.world_size > 1:
            raise ConfigError(f"{args.world_size} processes would each find an alpha of their own; KLControlCallback allows one")
        sampled = getattr(args, "temperature", None)
        if sampled is not None and sampled != self.controller.config.temperature:
            raise ConfigError(f"KLConfig.temperature = {self.controller.config.temperature}, the trainer samples at {sampled}: must be equal")
        self._release()
        if saved := self.logra.param_groups[0].pop(SAVED, None):  # the trainer has loaded a checkpoint
            self.controller.load_state_dict(saved)
        self.logra.scale = self._scale
        if self.probe is None and self._needed:
            self._hook = self.logra.model.register_forward_pre_hook(self._observe, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._release()
        self.logra.scale = None

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.history and logs is not None and "loss" in logs:
            values = {f"kl/{k}": v for k in LOGGED if (v := self.history[-1][k]) is not None}
            logs.update(values)
            if state.log_history:  # appended before this event, so that it would miss them
                state.log_history[-1].update(values)

    @property
    def _needed(self) -> bool:
        """Whether anything is predicted or measured on contexts."""
        return self.exact or self.controller.config.schedule != "none"

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._rows = None, []

    def _observe(self, module, args: tuple, kwargs: dict) -> None:
        """Keep sequences [T] of this forward until there are enough for the step."""
        wanted = self.controller.config.probe_responses - len(self._rows)
        labels, ids, mask = (kwargs.get(k) for k in ("labels", "input_ids", "attention_mask"))
        if wanted <= 0 or labels is None or not torch.is_grad_enabled():
            return
        mask = torch.ones_like(labels) if mask is None else mask
        if ids is None or kwargs.get("position_ids") is not None or not ids.shape == labels.shape == mask.shape:
            raise ConfigError("KLControlCallback reads input_ids, attention_mask and labels, all [B, T], and no packed sequences; pass probe=")
        response = (labels != -100) & mask.bool()
        response[:, 0] = False  # has no context
        for row in response.any(1).nonzero().flatten().tolist()[:wanted]:
            self._rows.append((ids[row].clone(), mask[row].clone(), response[row]))

    def _contexts(self) -> ProbeBatch:
        if self.probe is not None:
            return self.probe()
        if not self._rows:
            raise ConfigError("no forward with labels reached the model since the last step, so there are no contexts to predict KL on: pass probe=")
        width = max(len(row[0]) for row in self._rows)  # microbatches may be padded to different widths
        return ProbeBatch(*(torch.stack([F.pad(t, (0, width - len(t))) for t in column]) for column in zip(*self._rows, strict=True)))

    def _scale(self, update: SketchUpdate) -> float:
        model, config = self.logra.model, self.controller.config
        probe = self._contexts() if self._needed else None
        alpha = self.controller.scale(model, update, probe)
        measured = {"exact_kl": exact_kl(model, update, probe, alpha, config.temperature)} if self.exact else {}
        self.history.append({"version": update.version, **self.controller.last, **measured})
        self._rows = []
        return alpha
