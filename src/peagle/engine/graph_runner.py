"""Decode steps as CUDA graphs: one launch a step, results one step later.

Shapes: B rows of a graph, K drafts, M blocks a sequence, E stop ids.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.attention import LayerKVCache
from peagle.engine.model_runner import block_tables
from peagle.engine.pipeline import RowReport, read_report
from peagle.engine.sampling_rules import has_penalties
from peagle.engine.sequence import Sequence
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

if TYPE_CHECKING:
    from peagle.engine.decode_step_triton import DecodeStep, StepBuffers

MAX_STOP_IDS = 8
_WARM_UPS = 2


def buckets(max_num_seqs: int) -> list[int]:
    """Numbers of rows for which there are graphs: powers of two, then steps of 16."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    sizes += range(16, max_num_seqs, 16)
    return [*sizes, max_num_seqs]


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
    """

    num_seqs: int
    num_drafts: int
    table_width: int
    num_stop_ids: int
    block_size: int
    max_model_len: int
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    Attributes:
        sequences: of its rows.
        report_BX: on the host once `done` has happened; None where nothing is awaited.
    """

    sequences: SequenceOf[Sequence]
    report_BX: Tensor
    done: torch.cuda.Event | None


class _Graph:
    """One captured step: B rows, greedy or not. On a CPU, for tests, it runs as it is."""

    def __init__(self, step: DecodeStep) -> None:
        self.buffers = step.buffers
        self._run = step.run if self.buffers.active_B.device.type == "cpu" else _captured(step)
        pinned, shape = self.buffers.active_B.is_cuda, self.buffers.report_BX.shape
        self._reports = [torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._next = 0

    def launch(self, sequences: SequenceOf[Sequence]) -> Flight:
        self._run()
        report_BX = self._reports[self._next]
        self._next = 1 - self._next
        report_BX.copy_(self.buffers.report_BX, non_blocking=True)
        if not self.buffers.active_B.is_cuda:
            return Flight(sequences, report_BX, None)
        done = torch.cuda.Event()
        done.record()
        return Flight(sequences, report_BX, done)


def _captured(step: DecodeStep) -> Callable[[], None]:
    """The step as a graph. Nobody is active while it is captured: no KV is written."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph.replay


class GraphRunner:
    """Launches decode steps and reads their results.

    Args:
        target: the target, its KV caches set.
        drafter: the head; None decodes plainly.
        drafter_caches: its KV.
        sizes: of the largest graph.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        drafter_caches: list[LayerKVCache],
        sizes: StepSizes,
    ) -> None:
        self._target, self._drafter, self._caches = target, drafter, drafter_caches
        self._sizes = sizes
        self._buckets = buckets(sizes.num_seqs)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._rows: list[tuple[Sequence, int]] = []  # and how many blocks the device knows
        self._graph: _Graph | None = None

    def can_run(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the graphs do all that these sequences ask for."""
        return len(sequences) <= self._sizes.num_seqs and all(map(self._is_simple, sequences))

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
            # Who pauses drafting needs the features kept; who never drafts does not.
            sequence.may_speculate and not sequence.num_speculative_tokens,
            sequence.pending_features is not None,
        )
        return not any(rules)

    def start(self, sequences: SequenceOf[Sequence]) -> Flight:
        """Take over sequences from the host and launch a step."""
        greedy = all(s.params.is_greedy for s in sequences)
        size = next(size for size in self._buckets if size >= len(sequences))
        self._graph = self._graphs.get((size, greedy)) or self._capture(size, greedy)
        self._rows = [(s, len(s.block_table)) for s in sequences]
        self._upload(self._graph.buffers, sequences)
        return self._graph.launch(sequences)

    def go_on(self) -> Flight:
        """Launch the next step of the same sequences; their blocks may have grown."""
        assert self._graph is not None, "nothing was started"
        sequences = [sequence for sequence, _ in self._rows]
        if any(len(s.block_table) != known for s, known in self._rows):
            self._rows = [(s, len(s.block_table)) for s in sequences]
            self._copy(self._graph.buffers.block_tables_BM, self._tables(sequences))
        return self._graph.launch(sequences)

    def read(self, flight: Flight) -> list[RowReport]:
        """What a step did, a row each; waits for it."""
        if flight.done is not None:
            flight.done.synchronize()
        rows = flight.report_BX[: len(flight.sequences)].tolist()
        num_drafts = max(self._sizes.num_drafts, 1)
        return [read_report(row, num_drafts) for row in rows]

    def _capture(self, size: int, greedy: bool) -> _Graph:
        from peagle.engine.decode_step_triton import DecodeStep, StepBuffers

        sizes = replace(self._sizes, num_seqs=size)
        buffers = StepBuffers(sizes, self._target.device)
        step = DecodeStep(self._target, self._drafter, self._caches, buffers, greedy=greedy)
        graph = self._graphs[size, greedy] = _Graph(step)
        return graph

    def _upload(self, buffers: StepBuffers, sequences: SequenceOf[Sequence]) -> None:
        """Write what the host knows of the sequences over what the device knew."""
        state, limits, sampling = buffers.state, buffers.limits, buffers.sampling
        params = [s.params for s in sequences]
        most, num_stop = buffers.drafts_BK.shape[1], self._sizes.num_stop_ids
        columns: list[tuple[Tensor, list[int]]] = [
            (state.last_tokens_B, [s.token_ids[-1] for s in sequences]),
            (state.first_positions_B, [len(s) - 1 for s in sequences]),
            (state.num_outputs_B, [s.num_output_tokens for s in sequences]),
            (state.num_drafts_B, [len(s.drafts) for s in sequences]),
            (state.finish_B, [0] * len(sequences)),
            (limits.min_tokens_B, [p.min_tokens for p in params]),
            (limits.max_tokens_B, [p.max_tokens for p in params]),
            (limits.num_speculative_B, [s.num_speculative_tokens for s in sequences]),
            (sampling.top_k_B, [min(p.top_k, self._target.vocab_size) for p in params]),
            (sampling.seeds_B, [s.seed for s in sequences]),
            (buffers.context_starts_B, [s.drafter_start for s in sequences]),
        ]
        for buffer_B, values in columns:
            self._copy(buffer_B, torch.tensor(values))
        floats = (
            (sampling.temperature_B, [p.temperature for p in params]),
            (sampling.top_p_B, [p.top_p for p in params]),
            (sampling.min_p_B, [p.min_p for p in params]),
        )
        for buffer_B, values in floats:
            assert buffer_B is not None
            self._copy(buffer_B, torch.tensor(values))
        drafts = [s.drafts + [0] * (most - len(s.drafts)) for s in sequences]
        self._copy(buffers.drafts_BK, torch.tensor(drafts))
        stop = [sorted(s.stop_token_ids) for s in sequences]
        padded = [ids + [-1] * (num_stop - len(ids)) for ids in stop]
        self._copy(limits.stop_ids_BE, torch.tensor(padded))
        self._copy(buffers.block_tables_BM, self._tables(sequences))
        active = torch.arange(buffers.active_B.shape[0]) < len(sequences)
        buffers.active_B.copy_(active)

    def _tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        return block_tables(sequences, torch.device("cpu"), self._sizes.table_width)

    @staticmethod
    def _copy(buffer: Tensor, values: Tensor) -> None:
        """Into the first rows of a buffer."""
        buffer[: values.shape[0]].copy_(values.to(buffer.dtype))
