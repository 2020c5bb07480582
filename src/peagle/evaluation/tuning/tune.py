"""`peagle tune`: costs measured and joined with acceptance; what tune.json holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from peagle.evaluation.journal import Journal
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.grid import Grid
from peagle.evaluation.tuning.machine import CostPoint, Machine, StepCost
from peagle.evaluation.tuning.model import CostModel, Shape
from peagle.evaluation.tuning.schedule import (
    Schedule,
    best_single_k,
    choose_schedule,
    speculative_config,
    vllm_config,
)
from peagle.results import (
    BreakEven,
    Prediction,
    PredictionCheck,
    Provenance,
    TunedAcceptance,
    TunedCosts,
    TuneResults,
)

WITHIN = 0.10
Watch = Callable[[CostPoint, bool], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs.

    Attributes:
        by_cell: of the fastest visit to each cell: what others take of a machine only ever adds to
            a step's time.
        spread: how much longer the middle visit took than the fastest, the median over cells; near
            0 on a quiet machine.
    """

    by_cell: Mapping[CostPoint, StepCost]
    spread: float

    @classmethod
    def of(cls, visits: Mapping[CostPoint, Sequence[StepCost]]) -> Costs:
        """Those of all visits, at least one to each cell."""
        fastest = {c: min(costs, key=lambda cost: cost.seconds) for c, costs in visits.items()}
        spreads = (
            StepCost.median(costs).seconds / fastest[cell].seconds - 1
            for cell, costs in visits.items()
        )
        return cls(fastest, median(spreads))


def measure_costs(
    machine: Machine,
    grid: Grid,
    rounds: int,
    journal: Journal,
    watch: Watch = lambda cell, was_there: None,
) -> Costs:
    """Visit every cell `rounds` times, those of the journal left out.

    Args:
        machine: what is measured.
        grid: the cells.
        rounds: visits to each.
        journal: gets each visit as it is finished.
        watch: called after each visit, with whether it was there already.
    """
    visits: dict[CostPoint, list[StepCost]] = {cell: [] for cell in grid.cells}
    for number, cell in grid.visits(rounds, interleave_k=machine.changes_k_cheaply):
        key = f"cost batch={cell.batch} k={cell.k} visit={number}"
        found = journal.get(key)
        cost = machine.measure(cell) if found is None else StepCost(**found)
        if found is None:
            journal.add(key, asdict(cost))
        visits[cell].append(cost)
        watch(cell, found is not None)
    return Costs.of(visits)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the measurements amount to.

    Attributes:
        grid: the cells.
        costs: measured.
        acceptance: by K.
        checked: the model fitted to `grid.fitted` alone, which the other cells check.
        model: fitted to all cells: what the schedule and the break-even rest on.
        schedule: (first, last, K).
        single_k: the best K for all batch sizes.
        is_parallel: the head drafts in one pass.
        threshold: gain below which K stays.
    """

    grid: Grid
    costs: Costs
    acceptance: AcceptanceByK
    checked: CostModel
    model: CostModel
    schedule: Schedule
    single_k: int
    is_parallel: bool
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
        """Fit, check and choose.

        Args:
            grid: the cells.
            costs: of all of them.
            acceptance: of all K of the grid.
            threshold: gain below which K stays.
            is_parallel, batch_rows, is_padded: as in `Shape`.

        Raises:
            UserError: acceptance at a K is not known.
        """
        lengths = {k: acceptance.lengths()[k] for k in (0, *grid.ks)}
        shape = Shape(lengths, is_parallel, batch_rows, is_padded)
        fitted = {cell: costs.by_cell[cell] for cell in grid.cells if cell in grid.fitted}
        model = CostModel(shape, costs.by_cell)
        ks = (0, *grid.ks)
        return cls(
            grid,
            costs,
            acceptance,
            CostModel(shape, fitted),
            model,
            choose_schedule(model.tokens_per_s, grid.batches[-1], ks, threshold),
            best_single_k(model.tokens_per_s, grid.batches, ks),
            is_parallel,
            threshold,
        )

    @property
    def lengths(self) -> Mapping[int, float]:
        """Acceptance length by K, 1 for K = 0."""
        return self.model.shape.acceptance_length

    def measured_tokens_per_s(self, cell: CostPoint) -> float:
        """b x acceptance length(K) / measured seconds of a step."""
        return cell.batch * self.lengths[cell.k] / self.costs.by_cell[cell].seconds

    def break_even(self, batch: int, k: int) -> float:
        """t(b, K) / t(b, 0): the acceptance length from which drafting K is faster than plain."""
        return self.model.seconds(batch, k) / self.model.seconds(batch, 0)

    def predictions(self) -> list[Prediction]:
        """Tokens per second of every cell by the checked model, and as measured."""
        return [
            Prediction(
                batch=cell.batch,
                k=cell.k,
                predicted_tokens_per_s=self.checked.tokens_per_s(cell.batch, cell.k),
                measured_tokens_per_s=self.measured_tokens_per_s(cell),
                fitted=cell in self.grid.fitted,
            )
            for cell in sorted(self.grid.cells)
        ]

    def check(self) -> PredictionCheck:
        """How many of the cells that were not fitted are predicted within 10%."""
        errors = [
            abs(one.predicted_tokens_per_s / one.measured_tokens_per_s - 1)
            for one in self.predictions()
            if not one.fitted and one.measured_tokens_per_s
        ]
        within = sum(error <= WITHIN for error in errors)
        return PredictionCheck(
            num_unfitted=len(errors),
            within_10_percent=within,
            share=within / len(errors) if errors else None,
            worst=max(errors, default=None),
        )

    def results(
        self, provenance: Mapping[str, Any], settings: Mapping[str, Any], draft: str
    ) -> TuneResults:
        """Build tune.json.

        Args:
            provenance: who measured with what.
            settings: of the measurement.
            draft: the head, as the user calls it.
        """
        shape, cells = self.model.shape, sorted(self.grid.cells)
        by_cell = self.costs.by_cell
        single = [(1, self.grid.batches[-1], self.single_k)]
        return TuneResults(
            provenance=Provenance(**provenance),
            settings=dict(settings),
            costs=TunedCosts(
                target_s=sorted((shape.target_rows(c), by_cell[c].target_s) for c in cells),
                draft_s=sorted((shape.draft_rows(c), by_cell[c].draft_s) for c in cells if c.k),
                step_s=[(c.batch, c.k, by_cell[c].seconds, c in self.grid.fitted) for c in cells],
                spread=self.costs.spread,
            ),
            acceptance=TunedAcceptance(
                source=self.acceptance.source,
                acceptance_length={k: self.lengths[k] for k in self.grid.ks},
                measured_k=sorted(self.acceptance.per_pos),
            ),
            predictions=self.predictions(),
            check=self.check(),
            schedule=self.schedule,
            threshold=self.threshold,
            best_single_k=self.single_k,
            speculative_config={
                "peagle": speculative_config(draft, self.schedule),
                "vllm": vllm_config(draft, self.schedule, is_parallel=self.is_parallel),
                "vllm_single_k": vllm_config(draft, single, is_parallel=self.is_parallel),
            },
            break_even=[
                BreakEven(batch=b, k=k, acceptance_length=self.break_even(b, k))
                for b in self.grid.batches
                for k in self.grid.ks
            ],
        )
