"""Stochastic rounding of fp32 to bf16 with bits that everybody draws alike: what replaces an fp32 master.

A value between two neighbours of bf16 goes up with the probability of its place between them, so that the mean of what is stored is the
value itself, and steps far below half a unit in the last place (ulp) are kept on average where rounding to nearest loses all of them.
The bits of an element come from NumPy's Philox, keyed by (seed, version, layer) and counted by (row, column): neither device, thread
count, chunk nor slice changes one, so trainer and engines round alike without a word about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kl import cut_to_bfloat16
from ..optim import LARGEST
from ..projection import canonical_name, key_of
from ..settings import ConfigError, NonFiniteError
from ..weights import TINY, Masters, Merge, Modules, canonical

RECIPE = "logra-rounding-1"  # part of the key: a changed recipe must change every bit
BLOCK = 16  # elements that one step of Philox's counter serves: 4 words of 64 bits, 16 bits an element
CHUNK = 2**20  # elements of a weight rounded at once; bounds the temporaries, changes no bit


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
    count, steps = rows.stop - rows.start, -(-width // BLOCK)  # a row starts at a step of its own
    words = np.random.Philox(key=key_of(text), counter=rows.start * steps).random_raw(4 * count * steps)
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
        rounded = cut_to_bfloat16(part, bits.to(torch.int32).bitwise_and_(0xFFFF))
        if not (torch.isfinite(part).all() and torch.isfinite(rounded).all()):
            raise NonFiniteError(f"weight of {name!r} is not finite in bfloat16 after the update")
        made[start : start + step] = torch.where(rounded.abs() < TINY, 0, rounded)
    return made


class Stochastic(Masters):
    """Rounding of bf16 weights without masters: a merge computes W − U V in fp32, a layer at a time, and rounds it stochastically.

    Weights that differ in −0 and subnormals alone count as equal, and are merged into as +0 (`canonical`).
    """

    kind = "bfloat16"
    at_hand = False

    def start(self, layout: Modules) -> dict[str, torch.Tensor]:
        """No masters. Raises ConfigError, naming them, for weights that are their own fp32 master, or of another format."""
        self.layout, self.masters = layout, {}
        if other := {n: W.dtype for n in layout.shapes if (W := layout.local(n)).dtype != torch.bfloat16}:
            name, dtype = next(iter(other.items()))
            raise ConfigError(
                f"stochastic_rounding = True: allowed with bfloat16 weights only, but {len(other)} of {len(layout.shapes)} are not "
                f"({name!r} is {str(dtype).removeprefix('torch.')}); load the model in bfloat16, or turn it off"
            )
        return self.masters

    def read(self, name: str) -> torch.Tensor:
        """fp32, made anew at each call and shared with nobody."""
        return canonical(self.layout.local(name)).float()

    def stored(self, name: str) -> torch.Tensor:
        """The bf16 weight itself."""
        return self.layout.local(name)

    def refused(self, state: Mapping[str, torch.Tensor]) -> str:
        other = [f"{n} ({t.dtype})" for n, t in state.items() if t.dtype != torch.bfloat16]
        return f"weight not in bfloat16, though no masters are kept: {', '.join(other[:5])}" if other else ""

    def check(self, names: Iterable[str]) -> list[str]:
        """Layers whose sum with an update may leave bf16's range, which a merge would find too late."""
        weights = {n: self.stored(n) for n in names}
        return [n for n, W in weights.items() if W.numel() and not float(torch.stack(W.aminmax()).abs().max()) <= LARGEST]

    def write_(self, name: str, value: torch.Tensor, update: Merge | None) -> None:
        """Raises NonFiniteError before the layer changes; ConfigError for an fp32 weight without an update to round by."""
        if update is not None:
            value = stochastic_round(value, Rounding(update.seed, update.version), name, self.layout.rows(name).start)
        elif value.dtype != torch.bfloat16:
            raise ConfigError(f"weight of {name!r} is {value.dtype}; expected torch.bfloat16, since no fp32 master is kept")
        self.layout.store_(name, value)

    def keep(self, name: str) -> Any:
        return self.layout.keep(name)

    def put_back_(self, name: str, kept: Any) -> None:
        self.layout.restore_(name, kept)
