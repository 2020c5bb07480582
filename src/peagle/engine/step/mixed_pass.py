"""Prompts in the target's pass of a decode step, so that the weights are read once for both.

Shapes: B rows of the step, T of its batch; b prompts of R rows; M blocks of the longest sequence, m
of the longest of these prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.attention import ALL_BEFORE, Passes
from peagle.attention.triton_backend import TritonAttention
from peagle.kernels.drafts.batches import PackedBatch

if TYPE_CHECKING:
    from peagle.engine.step.decode_step import DecodeStep


class MixedPass:
    """Runs the target over the batch of a step, and behind it over prompts.

    A sequence whose prompt ends here is in both: its last token decodes, and sees the keys that
    this pass writes.

    Args:
        target_passes: passes of the target.
        has_trees: whether drafts are candidate trees.

    Attributes:
        passes: passes of the target that write all keys and values before any row attends.
    """

    def __init__(self, target_passes: Passes, *, has_trees: bool) -> None:
        self._has_trees = has_trees
        self.passes = Passes(target_passes.run, TritonAttention(one_launch=False))

    @torch.inference_mode()
    def __call__(
        self,
        step: DecodeStep,
        batch: PackedBatch,
        block_tables_BM: Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        visible_R: None = None,
    ) -> tuple[Tensor, ...]:
        """Set the outputs of the step's rows; return the outputs of the prompts, R rows each.

        Args:
            step: the step, whose rows come first.
            batch: the prompts.
            block_tables_BM: KV blocks of the prompts, [b, m].
            max_query_len, max_seq_len: lengths of the prompts, as in `Passes`.
            visible_R: always None: prompts have no trees, and the step has its own mask.
        """
        step.build_batch()
        own, tables_BM = step.batch, step.rows.block_tables_BM
        num_rows, width = len(own.tokens_R), tables_BM.shape[1]
        # The padding behind the step's rows is a sequence without a context: it sees nothing.
        tables_bM = F.pad(block_tables_BM, (0, width - block_tables_BM.shape[1], 1, 0))
        both = PackedBatch(
            tokens_R=torch.cat([own.tokens_R, batch.tokens_R]),
            positions_R=torch.cat([own.positions_R, batch.positions_R]),
            slots_R=torch.cat([own.slots_R, batch.slots_R]),
            query_start_loc=torch.cat([own.query_start_loc, num_rows + batch.query_start_loc]),
            seq_lens_B=torch.cat([own.seq_lens_B, F.pad(batch.seq_lens_B, (1, 0))]),
        )
        seen_R = None
        if self._has_trees:
            seen_R = torch.full_like(both.tokens_R, ALL_BEFORE)
            if step.trees is not None:
                seen_R[:num_rows] = step.trees.visible_T
        outputs = self.passes(
            both,
            torch.cat([tables_BM, tables_bM]),
            max_query_len=max(max_query_len, num_rows),
            max_seq_len=max(max_seq_len, step.buffers.sizes.max_model_len),
            visible_R=seen_R,
        )
        step.set_outputs([output[:num_rows] for output in outputs])
        return tuple(output[num_rows:] for output in outputs)
