"""Where the bytes of a training step are: every live tensor storage, counted by category, on any device, without an allocator.

A dispatch mode sees each new storage and drops it when it is freed; categories come from who holds it at the time of the report.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass
class Peak:
    """Bytes of live tensors above what was alive at the start: the largest value, and what is left now."""

    peak: int = 0
    live: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # of every tensor that got a new storage


class TrackMemory(TorchDispatchMode):
    """`with TrackMemory() as peak:` counts storages that are made inside, PyTorch operations only.

    Scratch space inside one kernel is not seen. peak.shapes holds the shape of each newly allocated tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.result = Peak()
        self._seen: set[int] = set()

    def __enter__(self) -> Peak:
        super().__enter__()
        return self.result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for tensor in tree_flatten(out)[0]:
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage()._cdata in given | self._seen:
                continue
            storage = tensor.untyped_storage()
            self._seen.add(storage._cdata)
            self.result.shapes.add(tuple(tensor.shape))
            self.result.live += storage.nbytes()
            self.result.peak = max(self.result.peak, self.result.live)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.result.live -= size


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None and t.numel()}
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state tensors."""
    return storage_bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))


class SavedActivations:
    """`with SavedActivations(model) as saved:` around a forward; `saved.bytes` is what autograd keeps for backward, weights left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)
