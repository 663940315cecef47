"""Stochastic rounding of fp32 to bf16 with bits that everybody draws alike: what replaces an fp32 master.

A value between two neighbours of bf16 goes up with the probability of its place between them, so that the mean of what is stored is the
value itself, and steps far below half a unit in the last place (ulp) are kept on average where rounding to nearest loses all of them.
The bits of an element come from NumPy's Philox, keyed by (seed, version, layer) and counted by (row, column): neither device, thread
count, chunk nor slice changes one, so trainer and engines round alike without a word about it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from ..projection import canonical_name
from ..settings import ConfigError, NonFiniteError

RECIPE = "logra-rounding-1"  # part of the key: a changed recipe must change every bit
BLOCK = 16  # elements that one step of Philox's counter serves: 4 words of 64 bits, 16 bits an element
CHUNK = 2**20  # elements of a weight rounded at once; bounds the temporaries, changes no bit
PART = 2**24  # the same for layers' outputs
TINY = torch.finfo(torch.float32).tiny  # the smallest normal number, of bf16 too


@dataclass(frozen=True)
class Rounding:
    """Which random bits: seed of the run, and the version that the weights have after the update (from 1)."""

    seed: int
    version: int

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("version", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"rounding {name} = {value!r}: expected an integer >= {least}")


def random_bits(rounding: Rounding, name: str, width: int, rows: slice, columns: slice = slice(None)) -> np.ndarray:
    """16 random bits for each of `rows` and `columns` of a weight with `width` columns, uint16; equal to that part of the whole."""
    text = f"{RECIPE}|{rounding.seed}|{rounding.version}|{canonical_name(name)}"
    key = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    count, steps = rows.stop - rows.start, -(-width // BLOCK)  # a row starts at a step of its own
    words = np.random.Philox(key=key, counter=rows.start * steps).random_raw(4 * count * steps)
    return words.astype("<u8", copy=False).view("<u2").reshape(count, steps * BLOCK)[:, :width][:, columns]


@torch.no_grad()
def stochastic_round(
    W_DK: torch.Tensor, rounding: Rounding, name: str, first: int = 0, width: int | None = None, columns: slice = slice(None)
) -> torch.Tensor:
    """bf16 of an fp32 weight: up with probability (distance to the lower neighbour) / ulp, exact to the 16 bits that fp32 has more.

    The random bits are added below the last place that stays, and the sum is cut: a carry is a step up in magnitude, through exponents
    too. What bf16 can represent stays as it is, but for −0 and subnormals, which become +0: a weight read back through a matrix
    product cannot tell them apart (an error below 1.2e-38).

    Args:
        W_DK: fp32 [D, K], or a slice of a larger weight: rows from `first` on, `columns` of `width`.
    Returns:
        a new bf16 tensor of the same shape on the same device.
    Raises:
        NonFiniteError: NaN or infinity, or a value beyond bf16's largest number was rounded away from zero.
    """
    width = W_DK.shape[1] if width is None else width
    made = torch.empty_like(W_DK, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    step = max(1, CHUNK // max(width, 1))
    for start in range(0, len(W_DK), step):
        part = W_DK[start : start + step].contiguous()
        bits = random_bits(rounding, name, width, slice(first + start, first + start + len(part)), columns)
        bits = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).to(part.device)  # two bytes an element travel to a GPU
        rounded = _cut(part, bits.to(torch.int32).bitwise_and_(0xFFFF))
        if not (torch.isfinite(part).all() and torch.isfinite(rounded).all()):
            raise NonFiniteError(f"weight of {name!r} is not finite in bfloat16 after the update")
        made[start : start + step] = torch.where(rounded.abs() < TINY, 0, rounded)
    return made


def _cut(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bf16 of contiguous fp32 `values` with `bits` (int32, below 2^16; overwritten) added below the last place that stays."""
    return bits.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _cut_or_nan(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """As `_cut`, for values that may be NaN: a carry would make a number of a GPU's, which has all bits set."""
    return _cut(values, bits.mul_(values == values))


def add_on_grid(y: torch.Tensor, change: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    """y + scale · change in bf16, rounded up or down by chance: right in the mean. Both bf16, of one shape [..., D]; the result is new.

    For a change of something that is already rounded. To nearest, every element that changes by less than half a unit in the last place
    would stay as it is; where two different fp32 sums are rounded, their places between the neighbours spare them that.
    """
    made = torch.empty_like(y, memory_format=torch.contiguous_format)
    for part, y_part, change_part in zip(*(t.reshape(-1).split(PART) for t in (made, y, change)), strict=True):
        bits = torch.randint(2**16, y_part.shape, dtype=torch.int32, device=y.device, generator=generator)
        values = y_part.float().add_(change_part, alpha=scale)
        part.copy_(_cut_or_nan(values, bits))
    return made
