"""A device that keeps its own books, and an engine around `Pipeline` without models.

What the device says of a sequence follows from what was launched, not from what the host knows. The
scheduler and its blocks are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.graph_runner import Pipeline, RowReport, buckets
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence, SequenceStatus

K = 2
MAX_MODEL_LEN = 40
BLOCK_SIZE = 4
Accept = Callable[[int, int], int]


def stream(seq_id: int, index: int) -> int:
    """Output token `index` of a sequence, whoever computes it."""
    return 1000 * (seq_id + 1) + index


def nothing_accepted(seq_id: int, index: int) -> int:
    return 0


def some_accepted(seq_id: int, index: int) -> int:
    return (7 * seq_id + 5 * index) % (K + 1)


class Unreadable:
    """What the device says of a sequence that ended before: nothing."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a sequence that has ended was read")


@dataclass
class Row:
    """A sequence as the device knows it."""

    sequence: Sequence
    num_outputs: int
    has_ended: bool = False


@dataclass(eq=False)
class Flight:
    sequences: list[Sequence]
    reports: list[Any]


class FakeRunner:
    """Stands in for `GraphRunner`: sequences by themselves, a report a step."""

    def __init__(self, max_num_seqs: int, accept: Accept) -> None:
        self._buckets = buckets(max_num_seqs)
        self._accept = accept
        self._rows: list[Row] = []
        self._unread: list[Flight] = []
        self._size = 0
        self.starts: list[int] = []  # how many sequences
        self.num_launches = self.num_reads = 0

    def can_run(self, sequences: list[Sequence]) -> bool:
        return len(sequences) <= self._buckets[-1]

    def is_tight(self, num_sequences: int) -> bool:
        return self._bucket(num_sequences) == self._size

    def _bucket(self, num_sequences: int) -> int:
        return next(size for size in self._buckets if size >= num_sequences)

    def start(self, sequences: list[Sequence]) -> Flight:
        assert not self._unread, "the host does not know yet where they stand"
        self._rows = [Row(s, s.num_output_tokens) for s in sequences]
        self._size = self._bucket(len(sequences))
        self.starts.append(len(sequences))
        return self._launch()

    def go_on(self) -> Flight:
        assert len(self._unread) == 1, "one step is in flight"
        return self._launch()

    def read(self, flight: Flight) -> list[Any]:
        assert self._unread.pop(0) is flight, "steps are read once, and in their order"
        self.num_reads += 1
        return flight.reports

    def _launch(self) -> Flight:
        self.num_launches += 1
        flight = Flight([r.sequence for r in self._rows], [self._step(r) for r in self._rows])
        self._unread.append(flight)
        return flight

    def _step(self, row: Row) -> Any:
        if row.has_ended:
            return Unreadable()
        sequence, first = row.sequence, row.num_outputs
        length = sequence.num_prompt_tokens + first
        # The newest token and K drafts, then the drafter's K - 1 mask slots behind them.
        slots = len(sequence.block_table) * BLOCK_SIZE
        assert slots >= min(length + 2 * K, MAX_MODEL_LEN), "it writes beyond its blocks"
        accepted = self._accept(sequence.seq_id, first)
        emitted = [stream(sequence.seq_id, first + i) for i in range(accepted + 1)]
        row.num_outputs += len(emitted)
        row.has_ended = (
            row.num_outputs >= sequence.params.max_tokens
            or length + len(emitted) >= MAX_MODEL_LEN
            or not sequence.stop_token_ids.isdisjoint(emitted)
        )
        return RowReport(K, accepted, emitted, [1] * K)


class Engine:
    """What `LLMEngine` does with a pipeline, without models."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        num_blocks: int = 100,
        budget: int = 100,
        accept: Accept = nothing_accepted,
    ) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            num_lookahead_slots=3 * (K + 1),
        )
        self.runner = FakeRunner(max_num_seqs, accept)
        runner: Any = self.runner
        self.pipeline = Pipeline(runner, self.scheduler, self._take)
        self.sequences: list[Sequence] = []
        self.went_on: list[bool] = []
        self.on_take: Callable[[], None] = lambda: None
        extend = self.blocks.extend

        def watched(sequence: Sequence, num_tokens: int) -> bool:
            assert not sequence.is_finished, "blocks for one that has ended"
            return extend(sequence, num_tokens)

        self.blocks.extend = watched  # type: ignore[method-assign]

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    def add(self, max_tokens: int, prompt: int = 3, **options: Any) -> Sequence:
        seq_id = len(self.sequences)
        params = SamplingParams(max_tokens=max_tokens)
        options = {"stop_token_ids": frozenset(), **options}
        sequence = Sequence(seq_id, [seq_id] * prompt, params, seed=0, **options)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """Returns whether it went on without looking."""
        self.went_on.append(self.pipeline.go_on())
        if not self.went_on[-1]:
            self.pipeline.drain()
            if self.scheduler.has_unfinished:
                self._schedule()
        return self.went_on[-1]

    def _schedule(self) -> None:
        plan = self.scheduler.schedule()
        for chunk in plan.prefill:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            if chunk.samples:
                self._emit(chunk.sequence, [stream(chunk.sequence.seq_id, 0)])
        decoding = [chunk.sequence for chunk in plan.decode]
        if decoding:
            assert self.pipeline.runner.can_run(decoding)
            self.pipeline.start(decoding)

    def _take(self, sequence: Sequence, report: RowReport) -> None:
        assert not sequence.is_finished
        sequence.num_computed_tokens += 1 + report.num_accepted
        sequence.drafts = report.drafts
        self._emit(sequence, report.new_token_ids)
        self.on_take()

    def _emit(self, sequence: Sequence, new: list[int]) -> None:
        sequence.append(new, MAX_MODEL_LEN)
        settled = min(sequence.num_computed_tokens, len(sequence) - 1)
        self.blocks.publish(sequence, settled)
        if sequence.is_finished:
            self.scheduler.retire(sequence)

    def end(self, sequence: Sequence, reason: str = "cancelled", num_surplus: int = 0) -> None:
        """From the host, as `LLMEngine.cancel` and `LLMEngine.stop` do it."""
        if not sequence.is_finished:
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            self.scheduler.retire(sequence)
        if num_surplus:
            sequence.trim(num_surplus)

    def run_to_the_end(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        self.check()

    def check(self) -> None:
        """Everybody got all tokens, each once; nothing is held, nothing in flight is missed."""
        for sequence in self.sequences:
            assert sequence.is_finished
            count = sequence.num_output_tokens
            seq_id = sequence.seq_id
            assert sequence.output_token_ids == [stream(seq_id, i) for i in range(count)]
            if sequence.finish_reason == "length":
                room = MAX_MODEL_LEN - sequence.num_prompt_tokens
                assert count == min(sequence.params.max_tokens, room)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
