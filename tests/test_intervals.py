"""Intervals of acceptance: their coverage on simulated heads, against formulas, and properties."""

from math import prod
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.intervals import (
    MIN_CLUSTERS,
    acceptance_intervals,
    paired_difference,
    student_quantile,
)

K = 4
ALPHA, BETA = 6, 4  # of the requests' acceptance, a Beta distribution


def simulated(num_requests: int, generator: np.random.Generator):
    """Requests that differ in how well they are drafted: P(i accepted | before) is constant."""
    chance_N = generator.beta(ALPHA, BETA, size=num_requests)
    drafts_N = generator.integers(10, 60, size=num_requests)
    accepted_NK = np.zeros((num_requests, K), dtype=np.int64)
    for n in range(num_requests):
        hits = generator.random((drafts_N[n], K)) < chance_N[n]
        accepted_NK[n] = np.cumprod(hits, axis=1).sum(axis=0)
    return drafts_N, accepted_NK


def truth() -> list[float]:
    """E[p^i] of the Beta distribution: unconditional acceptance, as drafts do not depend on p."""
    return [prod((ALPHA + j) / (ALPHA + BETA + j) for j in range(i + 1)) for i in range(K)]


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [12, 40])
def test_coverage_is_what_it_says(num_requests: int) -> None:
    generator, runs = np.random.default_rng(num_requests), 400
    unconditional = truth()
    conditional = [a / b for a, b in zip(unconditional, [1, *unconditional[:-1]], strict=True)]
    hits = np.zeros(1 + 2 * K)
    for seed in range(runs):
        intervals = acceptance_intervals(
            *simulated(num_requests, generator), resamples=600, seed=seed
        )
        assert intervals.acceptance_length and intervals.unconditional and intervals.conditional
        found = [intervals.acceptance_length, *intervals.unconditional, *intervals.conditional]
        expected = [1 + sum(unconditional), *unconditional, *conditional]
        for number, (interval, value) in enumerate(zip(found, expected, strict=True)):
            assert interval is not None
            hits[number] += interval[0] <= value <= interval[1]
    # 0.95 +- three standard errors of 400 runs is 0.917 to 0.983; twelve requests lose a little.
    assert (hits / runs > (0.915 if num_requests >= 40 else 0.885)).all(), hits / runs
    assert (hits / runs < 0.985).all(), hits / runs


def test_drafts_as_if_independent_would_be_too_narrow() -> None:
    """The reason for drawing requests: the interval of single drafts misses far more often."""
    generator, value = np.random.default_rng(3), truth()[0]
    naive = ours = 0
    for seed in range(150):
        drafts_N, accepted_NK = simulated(20, generator)
        share = accepted_NK[:, 0].sum() / drafts_N.sum()
        naive += abs(share - value) < 1.96 * (share * (1 - share) / drafts_N.sum()) ** 0.5
        intervals = acceptance_intervals(drafts_N, accepted_NK, resamples=400, seed=seed)
        assert intervals.unconditional and intervals.unconditional[0]
        low, high = intervals.unconditional[0]
        ours += low <= value <= high
    assert naive < 0.75 * 150 < 0.87 * 150 < ours


def test_width_is_that_of_the_normal_approximation() -> None:
    """The delta method's standard error of a ratio of sums, for many requests."""
    drafts_N, accepted_NK = simulated(400, np.random.default_rng(0))
    total, ratio = drafts_N.sum(), accepted_NK.sum() / drafts_N.sum()
    residual_N = accepted_NK.sum(axis=1) - ratio * drafts_N
    error = (residual_N**2).sum() ** 0.5 / total
    interval = acceptance_intervals(drafts_N, accepted_NK, resamples=4000).acceptance_length
    assert interval is not None
    assert (interval[1] - interval[0]) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)
    assert sum(interval) / 2 == pytest.approx(1 + ratio, abs=0.2 * error)


def test_width_for_few_requests_is_students() -> None:
    """Of a mean of ten normal scores: t * s / sqrt(10), s with 9 degrees of freedom."""
    scores_N = [NormalDist().inv_cdf((n + 0.5) / 10) for n in range(10)]
    accepted_N = np.array([round(500 + 100 * score) for score in scores_N])
    intervals = acceptance_intervals(np.full(10, 1000), accepted_N[:, np.newaxis], resamples=20_000)
    assert intervals.acceptance_length is not None
    low, high = intervals.acceptance_length
    half = student_quantile(0.975, 9) * accepted_N.std(ddof=1) / 10**0.5 / 1000
    assert (high - low) / (2 * half) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("degrees", "value"), [(4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (1000, 1.9623)]
)
def test_student_quantile(degrees: int, value: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(value, abs=1e-3)


def test_few_requests_have_no_interval() -> None:
    drafts_N, accepted_NK = simulated(MIN_CLUSTERS - 1, np.random.default_rng(0))
    # Requests without a draft do not count.
    drafts_N = np.append(drafts_N, [0, 0, 0])
    accepted_NK = np.append(accepted_NK, np.zeros((3, K), dtype=np.int64), axis=0)
    intervals = acceptance_intervals(drafts_N, accepted_NK)
    assert (intervals.acceptance_length, intervals.unconditional) == (None, None)


def test_a_position_that_few_requests_reach_has_no_conditional_interval() -> None:
    accepted_NK = np.array([[5, 0, 0]] * 20 + [[5, 3, 1]], dtype=np.int64)
    intervals = acceptance_intervals(np.full(21, 10), accepted_NK)
    assert intervals.conditional is not None
    assert intervals.conditional[0] == (0.5, 0.5)
    assert intervals.conditional[1] is not None  # all of them reached it
    assert intervals.conditional[2] is None


@pytest.mark.parametrize("share", [0, 10])
def test_where_all_drafts_fare_alike_there_is_no_interval(share: int) -> None:
    """Twenty requests without an accepted draft do not show that there never is one."""
    accepted_NK = np.full((20, 2), share)
    intervals = acceptance_intervals(np.full(20, 10), accepted_NK)
    assert intervals.acceptance_length is None
    assert intervals.unconditional == [None, None]
    assert intervals.conditional == [None, None]


counters = st.lists(
    st.integers(1, 30).flatmap(
        lambda drafts: st.tuples(
            st.just(drafts),
            st.lists(st.integers(0, drafts), min_size=3, max_size=3).map(
                lambda counts: sorted(counts, reverse=True)
            ),
        )
    ),
    min_size=MIN_CLUSTERS,
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(counters, st.integers(0, 2**32))
def test_properties(requests: list[tuple[int, list[int]]], seed: int) -> None:
    drafts_N = np.array([drafts for drafts, _ in requests])
    accepted_NK = np.array([accepted for _, accepted in requests])
    intervals = acceptance_intervals(drafts_N, accepted_NK, resamples=200, seed=seed)
    assert intervals == acceptance_intervals(drafts_N, accepted_NK, resamples=200, seed=seed)
    assert intervals.unconditional and intervals.conditional
    rates = accepted_NK / drafts_N[:, None]
    for position, one in enumerate(intervals.unconditional):
        assert (one is None) == ({*rates[:, position]} in ({0.0}, {1.0}))
        if one is None:
            continue
        low, high = one
        # A pooled rate lies among those of the requests.
        assert rates[:, position].min() - 1e-9 <= low <= high <= rates[:, position].max() + 1e-9
    for one in intervals.conditional:
        assert one is None or 0 <= one[0] <= one[1] <= 1
    low, high = intervals.acceptance_length or (1, 1)
    assert 1 <= low <= high <= 1 + accepted_NK.shape[1]


@pytest.mark.parametrize("level", [0.95, 0.995])
def test_the_difference_of_parted_clusters_at_a_level(level: float) -> None:
    """Of equal denominators it is a difference of two means, whose interval a formula gives."""
    draw = np.random.default_rng(0)
    one, other = (draw.integers(0, 9, size) for size in (150, 250))
    rows = np.zeros((400, 4), dtype=np.int64)
    rows[:150, 0], rows[:150, 1], rows[150:, 2], rows[150:, 3] = one, 2, other, 2
    found, ends = paired_difference(rows[:, :2], rows[:, 2:], level=level, resamples=20_000)
    expected = (one.mean() - other.mean()) / 2
    error = sum(part.var(ddof=1) / len(part) for part in (one, other)) ** 0.5 / 2
    half = NormalDist().inv_cdf((1 + level) / 2) * error
    assert found == pytest.approx(expected) and ends is not None
    assert ends == pytest.approx((expected - half, expected + half), abs=0.06 * half)
