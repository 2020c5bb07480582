"""What the measurements of a sweep amount to: medians, spreads, speed-ups, the best K, goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.evaluation.best_k import Speed, best_k, tied_fastest
from peagle.evaluation.decoding_methods import PLAIN
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.timing import Figures, LatencyObjective, median_of
from peagle.results import (
    BestK,
    Cell,
    CellSpread,
    Goodput,
    Provenance,
    RunFigures,
    ThroughputResults,
    TrainingRecord,
)

EAGLE3 = "eagle3"


def summarize(
    measured: Mapping[SweepPoint, Sequence[Figures]],
    objective: LatencyObjective | None,
    *,
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
    training: Mapping[str, TrainingRecord] | None = None,
) -> ThroughputResults:
    """Build throughput.json from the repeats of every cell.

    Of every cell, at equal set and concurrency:
    - median and spread (least and most) of its repeats;
    - speed_up_over_plain: its output tokens/s over those of the method named plain;
    - speed_up_over_eagle3: over those of the method named eagle3 at its best K;
    - linearity: tokens/s at concurrency c over c / c0 times those at the least concurrency c0;
      1 where requests do not slow each other down;
    - meets_objective: whether the medians of its latencies keep the objective.
    The best K of a method is that of `best_k`; tied_k lists every K whose repeats overlap those of
    the fastest. Goodput is the most requests/s of a method at one K among the concurrencies that
    keep it; where none does, there is no entry.

    Args:
        measured: the repeats of every cell, at least one each.
        objective: to be kept; None if there is none.
        provenance, settings: of the measurements.
        training: the length of each head's training, by method.
    """
    medians = {cell: median_of(repeats) for cell, repeats in measured.items()}
    best = _best_k(measured, medians)
    speeds = {cell: found["output_tokens_per_s"] for cell, found in medians.items()}
    cells = []
    for cell, repeats in measured.items():
        every = [repeat["output_tokens_per_s"] for repeat in repeats]
        met = None if objective is None else objective.is_met(medians[cell])
        cells.append(
            Cell(
                **cell.to_json(),
                repeats=[RunFigures.model_validate(repeat) for repeat in repeats],
                median=RunFigures.model_validate(medians[cell]),
                spread=CellSpread(output_tokens_per_s=(min(every), max(every))),
                speed_up_over_plain=_over(PLAIN, cell, speeds, best),
                speed_up_over_eagle3=_over(EAGLE3, cell, speeds, best),
                linearity=_linearity(cell, speeds),
                meets_objective=met,
            )
        )
    return ThroughputResults(
        provenance=Provenance(**provenance),
        settings=dict(settings),
        cells=cells,
        best_k=best,
        goodput=_goodput(cells),
        training=dict(training or {}),
    )


def _over(
    method: str,
    cell: SweepPoint,
    speeds: Mapping[SweepPoint, float],
    best: Sequence[BestK],
) -> float | None:
    """Speed over that of a method at the same load, with its best K; None without one."""
    ks = {(one.method, one.set, one.concurrency): one.k for one in best}
    k = ks.get((method, cell.set, cell.concurrency), 0)
    wanted = method, k, cell.set, cell.concurrency
    every = [v for c, v in speeds.items() if (c.method, c.k, c.set, c.concurrency) == wanted]
    other = max(every, default=0.0)
    return speeds[cell] / other if other else None


def _linearity(cell: SweepPoint, speeds: Mapping[SweepPoint, float]) -> float | None:
    same = {c.concurrency: v for c, v in speeds.items() if _arm(c) == _arm(cell)}
    least = min(same)
    alone = same[least] * cell.concurrency / least
    return speeds[cell] / alone if alone else None


def _arm(cell: SweepPoint) -> tuple[Any, ...]:
    return cell.method, cell.source, cell.engine, cell.k, cell.set


def _best_k(
    measured: Mapping[SweepPoint, Sequence[Figures]], medians: Mapping[SweepPoint, Figures]
) -> list[BestK]:
    """The best K of each method that drafts, at each set and concurrency."""
    loads: dict[tuple[str, str, int], dict[int, Speed]] = {}
    for cell, repeats in measured.items():
        if cell.k:
            every = [one["output_tokens_per_s"] for one in repeats]
            speed = Speed(medians[cell]["output_tokens_per_s"], min(every), max(every))
            loads.setdefault((cell.method, cell.set, cell.concurrency), {})[cell.k] = speed
    return [
        BestK(
            method=method,
            set=name,
            concurrency=concurrency,
            k=(k := best_k(speeds)),
            output_tokens_per_s=speeds[k].median,
            tied_k=sorted(tied_fastest(speeds)),
        )
        for (method, name, concurrency), speeds in loads.items()
    ]


def _goodput(cells: Sequence[Cell]) -> list[Goodput]:
    best: dict[tuple[Any, ...], Goodput] = {}
    for cell in cells:
        key = cell.method, cell.engine, cell.k, cell.set
        rate = cell.median.requests_per_s or 0.0
        if cell.meets_objective and (key not in best or rate > (best[key].requests_per_s or 0.0)):
            best[key] = Goodput(
                method=cell.method,
                k=cell.k,
                set=cell.set,
                requests_per_s=rate,
                concurrency=cell.concurrency,
            )
    return list(best.values())
