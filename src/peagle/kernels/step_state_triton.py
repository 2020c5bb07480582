"""The end of a verification: a sequence's state moves on. The reference is `kernels.step_state`.

Shapes: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.step_state import NO_TOKEN, Finish, StepLimits, StepRecord, StepState

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
    num_drafts_ptr,
    finish_ptr,
    stop_ids_ptr,
    num_stop_ids,
    min_tokens_ptr,
    max_tokens_ptr,
    num_speculative_ptr,
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

    j = tl.arange(0, COLUMNS)
    is_emitted = j < num_emitted
    drafted = is_emitted & (j < num_accepted)
    tokens = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=-1).to(tl.int64)
    tokens = tl.where(is_emitted & (j == num_accepted), next_token, tokens)
    tl.store(emitted_ptr + b * (max_drafts + 1) + j, tokens, mask=j <= max_drafts)

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

    first += num_emitted
    room = tl.maximum(draft_end - 1 - first, 0)
    drafts = tl.minimum(tl.load(num_speculative_ptr + b), room)
    drafts = tl.where(is_active & (finish == 0), drafts, 0)
    tl.store(finish_ptr + b, finish)
    tl.store(last_tokens_ptr + b, tl.maximum(next_token, 0), mask=runs)
    tl.store(first_positions_ptr + b, first)
    tl.store(num_outputs_ptr + b, num_outputs + num_emitted)
    tl.store(num_drafts_ptr + b, drafts)
    tl.store(masks_ptr + b, tl.maximum(drafts - 1, 0))


def state_arguments(
    drafts_BK: Tensor, state: StepState, limits: StepLimits, out: StepRecord
) -> tuple[Tensor | int, ...]:
    """Arguments of `advance` from drafts_ptr to masks_ptr."""
    assert drafts_BK.is_contiguous(), "kernels step over whole rows"
    assert limits.stop_ids_BE.is_contiguous(), "kernels step over whole rows"
    return (
        drafts_BK,
        drafts_BK.shape[1],
        state.last_tokens_B,
        state.first_positions_B,
        state.num_outputs_B,
        state.num_drafts_B,
        state.finish_B,
        limits.stop_ids_BE,
        limits.stop_ids_BE.shape[1],
        limits.min_tokens_B,
        limits.max_tokens_B,
        limits.num_speculative_B,
        limits.max_model_len,
        limits.draft_end,
        out.num_accepted_B,
        out.next_tokens_B,
        out.emitted_BJ,
        out.num_kept_B,
        out.num_mask_slots_B,
    )


def state_sizes(max_drafts: int, limits: StepLimits) -> dict[str, int]:
    """Block sizes of `advance`."""
    return {
        "COLUMNS": triton.next_power_of_2(max_drafts + 1),
        "STOP_IDS": triton.next_power_of_2(max(limits.stop_ids_BE.shape[1], 1)),
    }
