"""Where the A of a layer's input comes from and what of it is kept: shared by the layers that read one input, as matrices or as bits.

Belongs here: `Source`, the sketch that has one, and names of layers that read the same input (q, k, v; gate, up).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..projection import Projection, canonical_name
from ..sketch import LayerSketch

STORAGES = ("fp32", "bits")
SAME_INPUT = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def input_name(name: str) -> str:
    """Canonical name of what a layer reads: the same for q, k and v, and for gate and up, of one block; else the layer's own."""
    block, dot, last = canonical_name(name).rpartition(".")
    return block + dot + SAME_INPUT.get(last, last)


class Source:
    """A [R, K] of one input. keep: "fp32", matrices in the dtypes that are used; "bits", the signs alone, unpacked at each use."""

    by_value = False

    def __init__(self, projection: Projection, keep: str = "fp32") -> None:
        self.projection, self.keep = projection, keep
        self.made: dict[tuple, torch.Tensor] = {}

    @property
    def draw(self) -> object:
        return self.projection

    def matrix(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.keep == "bits":
            return self.projection.unpacked(self.bits(device), dtype)
        if (dtype, device) not in self.made:
            self.made[dtype, device] = self.make(dtype, device)
        return self.made[dtype, device]

    def bits(self, device: torch.device) -> torch.Tensor:
        """uint8 [R, 8·ceil(K/64)] on a device, kept there."""
        if ("bits", device) not in self.made:
            self.made["bits", device] = torch.from_numpy(self.projection.bits).to(device)
        return self.made["bits", device]

    def make(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.projection.matrix(dtype, device)

    def redraw(self, number: int) -> None:
        if number != self.projection.spec.draw:
            spec = dataclasses.replace(self.projection.spec, draw=number)
            self.projection = Projection(spec, self.projection.name, self.projection.width)
            self.made.clear()

    def clear(self) -> None:
        """What has accumulated was dropped."""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"made": {}}


class Products(WeakTensorKeyDictionary):
    """P = x Aᵀ of the inputs x that are alive now; a copy begins empty."""

    def __reduce__(self):
        return type(self), ()

    def __deepcopy__(self, memo: dict) -> Products:
        return memo.setdefault(id(self), type(self)())


class SourcedSketch(LayerSketch):
    """The one-sided sketch of a layer whose A is its input's.

    products: shared by the layers that read one input, else None.
    """

    def __init__(self, name: str, module: nn.Linear, source: Source, products: Products | None = None) -> None:
        self.name, self.module, self.source, self.products = name, module, source, products

    @property
    def projection(self) -> Projection:
        return self.source.projection

    @property
    def by_value(self) -> bool:
        """Whether V of the next update is no function of a seed."""
        return self.source.by_value

    @property
    def keeps(self) -> bool:
        return self.source.keep == "fp32"

    @property
    def draw(self) -> object:
        return self.source.draw

    def matrix(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.source.matrix(dtype, self.module.weight.device)

    @torch.no_grad()
    def keep(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if self.products is None:
            return super().keep(x, dtype)
        if (known := self.products.get(x)) is None or known[0] != (x._version, dtype, self.draw):
            self.products[x] = known = (x._version, dtype, self.draw), super().keep(x, dtype)
        return known[1]

    def redraw(self, number: int) -> None:
        self.source.redraw(number)

    def clear(self) -> None:
        self.source.clear()
