"""What the measurements of a sweep amount to: medians, spreads, speed-ups, the best K, goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.evaluation.methods import PLAIN
from peagle.evaluation.sweep import Cell
from peagle.evaluation.timing import Figures, Objective, median_of

FORMAT_VERSION = 1
NAME = "throughput.json"
EAGLE3 = "eagle3"


def summarize(
    measured: Mapping[Cell, Sequence[Figures]], objective: Objective | None
) -> dict[str, Any]:
    """The tables of throughput.json: "cells", "best_k" and "goodput".

    Of every cell, at equal set and concurrency:
    - median and spread (least and most) of its repeats;
    - speed_up_over_plain: its output tokens/s over those of the method named plain;
    - speed_up_over_eagle3: over those of the method named eagle3 at the K that is best for it;
    - linearity: tokens/s at concurrency c over c / c0 times those at the least concurrency c0;
      1 where requests do not slow each other down;
    - meets_objective: whether the medians of its latencies keep the objective.
    Goodput is the most requests/s of a method at one K among the concurrencies that keep it; where
    none does, there is no entry.

    Args:
        measured: the repeats of every cell, at least one each.
        objective: to be kept; None if there is none.
    """
    medians = {cell: median_of(repeats) for cell, repeats in measured.items()}
    speeds = {cell: found["output_tokens_per_s"] for cell, found in medians.items()}
    cells = []
    for cell, repeats in measured.items():
        every = [repeat["output_tokens_per_s"] for repeat in repeats]
        met = None if objective is None else objective.is_met(medians[cell])
        cells.append(
            {
                **cell.to_json(),
                "repeats": list(repeats),
                "median": medians[cell],
                "spread": {"output_tokens_per_s": [min(every), max(every)]},
                "speed_up_over_plain": _over(PLAIN, cell, speeds),
                "speed_up_over_eagle3": _over(EAGLE3, cell, speeds),
                "linearity": _linearity(cell, speeds),
                "meets_objective": met,
            }
        )
    return {"cells": cells, "best_k": _best_k(speeds), "goodput": _goodput(cells)}


def _over(method: str, cell: Cell, speeds: Mapping[Cell, float]) -> float | None:
    """Speed over the best of a method at the same load; None without one."""
    load = cell.set, cell.concurrency
    every = [v for c, v in speeds.items() if c.method == method and (c.set, c.concurrency) == load]
    best = max(every, default=0.0)
    return speeds[cell] / best if best else None


def _linearity(cell: Cell, speeds: Mapping[Cell, float]) -> float | None:
    same = {c.concurrency: v for c, v in speeds.items() if _arm(c) == _arm(cell)}
    least = min(same)
    alone = same[least] * cell.concurrency / least
    return speeds[cell] / alone if alone else None


def _arm(cell: Cell) -> tuple[Any, ...]:
    return cell.method, cell.source, cell.engine, cell.k, cell.set


def _best_k(speeds: Mapping[Cell, float]) -> list[dict[str, Any]]:
    """The fastest K of each method that drafts, at each set and concurrency."""
    best: dict[tuple[str, str, int], Cell] = {}
    for cell, speed in speeds.items():
        key = cell.method, cell.set, cell.concurrency
        if cell.k and (key not in best or speed > speeds[best[key]]):
            best[key] = cell
    return [
        {
            "method": cell.method,
            "set": cell.set,
            "concurrency": cell.concurrency,
            "k": cell.k,
            "output_tokens_per_s": speeds[cell],
        }
        for cell in best.values()
    ]


def _goodput(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for cell in cells:
        key = cell["method"], cell["engine"], cell["k"], cell["set"]
        rate = cell["median"]["requests_per_s"]
        if cell["meets_objective"] and (
            key not in best or rate > best[key]["median"]["requests_per_s"]
        ):
            best[key] = cell
    return [
        {
            "method": cell["method"],
            "k": cell["k"],
            "set": cell["set"],
            "requests_per_s": cell["median"]["requests_per_s"],
            "concurrency": cell["concurrency"],
        }
        for cell in best.values()
    ]
