"""Keeps one decode step in flight: the host reads step i while the device runs step i + 1.

The host knows each sequence as it was before the step in flight, and reserves KV blocks for that
step and the next. Blocks freed meanwhile are safe: whoever gets them writes later on the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence

if TYPE_CHECKING:
    from peagle.engine.graph_runner import Flight, GraphRunner


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
    """

    def __init__(self, runner: GraphRunner, scheduler: Scheduler, take: Take) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._take = take
        self._flight: Flight | None = None
        self._version = -1

    def can_run(self, sequences: SequenceOf[Sequence]) -> bool:
        """As `GraphRunner.can_run`."""
        return self._runner.can_run(sequences)

    def start(self, sequences: SequenceOf[Sequence]) -> None:
        """Launch a step of these sequences."""
        assert self._flight is None, "a step is in flight"
        self._flight = self._runner.start(list(sequences))
        # Others that run, with their prompts, join as soon as they can.
        alone = len(sequences) == len(self._scheduler.running)
        self._version = self._scheduler.version if alone else -1

    def go_on(self) -> bool:
        """Launch the next step, then take the results of the last; false if that cannot be.

        It cannot where somebody came, was stopped or changed, where K changes, or where blocks run
        out. Who ended by itself is known to the device: the others go on, unless somebody waits for
        the place or a smaller graph would do.
        """
        flight = self._flight
        if flight is None or self._version != self._scheduler.version:
            return False
        unfinished = [s for s in flight.sequences if not s.is_finished]
        if not self._runner.is_tight(len(unfinished)) or not self._scheduler.reserve(unfinished):
            return False
        self._flight = self._runner.go_on()
        self._read(flight)
        return True

    def drain(self) -> None:
        """Take the results of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: Flight) -> None:
        num_ended = num_left = 0
        for sequence, report in zip(flight.sequences, self._runner.read(flight), strict=True):
            if not sequence.is_finished:
                self._take(sequence, report)
                num_ended += sequence.is_finished
                num_left += not sequence.is_finished
        can_stay = num_left and not self._scheduler.waiting and self._runner.is_tight(num_left)
        if can_stay:
            self._version += num_ended  # each end counts as a change
