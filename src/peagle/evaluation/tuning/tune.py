"""The measurements of `peagle tune`, and the contents of tune.json."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from statistics import median
from typing import Any, Self

from peagle import results
from peagle.errors import UserError
from peagle.evaluation.journal import Journal
from peagle.evaluation.touched_experts import ExpertCounts, expected_experts
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import CostPoint, DecodeCost
from peagle.evaluation.tuning.model import CostModel, Shape
from peagle.evaluation.tuning.schedule import (
    best_single_k,
    choose_schedule,
    speculative_config,
    vllm_config,
)
from peagle.evaluation.tuning.trees import tree_config

MAX_PREDICTION_ERROR = 0.10


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of a cost table: every batch size at every K and at K = 0, both ascending.

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
        """Return all points, K = 0 first."""
        return [CostPoint(batch, k) for k in (0, *self.ks) for batch in self.batches]

    @property
    def fitted(self) -> frozenset[CostPoint]:
        """Return the points that the checked model is fitted to; the others check it.

        They are every second batch size and the largest, at K = 0, the smallest, the largest and
        one between: near a power of two less one, so that different batch sizes share token counts,
        and the fit can tell the cost of a sequence from the cost of a token.
        """
        batches = {*self.batches[::2], self.batches[-1]}
        first, last = self.ks[0], self.ks[-1]
        middle = 2 ** round(log2((last + 1) / 2))
        between = min(self.ks[1:-1] or self.ks, key=lambda k: (abs(k + 1 - middle), k))
        return frozenset(CostPoint(b, k) for b in batches for k in {0, first, between, last})

    def visits(self, rounds: int, *, interleave_k: bool) -> Iterator[tuple[int, CostPoint]]:
        """Yield (round, point) in the order of measurement.

        All points take turns, beginning with another one in each round, so that a slow spell hits
        all of them and not one. Where a change of K is dear, only batch sizes take turns.
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
    """The fastest visit to each point, since other processes only add to a step's time.

    `spread` is the extra share of time of the middle visit, the median over points: near 0 on a
    quiet machine.
    """

    by_point: Mapping[CostPoint, DecodeCost]
    spread: float

    @classmethod
    def of(cls, visits: Mapping[CostPoint, Sequence[DecodeCost]]) -> Self:
        """Join all visits, at least one to each point."""
        fastest = {c: min(costs, key=lambda cost: cost.seconds) for c, costs in visits.items()}
        spreads = (
            median(cost.seconds for cost in costs) / fastest[point].seconds - 1
            for point, costs in visits.items()
        )
        return cls(fastest, median(spreads))


def measure_costs(
    measure: Callable[[CostPoint], DecodeCost],
    grid: Grid,
    rounds: int,
    journal: Journal,
    watch: Callable[[CostPoint, bool], None] = lambda point, was_there: None,
    *,
    interleave_k: bool = True,
) -> Costs:
    """Visit every point `rounds` times, except for visits in the journal; it gets the others.

    `watch` is called after each visit, with whether the journal had it. With `interleave_k` K may
    change between any two visits.
    """
    visits: dict[CostPoint, list[DecodeCost]] = {point: [] for point in grid.points}
    for number, point in grid.visits(rounds, interleave_k=interleave_k):
        key = f"cost batch={point.batch} k={point.k} visit={number}"
        found = journal.get(key)
        cost = measure(point) if found is None else DecodeCost(**found)
        if found is None:
            journal.add(key, asdict(cost))
        visits[point].append(cost)
        watch(point, found is not None)
    return Costs.of(visits)


def recall_experts(
    count: Callable[[], ExpertCounts | None], journal: Journal
) -> ExpertCounts | None:
    """Return the counts of experts from the journal; count and add them if it lacks them."""
    if (kept := journal.get("experts")) is not None:
        return ExpertCounts.of_json(kept)
    counts = count()
    if counts is not None:
        journal.add("experts", counts.to_json())
    return counts


def tune_results(
    grid: Grid,
    costs: Costs,
    acceptance: AcceptanceByK,
    shape: Shape,
    *,
    draft: str,
    threshold: float,
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
    trees: Callable[[Sequence[results.Prediction]], list[results.TunedTrees]] = lambda chains: [],
) -> results.TuneResults:
    """Fit the model of costs, check it, and choose K.

    One model is fitted to `grid.fitted` alone, and the other points check it. The schedule and the
    break-even, t(b, K) / t(b, 0), rest on a model that is fitted to all points. Measured tokens per
    second are b x acceptance length(K) / seconds of a step. `draft` is the user's name of the head;
    K changes only for a gain above `threshold`. `trees` compares candidate trees with the measured
    speeds of chains.
    """
    by_point, lengths, points = costs.by_point, shape.acceptance_length, sorted(grid.points)
    model = CostModel(shape, by_point)
    checked = CostModel(shape, {p: by_point[p] for p in grid.points if p in grid.fitted})
    predictions = [
        results.Prediction(
            batch=point.batch,
            k=point.k,
            predicted_tokens_per_s=checked.tokens_per_s(point.batch, point.k),
            measured_tokens_per_s=point.batch * lengths[point.k] / by_point[point].seconds,
            fitted=point in grid.fitted,
        )
        for point in points
    ]
    errors = [
        abs(one.predicted_tokens_per_s / one.measured_tokens_per_s - 1)
        for one in predictions
        if not one.fitted and one.measured_tokens_per_s
    ]
    within = sum(error <= MAX_PREDICTION_ERROR for error in errors)
    ks = (0, *grid.ks)
    schedule = choose_schedule(model.tokens_per_s, grid.batches[-1], ks, threshold)
    single_k = best_single_k(model.tokens_per_s, grid.batches, ks)
    single = [(1, grid.batches[-1], single_k)]
    configs = {
        "peagle": speculative_config(draft, schedule),
        "vllm": vllm_config(draft, schedule, is_parallel=shape.is_parallel),
        "vllm_single_k": vllm_config(draft, single, is_parallel=shape.is_parallel),
    }
    tuned_trees = trees(predictions)
    if (config := tree_config(draft, tuned_trees)) is not None:
        configs["peagle_trees"] = config
    return results.TuneResults(
        provenance=results.Provenance(**provenance),
        settings=dict(settings),
        costs=results.TunedCosts(
            target_s=sorted((shape.target_rows(p), by_point[p].target_s) for p in points),
            draft_s=sorted((shape.draft_rows(p), by_point[p].draft_s) for p in points if p.k),
            step_s=[(p.batch, p.k, by_point[p].seconds, p in grid.fitted) for p in points],
            spread=costs.spread,
            experts=shape.experts and _tuned_experts(shape.experts, points),
        ),
        acceptance=results.TunedAcceptance(
            source=acceptance.source,
            acceptance_length={k: lengths[k] for k in grid.ks},
            measured_k=sorted(acceptance.per_pos),
        ),
        predictions=predictions,
        check=results.PredictionCheck(
            num_unfitted=len(errors),
            within_10_percent=within,
            share=within / len(errors) if errors else None,
            worst=max(errors, default=None),
        ),
        schedule=schedule,
        threshold=threshold,
        best_single_k=single_k,
        speculative_config=configs,
        break_even=[
            results.BreakEven(
                batch=b, k=k, acceptance_length=model.seconds(b, k) / model.seconds(b, 0)
            )
            for b in grid.batches
            for k in grid.ks
        ],
        trees=tuned_trees,
    )


def _tuned_experts(experts: ExpertCounts, points: Sequence[CostPoint]) -> results.TunedExperts:
    """Return the measured counts at these points, and those expected under even routing."""

    def even(point: CostPoint) -> float:
        rows = point.batch * (point.k + 1)
        return expected_experts(rows, experts.num_chosen, experts.num_experts)

    return results.TunedExperts(
        num_experts=experts.num_experts,
        num_chosen=experts.num_chosen,
        touched=[(p.batch, p.k, experts.touched(p.batch, p.k), even(p)) for p in points],
    )
