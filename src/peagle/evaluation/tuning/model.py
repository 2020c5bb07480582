"""The cost of a decode step at any batch size and K, fitted to measured steps.

    t(b, K) = t_target(b (K + 1), b) + t_draft(b, K) + t_rest(b, K)

Each part is a sum of terms with coefficients that are not negative, fitted to the relative error.
The terms of a pass are a constant (weights to read, launches), a cost for every sequence (its
attention), and a function of its rows that never falls and is linear between a few sizes: flat
where memory limits a pass, steep where arithmetic does. A mixture adds a cost for every distinct
expert that a pass touches: the weights of an expert are read once, however many rows choose it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from peagle.evaluation.touched_experts import ExpertCounts
from peagle.evaluation.tuning.machine import CostPoint, DecodeCost

Array = NDArray[np.float64]
# Neighbouring sizes between which a function of rows bends differ by at least this factor.
KNOT_RATIO = 2.0


def nonnegative_least_squares(terms_NM: Array, values_N: Array) -> Array:
    """Return the coefficients x_M >= 0 that minimise |terms x - values|.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23):
    coefficients enter where the error falls most, and leave where they would turn negative.
    `terms_NM` has a row for each measurement and a column for each term.
    """
    num_terms = terms_NM.shape[1]
    x_M, is_free = np.zeros(num_terms), np.zeros(num_terms, dtype=bool)
    scale = float(np.abs(terms_NM.T @ values_N).max(initial=0.0))
    for _ in range(3 * num_terms):
        gradient_M = terms_NM.T @ (values_N - terms_NM @ x_M)
        gradient_M[is_free] = -np.inf
        if is_free.all() or gradient_M.max() <= 1e-12 * scale:
            break
        is_free[gradient_M.argmax()] = True
        while True:
            wanted_M = np.zeros(num_terms)
            wanted_M[is_free] = np.linalg.lstsq(terms_NM[:, is_free], values_N, rcond=None)[0]
            low = is_free & (wanted_M <= 0)
            if not low.any():
                x_M = wanted_M
                break
            # Move towards the wanted coefficients until the first turns 0.
            share = (x_M[low] / np.maximum(x_M[low] - wanted_M[low], 1e-300)).min()
            x_M = x_M + share * (wanted_M - x_M)
            is_free &= ~(low & (x_M <= 1e-15 * max(1.0, float(x_M.max()))))
            x_M[~is_free] = 0.0
    return x_M


def choose_knots(rows: Sequence[float]) -> list[float]:
    """Return ascending knots among these sizes, with the smallest and the largest."""
    ordered = sorted(set(rows))
    knots = ordered[:1]
    for size in ordered[1:]:
        if size >= KNOT_RATIO * knots[-1]:
            knots.append(size)
    if knots[-1] != ordered[-1]:
        knots[max(1, len(knots) - 1) :] = ordered[-1:]
    return knots


def ramps(knots: Sequence[float], rows: float) -> list[float]:
    """Return the share of each stretch between knots that the rows cover; the last may exceed 1.

    A function that never falls and is linear between knots is a sum of these terms.
    """
    shares = [max(0.0, (rows - low) / (high - low)) for low, high in pairwise(knots)]
    return [*(min(1.0, share) for share in shares[:-1]), *shares[-1:]]


def _fit(
    terms: Callable[[CostPoint], list[float]], seconds: Mapping[CostPoint, float], least: float
) -> Callable[[CostPoint], float]:
    """Fit seconds = coefficients x terms to the error relative to max(seconds, least)."""
    weights_N = np.array([1 / max(value, least) for value in seconds.values()])
    terms_NM = np.array([terms(point) for point in seconds]) * weights_N[:, None]
    values_N = np.array(list(seconds.values())) * weights_N
    x_M = nonnegative_least_squares(terms_NM, values_N)
    return lambda point: float(np.dot(x_M, terms(point)))


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of rows and passes in a step, by batch size and K."""

    acceptance_length: Mapping[int, float]  # by K from 0 on: a drafter reads accepted tokens
    is_parallel: bool = True  # all drafts come from one pass of the drafter, else each from its own
    batch_rows: Callable[[int], int] = lambda batch: batch  # sequences for which a step has rows
    is_padded: bool = False  # the drafter has 2K rows for each sequence, as graphs have
    experts: ExpertCounts | None = None  # None for a dense target

    def target_rows(self, point: CostPoint) -> int:
        """Return the rows of the target's pass: b (K + 1)."""
        return self.batch_rows(point.batch) * (point.k + 1)

    def touched_experts(self, point: CostPoint) -> list[float]:
        """Return the distinct experts that the target's pass touches; [] for a dense target."""
        return [] if self.experts is None else [self.experts.touched(point.batch, point.k)]

    def draft_rows(self, point: CostPoint) -> float:
        """Return the rows of the drafter's passes: b (acceptance length + K - 1); 0 if K = 0."""
        if not point.k:
            return 0.0
        batch = self.batch_rows(point.batch)
        if self.is_padded:
            return 2.0 * batch * point.k
        return batch * (self.acceptance_length[point.k] + point.k - 1)

    def draft_passes(self, point: CostPoint) -> int:
        """Return the number of the drafter's passes."""
        return min(point.k, 1) if self.is_parallel else point.k


class CostModel:
    """Seconds of a step at any batch size and K, fitted to costs with and without drafts."""

    def __init__(self, shape: Shape, costs: Mapping[CostPoint, DecodeCost]) -> None:
        self.shape = shape
        least = 0.02 * min(cost.seconds for cost in costs.values())
        drafting = {point: cost for point, cost in costs.items() if point.k}
        target_knots = choose_knots([shape.target_rows(point) for point in costs])
        draft_knots = choose_knots([shape.draft_rows(point) for point in drafting])

        def target_terms(point: CostPoint) -> list[float]:
            batch = float(shape.batch_rows(point.batch))
            rows = ramps(target_knots, shape.target_rows(point))
            return [1.0, batch, *rows, *shape.touched_experts(point)]

        def draft_terms(point: CostPoint) -> list[float]:
            passes, batch = shape.draft_passes(point), shape.batch_rows(point.batch)
            rows = ramps(draft_knots, shape.draft_rows(point))
            return [float(passes), float(passes * batch), *rows]

        def rest_terms(point: CostPoint) -> list[float]:
            return [1.0, float(point.batch), point.batch * shape.acceptance_length[point.k]]

        self._target = _fit(target_terms, {c: t.target_s for c, t in costs.items()}, least)
        self._draft = _fit(draft_terms, {c: t.draft_s for c, t in drafting.items()}, least)
        self._rest = _fit(rest_terms, {c: t.rest_s for c, t in costs.items()}, least)

    def seconds(self, batch: int, k: int) -> float:
        """Return t(b, K), the seconds of a decode step."""
        point = CostPoint(batch, k)
        drafting = self._draft(point) if k else 0.0
        return self.target_seconds(point) + drafting + self._rest(point)

    def target_seconds(self, point: CostPoint) -> float:
        """Return t_target, the seconds of the target's pass with its verification."""
        return self._target(point)

    def tokens_per_s(self, batch: int, k: int) -> float:
        """Return b x acceptance length(K) / t(b, K), output tokens a second."""
        return batch * self.shape.acceptance_length[k] / self.seconds(batch, k)
