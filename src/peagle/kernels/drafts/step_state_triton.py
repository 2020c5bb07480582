"""A captured decode step on the device: running sequences, their next state, the host's report.

The reference of `advance` is `kernels.drafts.step_state`. All that these kernels read and write
stays on the device.

Shapes: B sequences (a bucket), K most drafts, J = K + 1; of trees N nodes, D most on a path.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from peagle.kernels.drafts.step_state import (
    NO_TOKEN,
    DecodeLimits,
    DecodeResult,
    DecodeState,
    Finish,
    Stamp,
)
from peagle.kernels.launch import launch

NUM_STAMPS = len(Stamp)


@triton.jit
def _stamp(times_ptr, index, TIMED: tl.constexpr):
    if TIMED:
        tl.store(times_ptr + index, globaltimer())


@triton.jit
def _begin_kernel(
    active_ptr,
    finish_ptr,
    num_draft_tokens_ptr,
    running_ptr,
    num_drafted_ptr,
    times_ptr,
    num_seqs,
    SEQS: tl.constexpr,
    TIMED: tl.constexpr,
):
    _stamp(times_ptr, 0, TIMED)
    b = tl.arange(0, SEQS)
    known = b < num_seqs
    active = tl.load(active_ptr + b, mask=known, other=0) != 0
    running = active & (tl.load(finish_ptr + b, mask=known, other=0) == 0)
    num_draft_tokens = tl.load(num_draft_tokens_ptr + b, mask=known, other=0)
    tl.store(running_ptr + b, running.to(tl.int64), mask=known)
    tl.store(num_drafted_ptr + b, tl.where(running, num_draft_tokens, 0), mask=known)


def begin_step(
    active_B: Tensor, state: DecodeState, running_B: Tensor, num_drafted_B: Tensor, times: Tensor
) -> None:
    """Mark the running sequences (active, not finished) and count their drafts; stamp the time."""
    launch(
        _begin_kernel,
        (1,),
        active_B,
        state.finish_B,
        state.num_draft_tokens_B,
        running_B,
        num_drafted_B,
        times,
        active_B.shape[0],
        SEQS=triton.next_power_of_2(active_B.shape[0]),
        TIMED=times.is_cuda,
        num_warps=1,
    )


@triton.jit
def _stamp_kernel(times_ptr, index, TIMED: tl.constexpr):
    _stamp(times_ptr, index, TIMED)


def stamp(times: Tensor, at: Stamp) -> None:
    """times[at] = the card's clock in nanoseconds, once all before it is done."""
    if times.is_cuda:
        launch(_stamp_kernel, (1,), times, int(at), TIMED=True, num_warps=1)


@triton.jit
def report_kernel(
    num_drafted_ptr,
    num_accepted_ptr,
    num_draft_tokens_ptr,
    emitted_ptr,
    drafts_ptr,
    nodes_ptr,
    times_ptr,
    report_ptr,
    num_seqs,
    max_accepted,
    max_drafts,
    nodes_width,
    width,
    index,
    COLUMNS: tl.constexpr,
    STAMPS: tl.constexpr,
    STAMP_COLUMNS: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Store one sequence's row of the report, or the last row, the times."""
    b = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    row = report_ptr + b.to(tl.int64) * width
    if b < num_seqs:
        tl.store(row, tl.load(num_drafted_ptr + b))
        tl.store(row + 1, tl.load(num_accepted_ptr + b))
        tl.store(row + 2, tl.load(num_draft_tokens_ptr + b))
        emitted = tl.load(
            emitted_ptr + b * (max_accepted + 1) + columns, mask=columns <= max_accepted, other=0
        )
        tl.store(row + 3 + columns, emitted, mask=columns <= max_accepted)
        is_draft = columns < max_drafts
        row += 4 + max_accepted
        drafts = tl.load(drafts_ptr + b * max_drafts + columns, mask=is_draft, other=0)
        tl.store(row + columns, drafts, mask=is_draft)
        is_node = columns < nodes_width
        nodes = tl.load(nodes_ptr + b * nodes_width + columns, mask=is_node, other=0)
        tl.store(row + max_drafts + columns, nodes, mask=is_node)
    else:
        i = tl.arange(0, STAMP_COLUMNS)
        times = tl.load(times_ptr + i, mask=i < STAMPS, other=0)
        if TIMED:
            times = tl.where(i >= index, globaltimer(), times)
            tl.store(times_ptr + i, times, mask=i < STAMPS)
        tl.store(row + i, times, mask=i < STAMPS)


def report_step(
    num_drafted_B: Tensor,
    out: DecodeResult,
    state: DecodeState,
    drafts_BK: Tensor,
    times: Tensor,
    report_RX: Tensor,
    nodes_BX: Tensor | None = None,
    *,
    at: Stamp = Stamp.DRAFTED,
) -> None:
    """Put the host's report into one tensor; stamp the time.

    Args:
        num_drafted_B: drafts that were verified.
        out, state: after the step.
        drafts_BK: the next drafts.
        times: int64 [NUM_STAMPS].
        report_RX: int64 [B + 1, 2K + 4], or [B + 1, 4 + D + 3N] for trees: of each sequence the
            drafts verified, the drafts accepted, the drafts to come, the emitted tokens, the next
            drafts, and of trees the row of each one's parent and its score; the last row begins
            with the times.
        nodes_BX: where drafts are trees, int64 [B, 2N]: these parents and scores.
        at: this stamp and those behind it are of now. At VERIFIED the drafts mean nothing yet.
    """
    num_seqs, max_drafts = drafts_BK.shape
    max_accepted = out.emitted_BJ.shape[1] - 1
    nodes_width = 0 if nodes_BX is None else nodes_BX.shape[1]
    width = 4 + max_accepted + max_drafts + nodes_width
    assert report_RX.shape == (num_seqs + 1, width) and report_RX.is_contiguous()
    assert nodes_BX is None or nodes_BX.is_contiguous()
    launch(
        report_kernel,
        (num_seqs + 1,),
        num_drafted_B,
        out.num_accepted_B,
        state.num_draft_tokens_B,
        out.emitted_BJ,
        drafts_BK,
        drafts_BK if nodes_BX is None else nodes_BX,
        times,
        report_RX,
        num_seqs,
        max_accepted,
        max_drafts,
        nodes_width,
        width,
        int(at),
        COLUMNS=triton.next_power_of_2(max(max_accepted + 1, max_drafts, nodes_width)),
        STAMPS=NUM_STAMPS,
        STAMP_COLUMNS=triton.next_power_of_2(NUM_STAMPS),
        TIMED=times.is_cuda,
        num_warps=1,
    )


_STOP = tl.constexpr(int(Finish.STOP))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def advance(
    b,
    is_active,
    num_accepted,
    next_token,
    drafts_ptr,
    max_drafts,
    last_tokens_ptr,
    first_positions_ptr,
    num_outputs_ptr,
    num_draft_tokens_ptr,
    finish_ptr,
    stop_ids_ptr,
    num_stop_ids,
    min_tokens_ptr,
    max_tokens_ptr,
    k_ptr,
    max_model_len,
    draft_end,
    accepted_out_ptr,
    next_out_ptr,
    emitted_ptr,
    kept_ptr,
    masks_ptr,
    COLUMNS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    """`step_state.advance` of one sequence; `num_accepted` and `next_token` are int64."""
    finish = tl.load(finish_ptr + b).to(tl.int64)
    runs = is_active & (finish == 0)
    num_accepted = tl.where(is_active, num_accepted, 0)
    next_token = tl.where(is_active, next_token, 0)
    num_emitted = tl.where(runs, num_accepted + 1, 0)
    tl.store(accepted_out_ptr + b, num_accepted)
    tl.store(next_out_ptr + b, tl.maximum(next_token, 0))

    # Store the emitted tokens: the accepted drafts and the next token.
    j = tl.arange(0, COLUMNS)
    is_emitted = j < num_emitted
    drafted = is_emitted & (j < num_accepted)
    tokens = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=-1).to(tl.int64)
    tokens = tl.where(is_emitted & (j == num_accepted), next_token, tokens)
    tl.store(emitted_ptr + b * (max_drafts + 1) + j, tokens, mask=j <= max_drafts)

    # Find the first emitted token that ends the output.
    e = tl.arange(0, STOP_IDS)
    stop_ids = tl.load(stop_ids_ptr + b * num_stop_ids + e, mask=e < num_stop_ids, other=-1)
    hits = (tokens[:, None] == stop_ids[None, :]) & (stop_ids[None, :] >= 0)
    num_outputs = tl.load(num_outputs_ptr + b)
    first = tl.load(first_positions_ptr + b)
    before = num_outputs + j
    is_stop = (tl.max(hits.to(tl.int32), 1) > 0) & (before >= tl.load(min_tokens_ptr + b))
    is_stop = is_stop & is_emitted
    is_long = (before + 1 >= tl.load(max_tokens_ptr + b)) | (first + j + 2 >= max_model_len)
    is_long = (is_long | (tokens == _NO_TOKEN)) & is_emitted
    last = tl.min(tl.where(is_stop | is_long, j, COLUMNS))
    stopped = tl.max(tl.where(is_stop & (j == last), 1, 0)) > 0
    reason = tl.where(stopped, _STOP, _LENGTH).to(tl.int64)
    finish = tl.where(last < COLUMNS, reason, finish)
    tl.store(kept_ptr + b, tl.minimum(num_emitted, last + 1))

    # Move the state, and choose the next number of drafts.
    first += num_emitted
    room = tl.maximum(draft_end - 1 - first, 0)
    drafts = tl.minimum(tl.load(k_ptr + b), room)
    drafts = tl.where(is_active & (finish == 0), drafts, 0)
    tl.store(finish_ptr + b, finish)
    tl.store(last_tokens_ptr + b, tl.maximum(next_token, 0), mask=runs)
    tl.store(first_positions_ptr + b, first)
    tl.store(num_outputs_ptr + b, num_outputs + num_emitted)
    tl.store(num_draft_tokens_ptr + b, drafts)
    tl.store(masks_ptr + b, tl.maximum(drafts - 1, 0))


def state_arguments(
    drafts_BK: Tensor, state: DecodeState, limits: DecodeLimits, out: DecodeResult
) -> tuple[Tensor | int, ...]:
    """Return the arguments of `advance` from drafts_ptr to masks_ptr."""
    assert drafts_BK.is_contiguous(), "kernels step over whole rows"
    assert limits.stop_ids_BE.is_contiguous(), "kernels step over whole rows"
    return (
        drafts_BK,
        drafts_BK.shape[1],
        state.last_tokens_B,
        state.first_positions_B,
        state.num_outputs_B,
        state.num_draft_tokens_B,
        state.finish_B,
        limits.stop_ids_BE,
        limits.stop_ids_BE.shape[1],
        limits.min_tokens_B,
        limits.max_tokens_B,
        limits.k_B,
        limits.max_model_len,
        limits.draft_end,
        out.num_accepted_B,
        out.next_tokens_B,
        out.emitted_BJ,
        out.num_kept_B,
        out.num_mask_slots_B,
    )


def state_sizes(max_drafts: int, limits: DecodeLimits) -> dict[str, int]:
    """Return the block sizes of `advance`."""
    return {
        "COLUMNS": triton.next_power_of_2(max_drafts + 1),
        "STOP_IDS": triton.next_power_of_2(max(limits.stop_ids_BE.shape[1], 1)),
    }
