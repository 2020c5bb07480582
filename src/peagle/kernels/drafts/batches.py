"""The batches of a decode step: the target's, and the drafter's that follows from it.

Shapes: B sequences, K most drafts, R packed rows of a pass (T of the target, S slots of the
drafter), M blocks a sequence. In a bucket the last rows may be padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

PADDING_SLOT = -1
NO_SEQUENCE = -1


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Inputs of one pass of a model, packed by sequence; rows beyond the last one are padding.

    Attributes:
        tokens_R: token ids.
        positions_R: position ids.
        slots_R: KV slots; -1 writes nothing.
        query_start_loc: [B+1], first row of each sequence; its last entry counts the real rows.
        seq_lens_B: context of each sequence, this pass included; 0 where inactive.
    """

    tokens_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    query_start_loc: Tensor
    seq_lens_B: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which a batch is made of them."""
        return [getattr(self, one.name) for one in fields(self)]


@dataclass(frozen=True, slots=True)
class TargetBatch(PackedBatch):
    """Inputs of one target pass; padding holds token 0 at position 0.

    Attributes:
        sequences_R: the sequence of a row; -1 for padding.
    """

    sequences_R: Tensor

    @classmethod
    def allocate(cls, num_seqs: int, num_rows: int, device: torch.device | str) -> Self:
        """Allocate buffers for B sequences and R rows."""
        sizes = (num_rows, num_rows, num_rows, num_seqs + 1, num_seqs, num_rows)
        return cls(*_ints(device, *sizes))


@dataclass(frozen=True, slots=True)
class DraftBatch(PackedBatch):
    """Inputs of the drafter's first pass, which follows a target pass of T rows.

    Mask slots and padding hold the mask token; padding stands at position 0.

    Attributes:
        feature_rows_R: row of the target batch whose feature belongs to the slot; T for mask slots
            and padding.
        last_ntp_B: row that predicts the first draft token; 0 where inactive.
        draft_rows_BK: row whose hidden state gives draft j; past its own drafts a sequence repeats
            its last row.
    """

    feature_rows_R: Tensor
    last_ntp_B: Tensor
    draft_rows_BK: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, num_slots: int, max_drafts: int, device: torch.device | str
    ) -> Self:
        """Allocate buffers for B sequences, R drafter slots and K drafts."""
        sizes = (num_slots, num_slots, num_slots, num_seqs + 1, num_seqs, num_slots, num_seqs)
        return cls(*_ints(device, *sizes, (num_seqs, max_drafts)))


def _ints(device: torch.device | str, *shapes: int | tuple[int, int]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes]


def count_draft_slots(num_seqs: int, num_rows: int, max_accepted: int, num_masks: int) -> int:
    """Return the slots of a captured draft batch, which every step fills or pads.

    They hold every slot of a step in which no sequence accepts more drafts than the head makes.
    Copies of the text may be longer: then the accepted rows fit in any case, and mask slots as far
    as there is room (`fit_mask_slots`).

    Args:
        num_rows: rows of the target's batch, each of which is read once at most.
        max_accepted: most drafts that a step accepts of a sequence.
        num_masks: mask slots of a sequence.
    """
    num_read = min(num_seqs * (max_accepted + 1), num_rows)
    usual = num_seqs * (2 * num_masks + 2)
    return min(num_read + num_seqs * num_masks, max(usual, num_read + num_masks))


def fit_mask_slots(num_accepted_B: Tensor, num_mask_slots_B: Tensor, num_slots: int) -> Tensor:
    """Return the mask slots that a draft batch of `num_slots` has room for, [B].

    Behind the accepted rows of all sequences the first sequences have all of theirs.
    """
    left = num_slots - (num_accepted_B + 1).sum()
    before_B = num_mask_slots_B.cumsum(0) - num_mask_slots_B
    return torch.minimum((left - before_B).clamp_min(0), num_mask_slots_B)


def slot_mapping(
    block_tables_BM: Tensor, sequences_S: Tensor, positions_S: Tensor, block_size: int, limit: int
) -> Tensor:
    """Return the KV slots: block_tables[b, p // block_size] * block_size + p % block_size.

    Positions at or above `limit` map to -1, the padding slot.
    """
    inside_S = positions_S < limit
    safe_S = torch.where(inside_S, positions_S, 0)
    blocks_S = block_tables_BM[sequences_S, safe_S // block_size]
    return torch.where(inside_S, blocks_S * block_size + safe_S % block_size, PADDING_SLOT)


def pack_rows(
    rows: Sequence[Sequence[int]],
    first: Sequence[int],
    block_tables_BM: Tensor,
    *,
    block_size: int,
    max_model_len: int,
) -> TargetBatch:
    """Make the target's batch of some rows on the host, where numpy takes a fifth of torch's time.

    Args:
        rows: the tokens of each sequence.
        first: the position of each sequence's first row.
        block_tables_BM: KV blocks of each sequence, on the host.
        block_size: slots of a block.
        max_model_len: positions from here on write no KV.
    """
    lens_B, first_B = np.array([len(row) for row in rows]), np.array(first)
    start_loc, sequences_T, offset_T = _spread(lens_B)
    positions_T = first_B[sequences_T] + offset_T
    slots_T = _host_slots(block_tables_BM, sequences_T, positions_T, block_size, max_model_len)
    tokens_T = np.fromiter(chain.from_iterable(rows), np.int64, len(sequences_T))
    arrays = tokens_T, positions_T, slots_T, start_loc, first_B + lens_B, sequences_T
    return TargetBatch(*map(torch.from_numpy, arrays))


def _spread(lens_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first row of each sequence and the number of all rows, [B + 1]; of each row the
    sequence, and the rows of that one before it.
    """
    start_loc = np.zeros(len(lens_B) + 1, dtype=np.int64)
    np.cumsum(lens_B, out=start_loc[1:])
    sequences_R = np.repeat(np.arange(len(lens_B)), lens_B)
    return start_loc, sequences_R, np.arange(len(sequences_R)) - start_loc[sequences_R]


def _host_slots(
    block_tables_BM: Tensor,
    sequences_S: np.ndarray,
    positions_S: np.ndarray,
    block_size: int,
    limit: int,
) -> np.ndarray:
    """`slot_mapping` on the host."""
    inside_S = positions_S < limit
    safe_S = np.where(inside_S, positions_S, 0)
    blocks_S = block_tables_BM.numpy()[sequences_S, safe_S // block_size]
    return np.where(inside_S, blocks_S * block_size + safe_S % block_size, PADDING_SLOT)


def expand_draft_batch(
    target_tokens_T: Tensor,
    target_positions_T: Tensor,
    target_start_loc: Tensor,
    num_accepted_B: Tensor,
    next_tokens_B: Tensor,
    block_tables_BM: Tensor,
    *,
    block_size: int,
    num_mask_slots_B: Tensor,
    max_drafts: int,
    mask_token_id: int,
    max_model_len: int,
) -> DraftBatch:
    """Build the drafter's batch after verification (reference/peagle.md, "Drafter inputs").

    Sequence b brings a_b + 1 NTP slots, then `num_mask_slots_B[b]` MTP slots. NTP slot j pairs the
    feature of target row j with the token after it: target token j + 1, or for the last one the
    token that verification emitted. Positions are not shifted. A prompt is the case where every
    token after the first counts as accepted. All tensors are on the host.

    Args:
        target_tokens_T, target_positions_T: the batch that the target ran.
        target_start_loc: [B+1] first target row of each sequence.
        num_accepted_B: a, accepted tokens after the first row.
        next_tokens_B: the token emitted after the accepted ones.
        block_tables_BM: KV blocks of each sequence.
        block_size: slots of a block.
        num_mask_slots_B: k_b - 1 for parallel drafting; 0 for autoregressive, and where nothing is
            drafted.
        max_drafts: K, columns of `draft_rows_BK`.
        mask_token_id: token of the mask slots.
        max_model_len: positions from here on write no KV.
    """
    tokens_T, positions_T, accepted_B = (
        x.numpy() for x in (target_tokens_T, target_positions_T, num_accepted_B)
    )
    masks_B, first_row_B = num_mask_slots_B.numpy(), target_start_loc.numpy()[:-1]
    num_target_rows, lens_B = len(tokens_T), accepted_B + 1 + masks_B
    start_loc, sequences_S, offset_S = _spread(lens_B)
    is_ntp_S = offset_S <= accepted_B[sequences_S]
    row_S = np.where(is_ntp_S, first_row_B[sequences_S] + offset_S, num_target_rows)
    last_ntp_B = start_loc[:-1] + accepted_B
    tokens_S = tokens_T[np.minimum(row_S + 1, num_target_rows - 1)]
    tokens_S[last_ntp_B] = next_tokens_B.numpy()
    tokens_S[~is_ntp_S] = mask_token_id
    first_B = positions_T[first_row_B]
    positions_S = first_B[sequences_S] + offset_S
    slots_S = _host_slots(block_tables_BM, sequences_S, positions_S, block_size, max_model_len)
    draft_rows_BK = last_ntp_B[:, None] + np.minimum(np.arange(max_drafts), masks_B[:, None])
    arrays = tokens_S, positions_S, slots_S, start_loc, first_B + lens_B, row_S, last_ntp_B
    return DraftBatch(*map(torch.from_numpy, (*arrays, draft_rows_BK)))


def build_target_batch(
    last_tokens_B: Tensor,
    drafts_BK: Tensor,
    num_draft_tokens_B: Tensor,
    first_positions_B: Tensor,
    block_tables_BM: Tensor,
    active_B: Tensor,
    *,
    num_rows: int,
    block_size: int,
    max_model_len: int,
) -> TargetBatch:
    """Make rows [newest token | drafts] of every active sequence, then padding to `num_rows`.

    Args:
        last_tokens_B: newest token of each sequence.
        drafts_BK: its drafts; columns at or above `num_draft_tokens_B` are ignored.
        first_positions_B: position of the newest token.
        block_tables_BM: KV blocks of each sequence.
        active_B: bool; an inactive sequence has no rows.
        num_rows: T, at least the sum of (drafts + 1) over the active sequences.
        block_size: slots of a block.
        max_model_len: positions from here on write no KV.
    """
    device = last_tokens_B.device
    lens_B = torch.where(active_B, num_draft_tokens_B + 1, 0)
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
        tokens_R=torch.where(real_T, tokens_BJ[of_T, offset_T], 0),
        positions_R=positions_T,
        slots_R=torch.where(real_T, slots_T, PADDING_SLOT),
        sequences_R=torch.where(real_T, sequences_T, NO_SEQUENCE),
        query_start_loc=start_loc,
        seq_lens_B=torch.where(active_B, first_positions_B + lens_B, 0),
    )
