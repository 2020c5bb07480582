"""`peagle tune`: costs measured and joined with acceptance; the contents of tune.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from statistics import median
from typing import Any

from peagle.errors import UserError
from peagle.evaluation.journal import Journal
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import CostPoint, StepCost
from peagle.evaluation.tuning.model import CostModel, Shape
from peagle.evaluation.tuning.schedule import (
    Schedule,
    best_single_k,
    choose_schedule,
    speculative_config,
    vllm_config,
)

FORMAT_VERSION = 1
NAME, LOG_NAME = "tune.json", "tune_cells.jsonl"
WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of a cost table: every batch size at every K and at K = 0.

    Attributes:
        batches: ascending, each once.
        ks: draft tokens per step, ascending, each once; K = 0 comes by itself.

    Raises:
        UserError: a list is empty, not ascending, or has a number below 1.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, numbers in (("--batch-sizes", self.batches), ("-k", self.ks)):
            if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1:
                raise UserError(
                    f"{name} is {', '.join(map(str, numbers)) or 'empty'}; expected ascending "
                    "whole numbers of at least 1."
                )

    @property
    def points(self) -> list[CostPoint]:
        """All of them, K = 0 first."""
        return [CostPoint(batch, k) for k in (0, *self.ks) for batch in self.batches]

    @property
    def fitted(self) -> frozenset[CostPoint]:
        """The points that the checked model is fitted to; the others are its check.

        Every second batch size and the largest; K = 0, the smallest, the largest and one between:
        near a power of two less one, so that points of unlike batch sizes share their token counts,
        and the cost of a sequence is told apart from that of a token.
        """
        batches = {*self.batches[::2], self.batches[-1]}
        first, last = self.ks[0], self.ks[-1]
        middle = 2 ** round(log2((last + 1) / 2))
        between = min(self.ks[1:-1] or self.ks, key=lambda k: (abs(k + 1 - middle), k))
        return frozenset(CostPoint(b, k) for b in batches for k in {0, first, between, last})

    def visits(self, rounds: int, *, interleave_k: bool) -> Iterator[tuple[int, CostPoint]]:
        """Return (round, point) in the order of measurement.

        All points take turns, beginning with another one in each round, so that a slow spell hits
        all of them and not one. Where a change of K is dear, batch sizes alone take turns.
        """
        groups = [self.points]
        if not interleave_k:
            groups = [[point for point in self.points if point.k == k] for k in (0, *self.ks)]
        for points in groups:
            for number in range(rounds):
                shift = number * len(points) // rounds
                yield from ((number, point) for point in [*points[shift:], *points[:shift]])


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs.

    Attributes:
        by_point: of the fastest visit to each point: other processes only ever add to a step's
            time.
        spread: how much longer the middle visit took than the fastest, the median over points; near
            0 on a quiet machine.
    """

    by_point: Mapping[CostPoint, StepCost]
    spread: float

    @classmethod
    def of(cls, visits: Mapping[CostPoint, Sequence[StepCost]]) -> Costs:
        """Join all visits, at least one to each point."""
        fastest = {c: min(costs, key=lambda cost: cost.seconds) for c, costs in visits.items()}
        spreads = (
            median(cost.seconds for cost in costs) / fastest[point].seconds - 1
            for point, costs in visits.items()
        )
        return cls(fastest, median(spreads))


def measure_costs(
    measure: Callable[[CostPoint], StepCost],
    grid: Grid,
    rounds: int,
    journal: Journal,
    watch: Callable[[CostPoint, bool], None] = lambda point, was_there: None,
    *,
    interleave_k: bool = True,
) -> Costs:
    """Visit every point `rounds` times, those of the journal left out.

    Args:
        measure: returns the cost of a step.
        grid: the points.
        rounds: visits to each.
        journal: gets each visit as it is finished.
        watch: called after each visit, with whether it was there already.
        interleave_k: K may change between any two visits.
    """
    visits: dict[CostPoint, list[StepCost]] = {point: [] for point in grid.points}
    for number, point in grid.visits(rounds, interleave_k=interleave_k):
        key = f"cost batch={point.batch} k={point.k} visit={number}"
        found = journal.get(key)
        cost = measure(point) if found is None else StepCost(**found)
        if found is None:
            journal.add(key, asdict(cost))
        visits[point].append(cost)
        watch(point, found is not None)
    return Costs.of(visits)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The conclusions from measured costs and acceptance.

    Args:
        grid: the points.
        costs: of all of them.
        acceptance: of all K of the grid.
        checked: the model fitted to `grid.fitted` alone, which the other points check.
        model: fitted to all points: the schedule and the break-even rest on it.
        schedule: (first, last, K).
        single_k: the best K for all batch sizes.
        threshold: gain below which K stays.
    """

    grid: Grid
    costs: Costs
    acceptance: AcceptanceByK
    checked: CostModel
    model: CostModel
    schedule: Schedule
    single_k: int
    threshold: float

    @classmethod
    def of(
        cls,
        grid: Grid,
        costs: Costs,
        acceptance: AcceptanceByK,
        *,
        threshold: float,
        is_parallel: bool,
        batch_rows: Callable[[int], int] = lambda batch: batch,
        is_padded: bool = False,
    ) -> Tuned:
        """Fit, check and choose; `is_parallel`, `batch_rows` and `is_padded` are those of `Shape`.

        Raises:
            UserError: acceptance at a K is not known.
        """
        ks = (0, *grid.ks)
        lengths = {k: acceptance.lengths()[k] for k in ks}
        shape = Shape(lengths, is_parallel, batch_rows, is_padded)
        model = CostModel(shape, costs.by_point)
        return cls(
            grid,
            costs,
            acceptance,
            CostModel(shape, {p: c for p, c in costs.by_point.items() if p in grid.fitted}),
            model,
            choose_schedule(model.tokens_per_s, grid.batches[-1], ks, threshold),
            best_single_k(model.tokens_per_s, grid.batches, ks),
            threshold,
        )

    def break_even(self, batch: int, k: int) -> float:
        """t(b, K) / t(b, 0): the acceptance length from which drafting K is faster than plain."""
        return self.model.seconds(batch, k) / self.model.seconds(batch, 0)

    def predictions(self) -> list[dict[str, Any]]:
        """Return the tokens per second of every point by the checked model, and as measured.

        The latter are b x acceptance length(K) / measured seconds of a step.
        """
        lengths = self.model.shape.acceptance_length
        return [
            {
                "batch": point.batch,
                "k": point.k,
                "predicted_tokens_per_s": self.checked.tokens_per_s(point.batch, point.k),
                "measured_tokens_per_s": (
                    point.batch * lengths[point.k] / self.costs.by_point[point].seconds
                ),
                "fitted": point in self.grid.fitted,
            }
            for point in sorted(self.grid.points)
        ]

    def check(self) -> dict[str, Any]:
        """Return how many of the points that were not fitted are predicted within 10%."""
        errors = [
            abs(one["predicted_tokens_per_s"] / one["measured_tokens_per_s"] - 1)
            for one in self.predictions()
            if not one["fitted"]
        ]
        within = sum(error <= WITHIN for error in errors)
        return {
            "num_unfitted": len(errors),
            "within_10_percent": within,
            "share": within / len(errors) if errors else None,
            "worst": max(errors, default=None),
        }

    def to_json(
        self, provenance: Mapping[str, Any], settings: Mapping[str, Any], draft: str
    ) -> dict[str, Any]:
        """Return tune.json.

        Args:
            provenance: origin of the measurements.
            settings: of the measurement.
            draft: the head, as the user calls it.
        """
        shape, points = self.model.shape, sorted(self.grid.points)
        costs = self.costs.by_point
        single = [(1, self.grid.batches[-1], self.single_k)]
        return {
            "format_version": FORMAT_VERSION,
            "provenance": dict(provenance),
            "settings": dict(settings),
            "costs": {
                "target_s": sorted([shape.target_rows(p), costs[p].target_s] for p in points),
                "draft_s": sorted([shape.draft_rows(p), costs[p].draft_s] for p in points if p.k),
                "step_s": [[p.batch, p.k, costs[p].seconds, p in self.grid.fitted] for p in points],
                "spread": self.costs.spread,
            },
            "acceptance": {
                "source": self.acceptance.source,
                "acceptance_length": {str(k): shape.acceptance_length[k] for k in self.grid.ks},
                "measured_k": sorted(self.acceptance.per_pos),
            },
            "predictions": self.predictions(),
            "check": self.check(),
            "schedule": [list(one) for one in self.schedule],
            "threshold": self.threshold,
            "best_single_k": self.single_k,
            "speculative_config": {
                "peagle": speculative_config(draft, self.schedule),
                "vllm": vllm_config(draft, self.schedule, is_parallel=shape.is_parallel),
                "vllm_single_k": vllm_config(draft, single, is_parallel=shape.is_parallel),
            },
            "break_even": [
                {"batch": b, "k": k, "acceptance_length": self.break_even(b, k)}
                for b in self.grid.batches
                for k in self.grid.ks
            ],
        }
