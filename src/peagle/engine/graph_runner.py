"""Decode steps as CUDA graphs, with one step in flight while the host reads the step before.

The host knows each sequence as it was before the step in flight, and reserves KV blocks for that
step and the next. A sequence that gets blocks freed meanwhile writes them later on the same stream.

Shapes: B rows of a graph, K drafts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.features import FeatureRings
from peagle.engine.pass_graphs import Capturer
from peagle.engine.sampler import has_penalties
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence
from peagle.engine.stats import StepTimes

if TYPE_CHECKING:
    from peagle.engine.decode_step import DecodeStep

MAX_STOP_IDS = 8
# Steps of more sequences take long enough for the host to launch their kernels one by one.
MAX_GRAPH_ROWS = 256


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that have graphs: powers of two, then steps of 8, then of 64."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS, 64)]
    return [*(size for size in sizes if size < most), most]


def graph_sizes(max_num_seqs: int, depth: Callable[[int], int]) -> list[tuple[int, int]]:
    """Return (rows, K) of the graphs, where n sequences draft `depth(n)` tokens each.

    Where `depth` is 0 for some number of sequences, `DepthPolicy` may make it 0 for every number.
    """
    found: list[tuple[int, int]] = []
    smaller = 0
    pause = {0} & {depth(n) for n in range(1, max_num_seqs + 1)}
    for size in buckets(max_num_seqs):
        depths = pause | {depth(n) for n in range(smaller + 1, size + 1)}
        found += [(size, k) for k in sorted(depths)]
        smaller = size
    return found


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a step did for one sequence.

    Attributes:
        num_drafted: drafts that were verified.
        num_accepted: drafts that were accepted.
        new_token_ids: the accepted drafts and the target's own token, before stop conditions.
        drafts: drafts for the next step.
    """

    num_drafted: int
    num_accepted: int
    new_token_ids: list[int]
    drafts: list[int]


def read_report(row: list[int], num_drafts: int) -> RowReport:
    """Read a row of `StepBuffers.report_RX` on the host; K is `num_drafts`."""
    num_drafted, num_accepted, num_next = row[:3]
    emitted, drafts = row[3 : 4 + num_drafts], row[4 + num_drafts :]
    return RowReport(num_drafted, num_accepted, emitted[: num_accepted + 1], drafts[:num_next])


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    Attributes:
        sequences: the sequences of its rows.
        report_RX: the report, on the host once `done` has happened.
        done: None on a CPU, where the report is there at once.
    """

    sequences: SequenceOf[Sequence]
    report_RX: Tensor
    done: torch.cuda.Event | None


class _Graph:
    """One captured step. On a CPU, for tests, it runs without capture."""

    def __init__(self, step: DecodeStep, capture: Capturer) -> None:
        self._step = step  # owns the tensors in which the graph works
        self.buffers = step.buffers
        self.size = step.buffers.sizes.num_seqs, step.buffers.sizes.num_drafts
        self._is_cuda = self.buffers.active_B.is_cuda
        self._run = capture(step.run)
        shape = self.buffers.report_RX.shape
        self._reports = [
            torch.empty(shape, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(2)
        ]

    def launch(self, sequences: SequenceOf[Sequence]) -> Flight:
        self._run()
        report_RX = self._reports[0]
        self._reports.reverse()
        report_RX.copy_(self.buffers.report_RX, non_blocking=True)
        if not self._is_cuda:
            return Flight(sequences, report_RX, None)
        done = torch.cuda.Event()
        done.record()
        return Flight(sequences, report_RX, done)


class GraphRunner:
    """Launches decode steps and reads their results.

    Args:
        make_step: makes the step of (rows, K), greedy or not.
        max_num_seqs: most sequences of a step.
        vocab_size: size of the target's vocabulary.
        depth: K for a number of sequences that run together.
        capture: makes the graphs; no sequence is active meanwhile, so that no KV is written.
        features: takes the features of steps without drafts, where drafting may pause.

    Attributes:
        times: device times of the steps, by the rows of the graph.
    """

    def __init__(
        self,
        make_step: Callable[[tuple[int, int], bool], DecodeStep],
        max_num_seqs: int,
        vocab_size: int,
        depth: Callable[[int], int],
        capture: Capturer,
        features: FeatureRings | None = None,
    ) -> None:
        self._make_step = make_step
        self._sizes = graph_sizes(max_num_seqs, depth)
        self._buckets = buckets(max_num_seqs)
        self._vocab_size = vocab_size
        self._depth = depth
        self._capture = capture
        self._features = features
        self._graphs: dict[tuple[tuple[int, int], bool], _Graph] = {}
        self._sequences: list[Sequence] = []
        self._num_blocks: list[int] = []  # blocks of each sequence that the device knows
        self._graph: _Graph | None = None
        self._has_warned = False
        self.times: dict[int, StepTimes] = {}

    def capture_all(self) -> None:
        """Make all graphs now, the largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            for greedy in (True, False):
                self._graph_of(size, greedy)

    def can_run(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether a graph can do everything that these sequences ask for."""
        if len(sequences) > self._buckets[-1]:
            self._warn_of_size(len(sequences))
            return False
        keeps_features = self._features is not None and not self._depth(len(sequences))
        if not keeps_features and any(s.pending_features is not None for s in sequences):
            return False  # the drafter first reads the features that it has missed
        return all(map(_is_simple, sequences))

    def _warn_of_size(self, num_sequences: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_sequences} sequences decode together; the largest CUDA graph has "
                f"{self._buckets[-1]} rows. Such steps run without a graph; to avoid them, set "
                f"max_num_seqs to {self._buckets[-1]}.",
                stacklevel=2,
            )

    def is_tight(self, num_sequences: int) -> bool:
        """Return whether the running graph is the one for so many sequences."""
        assert self._graph is not None, "nothing was started"
        return self._size(num_sequences) == self._graph.size

    def _size(self, num_sequences: int) -> tuple[int, int]:
        rows = next(size for size in self._buckets if size >= num_sequences)
        return rows, self._depth(num_sequences)

    def start(self, sequences: SequenceOf[Sequence]) -> Flight:
        """Upload the sequences' state from the host and launch a step."""
        greedy = all(s.params.is_greedy for s in sequences)
        self._graph = self._graph_of(self._size(len(sequences)), greedy)
        if self._features is not None and not self._graph.size[1]:
            for sequence in sequences:
                if sequence.num_speculative_tokens and sequence.pending_features is None:
                    ring = self._features.open(sequence.seq_id, sequence.num_computed_tokens)
                    sequence.pending_features = ring
        self._sequences = list(sequences)
        self._num_blocks = [len(s.block_table) for s in sequences]
        self._graph.buffers.upload(sequences, self._vocab_size)
        return self._graph.launch(sequences)

    def go_on(self) -> Flight:
        """Launch the next step of the same sequences, whose blocks may have grown.

        Sequences that ended on the device do nothing in it.
        """
        assert self._graph is not None, "nothing was started"
        num_blocks = [len(s.block_table) for s in self._sequences]
        if any(map(gt, num_blocks, self._num_blocks)):
            self._num_blocks = num_blocks
            self._graph.buffers.upload_tables(self._sequences)
        return self._graph.launch(self._sequences)

    def read(self, flight: Flight) -> list[RowReport]:
        """Wait for a step and return its report, a row a sequence."""
        if flight.done is not None:
            flight.done.synchronize()
        *rows, times = flight.report_RX.tolist()
        if flight.done is not None:
            self.times.setdefault(len(rows), StepTimes()).add(times)
        num_drafts = flight.report_RX.shape[1] // 2 - 2
        return [read_report(row, num_drafts) for row in rows[: len(flight.sequences)]]

    def _graph_of(self, size: tuple[int, int], greedy: bool) -> _Graph:
        if (size, greedy) not in self._graphs:
            self._graphs[size, greedy] = _Graph(self._make_step(size, greedy), self._capture)
        return self._graphs[size, greedy]


def _is_simple(sequence: Sequence) -> bool:
    """Return whether the request asks for nothing that only the sampler can do."""
    params = sequence.params
    rules = (
        params.typical_p < 1,
        has_penalties(sequence),
        params.logit_bias,
        params.bad_words,
        params.allowed_token_ids is not None,
        params.logprobs is not None,
        sequence.grammar is not None,
        sequence.draft_probs_KV is not None,
        len(sequence.stop_token_ids) > MAX_STOP_IDS,
        # Until then the sampler forbids the stop ids.
        sequence.num_output_tokens < params.min_tokens,
    )
    return not any(rules)


class Pipeline:
    """Decides when a step may be launched before the last one is read.

    Args:
        runner: launches and reads steps.
        scheduler: the scheduler of the running sequences.
        take: called with each sequence and what a step did for it.
    """

    def __init__(
        self,
        runner: GraphRunner,
        scheduler: Scheduler,
        take: Callable[[Sequence, RowReport], None],
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._take = take
        self._flight: Flight | None = None
        self._version = -1

    def start(self, sequences: SequenceOf[Sequence]) -> None:
        """Launch a step of these sequences."""
        assert self._flight is None, "a step is in flight"
        self._flight = self.runner.start(list(sequences))
        # Sequences whose prompts still run join as soon as they can.
        alone = len(sequences) == len(self._scheduler.running)
        self._version = self._scheduler.version if alone else -1

    def go_on(self) -> bool:
        """Launch the next step, then take the results of the last; return false if that cannot be.

        It cannot where a sequence came, was stopped or changed, where K changes, or where blocks
        run out. The device knows the sequences that ended by themselves: the others go on, unless a
        waiting sequence can take the place or a smaller graph would do.
        """
        flight = self._flight
        if flight is None or self._version != self._scheduler.version:
            return False
        unfinished = [s for s in flight.sequences if not s.is_finished]
        if not self.runner.is_tight(len(unfinished)) or not self._scheduler.reserve(unfinished):
            return False
        self._flight = self.runner.go_on()
        self._read(flight)
        return True

    def drain(self) -> None:
        """Take the results of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: Flight) -> None:
        num_ended = num_left = 0
        for sequence, report in zip(flight.sequences, self.runner.read(flight), strict=True):
            if not sequence.is_finished:
                self._take(sequence, report)
                num_ended += sequence.is_finished
                num_left += not sequence.is_finished
        can_stay = num_left and not self._scheduler.waiting and self.runner.is_tight(num_left)
        if can_stay:
            self._version += num_ended  # each end counts as a change
