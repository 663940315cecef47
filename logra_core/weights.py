"""Where the weights of the target layers are and how an update gets into them: fp32 masters, or bf16 weights and nothing else.

Belongs here: what an update is merged into, whoever holds it (the trainer's model, a replica's, a worker's). What travels is sync.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from .settings import ConfigError
from .variants.rounding import TINY, Rounding, stochastic_round


class Masters:
    """fp32 masters [D, K] of the target weights, by name. `publish` is where a subclass makes a change visible to what serves the model."""

    rounds = False  # whether the weights are bf16 without masters, so that a merge rounds stochastically

    def __init__(self, masters: dict[str, torch.Tensor]) -> None:
        self.masters = masters

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """name -> (D, K), in order."""
        return {n: tuple(W_DK.shape) for n, W_DK in self.masters.items()}

    def master(self, name: str) -> torch.Tensor:
        """fp32 [D, K]."""
        return self.masters[name]

    def stored(self, name: str) -> torch.Tensor:
        """What is kept of a layer between updates, and all that checkpoints and full messages carry: here the master."""
        return self.master(name)

    def write_back(self, name: str) -> None:
        """Called after each change of one layer."""

    def publish(self) -> None:
        """Called once after all layers changed and their fingerprint was right, and again after a failure put them back."""

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, rounding: Rounding | None = None) -> None:
        """W ← W − U V in place; no [D, K] temporary (METHOD section 5). rounding: where no master is kept, and only there."""
        subtract_product_(self.master(name), U_DR, V_RK)
        self.write_back(name)

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        self.master(name).copy_(W_DK)
        self.write_back(name)

    def keep(self, name: str) -> Any:
        """What `put_back_` makes the layer of again, should an update fail."""
        return self.stored(name).clone()

    def put_back_(self, name: str, kept: Any) -> None:
        self.set_(name, kept)

    def norms(self, names: Iterable[str]) -> torch.Tensor:
        """‖master‖ of each, fp32 [len(names)]."""
        return torch.stack(torch._foreach_norm([self.master(n) for n in names]))

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """128-bit digest (hex) of names and master bits: equal exactly when the policies are. With `dtype`: of the masters rounded to it."""
        names = sorted(self.shapes)
        return weight_fingerprint((n, self.master(n) if dtype is None else canonical(self.master(n).to(dtype))) for n in names)


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


class Weights(Masters):
    """Masters of the target layers of a model: the weight itself when it is fp32, else a copy that is rounded back after a change.

    Where a copy is kept and the model's `load_state_dict` brings a weight that the copy does not round to, the copy becomes that weight.
    """

    def __init__(self, modules: dict[str, nn.Linear]) -> None:
        self.modules = modules
        own = {n: self._own(n) for n in modules}
        super().__init__({} if self.rounds else {n: W.float() for n, W in own.items() if W.dtype != torch.float32})
        self._handles = [modules[n].register_load_state_dict_post_hook(_Loaded(self, n)) for n in self.masters]

    def release(self) -> None:
        """Follow the model's `load_state_dict` no longer."""
        for handle in self._handles:
            handle.remove()

    def _own(self, name: str) -> torch.Tensor:
        """The part of the model's weight that this process has."""
        return self.modules[name].weight.detach()

    def loaded(self, name: str) -> None:
        """The model's weight was loaded: take it over, unless it is this master rounded, as in a checkpoint of both."""
        W_DK, master_DK = self._own(name), self.masters[name]
        if not torch.equal(master_DK.to(W_DK.device, W_DK.dtype), W_DK):
            master_DK.copy_(W_DK)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {n: tuple(m.weight.shape) for n, m in self.modules.items()}

    def master(self, name: str) -> torch.Tensor:
        """fp32 [D, K], shared with the model where the model is fp32."""
        return self.masters[name] if name in self.masters else self._own(name)

    def write_back(self, name: str) -> None:
        if name in self.masters:
            self._own(name).copy_(self.masters[name])


class _Loaded:
    """Hook on one layer. A copy of the model shares it, and is not what these masters belong to."""

    def __init__(self, weights: Weights, name: str) -> None:
        self.weights, self.name = weights, name

    def __call__(self, module: nn.Module, incompatible_keys) -> None:
        if module is self.weights.modules[self.name]:
            self.weights.loaded(self.name)

    def __deepcopy__(self, memo: dict) -> _Loaded:
        return self


class Rounded(Masters):
    """bf16 weights without a master: a merge computes W − U V in fp32, a layer at a time, and rounds it stochastically.

    Weights that differ in −0 and subnormals alone count as equal, and are merged into as +0 (`canonical`). A subclass says where they are.
    """

    rounds = True

    def stored(self, name: str) -> torch.Tensor:
        """bf16 [D, K], the weight itself."""
        raise NotImplementedError

    def store_(self, name: str, W_DK: torch.Tensor) -> None:
        """Put a bf16 weight in its place."""
        self.stored(name).copy_(W_DK)

    def master(self, name: str) -> torch.Tensor:
        """fp32 [D, K], made anew at each call and shared with nobody."""
        return canonical(self.stored(name)).float()

    def norms(self, names: Iterable[str]) -> torch.Tensor:
        """As `Masters.norms`, a layer at a time: only one is in fp32 at once."""
        return torch.stack([torch._foreach_norm([self.master(n)])[0] for n in names])

    def merge_(self, name: str, U_DR: torch.Tensor, V_RK: torch.Tensor, rounding: Rounding | None = None) -> None:
        """W ← round(W − U V): the product in fp32 as where a master is kept. Raises NonFiniteError before the layer changes."""
        if rounding is None:
            raise ConfigError(f"{name!r} has no fp32 master: an update without a rounding seed would be lost in it")
        W_DK = self._working_copy(name)
        subtract_product_(W_DK, U_DR, V_RK)
        own = self._stored_rows(name)
        self.store_(name, stochastic_round(W_DK[own], rounding, name, own.start))

    def _working_copy(self, name: str) -> torch.Tensor:
        """fp32 [D, K] of the whole layer, whatever part of it is stored here."""
        return self.master(name)

    def _stored_rows(self, name: str) -> slice:
        """Those that are stored here."""
        return slice(0, self.shapes[name][0])

    def set_(self, name: str, W_DK: torch.Tensor) -> None:
        """Take over a bf16 weight, bit for bit."""
        if W_DK.dtype != torch.bfloat16:
            raise ConfigError(f"weight of {name!r} is {W_DK.dtype}; expected torch.bfloat16, since no fp32 master is kept")
        self.store_(name, W_DK)


class RoundedTensors(Rounded):
    """bf16 weights in tensors of their own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__({})
        self.tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {n: tuple(W_DK.shape) for n, W_DK in self.tensors.items()}

    def stored(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class RoundedWeights(Rounded, Weights):
    """The bf16 weights of the target layers of a model, without masters."""

    def __init__(self, modules: dict[str, nn.Linear]) -> None:
        """Raises ConfigError, naming them, for weights that are not bf16."""
        only_bfloat16(modules)
        super().__init__(modules)

    def stored(self, name: str) -> torch.Tensor:
        return self.modules[name].weight.detach()


def only_bfloat16(modules: dict[str, nn.Linear]) -> None:
    """Raises ConfigError where stochastic rounding makes no sense: weights that are their own fp32 master, or of another format."""
    if other := {n: m.weight.dtype for n, m in modules.items() if m.weight.dtype != torch.bfloat16}:
        name, dtype = next(iter(other.items()))
        raise ConfigError(
            f"stochastic_rounding = True: allowed with bfloat16 weights only, but {len(other)} of {len(modules)} are not "
            f"({name!r} is {str(dtype).removeprefix('torch.')}); load the model in bfloat16, or turn it off"
        )
