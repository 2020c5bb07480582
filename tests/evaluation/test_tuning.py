"""A machine of known costs is recovered: predictions, schedule, break-even."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from peagle.config import SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.journal import TUNE_LOG, Journal
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import CostPoint, DecodeCost
from peagle.evaluation.tuning.model import (
    CostModel,
    Shape,
    choose_knots,
    nonnegative_least_squares,
    ramps,
)
from peagle.evaluation.tuning.schedule import k_at
from peagle.evaluation.tuning.tune import (
    Costs,
    Grid,
    measure_costs,
    recall_experts,
    tune_results,
)
from peagle.results import PredictionCheck, TuneResults
from tests.evaluation.tuning_machines import (
    LENGTHS,
    RATES,
    Cost,
    SimulatedMachine,
    by_experts,
    correlated_experts,
    free_drafts,
    linear,
    roofline,
)

GRID = Grid((1, 2, 4, 8, 16), tuple(range(1, 9)))
LARGE = Grid((1, 2, 4, 8, 16, 32, 64), tuple(range(1, 9)))


@dataclass
class Found:
    """The results for a machine, and the model that they rest on."""

    results: TuneResults
    model: CostModel

    @property
    def schedule(self) -> list[tuple[int, int, int]]:
        return self.results.schedule


def tuned(
    machine: SimulatedMachine, grid: Grid = GRID, rounds: int = 1, threshold: float = 0.0
) -> Found:
    costs = measure_costs(machine.measure, grid, rounds, Journal(None, {}))
    results = tune_results(
        grid,
        costs,
        AcceptanceByK({len(RATES): RATES}),
        machine.shape,
        draft="owner/head",
        threshold=threshold,
        provenance={"target": "t"},
        settings={},
    )
    return Found(results, CostModel(machine.shape, costs.by_point))


def true_speed(cost: Cost, shape: Shape, batch: int, k: int) -> float:
    return batch * shape.acceptance_length[k] / cost(shape, CostPoint(batch, k)).seconds


def test_a_linear_machine_is_recovered_exactly() -> None:
    found, shape = tuned(SimulatedMachine(linear)), Shape(LENGTHS)
    assert found.results.check == PredictionCheck(
        num_unfitted=33, within_10_percent=33, share=1.0, worst=found.results.check.worst
    )
    assert found.results.check.worst == pytest.approx(0, abs=1e-6)
    for batch in range(1, 17):
        speeds = {k: true_speed(linear, shape, batch, k) for k in range(9)}
        for k, speed in speeds.items():
            assert found.model.tokens_per_s(batch, k) == pytest.approx(speed, rel=1e-6)
        assert k_at(found.schedule, batch) == max(speeds, key=lambda k: speeds[k])
    for one in found.results.break_even:
        cost, plain = (linear(shape, CostPoint(one.batch, k)).seconds for k in (one.k, 0))
        assert one.acceptance_length == pytest.approx(cost / plain, rel=1e-6)


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("slowdown", [0.0, 0.3])
def test_unmeasured_speed_is_predicted(is_parallel: bool, slowdown: float) -> None:
    shape = Shape(LENGTHS, is_parallel, is_padded=True)
    found = tuned(SimulatedMachine(roofline, shape, slowdown), LARGE, rounds=7)
    check = found.results.check
    assert check.num_unfitted == 7 * 9 - 16 and check.share and check.worst
    # Of seven visits that others slow down by 30% the fastest is still 4% too slow.
    assert check.share >= (0.85 if slowdown else 0.95)
    assert check.worst < (0.25 if slowdown else 0.12)
    assert ((found.results.costs.spread or 0) > 0.1) == bool(slowdown)
    for batch in (1, 3, 8, 24, 48, 64):
        best = max(true_speed(roofline, shape, batch, k) for k in range(9))
        k = k_at(found.schedule, batch)
        assert true_speed(roofline, shape, batch, k) > 0.93 * best


def test_a_mixture_is_priced_by_the_experts_it_touches() -> None:
    """The measured experts predict every cell; tokens do not, nor do experts under even routing."""
    measured = Shape(LENGTHS, experts=correlated_experts(64))
    found = tuned(SimulatedMachine(by_experts, measured), LARGE)
    check = found.results.check
    assert check.share == 1 and check.worst is not None and check.worst < 0.02
    for batch in (3, 24, 48):  # sizes that were not measured at all
        for k in (0, 4, 8):
            expected = by_experts(measured, CostPoint(batch, k)).seconds
            assert found.model.seconds(batch, k) == pytest.approx(expected, rel=0.05)
    by_tokens = tuned(SimulatedMachine(by_experts), LARGE).results.check
    even = Shape(LENGTHS, experts=correlated_experts(64, independent=1.0))
    by_even_routing = tuned(SimulatedMachine(by_experts, even), LARGE).results.check
    for other in (by_tokens, by_even_routing):
        assert other.share is not None and other.share < 0.95
        assert other.worst is not None and other.worst > 0.2


def test_the_experts_in_the_file() -> None:
    shape = Shape(LENGTHS, experts=correlated_experts(16))
    experts = tuned(SimulatedMachine(by_experts, shape)).results.costs.experts
    assert experts is not None and (experts.num_experts, experts.num_chosen) == (128, 8)
    assert [(b, k) for b, k, *_ in experts.touched] == [
        (b, k) for b in GRID.batches for k in range(9)
    ]
    rows = {(b, k): (round(measured), round(even)) for b, k, measured, even in experts.touched}
    assert rows[1, 0] == (8, 8) and rows[8, 0] == (52, 52) and rows[1, 7] == (26, 52)


def test_dense_models_cost_what_they_cost_before_experts_had_a_price() -> None:
    """Seconds of the roofline machine as commit 5119ff7 predicted them."""
    found = tuned(SimulatedMachine(roofline, Shape(LENGTHS, is_padded=True)), LARGE)
    before = {
        (1, 0): 0.006080000000528889,
        (3, 2): 0.006889962115250585,
        (24, 5): 0.007884968156624072,
        (64, 8): 0.01996400683238991,
    }
    assert {point: found.model.seconds(*point) for point in before} == pytest.approx(
        before, rel=1e-9
    )
    assert found.schedule == [
        *((1, 22, 8), (23, 32, 7), (33, 37, 6), (38, 46, 5), (47, 60, 4), (61, 64, 3))
    ]
    assert found.results.costs.experts is None


def test_counted_experts_are_kept(tmp_path: Path) -> None:
    counts, file = correlated_experts(4), tmp_path / TUNE_LOG
    assert recall_experts(lambda: counts, Journal(file, {})) == counts

    def fail() -> None:
        raise AssertionError("counted again")

    assert recall_experts(fail, Journal(file, {})) == counts
    dense = Journal(None, {})
    assert recall_experts(lambda: None, dense) is None and len(dense) == 0


def test_rows_of_graphs_are_what_counts() -> None:
    """Where a step of 3 sequences runs as the graph of 4, it costs what one of 4 costs."""

    def graph(batch: int) -> int:
        return 1 << (batch - 1).bit_length()

    shape = Shape(LENGTHS, batch_rows=graph, is_padded=True)

    def cost(shape: Shape, point: CostPoint) -> DecodeCost:
        whole = linear(shape, CostPoint(graph(point.batch), point.k))
        return DecodeCost(whole.target_s + whole.draft_s, whole.target_s, whole.draft_s)

    model = tuned(SimulatedMachine(cost, shape)).model
    for batch in (3, 5, 7, 9):
        assert model.seconds(batch, 3) == pytest.approx(model.seconds(graph(batch), 3))
        expected = cost(shape, CostPoint(batch, 3)).seconds
        assert model.seconds(batch, 3) == pytest.approx(expected, rel=1e-6)


def test_free_drafts_are_drafted_to_the_end() -> None:
    found = tuned(SimulatedMachine(free_drafts), threshold=0.03)
    assert found.schedule == [(1, 16, 8)] and found.results.best_single_k == 8
    assert all(one.acceptance_length == pytest.approx(1) for one in found.results.break_even)


@pytest.mark.parametrize("cost", [linear, roofline])
def test_a_head_that_accepts_nothing_is_not_used(cost: Cost) -> None:
    found = tuned(SimulatedMachine(cost, Shape(dict.fromkeys(range(9), 1.0))))
    assert found.schedule == [(1, 16, 0)]
    assert set(found.results.speculative_config.values() or ()) == {None}
    assert all(one.acceptance_length > 1 for one in found.results.break_even)


def test_the_file() -> None:
    results = tuned(SimulatedMachine(linear), threshold=0.03).results
    assert len(results.costs.step_s) == len(results.predictions) == len(GRID.points)
    assert results.costs.target_s[0] == pytest.approx((1, 8e-3 + 6e-4 + 5e-4))
    assert len(results.costs.draft_s) == 5 * 8
    fitted = {CostPoint(b, k) for b, k, _, fitted in results.costs.step_s if fitted}
    assert fitted == GRID.fitted
    assert results.acceptance.acceptance_length[8] == pytest.approx(LENGTHS[8])
    for one in results.predictions:
        speed = true_speed(linear, Shape(LENGTHS), one.batch, one.k)
        assert one.measured_tokens_per_s == pytest.approx(speed)
    configs = results.speculative_config
    peagle, single = configs["peagle"], configs["vllm_single_k"]
    assert len(results.schedule) > 1 and peagle and single
    ours = SpeculativeConfig.parse(peagle)
    assert ours.num_speculative_tokens == max(k for _, _, k in results.schedule)
    assert all(ours.tokens_for(n) == k_at(results.schedule, n) for n in range(1, 17))
    assert configs["vllm"] == peagle | {"parallel_drafting": True}
    assert single["num_speculative_tokens"] == results.best_single_k
    assert "num_speculative_tokens_per_batch_size" not in single


def test_one_point_has_nothing_to_check() -> None:
    grid = Grid((1,), (4,))
    results = tuned(SimulatedMachine(linear), grid).results
    assert grid.fitted == set(grid.points)
    assert results.check == PredictionCheck(num_unfitted=0, within_10_percent=0)
    assert results.schedule == [(1, 1, 4)]


# ---- the fit ----


@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**31))
def test_least_squares_agree_with_scipy(columns: int, rows: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    terms, values = source.normal(size=(rows, columns)), source.normal(size=rows)
    ours = nonnegative_least_squares(terms, values)
    theirs, error = nnls(terms, values)
    assert (ours >= 0).all()
    assert np.linalg.norm(terms @ ours - values) == pytest.approx(error, abs=1e-8)
    if rows >= columns:
        assert ours == pytest.approx(theirs, abs=1e-6)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30))
def test_ramps_span_what_was_measured(rows: list[int]) -> None:
    knots = choose_knots(rows)
    assert (knots[0], knots[-1]) == (min(rows), max(rows))
    assert knots == sorted(set(knots))
    assert all(b >= 2 * a for a, b in pairwise(knots[:-1]))
    # A straight line is a sum of ramps, beyond the last knot too.
    for size in [*rows, max(rows) * 2] if len(knots) > 1 else []:
        assert np.dot(np.diff(knots), ramps(knots, size)) == pytest.approx(size - knots[0])


# ---- points and visits ----

ascending = st.sets(st.integers(1, 64), min_size=1, max_size=8).map(lambda s: tuple(sorted(s)))


@given(ascending, ascending, st.integers(1, 5), st.booleans())
def test_every_point_is_visited_in_every_round(
    batches: tuple[int, ...], ks: tuple[int, ...], rounds: int, interleave: bool
) -> None:
    grid = Grid(batches, ks)
    visits = list(grid.visits(rounds, interleave_k=interleave))
    assert sorted(visits) == sorted((n, point) for n in range(rounds) for point in grid.points)
    if interleave:
        assert [n for n, _ in visits] == sorted(n for n, _ in visits)
    else:
        assert sum(a.k != b.k for (_, a), (_, b) in pairwise(visits)) == len(ks)
    assert grid.fitted <= set(grid.points)
    corners = {CostPoint(b, k) for b in (min(batches), max(batches)) for k in (0, min(ks), max(ks))}
    assert corners <= grid.fitted


def test_the_usual_fit() -> None:
    assert GRID.fitted == {CostPoint(b, k) for b in (1, 4, 16) for k in (0, 1, 3, 8)}
    assert {c.k for c in Grid((1, 2), (3, 5, 7)).fitted} == {0, 3, 5, 7}


@pytest.mark.parametrize(("batches", "ks"), [((), (1,)), ((1,), ()), ((2, 1), (1,)), ((1,), (0,))])
def test_bad_grids(batches: tuple[int, ...], ks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="expected ascending whole numbers of at least 1"):
        Grid(batches, ks)


def test_the_fastest_visit_counts() -> None:
    slow, fast, other = (
        DecodeCost(3.0, 2.0, 0.5),
        DecodeCost(2.0, 1.0, 0.7),
        DecodeCost(2.5, 1.0, 1.0),
    )
    costs = Costs.of({CostPoint(1, 0): [slow, fast, other]})
    assert costs.by_point[CostPoint(1, 0)] == fast
    assert costs.spread == pytest.approx(0.25)


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    class Interrupted(SimulatedMachine):
        def measure(self, point: CostPoint) -> DecodeCost:
            if len(self.visits) == 10:
                raise KeyboardInterrupt
            return super().measure(point)

    grid, file = Grid((1, 2), (1, 2, 3)), tmp_path / TUNE_LOG
    with pytest.raises(KeyboardInterrupt):
        measure_costs(Interrupted(linear).measure, grid, 2, Journal(file, {"a": 1}))
    # As if the last line had been cut by a loss of power.
    file.write_bytes(file.read_bytes() + b'{"key": "cost ba')
    machine, seen = SimulatedMachine(linear), list[bool]()
    journal = Journal(file, {"a": 1})
    costs = measure_costs(machine.measure, grid, 2, journal, lambda _, there: seen.append(there))
    assert seen == [True] * 10 + [False] * 6 and len(machine.visits) == 6
    assert costs == measure_costs(SimulatedMachine(linear).measure, grid, 2, Journal(None, {}))
    again = SimulatedMachine(linear)
    assert measure_costs(again.measure, grid, 2, Journal(file, {"a": 1})) == costs
    assert again.visits == []
