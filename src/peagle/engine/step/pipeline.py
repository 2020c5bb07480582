"""One decode step in flight while the host reads the step before.

The host knows each sequence from before the step in flight, and reserves KV blocks for that step
and the next. It takes the tokens of a step as soon as they are verified, and the drafts when the
next step of the engine begins, or earlier if the masks of grammars depend on them.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

from peagle.engine.model_runner import RunTarget
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence, SequenceStatus
from peagle.engine.step.graph_runner import Flight, GraphRunner, RowDrafts, RowTokens


class Pipeline:
    """Decides whether a step may be launched before the last one is read.

    Args:
        append_tokens: called with each sequence and the tokens that a step verified of it.
        set_drafts: called with each sequence and its drafts of a step.
        prepare: finds the masks of grammars, for the drafts that the host knows.
    """

    def __init__(
        self,
        runner: GraphRunner,
        scheduler: Scheduler,
        append_tokens: Callable[[Sequence, RowTokens], None],
        set_drafts: Callable[[Sequence, RowDrafts], None],
        prepare: Callable[[], None],
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._append_tokens = append_tokens
        self._set_drafts = set_drafts
        self._prepare = prepare
        self._flight: Flight | None = None
        self._follows = False  # the step in flight runs right behind the one before it
        self._drafting: tuple[Flight, bool] | None = None  # drafts not taken yet; `follows`
        self._has_grammars = False
        self._version: int | None = None  # scheduler's at the last launch; None while others wait

    @property
    def is_in_flight(self) -> bool:
        """Return whether a step was launched whose results are not taken yet."""
        return self._flight is not None

    def launch(
        self,
        sequences: SequenceOf[Sequence],
        run_prompts: Callable[[RunTarget], None] | None = None,
        before_drafts: Callable[[], None] | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        """Launch a step of these sequences, then take the tokens of the step in flight.

        Args:
            run_prompts, before_drafts: as for `GraphRunner.launch`.
            is_alone: whether nothing else was launched since the last step.
        """
        if self._flight is not None and self.runner.needs_results(sequences):
            self.drain()
            sequences = [s for s in sequences if not s.is_finished]
            if not sequences:
                return
        # Sequences whose prompts still run, and waiting ones, join as soon as they can.
        alone = len(sequences) == len(self._scheduler.running)
        alone = alone and not self._scheduler.may_begin_more
        self._version = self._scheduler.version if alone else None
        self._has_grammars = any(s.grammar is not None for s in sequences)
        prompts = {"run_prompts": run_prompts, "before_drafts": before_drafts}
        launch = partial(self.runner.launch, sequences, **prompts)
        self._launch(launch, is_alone=is_alone)

    def _launch(
        self, launch: Callable[[Callable[[], None] | None], Flight], *, is_alone: bool = True
    ) -> None:
        """Launch a step and take the tokens of the last.

        Masks of grammars depend on these tokens and on the drafts: then both are taken while the
        target runs.
        """
        flight, follows = self._flight, self._follows
        self._follows = is_alone and flight is not None

        def meanwhile() -> None:
            self._read(flight, follows)
            self.read_drafts()
            self._prepare()

        if self._has_grammars:
            self._flight = launch(meanwhile)
        else:
            self._flight = launch(None)
            self._read(flight, follows)

    def go_on(self) -> bool:
        """Launch the next step, then take the tokens of the last; return False if that cannot be.

        The scheduler must decide first if a sequence came, was stopped or changed, if K changes, if
        blocks run out, or if prompts have waited long enough for others. The device knows the
        sequences that ended by themselves: the others go on, unless a waiting sequence can take the
        place or a smaller graph would do.
        """
        flight = self._flight
        if flight is None or self._version != self._scheduler.version:
            return False
        unfinished = [s for s in flight.sequences if s is not None and not s.is_finished]
        if not self.runner.is_tight(len(unfinished)) or not self._scheduler.reserve(unfinished):
            return False
        if self._scheduler.is_holding and not self._scheduler.holds(len(unfinished)):
            return False
        self._launch(self.runner.go_on)
        return True

    def must_drain(self) -> bool:
        """Return whether the results in flight must be taken before the scheduler decides.

        A sequence that loses its blocks keeps its drafts. If they are drawn the host must know
        them, as the device has only the q of the latest drafts.
        """
        return self.is_in_flight and self.runner.draws and self._scheduler.may_preempt()

    def drain(self) -> None:
        """Take the results of the step in flight, if there is one; sequences then join again."""
        flight, self._flight = self._flight, None
        self._read(flight, self._follows)
        self.read_drafts()
        self.runner.clear()

    def read_drafts(self) -> None:
        """Take the drafts of the step whose tokens were taken, if they are not taken yet."""
        if self._drafting is None:
            return
        (flight, follows), self._drafting = self._drafting, None
        reports = self.runner.read_drafts(flight, follows=follows)
        for sequence, report in zip(flight.sequences, reports, strict=True):
            if sequence is not None and sequence.status is SequenceStatus.RUNNING:
                self._set_drafts(sequence, report)

    def _read(self, flight: Flight | None, follows: bool) -> None:
        """Take the tokens of a step, if there is one; `follows` as in `GraphRunner.read_drafts`."""
        self.read_drafts()
        if flight is None:
            return
        self._drafting = flight, follows
        num_ended = num_left = 0
        reports = self.runner.read(flight)
        for sequence, report in zip(flight.sequences, reports, strict=True):
            # A sequence that was preempted meanwhile computes the same tokens again.
            if sequence is not None and sequence.status is SequenceStatus.RUNNING:
                self._append_tokens(sequence, report)
                num_ended += sequence.is_finished
                num_left += not sequence.is_finished
        can_wait = not self._scheduler.waiting or self._scheduler.is_holding
        can_stay = num_left and can_wait and self.runner.is_tight(num_left)
        if can_stay and self._version is not None:
            self._version += num_ended  # each end counts as a change
