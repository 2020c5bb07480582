"""Machines whose step costs are known functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from peagle.evaluation.touched_experts import ExpertCounts, expected_experts
from peagle.evaluation.tuning.machine import CostPoint, DecodeCost
from peagle.evaluation.tuning.model import Shape

Cost = Callable[[Shape, CostPoint], DecodeCost]
# Unconditional acceptance of the bundled head, about.
RATES = (0.86, 0.73, 0.6, 0.48, 0.38, 0.3, 0.24, 0.19)
LENGTHS = {k: 1 + sum(RATES[:k]) for k in range(len(RATES) + 1)}


def step(target_s: float, draft_s: float, rest_s: float) -> DecodeCost:
    return DecodeCost(target_s + draft_s + rest_s, target_s, draft_s)


def linear(shape: Shape, point: CostPoint) -> DecodeCost:
    """Nothing but straight lines, like a CPU."""
    rows, drafts = shape.target_rows(point), shape.draft_rows(point)
    draft = 2e-3 + 4e-4 * drafts + 2e-4 * point.batch if point.k else 0.0
    return step(8e-3 + 6e-4 * rows + 5e-4 * point.batch, draft, 2e-4 + 5e-5 * point.batch)


def roofline(shape: Shape, point: CostPoint) -> DecodeCost:
    """Flat, then linear, with a soft knee: an 8B model in 16 bits on a large GPU, about."""
    rows, drafts = shape.target_rows(point), shape.draft_rows(point)
    target = (6.0e-3**4 + (2.6e-5 * rows) ** 4) ** 0.25 + 1e-5 * point.batch
    draft = (7.5e-4**4 + (3e-6 * drafts) ** 4) ** 0.25 * shape.draft_passes(point)
    return step(target, draft, 5e-5 + 2e-5 * point.batch)


def free_drafts(shape: Shape, point: CostPoint) -> DecodeCost:
    """A step costs the same whatever is drafted."""
    return step(5e-3 + 1e-4 * point.batch, 0.0, 0.0)


# A layer of Qwen3-30B-A3B. Rows of one sequence resemble each other: K + 1 of them touch as many
# experts as (K + 1) ** 0.6 independent tokens.
NUM_EXPERTS, NUM_CHOSEN, INDEPENDENT = 128, 8, 0.6


def correlated_experts(largest_batch: int, independent: float = INDEPENDENT) -> ExpertCounts:
    """Distinct experts where sequences choose by themselves, and rows of one sequence do not."""

    def touched(batch: int, k: int) -> float:
        return expected_experts(batch * (k + 1) ** independent, NUM_CHOSEN, NUM_EXPERTS)

    by_k = {k: [touched(b, k) for b in range(1, largest_batch + 1)] for k in LENGTHS}
    return ExpertCounts(NUM_EXPERTS, NUM_CHOSEN, by_k)


def by_experts(shape: Shape, point: CostPoint) -> DecodeCost:
    """A mixture limited by memory: a step costs by the distinct experts, and a little by rows."""
    experts = correlated_experts(point.batch).touched(point.batch, point.k)
    target = 1e-3 + 6e-5 * experts + 1e-5 * shape.target_rows(point) + 2e-5 * point.batch
    draft = (7.5e-4**4 + (3e-6 * shape.draft_rows(point)) ** 4) ** 0.25 * shape.draft_passes(point)
    return step(target, draft, 5e-5 + 2e-5 * point.batch)


@dataclass
class SimulatedMachine:
    """Costs of a function, slowed down at random as others come and go.

    Attributes:
        cost: of a point.
        shape: of its steps.
        slowdown: the usual one, as a share; 0 is a quiet machine.
        changes_k_cheaply: as in `Machine`.
        visits: what was measured, in order.
    """

    cost: Cost
    shape: Shape = field(default_factory=lambda: Shape(LENGTHS))
    slowdown: float = 0.0
    changes_k_cheaply: bool = True
    visits: list[CostPoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(1)

    def measure(self, point: CostPoint) -> DecodeCost:
        self.visits.append(point)
        factor = 1 + self._random.expovariate(1 / self.slowdown) if self.slowdown else 1.0
        true = self.cost(self.shape, point)
        return DecodeCost(true.seconds * factor, true.target_s * factor, true.draft_s * factor)
