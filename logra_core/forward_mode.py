"""What forward mode over a frozen language model needs beyond torch's own rules: attention by blocks, and linear layers without a third product.

Of y = x Wᵀ + b torch computes ẏ = ẋ Wᵀ + x Ẇᵀ with Ẇ = 0 written out, a product and a tensor of the weight's size too many in every layer.
Belongs here: the context in which tangents are carried through a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .blockwise import forward_mode_attention


class FrozenLinear(TorchFunctionMode):
    """Inside a dual level, ẏ = ẋ Wᵀ of every `F.linear` whose weight and bias have no tangent."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, x_dot = fw.unpack_dual(input)
        if x_dot is None or any(p is not None and fw.unpack_dual(p).tangent is not None for p in (weight, bias)):
            return F.linear(input, weight, bias)
        return fw.make_dual(F.linear(x, weight, bias), F.linear(x_dot, weight))


@contextlib.contextmanager
def forward_mode(model: nn.Module) -> Iterator[None]:
    """A dual level of `torch.autograd.forward_ad` in which `model` carries tangents from a layer's output to its logits.

    Raises ConfigError, inside, for an attention without a forward-mode rule (blockwise.py). The model is as before afterwards.
    """
    with fw.dual_level(), forward_mode_attention(model), FrozenLinear():
        yield
