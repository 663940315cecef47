"""The only seed recipe: from (run seed, draw number, layer name) to the projection A[r, k], the same bits everywhere.

Entries come from NumPy's Philox raw words (a counter-based stream that is stable across versions) through operations that IEEE 754 rounds exactly (+ - * /
sqrt, and products short enough to be exact), so that neither device, thread count, BLAS, chunk nor shard changes a bit. METHOD section 1.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from .settings import DISTRIBUTIONS, ConfigError

WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
RECIPE = "logra-projection-1"  # part of the seed: a changed recipe must change every A
SIGNS = "rademacher"  # the distribution that is kept as bits


class Distribution(NamedTuple):
    """Of A's entries, with E[AᵀA] = I. make: (stream, rank, width) -> A, float64 [rank, width], of NumPy's Philox words by exactly rounded operations
    alone, since trainer and engine must make the same bits. rank_at_most_width: whether A cannot have more rows than columns."""

    make: Callable[[np.random.Philox, int, int], np.ndarray] | None
    rank_at_most_width: bool = False


@dataclass(frozen=True)
class ProjectionSpec:
    """Which draw of A: run seed, draw number (0 for the first update; stays 0 when A is fixed), rank r, distribution."""

    seed: int
    draw: int
    rank: int
    distribution: str

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigError(f"distribution = {self.distribution!r}: allowed is one of {', '.join(DISTRIBUTIONS)} (import logra_core.variants for more)")
        for name, least in (("seed", 0), ("draw", 0), ("rank", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} = {value!r}: expected an integer >= {least}")


def canonical_name(name: str) -> str:
    """Module name without the parts that wrappers add (torch.compile, activation checkpointing, FSDP1, a leading DDP `module.`)."""
    parts = [p for p in name.split(".") if p not in WRAPPER_PARTS]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == "module" else parts)


class Projection:
    """A[r, k] of one layer and one draw, with E[AᵀA] = I. Holds no matrix: one is made at each `matrix`; signs are drawn once, as bits.

    Rademacher, the paper's main runs': ±1/√r; others are plugged in (`settings.DISTRIBUTIONS`). spec: which draw. name: of the layer, canonical or wrapped.
    width: k, its inputs. Raises ConfigError: a width below 1, or more rows than columns of a distribution that cannot have them.
    """

    def __init__(self, spec: ProjectionSpec, name: str, width: int) -> None:
        if width < 1:
            raise ConfigError(f"width = {width}: a projection of {name!r} needs at least one column")
        if DISTRIBUTIONS[spec.distribution].rank_at_most_width and spec.rank > width:
            raise ConfigError(f"rank = {spec.rank}: {name!r} has {width} inputs, and {spec.distribution} rows need rank <= inputs")
        self.spec, self.name, self.width = spec, canonical_name(name), width

    @property
    def signs(self) -> bool:
        """Whether `bits` are all of it."""
        return self.spec.distribution == SIGNS

    @functools.cached_property
    def bits(self) -> np.ndarray:
        """Signs as random bits, uint8 [r, 8·ceil(k/64)]: bit j of byte i is column 8i + j, set for +1/√r. Rademacher only."""
        if not self.signs:
            raise ConfigError(f"distribution = {self.spec.distribution!r}: only {SIGNS} is a matrix of bits")
        return sign_bytes(stream_of(self.spec, self.name), self.spec.rank, self.width)

    def matrix(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", columns: slice = slice(None)) -> torch.Tensor:
        """A [r, k], new and contiguous; values made in float64 or exactly, then rounded once to `dtype`.

        columns: a contiguous part of A's columns (a row-parallel shard), equal to that part of the whole. ConfigError for a stepped slice.
        """
        if columns.step not in (None, 1):
            raise ConfigError(f"columns = {columns}: allowed is a slice with step 1")
        if self.signs:
            return self.unpacked(torch.from_numpy(self.bits).to(device), dtype, columns)
        values = DISTRIBUTIONS[self.spec.distribution].make(stream_of(self.spec, self.name), self.spec.rank, self.width)
        return torch.from_numpy(np.ascontiguousarray(values[:, columns])).to(device=device, dtype=dtype)

    def unpacked(self, bits: torch.Tensor, dtype: torch.dtype = torch.float32, columns: slice = slice(None)) -> torch.Tensor:
        """`matrix` from `bits` as a tensor on its device: a byte stands for eight entries, looked up in a table."""
        start, stop, _ = columns.indices(self.width)
        first, last, scale = start // 8, -(-stop // 8), 1.0 / math.sqrt(self.spec.rank)
        table = ((torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1).to(torch.float32).mul_(2 * scale).sub_(scale).to(bits.device, dtype)
        flat = F.embedding(bits[:, first : max(last, first)].to(torch.int32), table).flatten(1)
        return flat[:, start - 8 * first : max(stop - 8 * first, start - 8 * first)].contiguous()

    def digest(self, made: torch.Tensor | None = None) -> bytes:
        """128 bits that two sides compare: of the sign bits, else of A in fp32; kept. made: A, where it is at hand."""
        if "_digest" not in self.__dict__:
            content = self.bits if self.signs else (self.matrix() if made is None else made.detach().to("cpu", torch.float32)).contiguous().numpy()
            digest = xxhash.xxh3_128(f"{self.spec.rank}x{self.width}|".encode())
            digest.update(content)
            self._digest = digest.digest()
        return self._digest


def make_projection(spec: ProjectionSpec, name: str, width: int, **how) -> torch.Tensor:
    """A [r, k] of one layer; `how` as in `Projection.matrix`."""
    return Projection(spec, name, width).matrix(**how)


def projection_digest(projections: Mapping[str, Projection]) -> str:
    """128-bit digest (hex) of layer names and their A."""
    digest = xxhash.xxh3_128()
    for name in sorted(projections):
        digest.update(name.encode() + projections[name].digest())
    return digest.hexdigest()


def stream_of(spec: ProjectionSpec, name: str) -> np.random.Philox:
    """The random words that belong to one layer of one draw."""
    # The rank is left out: the rank-r matrix is then the first r rows of any larger one, up to the scale.
    text = f"{RECIPE}|{spec.distribution}|{spec.seed}|{spec.draw}|{canonical_name(name)}"
    return np.random.Philox(key=key_of(text))


def key_of(text: str) -> np.ndarray:
    """Philox key, uint64 [2], of a text."""
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def sign_bytes(stream: np.random.Philox, rank: int, width: int) -> np.ndarray:
    """Random bits, uint8 [rank, 8·words]; a row starts on a word of its own, so that rows may be drawn in any number of calls."""
    words = -(-width // 64)
    return stream.random_raw(rank * words).astype("<u8", copy=False).view(np.uint8).reshape(rank, words * 8)


DISTRIBUTIONS[SIGNS] = Distribution(None)  # made of `bits`
