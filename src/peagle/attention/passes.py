"""Passes of a model over packed batches: one pass, described to attention once.

Shapes: B sequences, R packed rows, M blocks of a sequence, D width of hidden states.
"""

from collections.abc import Callable

from torch import Tensor

from peagle.attention.base import AttentionBackend, AttentionMetadata, PreparedPaged, TreeMask
from peagle.kernels.drafts.batches import PackedBatch

# run(tokens [R], positions [R], attend, hidden [R, D] or None) -> outputs, R rows each
Run = Callable[[Tensor, Tensor, PreparedPaged, Tensor | None], tuple[Tensor, ...]]
# graphs(batch, block tables [B, M], hidden, visible [R], context starts [B]) -> outputs; None where
# no graph fits
Graphs = Callable[
    [PackedBatch, Tensor, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, ...] | None
]


class Passes:
    """Runs a model over batches.

    Args:
        run: the model.

    Attributes:
        graphs: runs passes over few rows as graphs; None launches every kernel by itself.
    """

    def __init__(self, run: Run, backend: AttentionBackend) -> None:
        self.run = run
        self.backend = backend
        self.graphs: Graphs | None = None

    def __call__(
        self,
        batch: PackedBatch,
        block_tables_BM: Tensor,
        hidden_RD: Tensor | None = None,
        *,
        max_query_len: int,
        max_seq_len: int,
        context_starts_B: Tensor | None = None,
        visible_R: Tensor | None = None,
        rows_before: int = 0,
    ) -> tuple[Tensor, ...]:
        """Return the model's outputs for a batch.

        Args:
            batch: the rows, and where they stand.
            block_tables_BM: KV blocks of each sequence, int64.
            hidden_RD: hidden states that the model reads; None for a model that reads none.
            max_query_len, max_seq_len: bounds of the rows and of the context of a sequence.
            context_starts_B: first visible position of each context; None shows all.
            visible_R: which rows of its sequence a row sees (`TreeMask`); None: all before it.
            rows_before: rows of each tree that earlier passes have written.
        """
        if self.graphs is not None and not rows_before:
            done = self.graphs(batch, block_tables_BM, hidden_RD, visible_R, context_starts_B)
            if done is not None:
                return done
        metadata = AttentionMetadata(
            batch.query_start_loc,
            batch.seq_lens_B,
            block_tables_BM,
            batch.slots_R,
            max_query_len,
            max_seq_len,
            context_starts_B,
            None if visible_R is None else TreeMask(visible_R, batch.positions_R, rows_before),
        )
        attend = self.backend.prepare(metadata)
        return self.run(batch.tokens_R, batch.positions_R, attend, hidden_RD)
