"""What a handful of runs can say: paired differences, F tests, shares, the effect that would have been seen, and one rule for verdicts.

Belongs here: the statistics that notebooks share. Distributions come from mpmath's incomplete beta function (torch brings mpmath, through sympy).
Intervals are of 95 %, tests two-sided at 5 %. An effect "could have been seen" if such a test finds one of that size in four of five repetitions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mpmath
import numpy as np

LEVEL, POWER = 0.05, 0.8


def f_tail(f: float, top: int, bottom: int, shift: float = 0.0) -> float:
    """P(F > f) of F(top, bottom), noncentral by `shift`: the central tails of top + 2j degrees, weighted by Poisson(j; shift / 2)."""
    a, b, x = top / 2, bottom / 2, top * f / (top * f + bottom)
    if f <= 0 or shift == 0:
        return 1.0 if f <= 0 else float(mpmath.betainc(b, a, 0, 1 - x, regularized=True))
    j = np.arange(int(shift / 2 + 12 * math.sqrt(shift / 2 + 1)) + 20)
    log_gamma = np.array([[math.lgamma(v) for v in j + s] for s in (1.0, a, a + b)])
    weights = np.exp(j * math.log(shift / 2) - shift / 2 - log_gamma[0])
    # I_x(a + 1, b) = I_x(a, b) - x^a (1 - x)^b / (a B(a, b))
    falls = np.exp((a + j) * math.log(x) + b * math.log1p(-x) - np.log(a + j) - log_gamma[1] - math.lgamma(b) + log_gamma[2])
    below = f_tail(f, top, bottom) + np.concatenate([[0.0], np.cumsum(falls)[:-1]])
    return float(min(1.0, (weights * below).sum()))


def _root(function, low: float, high: float) -> float:
    """Where an increasing function crosses 0; `high` is doubled until it is above."""
    while function(high) < 0:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


@functools.cache
def f_critical(top: int, bottom: int, level: float = LEVEL) -> float:
    """F that chance exceeds with probability `level`; of top = 1 it is the square of the two-sided Student t."""
    return _root(lambda f: level - f_tail(f, top, bottom), 0.0, 1.0)


@functools.cache
def seen_shift(top: int, bottom: int, level: float = LEVEL, power: float = POWER) -> float:
    """Noncentrality at which F(top, bottom) is significant with probability `power`."""
    critical = f_critical(top, bottom, level)
    return _root(lambda shift: f_tail(critical, top, bottom, shift) - power, 0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean with its t interval. n: independent values (pairs); 0: counted, not sampled. seen: the smallest true mean that could have been
    seen at this spread; nan: unknown."""

    mean: float
    low: float
    high: float
    n: int
    seen: float

    def __str__(self) -> str:
        if self.n == 0 or math.isinf(self.high):
            return f"{self.mean:+.3f} ({'counted' if self.n == 0 else 'one seed' if self.n == 1 else f'all {self.n} equal'})"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values, its t interval with n - 1 degrees, and the mean that could have been seen.

    One value has no interval, nor have several that are equal: shares of few answers meet by chance, which is no precision.
    """
    x = np.asarray(values, dtype=float)
    if np.ptp(x) < 1e-12:
        return Estimate(float(x.mean()), -math.inf, math.inf, len(x), math.nan)
    error = float(x.std(ddof=1)) / math.sqrt(len(x))
    half = math.sqrt(f_critical(1, len(x) - 1)) * error
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x), math.sqrt(seen_shift(1, len(x) - 1)) * error)


def counted(value: float) -> Estimate:
    """A number without chance in it, such as bytes."""
    return Estimate(value, value, value, 0, 0.0)


def paired(ours: Mapping, theirs: Mapping) -> Estimate:
    """`estimate` of ours minus theirs over the keys (seeds) that both have. Raises ValueError: they share none."""
    return estimate(differences(ours, theirs))


def differences(ours: Mapping, theirs: Mapping) -> np.ndarray:
    """Ours minus theirs, key by key in order. Raises ValueError: they share none."""
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ValueError(f"no pair: keys {sorted(ours)} and {sorted(theirs)}")
    return np.array([ours[key] - theirs[key] for key in both], dtype=float)


@dataclass(frozen=True)
class FTest:
    """F(top, bottom) = f with probability p by chance; residual: standard deviation of what is left.
    n: values a group. seen: how far one group alone must lie from all others for the test to have seen it."""

    f: float
    top: int
    bottom: int
    p: float
    residual: float
    n: float
    seen: float

    @property
    def half(self) -> float:
        """Half the interval of the difference of two groups, by the spread of all groups together."""
        return math.sqrt(f_critical(1, self.bottom) * 2 / self.n) * self.residual

    @property
    def pair_seen(self) -> float:
        """The smallest difference of two groups, named beforehand, that could have been seen."""
        return math.sqrt(seen_shift(1, self.bottom) * 2 / self.n) * self.residual

    def __str__(self) -> str:
        return f"F({self.top}, {self.bottom}) = {self.f:.2f}, p = {self.p:.2f}"


def _f_test(between: float, within: float, top: int, bottom: int, n: float) -> FTest:
    """n: values a group. One of k groups off by D has the noncentrality n D² (k - 1) / (k s²)."""
    spread = within / bottom
    f = between / top / spread
    seen = math.sqrt(seen_shift(top, bottom) * spread * (top + 1) / (top * n))
    return FTest(f, top, bottom, f_tail(f, top, bottom), math.sqrt(spread), n, seen)


def one_way(groups: Sequence[Sequence[float]]) -> FTest:
    """Do groups of independent values have one mean? `seen` takes their mean size."""
    parts = [np.asarray(g, dtype=float) for g in groups]
    total = np.concatenate(parts)
    between = sum(len(g) * (g.mean() - total.mean()) ** 2 for g in parts)
    within = sum(((g - g.mean()) ** 2).sum() for g in parts)
    return _f_test(between, within, len(parts) - 1, len(total) - len(parts), len(total) / len(parts))


def two_way(table: Sequence[Sequence[float]]) -> FTest:
    """Do the rows of a table [arms, seeds] have one mean, once what a seed does to every arm is taken off?"""
    x = np.asarray(table, dtype=float)
    rows, columns = x.mean(1, keepdims=True), x.mean(0, keepdims=True)
    rest = x - rows - columns + x.mean()
    k, n = x.shape
    return _f_test(n * ((rows - x.mean()) ** 2).sum(), (rest**2).sum(), k - 1, (k - 1) * (n - 1), n)


def share(right: int, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of a share by the exact binomial law (Clopper and Pearson)."""
    if not 0 <= right <= of or of < 1:
        raise ValueError(f"{right} of {of} is no share")

    def at_least(p: float, k: int) -> float:  # P(X >= k | p), which rises with p
        return float(mpmath.betainc(k, of - k + 1, 0, p, regularized=True))

    low = 0.0 if right == 0 else _root(lambda p: at_least(p, right) - level / 2, 0.0, 1.0)
    high = 1.0 if right == of else _root(lambda p: at_least(p, right + 1) - (1 - level / 2), 0.0, 1.0)
    return low, high


CLAIMS = ("more", "less", "not less", "not more", "alike")


def verdict(claim: str, low: float, high: float, margin: float) -> str:
    """Says "holds", "does not hold" or "undecided" of a claim about an effect, from the effect's interval and the smallest effect that matters.

    more: holds if the interval is above 0; does not if it is below the margin, so that no gain that matters is left.
    not less: holds if it is above -margin; does not if it is below 0. alike: holds if it is within the margin; does not if it is beyond 0.
    less, not more: the same, mirrored. What an interval of both kinds allows, holds.
    """
    if claim not in CLAIMS:
        raise ValueError(f"claim {claim!r}: allowed is one of {', '.join(CLAIMS)}")
    if claim in ("less", "not more"):
        claim, low, high = {"less": "more", "not more": "not less"}[claim], -high, -low
    holds = {"more": low > 0, "not less": low > -margin, "alike": -margin < low and high < margin}[claim]
    fails = {"more": high < margin, "not less": high < 0, "alike": low > 0 or high < 0}[claim]
    return "holds" if holds else "does not hold" if fails else "undecided"
