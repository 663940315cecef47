"""Several processes as one: a decoder sharded by FSDP2, sketches summed over the data ranks, moments and masters kept by rows.

A sketch accumulates whole on every rank, outside FSDP, and is summed over ranks and cut by rows once an update (METHOD section 2: summed
over ranks, never over rows). The rows of U are then put together on every rank, since the probe, the message and the merge all read it, so that from the summed sketch
on each number is computed by the code and in the shapes of a single process, and comes out with its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..kl import ProbeBatch
from ..optim import LoGRA, MissingSketchError
from ..settings import ConfigError, NonFiniteError, OptimConfig, SketchConfig
from ..sketch import SKETCH
from ..sync import SketchUpdate, SyncError
from ..weights import Masters, Modules, Weights, canonical, subtract_product_, weight_fingerprint
from .ranks import Ranks


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: modules of the classes that transformers says must stay whole, else the longest ModuleList."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    if blocks := [m for m in model.modules() if type(m).__name__ in whole]:
        return blocks
    return list(max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=()))


def shard(model: nn.Module, ranks: Ranks, compute_dtype: str = "float32", blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """`fully_shard` every decoder block and then the rest, in place; weights keep their dtype, by rows, on the rank's device.

    compute_dtype: of the gathered weights and of the activations. Enable activation checkpointing before, attach sketches after: a
    parameter that FSDP did not meet here is left alone. Gradients of trainable parameters are summed over ranks, not averaged, because
    each rank's loss is divided by the tokens of the whole batch already.
    """
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise RuntimeError("the model is sharded already")
    if any(hasattr(m, SKETCH) for m in model.modules()):
        raise RuntimeError("sketches are attached already: shard the model first, then attach, so that FSDP leaves them alone")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if compute_dtype == "bfloat16" else MixedPrecisionPolicy()
    # The root too gives its whole weights back after a forward: a probe would otherwise leave copies behind that miss the update.
    for module in (*(decoder_blocks(model) if blocks is None else blocks), model):
        fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


class Rows(Modules):
    """Layout: this rank's rows of the weights of a model that `shard` has sharded. `gather` is collective."""

    def __init__(self, modules: dict[str, nn.Linear], ranks: Ranks) -> None:
        super().__init__(modules)
        self.ranks = ranks

    def local(self, name: str) -> torch.Tensor:
        weight = self.modules[name].weight
        if not isinstance(weight, DTensor):
            raise RuntimeError(f"the weight of {name!r} is whole: shard the model first, and change weights outside forward and backward")
        return weight.detach().to_local()

    def gather(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """On every rank, to be dropped soon."""
        return self.ranks.gather_rows(value, self.shapes[name][0])

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Of a weight given whole, or as a DTensor sharded by rows."""
        return self.ranks.own_rows(whole)

    def rows(self, name: str) -> slice:
        return self.ranks.rows(self.shapes[name][0])


class ShardedWeights(Weights):
    """The weights of the target layers by rows, kept on each rank as `rounding` keeps whole ones.

    `merge_`, `fingerprint`, `norms_sq` and `assembled` are collective. The fingerprint is kept until a weight changes; it may then be
    asked for on one rank alone.
    """

    def __init__(self, modules: dict[str, nn.Linear], ranks: Ranks, rounding: Masters | None = None) -> None:
        self.ranks = ranks
        self._digest: str | None = None
        self._norms: dict[str, tuple[float, float]] = {}  # ‖W‖² of the layer, ‖·‖ of this rank's rows when it was taken
        super().__init__(Rows(modules, ranks), rounding)  # raises for a weight that is whole

    def loaded(self, name: str) -> None:
        super().loaded(name)
        self.changed()

    def changed(self) -> None:
        """Forget what was known of the weights: somebody else changed them."""
        self._digest = None
        self._norms.clear()

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, update: SketchUpdate | None = None) -> None:
        W_DK = self.whole(name)
        subtract_product_(W_DK, U_DR, V_RK)
        self.rounding.write_(name, self.layout.own(name, W_DK), update)
        self._digest = None
        self._norms.pop(name, None)
        if self.masters or self.layout.local(name).dtype == torch.float32:  # else what is kept is not W but W rounded
            self._note_norm(name, W_DK)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        super().set_(name, W_DK)
        self._norms.pop(name, None)
        self._digest = None

    def norms_sq(self) -> list[float]:
        """‖W‖² of each layer, in order. Layers whose rows have changed on some rank, by whoever, are measured anew."""
        stale = [n for n, norm in zip(self.modules, self.norms(self.modules).tolist()) if n not in self._norms or norm != self._norms[n][1]]
        stale = set().union(*self.ranks.gather(stale))
        for name in (n for n in self.modules if n in stale):
            self._note_norm(name, self.whole(name))
            self._digest = None
        return [self._norms[n][0] for n in self.modules]

    def _note_norm(self, name: str, W_DK: torch.Tensor) -> None:
        self._norms[name] = float(torch._foreach_norm([W_DK])[0].double().square()), float(self.norms([name])[0])

    def refuse_unmergeable(self) -> None:
        """One verdict for all ranks."""
        if bad := sorted(set().union(*self.ranks.gather(self.rounding.check(self.shapes)))):
            raise NonFiniteError(f"weight of {', '.join(bad[:5])} holds NaN, infinity or a value too large: nothing was changed")

    @property
    def known(self) -> bool:
        """Whether the fingerprint is kept."""
        return self._digest is not None

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        if dtype is None and self._digest is not None:
            return self._digest
        whole = ((n, self.whole(n)) for n in sorted(self.shapes))
        rounded = ((n, W_DK if dtype is None else canonical(W_DK.to(dtype))) for n, W_DK in whole)
        digest = ""
        if self.ranks.first:
            digest = weight_fingerprint(rounded)
        else:  # gathers with the others, and digests nothing
            for _ in whole:
                pass
        digest = self.ranks.from_first(lambda: digest)
        if dtype is None:
            self._digest = digest
        return digest

    def assembled(self) -> Weights | None:
        """All that is kept, whole in the main memory of rank 0; None on the others."""
        made = {}
        for name in self.modules:
            W_DK = self.layout.gather(name, self.stored(name))
            if self.ranks.first:
                made[name] = W_DK.to("cpu", copy=True)
        return Weights(made, type(self.rounding)()) if self.ranks.first else None


class ShardedLoGRA(LoGRA):
    """LoGRA over the ranks of a model that `shard` has sharded; all ranks call the same methods in the same order.

    Each rank runs backward on its share of the batch, with a loss whose sum over ranks is the loss of the batch. Sketches, rule states and
    masters of this rank are its rows; a proposed update is whole, and the same bits, on every rank. `state_dict` holds DTensors, so that
    `torch.distributed.checkpoint` loads it on any number of ranks; `load_state_dict` also takes the state of a single process.
    `to_bytes` of what `apply` returns may be called on one rank, after `weights.fingerprint()` on all.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, sketch: SketchConfig = SketchConfig(), optim: OptimConfig = OptimConfig(),
        scale: Callable[[SketchUpdate], float] | None = None, **plugs: Any,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}  # this rank's rows [d, R] of the sketches, summed over ranks
        super().__init__(model, sketch, optim, scale, **plugs)
        self.param_groups[0]["logra"]["run_id"] = ranks.from_first(lambda: self.run_id)
        for name in self.targets:
            self._keep(name, super()._state(name))

    def grad_norm(self) -> float:
        """Frobenius norm over all sketches, summed over ranks."""
        self._reduce()
        return math.sqrt(self.ranks.sum(sum(float(S.norm().double().square()) for S in self._sums.values())))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sums.clear()
        super().zero_grad()

    def state_dict(self) -> dict:
        made = super().state_dict()
        lengths = [t.module.out_features for t in self.targets.values()]
        made["state"] = {i: {k: self.ranks.as_dtensor(v, lengths[i]) for k, v in state.items()} for i, state in made["state"].items()}
        return made

    def load_state_dict(self, state_dict: dict) -> None:
        own = {i: {k: self.ranks.own_rows(v).clone() for k, v in state.items()} for i, state in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": own})
        self.weights.changed()

    def _make_weights(self, modules: dict[str, nn.Linear], rounding: Masters) -> ShardedWeights:
        return ShardedWeights(modules, self.ranks, rounding)

    def _gather(self) -> None:
        self._reduce()
        if not self._sums:
            raise MissingSketchError(f"no sketch for any of {len(self.targets)} targets on any rank: run loss.backward() with grad enabled first")

    def _accumulated(self, name: str) -> torch.Tensor:
        sketch = self.targets[name].sketch
        if name not in self._sums:
            return torch.zeros(sketch.shape, device=sketch.device)
        return self.ranks.gather_rows(self._sums[name], len(sketch))

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        return {k: self.ranks.gather_rows(v, self.targets[name].module.out_features) for k, v in super()._state(name).items()}

    def _keep(self, name: str, state: dict[str, torch.Tensor]) -> None:
        super()._keep(name, {k: self.ranks.own_rows(v).clone() for k, v in state.items()})

    def _seen(self) -> list:
        """One verdict for all ranks; what was summed is no gradient any more."""
        return self.ranks.gather(any(super()._seen()))

    def _sealing(self, version: int) -> Callable[[], str]:
        seal = super()._sealing(version)

        def known() -> str:
            if not self.weights.known:
                raise SyncError(f"update {version}: call weights.fingerprint() on every rank before to_bytes on one")
            return seal()

        return known

    def _reduce(self) -> None:
        """Sum what has accumulated over ranks and keep this rank's rows; the whole sketches are freed one by one. A rank that a backward did
        not reach adds nothing."""
        reached = self.ranks.gather([t.sketch.grad is not None for t in self.targets.values()])
        for i, (name, target) in enumerate(self.targets.items()):
            if any(flags[i] for flags in reached):
                sketch = target.sketch
                whole, sketch.grad = torch.zeros(sketch.shape, device=sketch.device) if sketch.grad is None else sketch.grad, None
                S_dR = self.ranks.sum_rows(whole)
                self._sums[name] = self._sums[name] + S_dR if name in self._sums else S_dR


class SharedProbe:
    """This rank's part (or None) of a probe batch, for the functions of kl.py: each rank runs the same number of forward passes, whatever
    it holds, so that FSDP's collectives meet; sums run over all ranks' contexts."""

    def __init__(self, part: ProbeBatch | None, ranks: Ranks) -> None:
        self.part, self.ranks = part, ranks

    @property
    def contexts(self) -> int:
        """|P| over all ranks."""
        return sum(self.ranks.gather(0 if self.part is None else self.part.contexts))

    def over_ranks(self, total: float, contexts: int) -> tuple[float, int]:
        everyone = self.ranks.gather((total, contexts))
        if not (contexts := sum(count for _, count in everyone)):
            raise ConfigError("probe batch without a response token on any rank: there is no context to predict on")
        return sum(value for value, _ in everyone), contexts

    def parts(self, vocabulary: int) -> Iterator[ProbeBatch]:
        own = [] if self.part is None else list(self.part.parts(vocabulary))
        most = max(self.ranks.gather(len(own)))  # before the first pass on every rank: this too is a collective
        yield from own
        for _ in range(most - len(own)):
            ids = torch.zeros(1, 2, dtype=torch.int64, device=self.ranks.device)
            yield _Idle(ids, torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool))


class _Idle(ProbeBatch):
    """A forward pass without a context, for company."""

    def __post_init__(self) -> None:
        pass

    @property
    def first(self) -> int:
        return 0
