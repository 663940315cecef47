"""Several processes as one: a decoder sharded by FSDP2, sketches summed over the data ranks, moments and masters kept by rows.

A sketch accumulates whole on every rank, outside FSDP, and is summed over ranks and cut by rows once an update (METHOD section 2: summed
over ranks, never over rows). The rows of U are then put together on every rank, since the probe, the message and the merge all read it, so that from the summed sketch
on each number is computed by the code and in the shapes of a single process, and comes out with its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..kl import ProbeBatch
from ..optim import LoGRA, MissingSketchError, row_scale, row_squares
from ..settings import ConfigError, OptimConfig, SketchConfig
from ..sketch import SKETCH, Target
from ..sync import SketchUpdate
from ..variants.rounding import Rounding
from ..weights import Masters, Rounded, RoundedTensors, Weights, canonical, only_bfloat16, subtract_product_, weight_fingerprint
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


class ShardedWeights(Weights):
    """Masters of the target layers by rows: this rank's rows of the sharded weight where it is fp32, else an fp32 copy of them.

    `merge_`, `fingerprint`, `norms_sq` and `assembled` are collective. The fingerprint is kept until a weight changes; it may then be
    asked for on one rank alone.
    """

    def __init__(self, modules: dict[str, nn.Linear], ranks: Ranks) -> None:
        self.ranks = ranks
        self._digest: str | None = None
        self._norms: dict[str, tuple[float, float]] = {}  # ‖W‖² of the layer, ‖·‖ of this rank's rows when it was taken
        Weights.__init__(self, modules)  # raises for a weight that is whole

    def _own(self, name: str) -> torch.Tensor:
        weight = self.modules[name].weight
        if not isinstance(weight, DTensor):
            raise RuntimeError(f"the weight of {name!r} is whole: shard the model first, and change weights outside forward and backward")
        return weight.detach().to_local()

    def write_back(self, name: str) -> None:
        super().write_back(name)
        self._digest = None

    def loaded(self, name: str) -> None:
        super().loaded(name)
        self.changed()

    def changed(self) -> None:
        """Forget what was known of the weights: somebody else changed them."""
        self._digest = None
        self._norms.clear()

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, rounding: Rounding | None = None) -> None:
        """W ← W − U V. The product is made of the whole layer on every rank: BLAS may add up a row of a shard in another order than the
        same row of the whole, and then no replica could follow bit for bit."""
        W_DK = self.whole(name)
        subtract_product_(W_DK, U_DR, V_RK)
        self.master(name).copy_(self.ranks.own_rows(W_DK))
        self.write_back(name)
        self._note_norm(name, W_DK)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        """Take over a weight, given whole or as a DTensor sharded by rows."""
        self.master(name).copy_(self.ranks.own_rows(W_DK))
        self._norms.pop(name, None)
        self.write_back(name)

    def whole(self, name: str) -> torch.Tensor:
        """fp32 [D, K] on every rank, to be dropped soon."""
        return self.ranks.gather_rows(self.master(name), self.shapes[name][0])

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

    def assembled(self) -> Masters | None:
        """All masters whole in the main memory of rank 0; None on the others."""
        made = {}
        for name in self.modules:
            W_DK = self.whole(name)
            if self.ranks.first:
                made[name] = W_DK.to("cpu", torch.bfloat16 if self.rounds else torch.float32)
        return (RoundedTensors if self.rounds else Masters)(made) if self.ranks.first else None


class ShardedRoundedWeights(Rounded, ShardedWeights):
    """This rank's rows of the bf16 weights, without masters. A layer is put together in fp32 for its merge; each rank rounds its rows, with the
    bits that the rows of the whole have."""

    def __init__(self, modules: dict[str, nn.Linear], ranks: Ranks) -> None:
        only_bfloat16(modules)
        super().__init__(modules, ranks)

    def stored(self, name: str) -> torch.Tensor:
        """This rank's rows, bf16 [d, K]."""
        return self._own(name)

    def store_(self, name: str, W_dK: torch.Tensor) -> None:
        self._own(name).copy_(W_dK)
        self._norms.pop(name, None)
        self._digest = None

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        super().set_(name, self.ranks.own_rows(W_DK))

    def _working_copy(self, name: str) -> torch.Tensor:
        return self.whole(name)

    def _stored_rows(self, name: str) -> slice:
        return self.ranks.rows(self.shapes[name][0])


class ShardedLoGRA(LoGRA):
    """LoGRA over the ranks of a model that `shard` has sharded; all ranks call the same methods in the same order.

    Each rank runs backward on its share of the batch, with a loss whose sum over ranks is the loss of the batch. Sketches, moments and
    masters of this rank are its rows; a proposed update is whole, and the same bits, on every rank. `state_dict` holds DTensors, so that
    `torch.distributed.checkpoint` loads it on any number of ranks; `load_state_dict` also takes the state of a single process.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, sketch: SketchConfig = SketchConfig(), optim: OptimConfig = OptimConfig(),
        scale: Callable[[SketchUpdate], float] | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}  # this rank's rows [d, R] of the sketches, summed over ranks
        super().__init__(model, sketch, optim, scale)
        self.param_groups[0]["logra"]["run_id"] = ranks.from_first(lambda: self.run_id)
        for target in self.targets.values():
            state = self.state[target.sketch]
            state.update({k: ranks.own_rows(state[k]).clone() for k in ("v", "m") if k in state})

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

    def _make_weights(self) -> ShardedWeights:
        kind = ShardedRoundedWeights if self.optim_config.stochastic_rounding else ShardedWeights
        return kind({n: t.module for n, t in self.targets.items()}, self.ranks)

    def _largest(self) -> list[float]:
        return [max(parts, key=lambda x: math.inf if math.isnan(x) else x) for parts in zip(*self.ranks.gather(super()._largest()))]

    def _weight_norms_sq(self) -> list[float]:
        return self.weights.norms_sq()

    def _missing(self) -> list[str]:
        self._reduce()
        return [n for n in self.targets if n not in self._sums]

    def _sketch_norms(self) -> list[float]:
        own = torch.stack(torch._foreach_norm([self._sums[n] for n in self.targets])).double().square().tolist()
        return [math.sqrt(sum(parts)) for parts in zip(*self.ranks.gather(own))]

    def _factor(self, name: str, target: Target, group: dict) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        state, length = self.state[target.sketch], target.module.out_features
        S_dR, v_d = self._sums[name], state["v"]
        if self.optim_config.rule == "row_adam" and type(target) is Target:  # rows need of each other no more than their norms
            moved_dR, moments = self._moved(S_dR, state)
            columns = [row_squares(S_dR), v_d] + ([row_squares(moved_dR)] if moments else [])
            square_D, v_D, *scaled_D = self.ranks.gather_rows(torch.stack(columns, 1), length).T.contiguous()
            scale_D, v_D = row_scale(square_D, v_D, S_dR.shape[1], self.version + 1, group["beta2"], group["eps"], *scaled_D)
            U_DR = self.ranks.gather_rows(self.ranks.own_rows(scale_D)[:, None] * moved_dR, length)
            return U_DR, target.projection(), moments | {"v": self.ranks.own_rows(v_D).clone()}
        own = dict(state)
        state.update({k: self.ranks.gather_rows(state[k], length) for k in ("v", "m") if k in state})
        target.sketch.grad = self.ranks.gather_rows(S_dR, len(target.sketch))
        try:  # any other rule: from the whole sketch, on every rank
            U_DR, V_RK, moments = super()._factor(name, target, group)
        finally:
            target.sketch.grad = None
            state.update(own)
        return U_DR, V_RK, {k: self.ranks.own_rows(x).clone() for k, x in moments.items()}

    def _reduce(self) -> None:
        """Sum what has accumulated over ranks and keep this rank's rows; the whole sketches are freed one by one."""
        reached = self.ranks.gather([t.sketch.grad is not None for t in self.targets.values()])
        for i, (name, target) in enumerate(self.targets.items()):
            if lacking := [rank for rank, flags in enumerate(reached) if not flags[i]]:
                if len(lacking) < self.ranks.world:
                    raise MissingSketchError(f"no backward reached {name!r} on ranks {lacking}: every rank runs one, an idle one with a zero loss")
                continue
            S_dR, target.sketch.grad = self.ranks.sum_rows(target.sketch.grad), None
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

    def over_ranks(self, total: float) -> tuple[float, int]:
        contexts = self.contexts
        if not contexts:
            raise ConfigError("probe batch without a response token on any rank: there is no context to predict on")
        return self.ranks.sum(total), contexts

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
