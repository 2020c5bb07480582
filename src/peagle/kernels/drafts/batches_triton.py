"""The batches of a captured decode step, each in one launch.

The reference is `kernels.drafts.batches`. One program a sequence; each adds up the
lengths of those before it, which for at most 1,024 sequences is one load. All sizes that vary are
read on the device.

Shapes: as in the references; S drafter slots (a bucket), D drafter width, K most drafts.
"""

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.batches import DraftBatch, PackedBatch, TargetBatch
from peagle.kernels.launch import launch

MAX_SEQUENCES = 1024
_PADDED = 512  # numbers of each tensor that one program of `pad_batch` copies


@triton.jit
def kv_slots(table_ptr, positions, inside, table_width, limit, BLOCK_SIZE: tl.constexpr):
    """Return the slots of positions of one sequence; -1 beyond the limit or the table."""
    block = positions // BLOCK_SIZE
    inside = inside & (positions < limit) & (block < table_width)
    blocks = tl.load(table_ptr + block, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)


@triton.jit
def _target_batch_kernel(
    last_tokens_ptr,
    drafts_ptr,
    num_draft_tokens_ptr,
    first_positions_ptr,
    tables_ptr,
    active_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    sequences_ptr,
    start_loc_ptr,
    seq_lens_ptr,
    num_seqs,
    num_rows,
    max_drafts,
    table_width,
    limit,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
):
    b = tl.program_id(0)
    # Find the rows of this sequence from the lengths of all.
    i = tl.arange(0, SEQS)
    known = i < num_seqs
    active = tl.load(active_ptr + i, mask=known, other=0) != 0
    drafts = tl.load(num_draft_tokens_ptr + i, mask=known, other=0).to(tl.int64)
    lens = tl.where(active & known, drafts + 1, 0)
    start = tl.sum(tl.where(i < b, lens, 0))
    length = tl.sum(tl.where(i == b, lens, 0))
    total = tl.sum(lens)

    # Store its rows: the newest token and the drafts.
    first = tl.load(first_positions_ptr + b).to(tl.int64)
    o = tl.arange(0, ROWS)
    inside = (o < length) & (start + o < num_rows)
    newest = tl.load(last_tokens_ptr + b).to(tl.int64)
    drafted = tl.load(drafts_ptr + b * max_drafts + o - 1, mask=inside & (o > 0), other=0)
    tokens = tl.where(o == 0, newest, drafted.to(tl.int64))
    table = tables_ptr + b.to(tl.int64) * table_width
    slots = kv_slots(table, first + o, inside, table_width, limit, BLOCK_SIZE)
    tl.store(tokens_ptr + start + o, tokens, mask=inside)
    tl.store(positions_ptr + start + o, first + o, mask=inside)
    tl.store(slots_ptr + start + o, slots, mask=inside)
    tl.store(sequences_ptr + start + o, (o * 0 + b).to(tl.int64), mask=inside)
    # Store its start and its length.
    tl.store(start_loc_ptr + b, start)
    tl.store(seq_lens_ptr + b, tl.where(length > 0, first + length, 0))
    if b == num_seqs - 1:
        tl.store(start_loc_ptr + num_seqs, total)

    # Every program clears its share of the padding.
    row = b * PADDING + tl.arange(0, PADDING)
    is_padding = (row >= total) & (row < num_rows)
    zeros = tl.zeros([PADDING], dtype=tl.int64)
    tl.store(tokens_ptr + row, zeros, mask=is_padding)
    tl.store(positions_ptr + row, zeros, mask=is_padding)
    tl.store(slots_ptr + row, zeros - 1, mask=is_padding)
    tl.store(sequences_ptr + row, zeros - 1, mask=is_padding)


def build_target_batch(
    last_tokens_B: Tensor,
    drafts_BK: Tensor,
    num_draft_tokens_B: Tensor,
    first_positions_B: Tensor,
    block_tables_BM: Tensor,
    active_B: Tensor,
    out: TargetBatch,
    *,
    block_size: int,
    max_model_len: int,
) -> None:
    """Write `batches.build_target_batch` into buffers; T is their length. Inputs are contiguous."""
    num_seqs, max_drafts = drafts_BK.shape
    num_rows = out.tokens_R.shape[0]
    _check_contiguous(drafts_BK, block_tables_BM)
    _check_sequences(num_seqs)
    launch(
        _target_batch_kernel,
        (num_seqs,),
        last_tokens_B,
        drafts_BK,
        num_draft_tokens_B,
        first_positions_B,
        block_tables_BM,
        active_B,
        out.tokens_R,
        out.positions_R,
        out.slots_R,
        out.sequences_R,
        out.query_start_loc,
        out.seq_lens_B,
        num_seqs,
        num_rows,
        max_drafts,
        block_tables_BM.shape[1],
        max_model_len,
        BLOCK_SIZE=block_size,
        SEQS=triton.next_power_of_2(num_seqs),
        ROWS=triton.next_power_of_2(max_drafts + 1),
        PADDING=triton.next_power_of_2(triton.cdiv(num_rows, num_seqs)),
        num_warps=1,
    )


@triton.jit
def _expand_kernel(
    target_tokens_ptr,
    target_positions_ptr,
    target_start_ptr,
    num_accepted_ptr,
    next_tokens_ptr,
    tables_ptr,
    num_masks_ptr,
    num_draft_tokens_ptr,
    active_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    feature_rows_ptr,
    start_loc_ptr,
    seq_lens_ptr,
    last_ntp_ptr,
    draft_rows_ptr,
    num_seqs,
    num_target_rows,
    num_slots,
    max_drafts,
    table_width,
    limit,
    mask_token,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    SLOTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    PADDING: tl.constexpr,
):
    b = tl.program_id(0)
    # Find the rows of this sequence from the lengths of all.
    i = tl.arange(0, SEQS)
    known = i < num_seqs
    active = tl.load(active_ptr + i, mask=known, other=0) != 0
    accepted = tl.load(num_accepted_ptr + i, mask=known, other=0).to(tl.int64)
    num_read = tl.where(active & known, accepted + 1, 0)
    wanted = tl.load(num_masks_ptr + i, mask=active & known, other=0).to(tl.int64)
    left = num_slots - tl.sum(num_read) - (tl.cumsum(wanted) - wanted)
    masks = tl.minimum(tl.maximum(left, 0), wanted)
    lens = num_read + masks
    start = tl.sum(tl.where(i < b, lens, 0))
    length = tl.sum(tl.where(i == b, lens, 0))
    total = tl.sum(lens)

    # Store the number of drafts where not all mask slots have room.
    num_masks = tl.sum(tl.where(i == b, masks, 0))
    is_cut = num_masks < tl.sum(tl.where(i == b, wanted, 0))
    tl.store(num_draft_tokens_ptr + b, num_masks + 1, mask=is_cut)

    # Load the accepted prefix and the bonus token.
    runs = length > 0
    num_accepted = tl.load(num_accepted_ptr + b).to(tl.int64)
    first_row = tl.load(target_start_ptr + b).to(tl.int64)
    first = tl.load(target_positions_ptr + first_row, mask=runs, other=0).to(tl.int64)
    bonus = tl.load(next_tokens_ptr + b).to(tl.int64)
    table = tables_ptr + b.to(tl.int64) * table_width
    # Store the rows: shifted tokens, the bonus token, masks.
    for offset in range(0, length, SLOTS):
        o = offset + tl.arange(0, SLOTS)
        inside = (o < length) & (start + o < num_slots)
        shifts = inside & (o < num_accepted)
        shifted = tl.load(target_tokens_ptr + first_row + o + 1, mask=shifts, other=0)
        tokens = tl.where(o < num_accepted, shifted.to(tl.int64), mask_token)
        tokens = tl.where(o == num_accepted, bonus, tokens)
        rows = tl.where(o <= num_accepted, first_row + o, num_target_rows)
        slots = kv_slots(table, first + o, inside, table_width, limit, BLOCK_SIZE)
        tl.store(tokens_ptr + start + o, tokens, mask=inside)
        tl.store(positions_ptr + start + o, first + o, mask=inside)
        tl.store(slots_ptr + start + o, slots, mask=inside)
        tl.store(feature_rows_ptr + start + o, rows, mask=inside)

    # Store the start, the length and the rows that draft.
    last_ntp = tl.where(runs, start + num_accepted, 0)
    tl.store(start_loc_ptr + b, start)
    tl.store(seq_lens_ptr + b, tl.where(runs, first + length, 0))
    tl.store(last_ntp_ptr + b, last_ntp)
    if b == num_seqs - 1:
        tl.store(start_loc_ptr + num_seqs, total)
    j = tl.arange(0, DRAFTS)
    draft_rows = last_ntp + tl.where(runs, tl.minimum(j, num_masks), 0)
    tl.store(draft_rows_ptr + b * max_drafts + j, draft_rows, mask=j < max_drafts)

    # Every program clears its share of the padding.
    slot = b * PADDING + tl.arange(0, PADDING)
    is_padding = (slot >= total) & (slot < num_slots)
    zeros = tl.zeros([PADDING], dtype=tl.int64)
    tl.store(tokens_ptr + slot, zeros + mask_token, mask=is_padding)
    tl.store(positions_ptr + slot, zeros, mask=is_padding)
    tl.store(slots_ptr + slot, zeros - 1, mask=is_padding)
    tl.store(feature_rows_ptr + slot, zeros + num_target_rows, mask=is_padding)


def expand_draft_batch(
    target_tokens_T: Tensor,
    target_positions_T: Tensor,
    target_start_loc: Tensor,
    num_accepted_B: Tensor,
    next_tokens_B: Tensor,
    block_tables_BM: Tensor,
    active_B: Tensor,
    out: DraftBatch,
    *,
    block_size: int,
    num_mask_slots_B: Tensor,
    num_draft_tokens_B: Tensor,
    mask_token_id: int,
    max_model_len: int,
) -> None:
    """Write `batches.expand_draft_batch` into buffers of S slots.

    S must hold a + 1 slots of every active sequence (`batches.count_draft_slots`). Of its mask
    slots a sequence gets what `batches.fit_mask_slots` leaves; where these are fewer,
    `num_draft_tokens_B` becomes one more than they are. Rows of h_shared have feature row T, the
    length of `target_tokens_T`, padding included.
    """
    num_seqs, max_drafts = out.draft_rows_BK.shape
    num_slots = out.tokens_R.shape[0]
    _check_contiguous(block_tables_BM)
    _check_sequences(num_seqs)
    launch(
        _expand_kernel,
        (num_seqs,),
        target_tokens_T,
        target_positions_T,
        target_start_loc,
        num_accepted_B,
        next_tokens_B,
        block_tables_BM,
        num_mask_slots_B,
        num_draft_tokens_B,
        active_B,
        out.tokens_R,
        out.positions_R,
        out.slots_R,
        out.feature_rows_R,
        out.query_start_loc,
        out.seq_lens_B,
        out.last_ntp_B,
        out.draft_rows_BK,
        num_seqs,
        target_tokens_T.shape[0],
        num_slots,
        max_drafts,
        block_tables_BM.shape[1],
        max_model_len,
        mask_token_id,
        BLOCK_SIZE=block_size,
        SEQS=triton.next_power_of_2(num_seqs),
        SLOTS=max(32, triton.next_power_of_2(2 * max_drafts)),
        DRAFTS=triton.next_power_of_2(max_drafts),
        PADDING=triton.next_power_of_2(triton.cdiv(num_slots, num_seqs)),
        num_warps=1,
    )


@triton.jit
def _gather_kernel(
    features_ptr,
    shared_ptr,
    rows_ptr,
    out_ptr,
    num_rows,
    width,
    features_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    if row < num_rows:
        values = tl.load(features_ptr + row * features_stride + d, mask=d < width)
        tl.store(out_ptr + slot * out_stride + d, values, mask=d < width)
    else:
        values = tl.load(shared_ptr + d, mask=d < width)
        tl.store(out_ptr + slot * out_stride + d, values, mask=d < width)


def gather_features(
    features_TD: Tensor, h_shared_D: Tensor, feature_rows_S: Tensor, out_SD: Tensor
) -> None:
    """out[s] = features[rows[s]] where rows[s] < T, else h_shared.

    Features are those after fc; what stands in rows that no slot names is never read.
    """
    num_rows, width = features_TD.shape
    block = min(2048, triton.next_power_of_2(width))
    launch(
        _gather_kernel,
        (out_SD.shape[0], triton.cdiv(width, block)),
        features_TD,
        h_shared_D,
        feature_rows_S,
        out_SD,
        num_rows,
        width,
        features_TD.stride(0),
        out_SD.stride(0),
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "width", "most_rows", "most_seqs", "most_width"]
)
def _pad_kernel(
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    start_loc_ptr,
    seq_lens_ptr,
    tables_ptr,  # [num_seqs, width]
    starts_ptr,
    visible_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    out_slots_ptr,
    out_start_loc_ptr,
    out_seq_lens_ptr,
    out_tables_ptr,  # [most_seqs, most_width]
    out_starts_ptr,
    out_visible_ptr,
    num_rows,
    num_seqs,
    width,
    most_rows,
    most_seqs,
    most_width,
    BLOCK: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    KEEPS_STARTS: tl.constexpr,  # there are buffers for starts
    HAS_VISIBLE: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Copy the rows, and fill the padding behind them.
    is_row = i < num_rows
    is_out = i < most_rows
    tl.store(out_tokens_ptr + i, tl.load(tokens_ptr + i, mask=is_row, other=0), mask=is_out)
    tl.store(out_positions_ptr + i, tl.load(positions_ptr + i, mask=is_row, other=0), mask=is_out)
    tl.store(out_slots_ptr + i, tl.load(slots_ptr + i, mask=is_row, other=-1), mask=is_out)
    if HAS_VISIBLE:
        tl.store(out_visible_ptr + i, tl.load(visible_ptr + i, mask=is_row, other=0), mask=is_row)
    # Copy what each sequence has; those behind the last have no rows and no context.
    is_seq = i < num_seqs
    is_out = i < most_seqs
    loc = tl.load(start_loc_ptr + i, mask=i <= num_seqs, other=0)
    loc = tl.where(i <= num_seqs, loc, num_rows)
    tl.store(out_start_loc_ptr + i, loc, mask=i <= most_seqs)
    tl.store(out_seq_lens_ptr + i, tl.load(seq_lens_ptr + i, mask=is_seq, other=0), mask=is_out)
    if KEEPS_STARTS:
        starts = tl.zeros([BLOCK], tl.int64)
        if HAS_STARTS:
            starts = tl.load(starts_ptr + i, mask=is_seq, other=0)
        tl.store(out_starts_ptr + i, starts, mask=is_out)
    # Copy the block tables.
    is_block = i < num_seqs * width
    block = tl.load(tables_ptr + i, mask=is_block, other=0)
    tl.store(out_tables_ptr + i // width * most_width + i % width, block, mask=is_block)


def pad_batch(
    batch: PackedBatch,
    block_tables_BM: Tensor,
    starts_B: Tensor | None,
    visible_R: Tensor | None,
    out: PackedBatch,
    out_tables_BM: Tensor,
    out_starts_B: Tensor | None,
    out_visible_R: Tensor | None,
) -> None:
    """Copy a batch into larger buffers, in one launch.

    Rows of padding hold token 0 at position 0, write no KV and belong to no sequence.

    Args:
        batch: all its tensors are int64 and contiguous, like those after it.
        block_tables_BM: KV blocks; of the buffer as much is written.
        starts_B: starts of contexts; None: 0, if there is a buffer for them.
        visible_R: rows that each row sees; None, or there is a buffer for them.
        out, out_tables_BM, out_starts_B, out_visible_R: the buffers.
    """
    num_rows, most_rows = len(batch.tokens_R), len(out.tokens_R)
    (num_seqs, width), (most_seqs, most_width) = block_tables_BM.shape, out_tables_BM.shape
    assert num_rows <= most_rows and num_seqs <= most_seqs and width <= most_width
    tables_BM = block_tables_BM.contiguous()
    count = max(most_rows, most_seqs + 1, num_seqs * width)
    launch(
        _pad_kernel,
        (-(-count // _PADDED),),
        batch.tokens_R,
        batch.positions_R,
        batch.slots_R,
        batch.query_start_loc,
        batch.seq_lens_B,
        tables_BM,
        tables_BM if starts_B is None else starts_B,
        tables_BM if visible_R is None else visible_R,
        out.tokens_R,
        out.positions_R,
        out.slots_R,
        out.query_start_loc,
        out.seq_lens_B,
        out_tables_BM,
        out_tables_BM if out_starts_B is None else out_starts_B,
        out_tables_BM if out_visible_R is None else out_visible_R,
        num_rows,
        num_seqs,
        width,
        most_rows,
        most_seqs,
        most_width,
        BLOCK=_PADDED,
        HAS_STARTS=starts_B is not None,
        KEEPS_STARTS=out_starts_B is not None,
        HAS_VISIBLE=visible_R is not None and out_visible_R is not None,
        num_warps=4,
    )


def _check_contiguous(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), "kernels step over whole rows"


def _check_sequences(num_seqs: int) -> None:
    if num_seqs > MAX_SEQUENCES:
        raise ValueError(
            f"a batch has {num_seqs} sequences; expected at most {MAX_SEQUENCES}, which one "
            "program adds up"
        )
