"""Throughput sweeps: methods x K x concurrency x prompt set, repeated in rotating order."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch

from peagle.engine.placement import OtherPrograms
from peagle.errors import UserError
from peagle.evaluation.decoding import Backend, Request
from peagle.evaluation.dialogues import run_conversations
from peagle.evaluation.engine_backend import WARM_UP_TOKENS, EngineBackend
from peagle.evaluation.gpu_busy import gpu_utilization
from peagle.evaluation.journal import Journal
from peagle.evaluation.timing import figures_of
from peagle.results import RunFigures

SLOT_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A configuration to measure; its results are a cell of throughput.json.

    `k` is 0 for plain decoding, and for a server that does not report its K.
    """

    method: str
    source: str
    engine: str
    k: int
    concurrency: int
    set: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def key(self, repeat: int) -> dict[str, Any]:
        """Return the key of a repeat of the point in a journal."""
        return {"cell": self.to_json(), "repeat": repeat}

    def __str__(self) -> str:
        k = f" K={self.k}" if self.k else ""
        return f"{self.method}{k}, concurrency {self.concurrency}, {self.set}"


@dataclass(frozen=True, slots=True)
class Arm:
    """A method at one K with its backend.

    The use of `device` is read (None for a server). `close` ends a backend that needs the machine
    to itself: the runs of such an arm follow each other, and its backend is closed before the next
    arm.
    """

    method: str
    source: str
    k: int
    backend: Backend
    device: torch.device | None = None
    close: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """The state of a sweep after a run, or before a warm-up, which has no `figures`.

    `warm_up` is (number of this warm-up, number of all) in the stage. `done` and `total` include
    the runs of earlier sittings. `problem` is the first error of this run's requests.
    """

    point: SweepPoint
    figures: RunFigures | None
    done: int
    total: int
    seconds_left: float | None = None
    problem: str = ""
    warm_up: tuple[int, int] = (0, 0)


Watch = Callable[[SweepProgress], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements of a benchmark: every arm on every set at every concurrency."""

    arms: Sequence[Arm]  # in the order of tables
    sets: Mapping[str, Sequence[Request]]
    concurrencies: Sequence[int]
    repeats: int = 3  # measurements of each point
    warm_up: int = 1  # short runs of each arm at each concurrency before the first measurement

    @property
    def points(self) -> dict[SweepPoint, Arm]:
        """Return all points with their arms, in the order of tables."""
        return {
            SweepPoint(arm.method, arm.source, arm.backend.name, arm.k, concurrency, name): arm
            for name in self.sets
            for arm in self.arms
            for concurrency in self.concurrencies
        }

    def requests(self, point: SweepPoint) -> list[Request]:
        """Return the requests of a point: all prompts, repeated until every slot had a few.

        With fewer requests, filling and emptying the slots would take a large share of the time.
        """
        own, slots = self.sets[point.set], point.concurrency
        return list(islice(cycle(own), max(len(own), SLOT_REQUESTS * slots if slots > 1 else 1)))

    def stages(self) -> list[list[tuple[int, SweepPoint]]]:
        """Return (repeat, point) in the order of measurement, stage by stage.

        Arms that take turns are one stage, and each arm with a machine to itself is another. The
        points of a stage take turns, and each round begins at another point: a machine that slows
        down over the stage, or over a round, favours none of them.
        """
        stages: dict[int | None, list[SweepPoint]] = {}
        for point, arm in self.points.items():
            stages.setdefault(id(arm) if arm.close else None, []).append(point)
        orders = []
        for points in stages.values():
            order: list[tuple[int, SweepPoint]] = []
            for repeat in range(self.repeats):
                first = repeat * len(points) // self.repeats
                order += [(repeat, point) for point in points[first:] + points[:first]]
            orders.append(order)
        return orders

    def run(
        self, log: Journal, watch: Watch = lambda _: None
    ) -> dict[SweepPoint, list[RunFigures]]:
        """Measure the points that the log lacks, and keep the figures there.

        Returns:
            the repeats of every point: first the points of this sweep, then other points of
            the log.

        Raises:
            UserError: a server cannot be reached, or no request of a point is answered (all prompts
                are too long, say). Finished measurements are in the log.
        """
        points = self.points
        stages = [
            [(repeat, point) for repeat, point in stage if log.get(point.key(repeat)) is None]
            for stage in self.stages()
        ]
        due = [one for stage in stages for one in stage]
        total = len(points) * self.repeats
        done = total - len(due)
        seconds_of: dict[SweepPoint, float] = {}
        sittings = [value.get("sitting", 1) for key, value in log.items() if "repeat" in key]
        sitting = 1 + max(sittings, default=0)
        for stage in filter(None, stages):
            close = points[stage[0][1]].close
            try:
                self._warm_up([point for _, point in stage], watch, done, total)
                for repeat, point in stage:
                    figures, problem = self._measure(point, points[point], seconds_of)
                    figures = figures.model_copy(update={"sitting": sitting})
                    log.add(point.key(repeat), figures.to_json())
                    done += 1
                    due = due[1:]
                    mean = fmean(seconds_of.values())
                    left = sum(seconds_of.get(point, mean) for _, point in due)
                    watch(SweepProgress(point, figures, done, total, left, problem))
            finally:
                if close:
                    close()
        found: dict[SweepPoint, dict[int, RunFigures]] = {point: {} for point in points}
        for key, figures in log.items():
            if "repeat" in key:
                repeats = found.setdefault(SweepPoint(**key["cell"]), {})
                repeats[key["repeat"]] = RunFigures.model_validate(figures)
        return {point: [one for _, one in sorted(own.items())] for point, own in found.items()}

    def _measure(
        self, point: SweepPoint, arm: Arm, seconds_of: dict[SweepPoint, float]
    ) -> tuple[RunFigures, str]:
        """Run a point once; return its figures and the first error, and note the seconds."""
        started, others = time.perf_counter(), OtherPrograms()
        with gpu_utilization(arm.device) as busy:
            run = run_conversations(arm.backend, self.requests(point), point.concurrency)
        is_here = isinstance(arm.backend, EngineBackend)  # a server is another program
        taken = others.busy_cores() if is_here else None
        errors = [answer.error for answer in run.answers if answer.error]
        problem = errors[0] if errors else ""
        if len(errors) == len(run.answers):
            raise UserError(f"{point}: no request was answered: {problem}")
        seconds_of[point] = time.perf_counter() - started
        figures = figures_of(run, fmean(busy) if busy else None)
        return figures.model_copy(update={"other_cores": taken}), problem

    def _warm_up(self, due: Sequence[SweepPoint], watch: Watch, done: int, total: int) -> None:
        """Run each arm briefly at each concurrency still to be measured, on one set."""
        points = self.points
        once = {(id(points[point]), point.concurrency): point for point in reversed(due)}
        most = len(once) * self.warm_up
        numbers = iter(range(1, most + 1))
        for point in reversed(once.values()):
            requests = [_shortened(one) for one in self.requests(point)[: point.concurrency]]
            for _ in range(self.warm_up):
                watch(SweepProgress(point, None, done, total, warm_up=(next(numbers), most)))
                points[point].backend.run(requests, point.concurrency)


def _shortened(request: Request) -> Request:
    params = request.params
    most = min(params.max_tokens, WARM_UP_TOKENS)
    least = min(params.min_tokens, most)
    return replace(request, params=replace(params, max_tokens=most, min_tokens=least))
