"""Keeps one decode step in flight: the host reads step i while the device runs step i + 1.

The host knows each sequence as it was before the step in flight, and reserves KV blocks for that
step and the next. Blocks freed meanwhile are safe: whoever gets them writes later on the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence

if TYPE_CHECKING:
    from peagle.engine.graph_runner import Flight, GraphRunner


# A stop for prompts costs everybody who runs some milliseconds in which the device has nothing to
# do. So the next one comes no sooner than this, in seconds, and brings in all who came meanwhile.
PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a step did for one sequence.

    Attributes:
        num_drafted: drafts that were verified; num_accepted: those that stand.
        new_token_ids: they and the target's own token; before stop conditions.
        drafts: for the next step.
    """

    num_drafted: int
    num_accepted: int
    new_token_ids: list[int]
    drafts: list[int]


def read_report(row: list[int], num_drafts: int) -> RowReport:
    """A row of `StepBuffers.report_RX` on the host; K is `num_drafts`."""
    num_drafted, num_accepted, num_next = row[:3]
    emitted, drafts = row[3 : 4 + num_drafts], row[4 + num_drafts :]
    return RowReport(num_drafted, num_accepted, emitted[: num_accepted + 1], drafts[:num_next])


Take = Callable[[Sequence, RowReport], None]


class Pipeline:
    """Decides when a step may be launched before the last one is read.

    Args:
        runner: launches and reads steps.
        scheduler: whose running sequences they are.
        take: called with each sequence and what a step did for it.
        clock: seconds.
    """

    def __init__(
        self,
        runner: GraphRunner,
        scheduler: Scheduler,
        take: Take,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._take = take
        self._clock = clock
        self._flight: Flight | None = None
        self._version = -1
        self._started_s = 0.0

    def can_run(self, sequences: SequenceOf[Sequence]) -> bool:
        """As `GraphRunner.can_run`."""
        return self._runner.can_run(sequences)

    def start(self, sequences: SequenceOf[Sequence]) -> None:
        """Launch a step of these sequences."""
        assert self._flight is None, "a step is in flight"
        self._flight = self._runner.start(list(sequences))
        # Others that run, with their prompts, or may, join as soon as they can.
        scheduler = self._scheduler
        alone = len(sequences) == len(scheduler.running) and not scheduler.num_admissible
        self._version = scheduler.version if alone else -1
        self._started_s = self._clock()

    def go_on(self) -> bool:
        """Launch the next step, then take the results of the last; false if that cannot be.

        It cannot where somebody was stopped or changed, where K changes, where a smaller graph
        would do, where blocks run out, or where it is time for those who wait. Who ended by itself
        is known to the device: the others go on.
        """
        flight = self._flight
        if flight is None or self._version != self._scheduler.version or self._must_admit():
            return False
        unfinished = [s for s in flight.sequences if not s.is_finished]
        if not unfinished or not self._runner.is_tight(len(unfinished)):
            return False
        if not self._scheduler.reserve(unfinished):
            return False
        self._flight = self._runner.go_on()
        self._read(flight)
        return True

    def _must_admit(self) -> bool:
        """Whether to stop for those who may be let in.

        The more of them there are beside those who run, the sooner.
        """
        coming, running = self._scheduler.num_admissible, len(self._scheduler.running)
        patience_s = PATIENCE_S * running / (running + coming) if coming else inf
        return self._clock() - self._started_s >= patience_s

    def drain(self) -> None:
        """Take the results of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: Flight) -> None:
        for sequence, report in zip(flight.sequences, self._runner.read(flight), strict=True):
            if not sequence.is_finished:
                self._take(sequence, report)
                self._version += sequence.is_finished  # as the scheduler counts it
