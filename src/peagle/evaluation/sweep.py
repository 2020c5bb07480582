"""Throughput sweeps: methods x K x concurrency x prompt set, repeated in rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch

from peagle.errors import UserError
from peagle.evaluation.decoding import Backend, Request
from peagle.evaluation.gpu_busy import gpu_utilization
from peagle.evaluation.journal import Journal
from peagle.evaluation.timing import Figures, figures_of, first_error

LOG_NAME = "cells.jsonl"
WARM_UP_TOKENS = 16
WAVES = 3


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One configuration that is measured, a cell of throughput.json.

    `k` is 0 for plain decoding, and where a server does not tell its K.
    """

    method: str
    source: str
    engine: str
    k: int
    concurrency: int
    set: str

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def key(self, repeat: int) -> dict[str, Any]:
        """Return the key of one of its measurements in a journal."""
        return {"cell": self.to_json(), "repeat": repeat}

    def __str__(self) -> str:
        k = f" K={self.k}" if self.k else ""
        return f"{self.method}{k}, concurrency {self.concurrency}, {self.set}"


@dataclass(frozen=True, slots=True)
class Arm:
    """A method at one K with its backend, and the device whose use is read (None for a server)."""

    method: str
    source: str
    k: int
    backend: Backend
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is, after each run; `cell` and `figures` are None while it warms up.

    `done` and `total` count the runs of an earlier sitting too. `problem` is the first error among
    the requests of this run.
    """

    cell: SweepPoint | None
    figures: Figures | None
    done: int
    total: int
    seconds_left: float | None = None
    problem: str = ""


Watch = Callable[[SweepProgress], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements of a benchmark.

    Attributes:
        arms: in the order of tables.
        sets: the requests of each set.
        concurrencies: requests in flight.
        repeats: measurements of each cell.
        warm_up: short runs of each arm at each concurrency before the first measurement.
    """

    arms: Sequence[Arm]
    sets: Mapping[str, Sequence[Request]]
    concurrencies: Sequence[int]
    repeats: int = 3
    warm_up: int = 1

    @property
    def cells(self) -> dict[SweepPoint, Arm]:
        """All cells with their arms, in the order of tables."""
        return {
            SweepPoint(arm.method, arm.source, arm.backend.name, arm.k, concurrency, name): arm
            for name in self.sets
            for arm in self.arms
            for concurrency in self.concurrencies
        }

    def requests(self, cell: SweepPoint) -> list[Request]:
        """Return the requests of a cell: all prompts, again and again until every slot had a few.

        With fewer, the time in which the slots fill and run dry would count for much.
        """
        own, slots = self.sets[cell.set], cell.concurrency
        return list(islice(cycle(own), max(len(own), WAVES * slots if slots > 1 else 1)))

    def order(self) -> list[tuple[int, SweepPoint]]:
        """Return (repeat, cell) in the order of measurement.

        All cells take turns, and each round begins at another one: a machine that grows slower
        over the sweep, or over a round, favours none.
        """
        cells = list(self.cells)
        order: list[tuple[int, SweepPoint]] = []
        for repeat in range(self.repeats):
            first = repeat * len(cells) // self.repeats
            order += [(repeat, cell) for cell in cells[first:] + cells[:first]]
        return order

    def run(self, log: Journal, watch: Watch = lambda _: None) -> dict[SweepPoint, list[Figures]]:
        """Measure the cells that the log does not have yet, and keep them there.

        Returns:
            the repeats of every cell, in the order of the repeats.

        Raises:
            UserError: a server cannot be reached, or no request of a cell is answered (all prompts
                are too long, say). Finished measurements are in the log.
        """
        cells, order = self.cells, self.order()
        due = [(repeat, cell) for repeat, cell in order if log.get(cell.key(repeat)) is None]
        done = len(order) - len(due)
        self._warm_up([cell for _, cell in due], lambda: watch(_warming_up(done, len(order))))
        seconds_of: dict[SweepPoint, float] = {}
        for number, (repeat, cell) in enumerate(due, 1):
            started, arm = time.perf_counter(), cells[cell]
            with gpu_utilization(arm.device) as busy:
                run = arm.backend.run(self.requests(cell), cell.concurrency)
            problem = first_error(run.answers)
            if all(answer.error for answer in run.answers):
                raise UserError(f"{cell}: no request was answered: {problem}")
            figures = figures_of(run, fmean(busy) if busy else None)
            log.add(cell.key(repeat), figures)
            seconds_of[cell] = time.perf_counter() - started
            mean = fmean(seconds_of.values())
            left = sum(seconds_of.get(cell, mean) for _, cell in due[number:])
            watch(SweepProgress(cell, figures, done + number, len(order), left, problem))
        every = {cell: [log.get(cell.key(r)) for r in range(self.repeats)] for cell in cells}
        return {cell: [one for one in found if one] for cell, found in every.items()}

    def _warm_up(self, due: Sequence[SweepPoint], watch: Callable[[], None]) -> None:
        """Run each arm shortly at each concurrency still to be measured, on one set."""
        cells = self.cells
        once = {(id(cells[cell]), cell.concurrency): cell for cell in reversed(due)}
        for cell in reversed(once.values()):
            requests = [_shortened(one) for one in self.requests(cell)[: cell.concurrency]]
            for _ in range(self.warm_up):
                cells[cell].backend.run(requests, cell.concurrency)
                watch()


def _warming_up(done: int, total: int) -> SweepProgress:
    return SweepProgress(None, None, done, total)


def _shortened(request: Request) -> Request:
    params = request.params
    most = min(params.max_tokens, WARM_UP_TOKENS)
    least = min(params.min_tokens, most)
    return replace(request, params=replace(params, max_tokens=most, min_tokens=least))
