"""The results of a sweep: medians, spreads, speed-ups, the best K, goodput.

The best K at a load is the smallest K that does not show to be slower than another. Runs of one
configuration differ, so the fastest median may be luck. Two speeds tie if the ranges of their
repeats overlap and their medians are close. Of the K that tie with the fastest the smallest is the
best: it drafts and verifies the fewest tokens for the same speed.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from peagle.evaluation.decoding_methods import PLAIN
from peagle.evaluation.objective import LatencyObjective
from peagle.evaluation.serving_cost import cost_per_million_tokens, instances_for
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.timing import median_of
from peagle.results import (
    BestK,
    Cell,
    CellSpread,
    Goodput,
    Provenance,
    RunFigures,
    ThroughputResults,
    TouchedExperts,
    TrainingRecord,
    Turns,
)

EAGLE3 = "eagle3"
# Cells whose medians are further apart do not tie: ranges of few repeats overlap by one slow run.
TIE_SHARE = 0.03
# Beyond this spread, as a share of the median, the median of a few repeats is an accident.
MAX_SPREAD = 0.5
# Most busy cores by which the other programs may differ between sittings.
MAX_LOAD_DIFFERENCE = 0.5


def tied_fastest(cells: Iterable[Cell]) -> list[Cell]:
    """Return the fastest cell by its median, and all that tie with it, in order.

    A cell ties if its repeats overlap the fastest cell's, and its median is at most TIE_SHARE
    below. `cells` are those of one load, at least one.
    """
    every = list(cells)
    fastest = max(every, key=lambda cell: cell.speed)
    least = fastest.speed_range[0]
    near = [cell for cell in every if cell.speed >= (1 - TIE_SHARE) * fastest.speed]
    return [cell for cell in near if cell.speed_range[1] >= least]


def best_k_cell(cells: Iterable[Cell]) -> Cell:
    """Return the cell with the best K among the cells of one method at one load."""
    return min(tied_fastest(cells), key=lambda cell: (cell.k or 0, -cell.speed))


def summarize(
    measured: Mapping[SweepPoint, Sequence[RunFigures]],
    objective: LatencyObjective | None,
    *,
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
    training: Mapping[str, TrainingRecord] | None = None,
    experts: Mapping[SweepPoint, TouchedExperts] | None = None,
    turns: Mapping[str, Turns] | None = None,
    price_per_hour: float | None = None,
    requests_per_second: float | None = None,
) -> ThroughputResults:
    """Build throughput.json from the repeats of every point.

    The figures of a cell, at equal set and concurrency:
    - median and spread (least and most) of its repeats;
    - speed_up_over_plain: its output tokens/s over those of the method named plain, on the same
      engine if measured there, else on the fastest;
    - speed_up_over_eagle3: the same over the method named eagle3, at its best K;
    - linearity: tokens/s at concurrency c over c / c0 times tokens/s at the least concurrency c0;
      1 if requests do not slow each other down;
    - meets_objective: whether the medians of its latencies keep the objective;
    - cost_per_million_tokens at `price_per_hour`, and the instances for `requests_per_second`.
    `doubts` of a cell are repeats more than 50% apart and speed-ups above the acceptance length.
    `doubts` of the file are sittings under different loads of the machine.
    tied_k lists every K that ties with the fastest. Goodput is the most requests/s of a method at
    one K among the concurrencies that keep the objective; without one there is no entry.
    `training` has the length of each head's training by method, `experts` the distinct
    experts that a decode step touches, `turns` the turns of the sets whose prompts have several.
    """
    counts = experts or {}
    cells = [
        _cell(point, repeats, objective, counts.get(point)) for point, repeats in measured.items()
    ]
    loads: dict[tuple[str, str, str, int], list[Cell]] = {}
    for cell in cells:
        load = cell.method, cell.engine, cell.set, cell.concurrency
        loads.setdefault(load, []).append(cell)
    best = {}
    for load, own in loads.items():
        if drafting := [cell for cell in own if cell.k]:
            best[load] = best_k_cell(drafting)

    def over(method: str, cell: Cell) -> float | None:
        """Return the cell's speed over the speed of a method at the same load, with its best K."""
        speeds = {
            load[1]: best[load].speed if load in best else max(one.speed for one in own)
            for load, own in loads.items()
            if (load[0], *load[2:]) == (method, cell.set, cell.concurrency)
        }
        other = speeds.get(cell.engine) or max(speeds.values(), default=0.0)
        return cell.speed / other if other else None

    cells = [
        cell.model_copy(
            update={
                "speed_up_over_plain": over(PLAIN, cell),
                "speed_up_over_eagle3": over(EAGLE3, cell),
                "linearity": _linearity(cell, cells),
                **_costs(cell, price_per_hour, requests_per_second),
            }
        )
        for cell in cells
    ]
    cells = [cell.model_copy(update={"doubts": _doubts(cell)}) for cell in cells]
    return ThroughputResults(
        provenance=Provenance(**provenance),
        settings=dict(settings),
        cells=cells,
        best_k=[
            BestK(
                method=load[0],
                engine=load[1],
                set=load[2],
                concurrency=load[3],
                k=cell.k or 0,
                output_tokens_per_s=cell.speed,
                tied_k=sorted(
                    one.k for one in tied_fastest(c for c in loads[load] if c.k) if one.k
                ),
            )
            for load, cell in best.items()
        ],
        goodput=_goodput(cells),
        training=dict(training or {}),
        turns=dict(turns or {}),
        price_per_hour=price_per_hour,
        requests_per_second=requests_per_second,
        doubts=_doubts_of_sittings(cells),
    )


def _doubts(cell: Cell) -> list[str]:
    """Return doubts about the speed of a cell: its repeats vary, or its speed-up is impossible."""
    found = []
    least, most = cell.speed_range
    if cell.speed and (spread := (most - least) / cell.speed) > MAX_SPREAD:
        found.append(f"its repeats are {spread:.0%} apart")
    up, length = cell.speed_up_over_plain, cell.median.acceptance_length
    # A step writes `length` tokens, and takes at least as long as a step of plain decoding.
    if up is not None and length is not None and up > (1 + TIE_SHARE) * length:
        found.append(f"its speed-up of {up:.2f} is above its acceptance length of {length:.2f}")
    return found


def _doubts_of_sittings(cells: Sequence[Cell]) -> list[str]:
    """Return a doubt about a resumed sweep if other programs took more cores in one sitting."""
    taken: dict[float, list[float]] = {}
    for repeat in (repeat for cell in cells for repeat in cell.repeats):
        if repeat.other_cores is not None:
            taken.setdefault(repeat.sitting, []).append(repeat.other_cores)
    means = [fmean(cores) for cores in taken.values()]
    if not means or max(means) - min(means) <= MAX_LOAD_DIFFERENCE:
        return []
    return [
        f"it was measured in {len(means)} sittings, in which other programs kept "
        f"{min(means):.1f} to {max(means):.1f} cores busy"
    ]


def _cell(
    point: SweepPoint,
    repeats: Sequence[RunFigures],
    objective: LatencyObjective | None,
    experts: TouchedExperts | None,
) -> Cell:
    speeds = [repeat.output_tokens_per_s for repeat in repeats]
    figures = median_of(repeats)
    return Cell(
        **point.to_json(),
        repeats=list(repeats),
        median=figures,
        spread=CellSpread(output_tokens_per_s=(min(speeds), max(speeds))),
        meets_objective=None if objective is None else objective.is_met(figures),
        experts=experts,
    )


def _linearity(cell: Cell, cells: Sequence[Cell]) -> float | None:
    def arm(one: Cell) -> tuple[Any, ...]:
        return one.method, one.source, one.engine, one.k, one.set

    least = min((one for one in cells if arm(one) == arm(cell)), key=lambda one: one.concurrency)
    alone = least.speed * cell.concurrency / least.concurrency
    return cell.speed / alone if alone else None


def _costs(cell: Cell, price: float | None, wanted: float | None) -> dict[str, float | None]:
    return {
        "cost_per_million_tokens": price and cost_per_million_tokens(price, cell.speed),
        "instances": wanted and instances_for(wanted, cell.median.requests_per_s),
    }


def _goodput(cells: Sequence[Cell]) -> list[Goodput]:
    best: dict[tuple[Any, ...], Goodput] = {}
    for cell in cells:
        key = cell.method, cell.engine, cell.k, cell.set
        rate = cell.median.requests_per_s or 0.0
        if cell.meets_objective and (key not in best or rate > (best[key].requests_per_s or 0.0)):
            best[key] = Goodput(
                method=cell.method,
                engine=cell.engine,
                k=cell.k,
                set=cell.set,
                requests_per_s=rate,
                concurrency=cell.concurrency,
            )
    return list(best.values())
