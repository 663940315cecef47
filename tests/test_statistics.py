"""The statistics of the notebooks against tables, closed forms, and what simulated repetitions find."""

from __future__ import annotations

import math

import numpy as np
import pytest

from logra_core.lab.statistics import CLAIMS, counted, differences, estimate, f_critical, f_tail, one_way, paired, seen_shift, share, two_way, verdict


def test_student_and_f_tables() -> None:
    # two-sided 5 %: t(1) = tan(0.475 pi), t(2) = 0.95 sqrt(2 / (1 - 0.95²)) in closed form; the others as printed in tables
    assert math.sqrt(f_critical(1, 1)) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-9)
    assert math.sqrt(f_critical(1, 2)) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-9)
    for top, bottom, table in ((1, 5, 2.5706**2), (1, 10, 2.2281**2), (3, 20, 3.0984), (10, 30, 2.1646)):
        assert f_critical(top, bottom) == pytest.approx(table, rel=1e-4)
    for f in (0.3, 1.0, 4.0):  # F(2, n) has the tail (1 + 2 f / n)^(-n / 2)
        assert f_tail(f, 2, 7) == pytest.approx((1 + 2 * f / 7) ** -3.5, rel=1e-12)
    assert f_tail(0.0, 3, 4) == f_tail(-1.0, 3, 4) == 1.0


@pytest.mark.parametrize(("top", "bottom", "shift"), [(1, 2, 4.0), (1, 1, 265.0), (13, 26, 12.0)])
def test_the_noncentral_tail_is_what_simulation_finds(top: int, bottom: int, shift: float) -> None:
    rng = np.random.default_rng(0)
    f = (rng.noncentral_chisquare(top, shift, 400_000) / top) / (rng.chisquare(bottom, 400_000) / bottom)
    for at in (1.0, 5.0, 30.0):
        assert f_tail(at, top, bottom, shift) == pytest.approx((f > at).mean(), abs=0.003)


def test_power_by_a_published_table() -> None:
    # two-sided one-sample t test, 5 %, power 0.8: d = 1.0 needs n = 10, d = 0.5 needs n = 34 (Cohen 1988)
    for d, n in ((1.0, 10), (0.5, 34)):
        assert math.sqrt(seen_shift(1, n - 1) / n) <= d < math.sqrt(seen_shift(1, n - 2) / (n - 1))


def test_a_paired_difference_by_hand() -> None:
    ours, theirs = {0: 0.5, 1: 0.7, 2: 0.6, 7: 9.0}, {2: 0.5, 0: 0.3, 1: 0.4, 8: 1.0}
    assert differences(ours, theirs) == pytest.approx([0.2, 0.3, 0.1])
    found = paired(ours, theirs)  # mean 0.2, deviation 0.1, standard error 0.1 / sqrt(3), t(2) = 4.3027
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((0.2, 0.2 - half, 0.2 + half, 3))
    assert found.seen == pytest.approx(math.sqrt(seen_shift(1, 2)) * 0.1 / math.sqrt(3)) and found.seen > half
    assert str(found) == "+0.200 [-0.048, +0.448]" and str(estimate([0.1])) == "+0.100 (one seed)"
    assert estimate([0.1]).low == -math.inf and str(estimate([0.2, 0.2])) == "+0.200 (all 2 equal)"
    with pytest.raises(ValueError, match="no pair"):
        paired({0: 1.0}, {1: 1.0})


def test_an_effect_that_could_have_been_seen_is_seen_in_four_of_five() -> None:
    rng, sizes = np.random.default_rng(1), (3, 6)
    for n in sizes:
        effect = math.sqrt(seen_shift(1, n - 1) / n)
        x = rng.normal(effect, 1.0, (100_000, n))
        t = x.mean(1) / (x.std(1, ddof=1) / math.sqrt(n))
        assert (np.abs(t) > math.sqrt(f_critical(1, n - 1))).mean() == pytest.approx(0.8, abs=0.005)


def test_two_groups_are_the_t_test_and_seeds_are_taken_off() -> None:
    a, b = np.array([1.0, 2.0, 4.0]), np.array([2.0, 5.0, 6.0])
    pooled = ((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()
    t = (b.mean() - a.mean()) / math.sqrt(pooled / 4 * (2 / 3))
    found = one_way([a, b])
    assert (found.f, found.top, found.bottom) == pytest.approx((t**2, 1, 4))
    pairs = estimate(b - a)
    both = two_way([a, b])  # of two arms: the paired t test
    assert both.f == pytest.approx((pairs.mean / ((pairs.high - pairs.mean) / math.sqrt(f_critical(1, 2)))) ** 2)
    assert both.pair_seen == pytest.approx(both.seen) and both.seen == pytest.approx(pairs.seen) and both.half == pytest.approx(pairs.high - pairs.mean)
    assert two_way(np.array([a, b]) + 100 * np.arange(3)).f == pytest.approx(both.f)
    # by hand: three arms, two seeds
    table = np.array([[1.0, 3.0], [2.0, 2.0], [6.0, 7.0]])
    # row means 2, 2, 6.5; column means 3, 4; grand mean 3.5: SS rows 27, columns 1.5, total 29.5, so 1.0 is left with 2 degrees
    by_hand = two_way(table)
    assert (by_hand.f, by_hand.residual, by_hand.p) == pytest.approx((27.0, math.sqrt(0.5), 1 / (1 + 27.0)))
    assert str(by_hand) == "F(2, 2) = 27.00, p = 0.04"


def test_one_group_off_by_what_could_have_been_seen() -> None:
    rng, k, n = np.random.default_rng(2), 5, 3
    noise = rng.normal(size=(20_000, k, n))
    test = two_way(noise[0])
    noise[:, 0] += test.seen / test.residual  # in units of the true deviation
    rows, columns = noise.mean(2, keepdims=True), noise.mean(1, keepdims=True)
    grand = noise.mean((1, 2), keepdims=True)
    f = (n * ((rows - grand) ** 2).sum((1, 2)) / (k - 1)) / (((noise - rows - columns + grand) ** 2).sum((1, 2)) / ((k - 1) * (n - 1)))
    assert (f > f_critical(k - 1, (k - 1) * (n - 1))).mean() == pytest.approx(0.8, abs=0.01)


def test_shares() -> None:
    assert share(0, 10) == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)))
    assert share(10, 10) == pytest.approx((0.025 ** (1 / 10), 1.0))
    low, high = share(4, 128)

    def at_least(k, p):
        return sum(math.comb(128, i) * p**i * (1 - p) ** (128 - i) for i in range(k, 129))

    assert at_least(4, low) == pytest.approx(0.025) and 1 - at_least(5, high) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="no share"):
        share(3, 2)


@pytest.mark.parametrize(
    ("claim", "low", "high", "said"),
    [
        ("more", 0.01, 0.2, "holds"), ("more", -0.04, 0.02, "does not hold"), ("more", -0.04, 0.2, "undecided"), ("more", 0.01, 0.02, "holds"),
        ("less", -0.2, -0.01, "holds"), ("less", -0.02, 0.04, "does not hold"), ("less", -0.2, 0.04, "undecided"),
        ("not less", -0.02, 0.4, "holds"), ("not less", -0.4, -0.01, "does not hold"), ("not less", -0.4, 0.4, "undecided"),
        ("not more", -0.4, 0.02, "holds"), ("not more", 0.01, 0.4, "does not hold"),
        ("alike", -0.02, 0.01, "holds"), ("alike", 0.01, 0.2, "does not hold"), ("alike", -0.02, 0.2, "undecided"), ("alike", -0.2, 0.02, "undecided"),
        *((claim, -math.inf, math.inf, "undecided") for claim in CLAIMS),  # a single seed decides nothing
    ],
)  # fmt: skip
def test_verdicts(claim: str, low: float, high: float, said: str) -> None:
    assert verdict(claim, low, high, 0.03) == said


def test_what_is_counted_has_no_interval() -> None:
    assert str(counted(-0.4)) == "-0.400 (counted)" and verdict("less", counted(-0.4).low, counted(-0.4).high, 0.05) == "holds"


def test_a_claim_must_be_known() -> None:
    with pytest.raises(ValueError, match="allowed is one of more"):
        verdict("better", 0.0, 1.0, 0.03)
