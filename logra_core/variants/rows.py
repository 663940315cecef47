"""Other distributions of A: Gaussian (the paper's rank study), orthonormal (Haar), signed Walsh–Hadamard rows, and coordinates; in the table of
`SketchConfig.distribution` once `variants` is imported.

They keep E[AᵀA] = I and come of the same words as the core's (projection.py), by exactly rounded operations. METHOD section 8.
"""

from __future__ import annotations

import math

import numpy as np

from ..projection import Distribution
from ..settings import DISTRIBUTIONS


def gaussian(stream: np.random.Philox, rank: int, width: int) -> np.ndarray:
    """N(0, 1/r)."""
    return normal(stream, rank * width).reshape(rank, width) / math.sqrt(rank)


def orthonormal(stream: np.random.Philox, rank: int, width: int) -> np.ndarray:
    """Haar rows times √(k/r): they do not overlap, so cos(G, S A) = √(r/k), exact at r = k."""
    return _haar_rows(normal(stream, rank * width).reshape(rank, width)) * math.sqrt(width / rank)


def hadamard(stream: np.random.Philox, rank: int, width: int) -> np.ndarray:
    """r rows, without repetition, of the Walsh–Hadamard matrix of order k' with random signs on the columns, over √r; k' is the next power of
    two, and of its columns a random choice of k stays. Where k = k' the rows are orthonormal times √(k/r); else they overlap, by √(1 − k/k')
    of what random signs would. Entry (i, j) of the Walsh–Hadamard matrix is the parity of i & j.
    """
    order = 1 << (width - 1).bit_length()
    signs = stream.random_raw(width) & np.uint64(1)
    rows = np.argsort(stream.random_raw(order), kind="stable")[:rank].astype(np.uint64)
    # the first columns of a longer matrix would make rows i and i + order/2 nearly parallel
    columns = np.argsort(stream.random_raw(order), kind="stable")[:width].astype(np.uint64)
    parity = np.bitwise_count(rows[:, None] & columns) & 1
    return (1.0 - 2.0 * (parity ^ signs.astype(np.uint8))) / math.sqrt(rank)


def coordinates(stream: np.random.Philox, rank: int, width: int) -> np.ndarray:
    """√(k/r) times r unit vectors, without repetition: S is a choice of G's columns, and all of them, reordered, at r = k."""
    chosen = np.argsort(stream.random_raw(width), kind="stable")[:rank]
    return (chosen[:, None] == np.arange(width)) * math.sqrt(width / rank)


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


def normal(stream: np.random.Philox, count: int) -> np.ndarray:
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


DISTRIBUTIONS["gaussian"] = Distribution(gaussian)
DISTRIBUTIONS |= {make.__name__: Distribution(make, rank_at_most_width=True) for make in (orthonormal, hadamard, coordinates)}
