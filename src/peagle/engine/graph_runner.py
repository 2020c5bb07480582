"""Decode steps as CUDA graphs: one launch a step, results one step later.

Shapes: B rows of a graph, K drafts, M blocks a sequence, E stop ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from operator import gt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.attention import LayerKVCache
from peagle.engine.capture import Capturer
from peagle.engine.features import FeatureRings
from peagle.engine.pipeline import RowReport, read_report
from peagle.engine.sampling_rules import has_penalties
from peagle.engine.sequence import Sequence
from peagle.engine.stats import StepTimes
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

if TYPE_CHECKING:
    from peagle.engine.decode_step_triton import DecodeStep

MAX_STOP_IDS = 8
# Steps of more sequences are long enough for their kernels to be launched one by one.
MAX_GRAPH_ROWS = 256


def buckets(max_num_seqs: int) -> list[int]:
    """Numbers of rows for which there are graphs: powers of two, then steps of 8, then of 64."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS, 64)]
    return [*(size for size in sizes if size < most), most]


def graph_sizes(max_num_seqs: int, depth: Callable[[int], int]) -> list[tuple[int, int]]:
    """(rows, K) of the graphs, where n sequences draft `depth(n)` tokens each.

    Where some number of sequences does not draft, every number may: see `depth.DepthPolicy`.
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
class StepSizes:
    """What a step's buffers are made for.

    Attributes:
        num_seqs: B.
        num_drafts: K, 0 without a drafter.
        table_width: M.
        num_stop_ids: E.
        block_size: slots of a KV block.
        max_model_len, max_draft_len: as in `StepLimits`.
        synthetic_rates: acceptance set for measurements, see `SpeculativeConfig`.
    """

    num_seqs: int
    num_drafts: int
    table_width: int
    num_stop_ids: int
    block_size: int
    max_model_len: int
    max_draft_len: int
    synthetic_rates: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    Attributes:
        sequences: of its rows.
        report_RX: on the host once `done` has happened; None where nothing is awaited.
    """

    sequences: SequenceOf[Sequence]
    report_RX: Tensor
    done: torch.cuda.Event | None


def _has_gap(sequence: Sequence) -> bool:
    """Whether there are features that the drafter has not read, or must not read now.

    Who pauses drafting needs them kept; who never drafts does not.
    """
    is_paused = sequence.may_speculate and not sequence.num_speculative_tokens
    return is_paused or sequence.pending_features is not None


class _Graph:
    """One captured step: B rows, greedy or not. On a CPU, for tests, it runs as it is."""

    def __init__(self, step: DecodeStep, capture: Capturer) -> None:
        # The graph works in the step's own tensors: they live as long as it does.
        self._step = step
        self.buffers = step.buffers
        is_cuda = self.buffers.active_B.is_cuda
        self._run = capture(step.run)
        shape = self.buffers.report_RX.shape
        self._reports = [
            torch.empty(shape, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)
        ]

    @property
    def size(self) -> tuple[int, int]:
        """B and K."""
        return self.buffers.sizes.num_seqs, self.buffers.sizes.num_drafts

    def launch(self, sequences: SequenceOf[Sequence]) -> Flight:
        self._run()
        report_RX = self._reports[0]
        self._reports.reverse()
        report_RX.copy_(self.buffers.report_RX, non_blocking=True)
        if not self.buffers.active_B.is_cuda:
            return Flight(sequences, report_RX, None)
        done = torch.cuda.Event()
        done.record()
        return Flight(sequences, report_RX, done)


class GraphRunner:
    """Launches decode steps and reads their results.

    Args:
        target: the target, its KV caches set.
        drafter: the head; None decodes plainly.
        drafter_caches: its KV.
        sizes: of the largest graph.
        depth: K where so many sequences run together.
        capture: makes the graphs; while it does nobody is active, so that no KV is written.
        features: where steps without drafts keep features; None: there are none, or no head.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        drafter_caches: list[LayerKVCache],
        sizes: StepSizes,
        depth: Callable[[int], int],
        capture: Capturer,
        features: FeatureRings | None = None,
    ) -> None:
        self._features = features
        self._target, self._drafter, self._caches = target, drafter, drafter_caches
        self._sizes = sizes
        self._depth = depth
        self._buckets = buckets(sizes.num_seqs)
        self._graphs: dict[tuple[tuple[int, int], bool], _Graph] = {}
        self._capture = capture
        self._sequences: list[Sequence] = []
        self._num_blocks: list[int] = []  # of each, as the device knows them
        self._graph: _Graph | None = None
        self._has_warned = False
        self.times: dict[int, StepTimes] = {}  # by the rows of the graph

    def capture_all(self) -> None:
        """Make all graphs now, the largest first: the others then fit into its memory."""
        for size in reversed(graph_sizes(self._sizes.num_seqs, self._depth)):
            for greedy in (True, False):
                self._graph_of(size, greedy)

    def can_run(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the graphs do all that these sequences ask for."""
        if len(sequences) > self._buckets[-1]:
            self._warn_of_size(len(sequences))
            return False
        keeps = self._keeps(self._size(len(sequences)))
        return all(self._is_simple(s) and (keeps or not _has_gap(s)) for s in sequences)

    def _keeps(self, size: tuple[int, int]) -> bool:
        """Whether a step of that size keeps features for a head that does not draft now."""
        return self._features is not None and not size[1]

    def _warn_of_size(self, num_sequences: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_sequences} sequences decode together; the largest CUDA graph has "
                f"{self._buckets[-1]}. Such steps run without a graph; to avoid them, set "
                f"max_num_seqs to {self._buckets[-1]}.",
                stacklevel=2,
            )

    def is_tight(self, num_sequences: int) -> bool:
        """Whether the running graph is the one for so many sequences."""
        assert self._graph is not None, "nothing was started"
        return self._size(num_sequences) == self._graph.size

    def _size(self, num_sequences: int) -> tuple[int, int]:
        rows = next(size for size in self._buckets if size >= num_sequences)
        return rows, self._depth(num_sequences)

    def _is_simple(self, sequence: Sequence) -> bool:
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
            # Until then its stop ids are forbidden, which is the sampler's business.
            sequence.num_output_tokens < params.min_tokens,
        )
        return not any(rules)

    def start(self, sequences: SequenceOf[Sequence]) -> Flight:
        """Take over sequences from the host and launch a step."""
        greedy = all(s.params.is_greedy for s in sequences)
        self._graph = self._graph_of(self._size(len(sequences)), greedy)
        if self._features is not None and self._keeps(self._graph.size):
            for sequence in sequences:
                if sequence.may_speculate:
                    self._features.open(sequence, sequence.num_computed_tokens)
        self._sequences = list(sequences)
        self._num_blocks = [len(s.block_table) for s in sequences]
        self._graph.buffers.upload(sequences, self._target.vocab_size)
        return self._graph.launch(sequences)

    def go_on(self) -> Flight:
        """Launch the next step of the same sequences; their blocks may have grown.

        Those that ended by themselves do nothing in it.
        """
        assert self._graph is not None, "nothing was started"
        num_blocks = [len(s.block_table) for s in self._sequences]
        if any(map(gt, num_blocks, self._num_blocks)):
            self._num_blocks = num_blocks
            self._graph.buffers.upload_tables(self._sequences)
        return self._graph.launch(self._sequences)

    def read(self, flight: Flight) -> list[RowReport]:
        """What a step did, a row each; waits for it."""
        if flight.done is not None:
            flight.done.synchronize()
        *rows, times = flight.report_RX.tolist()
        if flight.done is not None:
            self.times.setdefault(len(rows), StepTimes()).add(times)
        num_drafts = flight.report_RX.shape[1] // 2 - 2
        return [read_report(row, num_drafts) for row in rows[: len(flight.sequences)]]

    def _graph_of(self, size: tuple[int, int], greedy: bool) -> _Graph:
        if (size, greedy) not in self._graphs:
            from peagle.engine.decode_step_triton import DecodeStep
            from peagle.engine.step_buffers_triton import StepBuffers

            sizes = replace(self._sizes, num_seqs=size[0], num_drafts=size[1])
            buffers = StepBuffers(sizes, self._target.device)
            keeps = self._features is not None and self._keeps(size)
            step = DecodeStep(
                self._target,
                self._drafter if size[1] else None,
                self._caches,
                buffers,
                greedy=greedy,
                kept_SCA=self._features.rows_SCA if self._features and keeps else None,
            )
            self._graphs[size, greedy] = _Graph(step, self._capture)
        return self._graphs[size, greedy]
