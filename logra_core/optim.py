"""From sketch to weight change: `row_adam` and `sgd` as pure functions, and `LoGRA`, the optimizer around them (METHOD section 3).

`propose()` changes nothing; `apply(update, alpha)` merges and returns what to send; `step()` is both, for loops that know only optimizers.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from .projection import Projection
from .settings import RULES, ConfigError, NonFiniteError, OptimConfig, SketchConfig, to_dict
from .sketch import Sketcher, attach, detach, select_targets
from .sync import SketchUpdate, SyncError
from .weights import TINY, Masters, Modules, Weights, not_finite

LARGEST = 1e18  # of a sketch or factor entry: squares and products with A stay finite in fp32
_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class MissingSketchError(RuntimeError):
    """No backward pass reached any target since the last update."""


def sgd(S_DR: torch.Tensor) -> torch.Tensor:
    """U = S, a copy."""
    return S_DR.clone()


def row_adam(
    S_DR: torch.Tensor, v_D: torch.Tensor, step: int, beta2: float, eps: float, moved_DR: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RowAdam: Adam's second moment, one value an output row, no first moment (METHOD section 3).

    Args:
        S_DR: sketch [D, R] fp32. v_D: moment [D] fp32 before this step. step: t, counted from 1. moved_DR: what the step is made of in place of S (a first
        moment).
    Returns U [D, R] with ‖U‖ = ‖S‖ (or ‖moved‖), and the new moment [D]; the inputs are unchanged. A zero S gives a zero U.
    """
    moved_DR = S_DR if moved_DR is None else moved_DR
    square_D = torch.linalg.vector_norm(S_DR, dim=1).square()  # Σ_j S²: the only pass over S besides U's own
    v_D = beta2 * v_D + (1 - beta2) * square_D / S_DR.shape[1]  # v ← β2 v + (1−β2) mean_j S²
    root_D = (v_D / (1 - beta2**step)).sqrt()  # root = √(v / (1−β2ᵗ))
    inverse_D = 1 / (root_D + torch.clamp(eps * root_D.mean(), min=TINY))  # inv = 1 / (root + max(ε mean(root), tiny))
    inverse_D = inverse_D / inverse_D.max()  # rms(inv) is scale-free; this keeps its squares finite
    inverse_D = inverse_D / inverse_D.square().mean().sqrt()  # inv ← inv / rms(inv)
    square_D = square_D if moved_DR is S_DR else torch.linalg.vector_norm(moved_DR, dim=1).square()
    norm_U = (inverse_D.square() @ square_D).sqrt()  # ‖inv ⊙ S‖
    scale = square_D.sum().sqrt() / norm_U.clamp(min=TINY)  # ‖U‖ = ‖S‖
    return (inverse_D * scale)[:, None] * moved_DR, v_D  # U = inv ⊙ S, rescaled


def product_norm_sq(U_DR: torch.Tensor, V_RK: torch.Tensor) -> torch.Tensor:
    """‖U V‖² without the [D, K] product: tr(U (V Vᵀ) Uᵀ) = ⟨UᵀU, V Vᵀ⟩, a float64 scalar."""
    return torch.sum((U_DR.T @ U_DR) * (V_RK @ V_RK.T), dtype=torch.float64)


class Step(NamedTuple):
    """When a rule is asked. number: t of the update, from 1. age: updates made with this A before (0 where A is new)."""

    number: int
    age: int
    beta2: float
    eps: float


class RowAdamRule:
    """`row_adam` with its moment v [D]; any rule is such an object, and pure: nothing that is given is changed.

    start: state before the first update, by name; each tensor's first dimension is the layer's rows D. A call gives U [D, R] before the common factor, and
    the new state. moved_DR: what is moved along in place of S.
    """

    def start(self, rows: int, columns: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"v": torch.zeros(rows, device=device)}

    def __call__(self, S_DR, V_RK, state, step, moved_DR=None):
        U_DR, v_D = row_adam(S_DR, state["v"], step.number, step.beta2, step.eps, moved_DR)
        return U_DR, {"v": v_D}


class SGDRule(RowAdamRule):
    """`sgd`, without state."""

    def start(self, rows, columns, device):
        return {}

    def __call__(self, S_DR, V_RK, state, step, moved_DR=None):
        return sgd(S_DR if moved_DR is None else moved_DR), {}


Rule = RowAdamRule  # any object like it
RULES |= {"row_adam": RowAdamRule(), "sgd": SGDRule()}


@dataclass(eq=False)
class _Pending:
    """A proposed update and what goes with it: new states, right factors at hand, √Σ‖UA‖², and the sketches that it was made of."""

    update: SketchUpdate
    states: dict[str, dict[str, torch.Tensor]]
    size: float
    seen: list[tuple]


def _plain(config) -> dict:
    """Settings as they come back from a file."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in to_dict(config).items()}


class LoGRA(torch.optim.Optimizer):
    """Freezes the model, sketches its targets, and updates them.

    Args:
        model: any module whose targets are `nn.Linear`, on its device and in its dtype already; weights stay where they are: fp32, or with
            fp32 masters kept here, or as another rounding keeps them.
        sketch, optim: settings; `optim.update_ratio` becomes the `lr` of the parameter group, so schedulers work. scale: called by `step()` with the
        proposed update, returns α (for example a KL controller); default α = 1. sketcher, rule, rounding: other sketches (`sketch.attach`), another rule,
        another way to keep weights (`weights.Masters`) than the
            settings name. A subclass of the settings may bring its own; `logra_core.variants` has such.

    The loss decides what S is: the paper's is divided by the generated tokens of the whole batch before `backward`, so nothing is divided here. A target
    that no backward reached has S = 0. Under autocast (and for bf16 models) S is made with A rounded to the compute dtype, while the merge has A in fp32:
    for Rademacher they differ by one factor, bf16(1/√r) √r, within 2⁻⁸ of 1 and 1 where r is a power of 4; the update ratio sets the size of the step, so it
    cancels.

    `state_dict` holds rule states, masters and the version, loads with `weights_only=True` and restores bit for bit together with the model's own
    `state_dict`.

    One process: on several, `ShardedLoGRA` takes its place. Under a trainer (transformers, TRL) `max_grad_norm` clips the sketches, whose squared norm is
    that of the dense gradients on average (E‖G Aᵀ‖² = ‖G‖²). It never shortens the step, whose size `lr` sets: one factor c on all sketches leaves `sgd` as
    it is, and with `row_adam` makes the batch count c² times in the moments v, nothing else. To bound the step, set a KL budget (`KLControlCallback`).
    """

    def __init__(
        self, model: nn.Module, sketch: SketchConfig = SketchConfig(), optim: OptimConfig = OptimConfig(),
        scale: Callable[[SketchUpdate], float] | None = None, *, sketcher: Sketcher | None = None, rule: Rule | None = None,
        rounding: Masters | None = None,
    ) -> None:  # fmt: skip
        self.model, self.config, self.optim_config, self.scale = model, sketch, optim, scale
        self.rule = rule or (optim.make_rule(sketch) if hasattr(optim, "make_rule") else RULES[optim.rule])
        rounding = rounding or (optim.make_rounding() if hasattr(optim, "make_rounding") else Masters())
        # before anything is attached, since weights may be refused
        self.weights = self._make_weights(select_targets(model, sketch.targets), rounding)
        try:
            self.targets = attach(model, sketch, _DTYPE[optim.wire_dtype], sketcher)
        except BaseException:
            self.weights.release()
            raise
        self.sent: SketchUpdate | None = None
        self._pending: _Pending | None = None
        self._unusable, self._detached = "", False
        group = {"params": [t.sketch for t in self.targets.values()], "logra": self._identity(uuid.uuid4().hex, 0)}
        super().__init__([group], {"lr": optim.update_ratio, "beta2": optim.beta2, "eps": optim.eps})
        for name, target in self.targets.items():
            state = self.rule.start(target.module.out_features, target.spec.rank, target.weight.device)
            if name in self.weights.masters:
                state["master"] = self.weights.masters[name]
            self.state[target.sketch] = state

    def _identity(self, run_id: str, version: int) -> dict:
        settings = {k: v for k, v in _plain(self.config).items() if k not in getattr(self.config, "free", ())}
        optim = {k: v for k, v in _plain(self.optim_config).items() if k not in ("update_ratio", "beta2", "eps", "wire_dtype")}
        return {"run_id": run_id, "version": version, "sketch": settings, "optim": optim, "names": list(self.targets)}

    @property
    def version(self) -> int:
        """Number of updates applied so far."""
        return self.param_groups[0]["logra"]["version"]

    @property
    def run_id(self) -> str:
        """Random name of this run, kept across resumes; replicas follow one run."""
        return self.param_groups[0]["logra"]["run_id"]

    def grad_norm(self) -> float:
        """Frobenius norm over all sketches, 0 for those that saw no backward."""
        norms = [t.sketch.grad.norm() for t in self.targets.values() if t.sketch.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    @torch.no_grad()
    def propose(self) -> SketchUpdate:
        """The next update in fp32, its size set by the update ratio: √Σ‖UA‖² = lr · √Σ‖W‖² (METHOD section 3). Changes nothing.

        Raises MissingSketchError: no target saw a backward. NonFiniteError: a sketch or a weight holds NaN or infinity. RuntimeError: detached, cast or
        moved since it was attached, or left half updated by an error (see `apply`).
        """
        self._check_usable()
        self._pending = None
        self._gather()
        group, age = self.param_groups[0], self.config.draw(self.version)[1]
        step = Step(self.version + 1, age, group["beta2"], group["eps"])
        factors, bases, drawn, states, norms = {}, {}, {}, {}, []
        for name, target in self.targets.items():
            try:
                S_DR, V_RK = target.how.factors(self._accumulated(name))
                factors[name], states[name] = self.rule(S_DR, V_RK, self._state(name), step)
            except NonFiniteError as error:  # where a decomposition of what is not finite would have no defined result
                raise NonFiniteError(f"sketch of {name} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed ({error})") from error
            norms.append(product_norm_sq(factors[name], V_RK))
            bases[name] = V_RK if target.how.by_value else target.how.projection
            if target.how.keeps:
                drawn[name] = V_RK
        norms = torch.stack(norms).tolist()
        if bad := [n for n, size in zip(self.targets, norms, strict=True) if not size <= LARGEST**2]:  # NaN and infinity reach the norm
            raise NonFiniteError(f"sketch of {', '.join(bad[:5])} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed")
        total, weights = math.sqrt(sum(norms)), math.sqrt(sum(self.weights.norms_sq()))
        if not math.isfinite(weights):
            raise NonFiniteError(f"norm of the weights is {weights}: nothing was changed")
        torch._foreach_mul_(list(factors.values()), group["lr"] * weights / total if total else 0.0)
        update = SketchUpdate(self.run_id, self.version + 1, factors, bases, self.config.seed, self.weights.kind, drawn=drawn)
        self._pending = _Pending(update, states, group["lr"] * weights, self._seen())
        return update

    @torch.no_grad()
    def apply(self, update: SketchUpdate, alpha: float = 1.0) -> SketchUpdate:
        """Merge α · update into the weights, take over the rule's states, clear the sketches and redraw A.

        Returns the update as sent, also kept as `sent`: α inside, rounded once to the wire dtype; both sides merge exactly this. Its `to_bytes` carries the
        fingerprint of the weights, asked for before the next update. Raises RuntimeError: `update` is not the one last proposed, or a backward came since,
        whose share would be lost. ConfigError, NonFiniteError: α or a factor is not finite. Nothing has changed then. An error while layers are merged
        (memory, an interrupt) leaves some of them updated: every later call is refused until `load_state_dict`, before which the model's own is loaded.
        """
        self._check_usable()
        pending = self._pending
        if pending is None or pending.update is not update:
            raise RuntimeError(f"update {update.version} is not the one last proposed at version {self.version}; propose again")
        if self._seen() != pending.seen:
            raise RuntimeError("a backward pass came between propose and apply, and its gradient would be lost: propose again")
        wire = update.scaled(alpha, _DTYPE[self.optim_config.wire_dtype])
        if not_finite(wire.factors) or not alpha * pending.size <= LARGEST:
            raise NonFiniteError(f"a factor scaled by alpha = {alpha:g} is not finite or too large to merge: nothing was changed")
        self.weights.refuse_unmergeable()
        merged = 0
        try:
            for name, U_DR in wire.factors.items():
                self.weights.merge_(name, U_DR, wire.basis(name, U_DR.device), wire)
                merged += 1
        except BaseException as error:
            self._unusable = f"update {update.version} failed after {merged} of {len(wire.factors)} layers ({type(error).__name__})"
            raise
        for name, state in pending.states.items():
            self._keep(name, state)
        for name, basis in update.bases.items():
            if isinstance(basis, Projection) and not basis.signs:
                basis.digest(update.drawn.get(name))  # while the matrix is at hand
        update.drawn.clear()  # no update keeps an old draw alive beside the next one
        self._pending = None
        self.param_groups[0]["logra"]["version"] = update.version
        self._redraw()
        self.zero_grad()
        self.sent = wire.sealed(self._sealing(update.version))
        return self.sent

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """propose, scale, apply: the drop-in for loops that know only optimizers. What apply returns is then in `sent`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update = self.propose()
        self.apply(update, 1.0 if self.scale is None else self.scale(update))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what has accumulated, and what a sketch prepared for it; the memory is freed whatever `set_to_none` says."""
        super().zero_grad(set_to_none=True)
        for target in self.targets.values():
            target.how.clear()

    def add_param_group(self, param_group: dict) -> None:
        if self.param_groups:
            raise ConfigError("LoGRA moves the layers that SketchConfig.targets names and nothing else: give other parameters an optimizer of their own")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore rule states, masters and version. Raises ConfigError, naming what differs, for a state of other settings or layers."""
        theirs, ours = state_dict["param_groups"][0].get("logra"), self.param_groups[0]["logra"]
        if theirs is None or "optim" not in theirs:
            raise ConfigError("not a state of LoGRA: its parameter group has no entry 'logra', or one of an older version")
        differ = ["other layers"] if theirs["names"] != ours["names"] else []
        for what, config in (("sketch", self.config), ("optim", self.optim_config)):
            saved, here = (_plain(type(config)()) | settings[what] for settings in (theirs, ours))  # what a state lacks has its default
            differ += [f"{what}.{k}: saved {saved[k]!r}, here {here.get(k)!r}" for k in saved if saved[k] != here.get(k)]
        if differ:
            raise ConfigError(f"saved LoGRA state does not fit this one: {'; '.join(differ)}")
        super().load_state_dict(state_dict)
        self.param_groups[0]["logra"] = theirs | {k: ours[k] for k in ("optim", "sketch", "names")}
        for name, target in self.targets.items():
            if "master" in (state := self.state[target.sketch]):  # a copy, since merges change it in place and the state given may be kept
                state["master"] = self.weights.masters[name] = state["master"].clone()
        self._pending, self._unusable = None, ""
        self._redraw()
        self.zero_grad()

    def detach(self) -> None:
        """Take hooks and sketches off the model; this optimizer is of no use afterwards."""
        self.weights.release()
        detach(self.model)
        self._detached = True

    def _check_usable(self) -> None:
        if self._detached:
            raise RuntimeError("this LoGRA was detached from its model: make a new one")
        if self._unusable:
            raise RuntimeError(f"this LoGRA cannot go on: {self._unusable}; load the model's state and then this one's")
        for name, target in self.targets.items():
            sketch, kept = target.sketch, next(iter(self.state[target.sketch].values()), None)
            if sketch.dtype != torch.float32 or (kept is not None and kept.device.type != sketch.device.type):
                raise RuntimeError(f"{name!r} was cast or moved after LoGRA was attached ({sketch.dtype}, {sketch.device}): do that first, then attach")

    def _seen(self) -> list[tuple]:
        """What tells one accumulated sketch from what a later backward makes of it."""
        return [(id(g), g._version) if (g := t.sketch.grad) is not None else () for t in self.targets.values()]

    def _redraw(self) -> None:
        for target in self.targets.values():
            target.how.redraw(self.config.draw(self.version)[0])

    def _sealing(self, version: int) -> Callable[[], str]:
        def seal() -> str:
            if self.version != version or self._unusable:
                raise SyncError(f"update {version}: its fingerprint is of weights that have moved on; call to_bytes before the next update")
            return self.weights.fingerprint()

        return seal

    # ---- what ShardedLoGRA does over ranks

    def _make_weights(self, modules: dict[str, nn.Linear], rounding: Masters) -> Weights:
        return Weights(Modules(modules), rounding)

    def _gather(self) -> None:
        """Make ready what has accumulated. Raises MissingSketchError where that is nothing."""
        if all(t.sketch.grad is None for t in self.targets.values()):
            raise MissingSketchError(
                f"no sketch for any of {len(self.targets)} targets: run loss.backward() with grad enabled first, and call the layers as modules"
            )

    def _accumulated(self, name: str) -> torch.Tensor:
        """What has accumulated of a layer, whole; zeros where no backward reached it."""
        sketch = self.targets[name].sketch
        return torch.zeros(sketch.shape, device=sketch.device) if sketch.grad is None else sketch.grad

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """The rule's state of a layer, whole."""
        return {k: v for k, v in self.state[self.targets[name].sketch].items() if k != "master"}

    def _keep(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Take over this process's part of a new state."""
        self.state[self.targets[name].sketch].update(state)
