"""From sketch to weight change: `row_adam` and `sgd` as pure functions, and `LoGRA`, the optimizer around them (METHOD section 3).

`propose()` changes nothing; `apply(update, alpha)` merges and returns what to send; `step()` is both, for loops that know only optimizers.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from .projection import PackedProjection, ProjectionSpec
from .settings import ConfigError, NonFiniteError, OptimConfig, SketchConfig, check_momentum, to_dict
from .sketch import Target, attach, detach, select_targets
from .sync import SketchUpdate
from .variants.activation import observe
from .variants.orthogonal import orthogonal
from .weights import RoundedWeights, Weights, only_bfloat16

TINY = torch.finfo(torch.float32).tiny
LARGEST = 1e18  # of a sketch or factor entry: squares and products with A stay finite in fp32
_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class MissingSketchError(RuntimeError):
    """No backward pass reached a target since the last update."""


def sgd(S_DR: torch.Tensor) -> torch.Tensor:
    """U = S, a copy."""
    return S_DR.clone()


def row_adam(
    S_DR: torch.Tensor, v_D: torch.Tensor, step: int, beta2: float, eps: float, mean_DR: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RowAdam: Adam's second moment, one value an output row, no first moment (METHOD section 3).

    Args:
        S_DR: sketch [D, R] fp32. v_D: moment [D] fp32 before this step. step: t, counted from 1.
        mean_DR: what the step is made of in place of S, a first moment (`first_moment`).
    Returns:
        U [D, R] with ‖U‖ = ‖S‖ (or ‖mean‖), and the new moment [D]; the inputs are unchanged. A zero S gives a zero U.
    """
    square_D = row_squares(S_DR)  # Σ_j S²: the only pass over S besides U's own
    scale_D, v_D = row_scale(square_D, v_D, S_DR.shape[1], step, beta2, eps, None if mean_DR is None else row_squares(mean_DR))
    return scale_D[:, None] * (S_DR if mean_DR is None else mean_DR), v_D


def row_squares(S_DR: torch.Tensor) -> torch.Tensor:
    """Σ_j S² of each row [D]."""
    return torch.linalg.vector_norm(S_DR, dim=1).square()


def first_moment(S_DR: torch.Tensor, m_DR: torch.Tensor, step: int, beta1: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's first moment of sketches made with one A, after step t (from 1): (corrected for its start at 0, as it is kept), both [D, R]."""
    m_DR = torch.lerp(m_DR, S_DR, 1 - beta1)
    return m_DR / (1 - beta1**step), m_DR


def row_scale(
    square_D: torch.Tensor, v_D: torch.Tensor, rank: int, step: int, beta2: float, eps: float, scaled_D: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What RowAdam multiplies each row of S [D, rank] by, from the rows' Σ_j S² [D] alone, and the new moment [D].

    scaled_D: Σ_j of the squares of what is scaled, if that is not S.
    """
    v_D = beta2 * v_D + (1 - beta2) * square_D / rank  # v ← β2 v + (1−β2) mean_j S²
    root_D = (v_D / (1 - beta2**step)).sqrt()  # root = √(v / (1−β2ᵗ))
    inverse_D = 1 / (root_D + torch.clamp(eps * root_D.mean(), min=TINY))  # inv = 1 / (root + max(ε mean(root), tiny))
    inverse_D = inverse_D / inverse_D.max()  # rms(inv) is scale-free; this keeps its squares finite
    inverse_D = inverse_D / inverse_D.square().mean().sqrt()  # inv ← inv / rms(inv)
    square_D = square_D if scaled_D is None else scaled_D
    norm_U = (inverse_D.square() @ square_D).sqrt()  # ‖inv ⊙ S‖
    scale = square_D.sum().sqrt() / norm_U.clamp(min=TINY)  # ‖U‖ = ‖S‖
    return inverse_D * scale, v_D  # U = inv ⊙ S, rescaled


def product_norm_sq(U_DR: torch.Tensor, V_RK: torch.Tensor) -> torch.Tensor:
    """‖U V‖² without the [D, K] product: tr(U (V Vᵀ) Uᵀ) = ⟨UᵀU, V Vᵀ⟩, a float64 scalar."""
    return torch.sum((U_DR.T @ U_DR) * (V_RK @ V_RK.T), dtype=torch.float64)


class AtHand(Mapping):
    """name -> A [R, K] fp32 of the targets' current draw as they keep it: stored, or unpacked at each look-up; regenerated ones are left out.

    Holds what was drawn, so that it stays the same after the targets are redrawn.
    """

    def __init__(self, targets: dict[str, Target]) -> None:
        kept = {"fp32": Target.projection, "bits": Target.packed}
        self._kept = {n: kept[t.storage](t) for n, t in targets.items() if t.storage in kept}

    def __getitem__(self, name: str) -> torch.Tensor:
        A_RK = self._kept[name]
        return A_RK.unpack() if isinstance(A_RK, PackedProjection) else A_RK

    def __iter__(self):
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class LoGRA(torch.optim.Optimizer):
    """Freezes the model, sketches its targets, and updates them.

    Args:
        model: any module whose targets are `nn.Linear`; weights stay where they are: fp32, or with fp32 masters kept here, or bf16 without
            masters (`optim.stochastic_rounding`; ConfigError, with nothing changed, where they are not bf16).
        sketch, optim: settings; `optim.update_ratio` becomes the `lr` of the parameter group, so schedulers work.
        scale: called by `step()` with the proposed update, returns α (for example a KL controller); default α = 1.

    `state_dict` holds moments, masters and the version, loads with `weights_only=True` and restores bit for bit together with
    the model's own `state_dict`.

    One process: on several, `ShardedLoGRA` takes its place. Under a trainer (transformers, TRL) `max_grad_norm` clips the sketches, whose squared norm is that of the dense gradients on average
    (E‖G Aᵀ‖² = ‖G‖²). It never shortens the step, whose size `lr` sets: one factor c on all sketches leaves `sgd` as it is, and with
    `row_adam` makes the batch count c² times in the moments v, nothing else. To bound the step, set a KL budget (`KLControlCallback`).
    """

    def __init__(
        self,
        model: nn.Module,
        sketch: SketchConfig = SketchConfig(),
        optim: OptimConfig = OptimConfig(),
        scale: Callable[[SketchUpdate], float] | None = None,
    ) -> None:
        check_momentum(sketch, optim)
        self.model, self.config, self.optim_config, self.scale = model, sketch, optim, scale
        if optim.stochastic_rounding:
            only_bfloat16(select_targets(model, sketch.targets))
        self.targets = attach(model, sketch, _DTYPE[optim.wire_dtype])
        self.weights = self._make_weights()
        self._pending: tuple[SketchUpdate, dict[str, dict[str, torch.Tensor]], float] | None = None  # update, new moments, size √Σ‖UA‖²
        group = {"params": [t.sketch for t in self.targets.values()], "logra": self._identity(uuid.uuid4().hex, 0)}
        super().__init__([group], {"lr": optim.update_ratio, "beta2": optim.beta2, "eps": optim.eps})
        for name, target in self.targets.items():
            state = {"v": torch.zeros(target.module.out_features, device=target.weight.device)}
            if optim.beta1:
                state["m"] = torch.zeros(target.sketch.shape, device=target.weight.device)
            if name in self.weights.masters:
                state["master"] = self.weights.masters[name]
            self.state[target.sketch] = state

    def _identity(self, run_id: str, version: int) -> dict:
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in to_dict(self.config).items()}
        del settings["projection_storage"]  # changes no number
        optim = {name: getattr(self.optim_config, name) for name in ("rule", "stochastic_rounding", "beta1")}
        return {"run_id": run_id, "version": version, "sketch": settings, "names": list(self.targets)} | optim

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

        Raises:
            MissingSketchError: a target saw no backward. NonFiniteError: a sketch or a weight holds NaN or infinity.
        """
        if missing := self._missing():
            raise MissingSketchError(
                f"no sketch for {len(missing)} of {len(self.targets)} targets ({', '.join(missing[:3])}): run loss.backward() with grad "
                "enabled first, and call the layers as modules"
            )
        group = self.param_groups[0]
        factors, sent, moments, norms = {}, {}, {}, []
        if self.optim_config.rule == "orthogonal" or self.config.kind == "two_sided":
            # decompositions of what is not finite have no defined result
            self._refuse(self._sketch_norms(), LARGEST)
        for name, target in self.targets.items():
            factors[name], V_RK, moments[name] = self._factor(name, target, group)
            norms.append(product_norm_sq(factors[name], V_RK))
            if target.by_value:
                sent[name] = V_RK
        norms = torch.stack(norms).tolist()
        self._refuse(norms, LARGEST**2)  # NaN and infinity reach the norm
        total, weights = math.sqrt(sum(norms)), math.sqrt(sum(self._weight_norms_sq()))
        if not math.isfinite(weights):
            raise NonFiniteError(f"norm of the weights is {weights}: nothing was changed")
        factor = group["lr"] * weights / total if total else 0.0
        torch._foreach_mul_(list(factors.values()), factor)
        ranks = {n: t.spec.rank for n, t in self.targets.items() if n not in sent and t.spec.rank != self.config.rank}
        update = SketchUpdate(
            self.run_id, self.version + 1, self._spec(), factors, {n: t.width for n, t in self.targets.items()}, sent, ranks=ranks,
            drawn=AtHand({n: t for n, t in self.targets.items() if n not in sent}),
            rounding_seed=self.config.seed if self.weights.rounds else None,
        )  # fmt: skip
        self._pending = (update, moments, group["lr"] * weights)
        return update

    def observe(self, mask: torch.Tensor | None = None, prefix: int = 0) -> AbstractContextManager[None]:
        """Context for passes that score the batch before its gradient is taken: A of this update is found in them (activation.py).

        mask, prefix: see `activation.observe`. Without such a pass A has random rows, drawn from the seed.
        Raises:
            ConfigError: projection is not "activation". Inside, see `activation.observe`.
        """
        if self.config.projection != "activation":
            raise ConfigError(f"SketchConfig.projection = {self.config.projection!r}: only 'activation' observes inputs")
        return observe(self.targets.values(), mask, prefix)

    def _refuse(self, sizes: list[float], largest: float) -> None:
        if bad := [n for n, size in zip(self.targets, sizes, strict=True) if not size <= largest]:
            raise NonFiniteError(f"sketch of {', '.join(bad[:5])} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed")

    def _refuse_large(self) -> None:
        """Without masters a sum beyond bf16's range is found while merging, too late to change nothing."""
        if bad := [n for n, size in zip(self.targets, self._largest(), strict=True) if not size <= LARGEST]:
            raise NonFiniteError(f"weight of {', '.join(bad[:5])} holds NaN, infinity or a value above {LARGEST:g}: nothing was changed")

    @torch.no_grad()
    def apply(self, update: SketchUpdate, alpha: float = 1.0) -> SketchUpdate:
        """Merge α · update into the weights, take over the moments, clear the sketches and redraw A.

        Returns:
            the update as sent: α inside, rounded once to the wire dtype; both sides merge exactly this.
        Raises:
            RuntimeError: `update` is not the one last proposed. ConfigError, NonFiniteError: α or a factor is not finite.
            Nothing has changed then.
        """
        if self._pending is None or self._pending[0] is not update:
            raise RuntimeError(f"update {update.version} is not the one last proposed at version {self.version}; propose again")
        wire = update.scaled(alpha, _DTYPE[self.optim_config.wire_dtype])
        sums = torch.stack([U_DR.sum(dtype=torch.float32) for U_DR in wire.factors.values()])  # NaN and infinity reach a sum
        if not torch.isfinite(sums).all() or not alpha * self._pending[2] <= LARGEST:
            raise NonFiniteError(f"a factor scaled by alpha = {alpha:g} is not finite or too large to merge: nothing was changed")
        if self.weights.rounds:
            self._refuse_large()
        for name, U_DR in wire.factors.items():
            self.weights.merge_(name, U_DR, wire.basis(name, U_DR.device), wire.rounding)
        for name, moments in self._pending[1].items():
            self.state[self.targets[name].sketch].update(moments)
        self._pending = None
        self.param_groups[0]["logra"]["version"] = update.version
        self._redraw()
        self.zero_grad()
        return wire

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """propose, scale, apply: the drop-in for loops that know only optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update = self.propose()
        self.apply(update, 1.0 if self.scale is None else self.scale(update))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what has accumulated, and an activation-aware A that was made for it; the memory is freed whatever `set_to_none` says."""
        super().zero_grad(set_to_none=True)
        if any(t.found for t in self.targets.values()):
            for target in self.targets.values():
                target.forget()

    def add_param_group(self, param_group: dict) -> None:
        if self.param_groups:
            raise ConfigError("LoGRA moves the layers that SketchConfig.targets names and nothing else: give other parameters an optimizer of their own")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore moments, masters and version. Raises ConfigError, naming what differs, for a state of other settings or layers."""
        theirs, ours = state_dict["param_groups"][0].get("logra"), self.param_groups[0]["logra"]
        if theirs is None:
            raise ConfigError("not a state of LoGRA: its parameter group has no entry 'logra'")
        theirs = {"stochastic_rounding": False, "beta1": 0.0} | theirs  # a state older than these settings
        theirs["sketch"] = {"refresh_every": 1} | theirs["sketch"]
        differ = [k for k in ("rule", "sketch", "names", "stochastic_rounding", "beta1") if theirs[k] != ours[k]]
        if differ:
            detail = "; ".join(f"{k}: saved {theirs[k]}, here {ours[k]}" for k in differ if k != "names") or "other layers"
            raise ConfigError(f"saved LoGRA state does not fit this one: {detail}")
        super().load_state_dict(state_dict | {"param_groups": [state_dict["param_groups"][0] | {"logra": theirs}]})
        for name, target in self.targets.items():
            if "master" in (state := self.state[target.sketch]):  # a copy, since merges change it in place and the state given may be kept
                state["master"] = self.weights.masters[name] = state["master"].clone()
        self._pending = None
        self._redraw()
        self.zero_grad()

    def detach(self) -> None:
        """Take hooks and sketches off the model; this optimizer is of no use afterwards."""
        self.weights.release()
        detach(self.model)

    # ---- what distributed.py does in another way

    def _make_weights(self) -> Weights:
        kind = RoundedWeights if self.optim_config.stochastic_rounding else Weights
        return kind({n: t.module for n, t in self.targets.items()})

    def _missing(self) -> list[str]:
        """Targets that no backward has reached."""
        return [n for n, t in self.targets.items() if t.sketch.grad is None]

    def _largest(self) -> list[float]:
        """Largest magnitude (or NaN) of each target's weight."""
        weights = (self.weights.stored(n) for n in self.targets)
        return [float(torch.stack(W_DK.aminmax()).abs().max()) if W_DK.numel() else 0.0 for W_DK in weights]

    def _sketch_norms(self) -> list[float]:
        return torch.stack(torch._foreach_norm([t.sketch.grad for t in self.targets.values()])).tolist()

    def _factor(self, name: str, target: Target, group: dict) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """U [D, R] before the common factor, V [R, K], and the layer's new moments."""
        (S_DR, V_RK), state = target.factors(), self.state[target.sketch]
        moved_DR, moments = self._moved(S_DR, state)
        if self.optim_config.rule == "row_adam":
            mean_DR = moved_DR if moments else None
            U_DR, moments["v"] = row_adam(S_DR, state["v"], self.version + 1, group["beta2"], group["eps"], mean_DR)
            return U_DR, V_RK, moments
        return (sgd(moved_DR) if self.optim_config.rule == "sgd" else orthogonal(moved_DR, V_RK)), V_RK, moments

    def _moved(self, S_DR: torch.Tensor, state: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What the rule turns into a step: S, or with `beta1` its running mean; and the new first moment, if there is one."""
        if not self.optim_config.beta1:
            return S_DR, {}
        made = self.config.draw(self.version)[1]
        m_DR = state["m"] if made else torch.zeros_like(state["m"])  # of another A: coordinates in another basis
        mean_DR, m_DR = first_moment(S_DR, m_DR, made + 1, self.optim_config.beta1)
        return mean_DR, {"m": m_DR}

    def _spec(self) -> ProjectionSpec:
        c = self.config
        return ProjectionSpec(c.seed, c.draw(self.version)[0], c.rank, c.distribution, c.share_inputs)

    def _redraw(self) -> None:
        for target in self.targets.values():
            target.redraw(self._spec())

    def _weight_norms_sq(self) -> list[float]:
        return self.weights.norms(self.targets).double().square().tolist()
