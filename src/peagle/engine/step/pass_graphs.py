"""Passes over prompts as CUDA graphs, and passes of steps that decode graphs cannot run.

The GPU computes a few hundred tokens in less time than the host needs to launch the kernels one by
one.

Shapes: B sequences, R rows of a pass, M blocks of a sequence, D drafter width.
"""

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.attention import Passes
from peagle.engine.step.capture import Capturer
from peagle.kernels.drafts.batches import PADDING_SLOT, PackedBatch, TargetBatch

# Tokens of the passes that have graphs.
TOKEN_BUCKETS = (32, 128, 256, 512, 1024, 2048)
# Larger passes run as graphs if launching their kernels takes longer than running them, or if they
# have no more than this share of padding.
ALWAYS_GRAPHED_ROWS = 512
MAX_PADDING_SHARE = 0.1
MAX_SEQUENCES = 32


class PassGraphs:
    """Runs passes over inputs that it copies into fixed buffers, with a graph a number of rows.

    The next graph that runs, of this or of a decode step, overwrites the outputs.

    Args:
        passes: the model, with an attention backend that reads nothing on the host.
        capture: makes the graphs; capturing writes no KV.
        table_width: blocks of the longest sequence.
        hidden_1D: a tensor with the type and width of the hidden states that the model reads; None
            for a model that reads none.
        token_buckets: tokens of the passes that have graphs.
        max_sequences: most sequences of a pass that runs as a graph.
        always_pays: whether a graph runs every pass that fits, whatever its padding.
        has_trees: whether passes have a mask of visible rows (`TreeMask`); all or none have.
        has_starts: whether passes may have starts of contexts.
    """

    def __init__(
        self,
        passes: Passes,
        capture: Capturer,
        table_width: int,
        block_size: int,
        device: torch.device,
        hidden_1D: Tensor | None = None,
        *,
        token_buckets: Sequence[int] = TOKEN_BUCKETS,
        max_sequences: int = MAX_SEQUENCES,
        always_pays: bool = False,
        has_trees: bool = False,
        has_starts: bool = False,
    ) -> None:
        launched = Passes(passes.run, passes.backend)
        # All passes share these, because only one of them runs at a time.
        tables_BM = torch.zeros(max_sequences, table_width, dtype=torch.int64, device=device)
        hidden_RD = None
        if hidden_1D is not None:
            hidden_RD = hidden_1D.new_zeros(max(token_buckets), hidden_1D.shape[1])
        starts_B = torch.zeros_like(tables_BM[:, 0]) if has_starts else None
        self._max_sequences, self._has_trees = max_sequences, has_trees
        self._has_starts = has_starts
        shared = tables_BM, starts_B, block_size, hidden_RD, has_trees
        self._passes = [
            _Pass(launched, capture, num_rows, *shared) for num_rows in reversed(token_buckets)
        ][::-1]
        if not always_pays:
            for one in self._passes:
                one.find_least_rows()

    def most_rows(self, most: int) -> int | None:
        """Return the rows of the largest graph, if several passes of that size are faster than one
        of `most` rows, which has no graph; else None.
        """
        largest = self._passes[-1]
        return largest.num_rows if largest.launch_ratio * largest.num_rows > most else None

    def __call__(
        self,
        batch: PackedBatch,
        block_tables_BM: Tensor,
        hidden_RD: Tensor | None,
        visible_R: Tensor | None = None,
        starts_B: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Return the model's outputs; None if no graph fits the pass, or none pays."""
        num_rows, has_trees = batch.tokens_R.shape[0], visible_R is not None
        if batch.seq_lens_B.shape[0] > self._max_sequences or has_trees != self._has_trees:
            return None
        if starts_B is not None and not self._has_starts:
            return None
        for fitting in self._passes:
            if fitting.num_rows >= num_rows:
                pays = num_rows >= fitting.least_rows
                inputs = batch, block_tables_BM, hidden_RD, visible_R, starts_B
                return fitting(*inputs) if pays else None
        return None


class _Pass:
    """The graph of one number of rows; the last ones may be padding.

    Attributes:
        least_rows: rows from which on the graph is faster than its kernels one by one.
        launch_ratio: time in which the host launches the kernels, over the time of the graph.
    """

    def __init__(
        self,
        passes: Passes,
        capture: Capturer,
        num_rows: int,
        tables_BM: Tensor,
        starts_B: Tensor | None,
        block_size: int,
        hidden_RD: Tensor | None,
        has_trees: bool,
    ) -> None:
        self.num_rows = num_rows
        self.least_rows, self.launch_ratio = 0, math.inf
        self._passes = passes
        self._batch = TargetBatch.allocate(len(tables_BM), num_rows, tables_BM.device)
        self._batch.slots_R.fill_(PADDING_SLOT)
        self._tables_BM, self._starts_B = tables_BM, starts_B
        self._max_seq_len = tables_BM.shape[1] * block_size
        self._hidden_RD = None if hidden_RD is None else hidden_RD[:num_rows]
        self._visible_R = torch.zeros_like(self._batch.tokens_R) if has_trees else None
        self._outputs: tuple[Tensor, ...] = ()
        self._replay = capture(self._set_outputs)

    def find_least_rows(self) -> None:
        """Measure the number of rows from which on the graph pays."""
        if self.num_rows <= ALWAYS_GRAPHED_ROWS or not self._tables_BM.is_cuda:
            return
        self.launch_ratio = self._measure_launches()
        if self.launch_ratio <= 1:
            self.least_rows = int((1 - MAX_PADDING_SHARE) * self.num_rows)

    def _measure_launches(self) -> float:
        seconds: list[float] = []
        for run, waits in ((self._run, False), (self._replay, True)):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            run()
            if waits:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
        return seconds[0] / seconds[1]

    def _set_outputs(self) -> None:
        self._outputs = self._run()

    @torch.inference_mode()
    def _run(self) -> tuple[Tensor, ...]:
        return self._passes(
            self._batch,
            self._tables_BM,
            self._hidden_RD,
            max_query_len=self.num_rows,
            max_seq_len=self._max_seq_len,
            context_starts_B=self._starts_B,
            visible_R=self._visible_R,
        )

    @torch.inference_mode()
    def __call__(
        self,
        batch: PackedBatch,
        block_tables_BM: Tensor,
        hidden_RD: Tensor | None,
        visible_R: Tensor | None,
        starts_B: Tensor | None,
    ) -> tuple[Tensor, ...]:
        from peagle.kernels.drafts.batches_triton import pad_batch

        buffers = self._batch, self._tables_BM, self._starts_B, self._visible_R
        pad_batch(batch, block_tables_BM, starts_B, visible_R, *buffers)
        count = len(batch.tokens_R)
        if self._hidden_RD is not None and hidden_RD is not None:
            self._hidden_RD[:count].copy_(hidden_RD)
        self._replay()
        return tuple(output[:count] for output in self._outputs)
