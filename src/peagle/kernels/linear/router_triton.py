"""Triton kernel of `kernels.linear.router`: the experts of a token and their weights."""

import triton
import triton.language as tl

from peagle.kernels.overlap_triton import wait_for_inputs

_LOWEST = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def _sort_key(number):
    """Return an integer for each float32, in the order of the numbers."""
    bits = (number + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose_experts_kernel(
    index_ptr,  # int32 [T, C]
    weights_ptr,  # [T, C]
    logits_ptr,  # [T, E]
    num_experts,
    num_chosen,
    EXPERTS: tl.constexpr,
    AMONG_CHOSEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store one token's experts with the largest logits, and their shares of the softmax.

    A logit that is no number counts as the largest. Of equal logits the first is chosen first.
    """
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    logits_ptrs = logits_ptr + token * num_experts + e
    logit = tl.load(logits_ptrs, mask=is_expert, other=-float("inf")).to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)
    place = tl.full([EXPERTS], EXPERTS, tl.int32)
    key = tl.where(is_expert, _sort_key(logit), _LOWEST)
    for c in range(num_chosen):
        is_next = e == tl.argmax(key, 0)
        place = tl.where(is_next, c, place)
        key = tl.where(is_next, _LOWEST, key)
    is_chosen = place < num_chosen
    share = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(tl.where(is_chosen, share, 0.0) if AMONG_CHOSEN else share, 0)
    to = token * num_chosen + place
    tl.store(index_ptr + to, e, mask=is_chosen)
    tl.store(weights_ptr + to, (share / total).to(weights_ptr.dtype.element_ty), mask=is_chosen)
