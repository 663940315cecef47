"""Where the weights of the target layers are and how an update gets into them: a layout (where), a rounding (how they are kept), one merge.

Belongs here: what an update is merged into, whoever holds it (the trainer's model, a replica's, a worker's). What travels is sync.py's. Layouts:
whole weights in a model's modules, or tensors by themselves; rows of sharded ones are parallel/'s, served ones engines/'s. Roundings: fp32 masters, as the
paper trains; variants/rounding.py has bf16 weights without masters. METHOD section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from .settings import NonFiniteError

TINY = torch.finfo(torch.float32).tiny  # the smallest normal number, of bf16 too


class Merge(Protocol):
    """What a rounding may draw its bits by: the run's seed, and the version that the weights have after the update (from 1)."""

    seed: int
    version: int


class Modules:
    """Layout: the weights [D, K] of the layers of a model, whole in this process.

    `local` is what this process stores of a layer; `gather` makes it whole, `own` takes this process's part of what is whole.
    """

    copies = False  # whether an fp32 weight needs a master beside it

    def __init__(self, modules: Mapping[str, nn.Linear]) -> None:
        self.modules = dict(modules)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """name -> (D, K), in order."""
        return {n: tuple(m.weight.shape) for n, m in self.modules.items()}

    def local(self, name: str) -> torch.Tensor:
        return self.modules[name].weight.detach()

    def store_(self, name: str, value: torch.Tensor) -> None:
        """Put `value`, rounded to its dtype, where `local` is."""
        self.local(name).copy_(value)

    def gather(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def rows(self, name: str) -> slice:
        """Which rows of the whole are local."""
        return slice(0, self.shapes[name][0])

    def keep(self, name: str) -> Any:
        """What `restore_` makes the layer of again, should an update fail."""
        return self.local(name).clone()

    def restore_(self, name: str, kept: Any) -> None:
        self.store_(name, kept)

    def publish(self) -> None:
        """Called once after all layers changed and their fingerprint was right, and again after a failure put them back."""


class Tensors(Modules):
    """Layout: weights in tensors of their own, by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__({})
        self.tensors = dict(tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {n: tuple(W_DK.shape) for n, W_DK in self.tensors.items()}

    def local(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class Masters:
    """Rounding: an fp32 master of every layer, the weight itself where that is fp32; else the weight is the master rounded to nearest."""

    kind = "masters"  # in messages; both sides of a sync keep their weights alike
    at_hand = True  # whether `read` makes nothing new

    def start(self, layout: Modules) -> dict[str, torch.Tensor]:
        """Masters by name, of the layers whose weight is not fp32, or is not to be merged into."""
        self.layout = layout
        local = ((n, layout.local(n)) for n in layout.shapes)
        self.masters = {n: W.to(torch.float32, copy=True) for n, W in local if layout.copies or W.dtype != torch.float32}
        return self.masters

    def read(self, name: str) -> torch.Tensor:
        """fp32, what is merged into: shared with the model where the model is fp32."""
        return self.masters[name] if name in self.masters else self.layout.local(name)

    def stored(self, name: str) -> torch.Tensor:
        """What is kept of a layer between updates, and all that checkpoints and full messages carry."""
        return self.read(name)

    def refused(self, state: Mapping[str, torch.Tensor]) -> str:
        """Why weights of a full message cannot be kept so; "" if they can."""
        return ""

    def check(self, names: Iterable[str]) -> list[str]:
        """Layers that a merge could not take, found while nothing has changed."""
        return []

    def write_(self, name: str, value: torch.Tensor, update: Merge | None) -> None:
        """Take over a merged weight (fp32; `read` itself where it was merged in place), or without an update one as it is."""
        master = self.read(name)
        if not value.is_set_to(master):
            master.copy_(value)
        if name in self.masters:
            self.layout.store_(name, master)

    def keep(self, name: str) -> Any:
        return self.read(name).clone()

    def put_back_(self, name: str, kept: Any) -> None:
        self.write_(name, kept, None)


class Weights:
    """The weights of the target layers: merged into, digested, saved.

    layout: or a dict of modules, or of tensors. rounding: fp32 masters unless told. Where masters are copies and the model's `load_state_dict` brings a
    weight that the master does not round to, it becomes that weight.
    """

    def __init__(self, layout: Modules | Mapping[str, nn.Linear] | Mapping[str, torch.Tensor], rounding: Masters | None = None) -> None:
        if not isinstance(layout, Modules):
            tensors = any(isinstance(v, torch.Tensor) for v in layout.values())
            layout = Tensors(layout) if tensors else Modules(layout)
        self.layout, self.rounding = layout, rounding or Masters()
        self.masters = self.rounding.start(layout)
        self._handles = [layout.modules[n].register_load_state_dict_post_hook(_Loaded(self, n)) for n in self.masters if n in layout.modules]

    @property
    def modules(self) -> dict[str, nn.Linear]:
        return self.layout.modules

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """name -> (D, K), in order."""
        return self.layout.shapes

    @property
    def kind(self) -> str:
        """How they are kept: "masters", or the name of another rounding."""
        return self.rounding.kind

    def release(self) -> None:
        """Follow the model's `load_state_dict` no longer."""
        for handle in self._handles:
            handle.remove()

    def loaded(self, name: str) -> None:
        """The model's weight was loaded: take it over, unless it is this master rounded, as in a checkpoint of both."""
        W_DK, master_DK = self.layout.local(name), self.masters[name]
        if not torch.equal(master_DK.to(W_DK.device, W_DK.dtype), W_DK):
            master_DK.copy_(W_DK)

    def master(self, name: str) -> torch.Tensor:
        """fp32, this process's part: shared with the model where the model is fp32."""
        return self.rounding.read(name)

    def stored(self, name: str) -> torch.Tensor:
        """This process's part of what is kept between updates: the master, or a bf16 weight without one."""
        return self.rounding.stored(name)

    def whole(self, name: str) -> torch.Tensor:
        """fp32 [D, K]."""
        return self.layout.gather(name, self.master(name))

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, update: Merge | None = None) -> None:
        """W ← W − U V in place; no [D, K] temporary where masters are whole (METHOD section 5). update: whose seed another rounding draws by.

        The product is of the whole layer wherever rows are kept: BLAS may add up a row of a shard in another order than the same row of the whole, and then
        no replica could follow bit for bit.
        """
        W_DK = self.whole(name)
        subtract_product_(W_DK, U_DR, V_RK)
        self.rounding.write_(name, self.layout.own(name, W_DK), update)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        """Take over a weight, bit for bit."""
        self.rounding.write_(name, self.layout.own(name, W_DK), None)

    def keep(self, name: str) -> Any:
        """What `put_back_` makes the layer of again, should an update fail."""
        return self.rounding.keep(name)

    def put_back_(self, name: str, kept: Any) -> None:
        self.rounding.put_back_(name, kept)

    def publish(self) -> None:
        """Make all changes visible to what serves the model."""
        self.layout.publish()

    def norms(self, names: Iterable[str]) -> torch.Tensor:
        """‖master‖ of each, this process's part, fp32 [len(names)]."""
        if self.rounding.at_hand:
            return torch.stack(torch._foreach_norm([self.master(n) for n in names]))
        return torch.stack([torch._foreach_norm([self.master(n)])[0] for n in names])  # only one is in fp32 at once

    def norms_sq(self) -> list[float]:
        """‖W‖² of each layer, in order."""
        return self.norms(self.shapes).double().square().tolist()

    def refuse_unmergeable(self) -> None:
        """NonFiniteError for weights that a merge would find not finite when it is too late to change nothing."""
        if bad := self.rounding.check(self.shapes):
            raise NonFiniteError(f"weight of {', '.join(bad[:5])} holds NaN, infinity or a value too large: nothing was changed")

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """128-bit digest (hex) of names and master bits: equal exactly when the policies are. With `dtype`: of the masters rounded to it."""
        return weight_fingerprint((n, self.whole(n) if dtype is None else canonical(self.whole(n).to(dtype))) for n in sorted(self.shapes))


class _Loaded:
    """Hook on one layer. A copy of the model shares it, and is not what these masters belong to; a pickled one is of nobody."""

    def __init__(self, weights: Weights | None, name: str) -> None:
        self.weights, self.name = weights, name

    def __call__(self, module: nn.Module, incompatible_keys) -> None:
        if self.weights is not None and module is self.weights.modules[self.name]:
            self.weights.loaded(self.name)

    def __deepcopy__(self, memo: dict) -> _Loaded:
        return self

    def __reduce__(self):
        return type(self), (None, self.name)


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of floating-point tensors that hold NaN or infinity, which reach the extremes: one pass over each, one synchronisation."""
    names = [n for n, t in tensors.items() if t.numel()]
    ends = torch.stack([torch.stack(tensors[n].aminmax()).float() for n in names]) if names else torch.zeros(0, 2)
    return [n for n, ok in zip(names, torch.isfinite(ends).all(1).tolist()) if not ok]


def subtract_product_(W_DK: torch.Tensor, U_DR: torch.Tensor, V_RK: torch.Tensor) -> None:
    """W ← W − U V in fp32, whatever precision the process has set for its products: both sides of a sync must round alike."""
    with _full_precision():
        W_DK.addmm_(U_DR.to(W_DK.device, torch.float32), V_RK.to(W_DK.device), alpha=-1)


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32 and no bf16 passes in fp32 products (`torch.set_float32_matmul_precision`, `tf32=True` of a trainer)."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [s.fp32_precision for s in settings]
    try:
        for s in settings:
            s.fp32_precision = "ieee"
        yield
    finally:
        for s, value in zip(settings, before, strict=True):
            s.fp32_precision = value


def canonical(W_DK: torch.Tensor) -> torch.Tensor:
    """−0 and subnormals as +0: a weight read back through a matrix product cannot tell them apart."""
    return torch.where(W_DK.abs() < TINY, 0, W_DK)


def weight_fingerprint(items: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of names and of values as fp32, in the order given."""
    digest = xxhash.xxh3_128()
    for name, W_DK in items:
        digest.update(name.encode())
        digest.update(W_DK.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()
