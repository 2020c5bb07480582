"""95% confidence intervals of acceptance, by the bootstrap over requests.

The drafts of one request are alike: a head that knows the subject drafts well for many steps.
Intervals that took every draft for an independent trial would be far too narrow. So whole requests
are drawn again, with their counters, and the figure is computed from the pooled counters each time
(a cluster bootstrap of a ratio of sums).
"""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from peagle.results import Interval

RESAMPLES = 2000
MIN_CLUSTERS = 5  # fewer requests do not show how requests vary
_LEVEL = 0.95
_MAX_WEIGHTS = 4_000_000  # weights drawn at a time: 32 MB

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of the pooled figures; one entry a position in lists.

    An interval is None if too few requests have drafts at that position, or if all drafts were
    accepted or none: the resamples then do not vary.
    """

    acceptance_length: Interval | None
    unconditional: list[Interval | None] | None
    conditional: list[Interval | None] | None


def acceptance_intervals(
    drafts_N: Counts, accepted_NK: Counts, *, resamples: int = RESAMPLES, seed: int = 0
) -> Intervals:
    """Compute intervals from the counters of N clusters (requests, or conversations of turns).

    The ends are percentiles of the resampled figures, at levels widened for few clusters so that
    the normal case has the coverage of Student's t with N - 1 degrees of freedom (the expanded
    percentile interval of Hesterberg, arXiv 1411.5279). Clusters without drafts are left out.
    `accepted_NK` counts the drafts whose first i + 1 tokens were all accepted.
    """
    bears = drafts_N > 0
    reached_NJ = np.concatenate([drafts_N[bears, None], accepted_NK[bears]], axis=1)
    num_clusters = len(reached_NJ)
    if num_clusters < MIN_CLUSTERS:
        return Intervals(None, None, None)
    sums_RJ = _resampled_sums(reached_NJ, resamples, seed)
    drafts_R1, accepted_RK = sums_RJ[:, :1], sums_RJ[:, 1:]
    lengths_R = 1 + accepted_RK.sum(axis=1) / drafts_R1[:, 0]
    unconditional_RK = accepted_RK / drafts_R1
    with np.errstate(invalid="ignore"):
        conditional_RK = accepted_RK / sums_RJ[:, :-1]  # 0 / 0 is nan: that draw says nothing
    bearing_K = (reached_NJ[:, :-1] > 0).sum(axis=0)
    return Intervals(
        _interval(lengths_R, num_clusters, (1, 1 + accepted_RK.shape[1])),
        [_interval(column, num_clusters) for column in unconditional_RK.T],
        [
            _interval(column[~np.isnan(column)], int(bearing))
            for column, bearing in zip(conditional_RK.T, bearing_K, strict=True)
        ],
    )


def paired_difference(
    one_N2: Counts,
    other_N2: Counts,
    *,
    level: float = _LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, Interval | None]:
    """Return the difference of two ratios on the same clusters, and its paired interval.

    sum(one[:, 0]) / sum(one[:, 1]) - sum(other[:, 0]) / sum(other[:, 1]). Each resample draws
    clusters once for both, which cancels the difficulty that a request has for both. The interval
    is None below 5 clusters. Row n of both arrays has numerator and denominator of cluster n; rows
    of zeros in one of them part the clusters between both.
    """
    values_N4 = np.concatenate([one_N2, other_N2], axis=1)

    def difference(sums: NDArray[np.int64]) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]

    found = float(difference(values_N4.sum(axis=0)))
    if len(values_N4) < MIN_CLUSTERS:
        return found, None
    drawn_R = difference(_resampled_sums(values_N4, resamples, seed))
    return found, _interval(drawn_R[np.isfinite(drawn_R)], len(values_N4), (), level)


def _resampled_sums(values_NJ: Counts, resamples: int, seed: int) -> Counts:
    """Return the column sums of `resamples` draws of N rows with replacement."""
    num_rows = len(values_NJ)
    chances_N = np.full(num_rows, 1 / num_rows)
    generator = np.random.default_rng(seed)
    sums: list[Counts] = []
    for start in range(0, resamples, at_once := max(1, _MAX_WEIGHTS // num_rows)):
        size = min(at_once, resamples - start)
        sums.append(generator.multinomial(num_rows, chances_N, size=size) @ values_NJ)
    return np.concatenate(sums)


def _interval(
    values_R: NDArray[np.float64],
    num_clusters: int,
    ends: tuple[float, ...] = (0, 1),
    level: float = _LEVEL,
) -> Interval | None:
    """Return percentiles of the values; None for few clusters, or where all values are at one end.

    Each end is cut at the percentile Phi(-sqrt(N / (N - 1)) t) with t Student's quantile.
    """
    if num_clusters < MIN_CLUSTERS or any((values_R == end).all() for end in ends):
        return None
    quantile = student_quantile((1 + level) / 2, num_clusters - 1)
    tail = NormalDist().cdf(-sqrt(num_clusters / (num_clusters - 1)) * quantile)
    low, high = np.quantile(values_R, [tail, 1 - tail])
    return float(low), float(high)


def student_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution, by its expansion about the normal quantile.

    Abramowitz and Stegun 26.7.5; at 0.975 the error is below 0.001 from 4 degrees of freedom on.
    """
    z, v = NormalDist().inv_cdf(probability), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
