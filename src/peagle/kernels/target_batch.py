"""The target's batch of a decode step from what the device knows of each sequence.

Shapes: B sequences, K most drafts, T packed target rows (a bucket: the last ones may be padding),
M blocks a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.expand import PADDING_SLOT, slot_mapping

NO_SEQUENCE = -1


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """Inputs of one target pass, packed by sequence; rows beyond the last sequence are padding.

    Attributes:
        tokens_T: token ids; padding holds 0.
        positions_T: position ids; padding holds 0.
        slots_T: KV slots; -1 writes nothing.
        sequences_T: the sequence of a row; -1 for padding.
        query_start_loc: [B+1], first row of each sequence; its last entry counts the real rows.
        seq_lens_B: target context of each sequence, this pass included; 0 where inactive.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sequences_T: Tensor
    query_start_loc: Tensor
    seq_lens_B: Tensor

    @classmethod
    def allocate(cls, num_seqs: int, num_rows: int, device: torch.device | str) -> TargetBatch:
        """Buffers for B sequences and T rows."""

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        return cls(
            ints(num_rows),
            ints(num_rows),
            ints(num_rows),
            ints(num_rows),
            ints(num_seqs + 1),
            ints(num_seqs),
        )


def build_target_batch(
    last_tokens_B: Tensor,
    drafts_BK: Tensor,
    num_drafts_B: Tensor,
    first_positions_B: Tensor,
    block_tables_BM: Tensor,
    active_B: Tensor,
    *,
    num_rows: int,
    block_size: int,
    max_model_len: int,
) -> TargetBatch:
    """Rows [newest token | drafts] of every active sequence, then padding up to `num_rows`.

    Args:
        last_tokens_B: newest token of each sequence.
        drafts_BK: its drafts; columns at or above `num_drafts_B` are ignored.
        first_positions_B: position of the newest token.
        block_tables_BM: KV blocks of each sequence.
        active_B: bool; an inactive sequence has no rows.
        num_rows: T, at least the sum of (drafts + 1) over the active sequences.
        block_size: slots of a block.
        max_model_len: positions from here on write no KV.
    """
    device = last_tokens_B.device
    lens_B = torch.where(active_B, num_drafts_B + 1, 0)
    start_loc = torch.nn.functional.pad(lens_B.cumsum(0), (1, 0))
    rows_T = torch.arange(num_rows, device=device)
    sequences_T = torch.searchsorted(start_loc[1:].contiguous(), rows_T, right=True)
    real_T = rows_T < start_loc[-1]
    of_T = sequences_T.clamp_max(len(lens_B) - 1)
    offset_T = torch.where(real_T, rows_T - start_loc[of_T], 0)
    tokens_BJ = torch.cat((last_tokens_B.unsqueeze(1), drafts_BK), dim=1)
    positions_T = torch.where(real_T, first_positions_B[of_T] + offset_T, 0)
    slots_T = slot_mapping(block_tables_BM, of_T, positions_T, block_size, max_model_len)
    return TargetBatch(
        tokens_T=torch.where(real_T, tokens_BJ[of_T, offset_T], 0),
        positions_T=positions_T,
        slots_T=torch.where(real_T, slots_T, PADDING_SLOT),
        sequences_T=torch.where(real_T, sequences_T, NO_SEQUENCE),
        query_start_loc=start_loc,
        seq_lens_B=torch.where(active_B, first_positions_B + lens_B, 0),
    )
