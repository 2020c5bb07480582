"""Throughput sweeps: methods x K x concurrency x prompt set, repeated in rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch

from peagle.errors import UserError
from peagle.evaluation.decoding import Backend, Request
from peagle.evaluation.gpu_busy import GpuBusy
from peagle.evaluation.journal import Journal
from peagle.evaluation.timing import Figures, figures_of, first_error

LOG_NAME = "cells.jsonl"
WARM_UP_TOKENS = 16
WAVES = 3


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One configuration that is measured.

    Attributes:
        method: its name in tables.
        source: folder or hub id of the head; "" without one.
        engine: "peagle", or the URL of a server.
        k: draft tokens per step; 0 for plain decoding, and where a server does not tell.
        concurrency: requests in flight.
        set: of prompts.
    """

    method: str
    source: str
    engine: str
    k: int
    concurrency: int
    set: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    def key(self, repeat: int) -> dict[str, Any]:
        """Of one of its measurements in a journal."""
        return {"cell": self.to_json(), "repeat": repeat}

    def __str__(self) -> str:
        k = f" K={self.k}" if self.k else ""
        return f"{self.method}{k}, concurrency {self.concurrency}, {self.set}"


@dataclass(frozen=True, slots=True)
class Arm:
    """A method at one K and what runs it.

    Attributes:
        method, source, k: as in `SweepPoint`.
        backend: answers its requests.
        device: whose use is read; None for a server.
    """

    method: str
    source: str
    k: int
    backend: Backend
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is, after each run.

    Attributes:
        cell: just measured; None while warming up.
        figures: of it.
        done, total: runs measured and to measure, those of an earlier sitting included.
        seconds_left: estimated by what equal cells took, else by the mean.
        problem: the first request's that failed in this run, "" if none did.
    """

    cell: SweepPoint | None
    figures: Figures | None
    done: int
    total: int
    seconds_left: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure.

    Every cell sends the prompts of its set once; where there are fewer than the concurrency, they
    come again until every request in flight has one.

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
        """All cells, in the order of tables, each with what runs it."""
        return {
            SweepPoint(arm.method, arm.source, arm.backend.name, arm.k, concurrency, name): arm
            for name in self.sets
            for arm in self.arms
            for concurrency in self.concurrencies
        }

    def requests(self, cell: SweepPoint) -> list[Request]:
        """What a cell sends: all prompts, again and again until every slot had a few.

        With fewer, the time in which the slots fill and run dry would count for much.
        """
        own, slots = self.sets[cell.set], cell.concurrency
        return list(islice(cycle(own), max(len(own), WAVES * slots if slots > 1 else 1)))

    def order(self) -> list[tuple[int, SweepPoint]]:
        """(repeat, cell) in the order of measurement.

        All cells take turns, and each round begins at another one: a machine that grows slower
        over the sweep, or over a round, favours none.
        """
        cells = list(self.cells)
        order: list[tuple[int, SweepPoint]] = []
        for repeat in range(self.repeats):
            first = repeat * len(cells) // self.repeats
            order += [(repeat, cell) for cell in cells[first:] + cells[:first]]
        return order

    def run(
        self, log: Journal, watch: Callable[[SweepProgress], None] | None = None
    ) -> dict[SweepPoint, list[Figures]]:
        """Measure what the log does not have yet, and keep it there.

        Returns:
            the repeats of every cell, in the order of the repeats.

        Raises:
            UserError: a server cannot be reached, or no request of a cell is answered (all prompts
                are too long, say). What was measured is in the log.
        """
        cells, order = self.cells, self.order()
        due = [(repeat, cell) for repeat, cell in order if log.get(cell.key(repeat)) is None]
        self._warm_up([cell for _, cell in due], watch, len(order) - len(due), len(order))
        clock = _Clock()
        for number, (repeat, cell) in enumerate(due, 1):
            started, arm = time.perf_counter(), cells[cell]
            with GpuBusy(arm.device) as busy:
                run = arm.backend.run(self.requests(cell), cell.concurrency)
            if all(answer.error for answer in run.answers):
                raise UserError(f"{cell}: no request was answered: {first_error(run.answers)}")
            figures = figures_of(run, busy.share)
            log.add(cell.key(repeat), figures)
            clock.took(cell, time.perf_counter() - started)
            if watch is not None:
                done, left = len(order) - len(due) + number, due[number:]
                seconds = clock.expect([cell for _, cell in left])
                problem = first_error(run.answers)
                watch(SweepProgress(cell, figures, done, len(order), seconds, problem))
        every = {cell: [log.get(cell.key(r)) for r in range(self.repeats)] for cell in cells}
        return {cell: [one for one in found if one] for cell, found in every.items()}

    def _warm_up(
        self,
        due: Sequence[SweepPoint],
        watch: Callable[[SweepProgress], None] | None,
        done: int,
        total: int,
    ) -> None:
        """Run each arm shortly at each concurrency still to be measured."""
        cells = self.cells
        # One set does: it is the same work.
        once = {(id(cells[cell]), cell.concurrency): cell for cell in reversed(due)}
        for cell in reversed(once.values()):
            requests = [_short(one) for one in self.requests(cell)[: cell.concurrency]]
            for _ in range(self.warm_up):
                cells[cell].backend.run(requests, cell.concurrency)
                if watch is not None:
                    watch(SweepProgress(None, None, done, total))


class _Clock:
    """Foretells how long cells take."""

    def __init__(self) -> None:
        self._seconds: dict[SweepPoint, float] = {}

    def took(self, cell: SweepPoint, seconds: float) -> None:
        self._seconds[cell] = seconds

    def expect(self, cells: Sequence[SweepPoint]) -> float:
        known = self._seconds
        mean = sum(known.values()) / len(known)
        return sum(known.get(cell, mean) for cell in cells)


def _short(request: Request) -> Request:
    params = request.params
    most = min(params.max_tokens, WARM_UP_TOKENS)
    return replace(
        request,
        params=replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most)),
    )
