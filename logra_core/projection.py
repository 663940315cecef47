"""The only seed recipe: from (run seed, draw number, layer name) to the projection A[r, k], the same bits everywhere.

Entries come from NumPy's Philox raw words (a counter-based stream that is stable across versions) through operations that
IEEE 754 rounds exactly (+ - * / sqrt, and products short enough to be exact), so that neither device, thread count, BLAS,
chunk nor shard changes a bit. METHOD section 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from .settings import DISTRIBUTIONS, ConfigError

WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
RECIPE = "logra-projection-1"  # part of the seed: a changed recipe must change every A
NEEDS_WIDTH = ("orthonormal", "hadamard", "coordinates")  # distributions with at most as many rows as columns
SAME_INPUT = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class ProjectionSpec:
    """Which draw of A: run seed, draw number (0 for the first update; stays 0 when A is fixed), rank r, distribution.

    shared: layers of one block that read the same input (q, k, v; gate, up) have one A.
    """

    seed: int
    draw: int
    rank: int
    distribution: str
    shared: bool = False

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigError(f"distribution = {self.distribution!r}: allowed is one of {', '.join(DISTRIBUTIONS)}")
        for name, least in (("seed", 0), ("draw", 0), ("rank", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} = {value!r}: expected an integer >= {least}")
        if not isinstance(self.shared, bool):
            raise ConfigError(f"shared = {self.shared!r}: expected true or false")


def canonical_name(name: str) -> str:
    """Module name without the parts that wrappers add (torch.compile, activation checkpointing, FSDP1, a leading DDP `module.`)."""
    parts = [p for p in name.split(".") if p not in WRAPPER_PARTS]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == "module" else parts)


def input_name(name: str) -> str:
    """Canonical name of what a layer reads: the same for q, k and v, and for gate and up, of one block; else the layer's own."""
    block, dot, last = canonical_name(name).rpartition(".")
    return block + dot + SAME_INPUT.get(last, last)


def make_projection(
    spec: ProjectionSpec,
    name: str,
    width: int,
    *,
    columns: slice = slice(None),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A[r, k] with E[AᵀA] = I (METHOD section 1).

    Rademacher: ±1/√r. Gaussian: N(0, 1/r). Orthonormal: Haar rows times √(k/r). Hadamard: r rows, without repetition, of the
    Walsh–Hadamard matrix of order k' with random signs on the columns, over √r; k' is the next power of two, and of its columns a random
    choice of k stays. Where k = k' the rows are orthonormal times √(k/r); else they overlap, by √(1 − k/k') of what random signs would.
    Coordinates: √(k/r) times r unit vectors, without repetition: S is a choice of G's columns, and all of them, reordered, at r = k.
    The last three need r <= k.

    Args:
        name: of the module, canonical or wrapped. width: k, inputs of the layer.
        columns: contiguous part of A's columns to return (a row-parallel shard), equal to the slice of the whole.
        dtype, device: of the result; the values are made in float64 or exactly, then rounded once.
    Returns:
        tensor [r, k] (or [r, len(columns)]), contiguous.
    Raises:
        ConfigError: r > k for orthonormal rows, a width below 1, or a stepped slice.
    """
    if width < 1:
        raise ConfigError(f"width = {width}: a projection of {name!r} needs at least one column")
    if columns.step not in (None, 1):
        raise ConfigError(f"columns = {columns}: allowed is a slice with step 1")
    stream = stream_of(spec, name)
    device = torch.device(device)
    if spec.distribution == "rademacher":
        return _rademacher(stream, spec.rank, width, columns, dtype, device)
    if spec.distribution == "gaussian":
        values = _normal(stream, spec.rank * width).reshape(spec.rank, width) / math.sqrt(spec.rank)
    elif spec.rank > width:
        raise ConfigError(f"rank = {spec.rank}: {name!r} has {width} inputs, and orthonormal rows need rank <= {width}")
    elif spec.distribution == "hadamard":
        values = _hadamard(stream, spec.rank, width)
    elif spec.distribution == "coordinates":
        chosen = np.argsort(stream.random_raw(width), kind="stable")[: spec.rank]
        values = (chosen[:, None] == np.arange(width)) * math.sqrt(width / spec.rank)
    else:
        values = _haar_rows(_normal(stream, spec.rank * width).reshape(spec.rank, width)) * math.sqrt(width / spec.rank)
    return torch.from_numpy(np.ascontiguousarray(values[:, columns])).to(device=device, dtype=dtype)


def at_rank(spec: ProjectionSpec, ranks: dict[str, int], name: str) -> ProjectionSpec:
    """The draw of one layer: at its own rank, where `ranks` gives one."""
    return replace(spec, rank=ranks[name]) if name in ranks else spec


def projection_digest(
    spec: ProjectionSpec, widths: dict[str, int], made: Mapping[str, torch.Tensor] | None = None, ranks: dict[str, int] = {}
) -> str:
    """128-bit digest (hex) of the fp32 matrices A of all named layers; `made` saves drawing those it holds. ranks: see `at_rank`."""
    digest = xxhash.xxh3_128()
    for name in sorted(widths):
        A_RK = (made or {}).get(name)
        A_RK = make_projection(at_rank(spec, ranks, name), name, widths[name]) if A_RK is None else A_RK
        digest.update(name.encode())
        digest.update(A_RK.detach().to("cpu", torch.float32).contiguous().numpy())
    return digest.hexdigest()


def stream_of(spec: ProjectionSpec, name: str) -> np.random.Philox:
    """The random words that belong to one layer of one draw."""
    return np.random.Philox(key=_key(spec, name))


def _key(spec: ProjectionSpec, name: str) -> np.ndarray:
    # The rank is left out: the rank-r matrix is then the first r rows of any larger one, up to the scale.
    text = f"{RECIPE}|{spec.distribution}|{spec.seed}|{spec.draw}|{input_name(name) if spec.shared else canonical_name(name)}"
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)


class PackedProjection:
    """A Rademacher A[r, k] as its random bits: r·k/8 bytes (rows filled up to words of 64), unpacked when used to the bits of `make_projection`."""

    def __init__(
        self, spec: ProjectionSpec, name: str, width: int, device: torch.device | str = "cpu", bits: torch.Tensor | None = None
    ) -> None:
        """bits: uint8 [r, 8·ceil(k/64)], given in place of the draw."""
        if spec.distribution != "rademacher":
            raise ConfigError(f"distribution = {spec.distribution!r}: only rademacher can be kept as bits")
        self.width, self.scale = width, 1.0 / math.sqrt(spec.rank)
        self.bits = torch.from_numpy(_sign_bytes(stream_of(spec, name), spec.rank, width)).to(device) if bits is None else bits

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A [r, k], a new tensor on the device of the bits."""
        table = ((torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1).to(torch.float32).mul_(2 * self.scale).sub_(self.scale)
        table = table.to(device=self.bits.device, dtype=dtype)  # what eight bits stand for; a look-up needs no [r, k] integers
        return F.embedding(self.bits.to(torch.int32), table).flatten(1)[:, : self.width].contiguous()


def _sign_bytes(stream, rank: int, width: int) -> np.ndarray:
    """Random bits, uint8 [rank, 8·words]: bit j of byte i is column 8i + j; a row starts on a word of its own."""
    words = -(-width // 64)
    return stream.random_raw(rank * words).astype("<u8", copy=False).view(np.uint8).reshape(rank, words * 8)


def _rademacher(stream, rank, width, columns, dtype, device) -> torch.Tensor:
    packed = _sign_bytes(stream, rank, width)
    start, stop, _ = columns.indices(width)
    first, last = start // 8, -(-stop // 8)
    part = torch.from_numpy(np.ascontiguousarray(packed[:, first : max(last, first)]))
    if device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(part.numpy(), axis=1, bitorder="little"))
    else:  # move the packed bits, an eighth of a byte an entry, and unpack there
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        bits = ((part.to(device).unsqueeze(-1) >> shifts) & 1).flatten(1)
    scale = 1.0 / math.sqrt(rank)
    bits = bits[:, start - 8 * first : max(stop - 8 * first, start - 8 * first)]
    return bits.to(torch.float32).mul_(2 * scale).sub_(scale).to(dtype).contiguous()  # 0, 1 -> -scale, +scale: exact


def _hadamard(stream, rank: int, width: int) -> np.ndarray:
    """±1/√r, float64 [r, k]: entry (i, j) of the Walsh–Hadamard matrix is the parity of i & j."""
    order = 1 << (width - 1).bit_length()
    signs = stream.random_raw(width) & np.uint64(1)
    rows = np.argsort(stream.random_raw(order), kind="stable")[:rank].astype(np.uint64)
    # the first columns of a longer matrix would make rows i and i + order/2 nearly parallel
    columns = np.argsort(stream.random_raw(order), kind="stable")[:width].astype(np.uint64)
    parity = np.bitwise_count(rows[:, None] & columns) & 1
    return (1.0 - 2.0 * (parity ^ signs.astype(np.uint8))) / math.sqrt(rank)


def random_signs(stream: np.random.Philox, rows: int, columns: int) -> torch.Tensor:
    """The next ±1, fp32 [rows, columns]; each row starts on a word of its own, so that rows may be drawn in any number of calls."""
    bits = torch.from_numpy(np.unpackbits(_sign_bytes(stream, rows, columns), axis=1, bitorder="little", count=columns))
    return bits.to(torch.float32).mul_(2).sub_(1)


def _normal(stream, count: int) -> np.ndarray:
    """Standard normals, float64 [count], by the inverse distribution function (Wichura 1988, AS 241, PPND16)."""
    uniform = ((stream.random_raw(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    uniform = np.minimum(uniform, 1.0 - 2.0**-53)  # the largest word rounds up to 1
    q = uniform - 0.5
    out = q * _ratio(0.180625 - q * q, _CENTRE)
    tail = np.flatnonzero(np.abs(q) > 0.425)
    distance = np.sqrt(-_log(np.minimum(uniform[tail], 1.0 - uniform[tail])))
    far = np.where(distance <= 5.0, _ratio(distance - 1.6, _MIDDLE), _ratio(distance - 5.0, _FAR))
    out[tail] = np.where(q[tail] < 0, -far, far)
    return out


def _log(x: np.ndarray) -> np.ndarray:
    # libm's log differs in the last bit between machines; this series uses only exactly rounded operations.
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = s * s, np.zeros_like(s)
    for odd in range(25, 0, -2):
        series = series * square + 1.0 / odd
    return (exponent - low) * 0.6931471805599453 + 2.0 * s * series


def _ratio(x: np.ndarray, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> np.ndarray:
    above, below = (np.zeros_like(x) for _ in range(2))
    for a, b in zip(*coefficients, strict=True):
        above, below = above * x + a, below * x + b
    return above / below


def _haar_rows(G_RK: np.ndarray) -> np.ndarray:
    """Gram–Schmidt of Gaussian rows (Haar distributed) by Cholesky of the Gram matrix, bit for bit on every BLAS.

    BLAS sums in an order of its own, so its operands are kept to integers short enough for every partial sum to be exact.
    """
    rank, width = G_RK.shape
    G_RK = np.round(G_RK * 2.0**14)  # |entry| < 2^18, so products of two sum exactly up to k = 2^17
    M_RR = G_RK @ G_RK.T
    inverse_RR = np.eye(rank)
    for j in range(rank):  # elimination on [M | I] gives L⁻¹, elementwise and so in a fixed order
        pivot = 1.0 / M_RR[j, j]
        factor = M_RR[j + 1 :, j] * pivot
        M_RR[j + 1 :, j + 1 :] -= np.multiply.outer(factor, M_RR[j, j + 1 :])
        inverse_RR[j + 1 :, : j + 1] -= np.multiply.outer(factor, inverse_RR[j, : j + 1])
        inverse_RR[j] *= np.sqrt(pivot)
    _, exponent = np.frexp(np.abs(inverse_RR).max(axis=1, keepdims=True))
    rest, total = np.ldexp(inverse_RR, -exponent), np.zeros((rank, width))
    for bits in (22, 44, 66):  # slices of 22 bits: 22 + 18 + log2(r) <= 53
        part = np.round(np.ldexp(rest, bits))
        rest = rest - np.ldexp(part, -bits)
        total = total + np.ldexp(part @ G_RK, -bits)
    return np.ldexp(total, exponent)


# AS 241 coefficients, highest power first (numerator, denominator), for the centre, the tails and the far tails.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
     0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.00124266094738807843860, 0.0265321895265761230930,
     0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0),
)  # fmt: skip
