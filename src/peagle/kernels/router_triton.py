"""Triton kernel of `kernels.router`: the experts of a token and their weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _largest(logits_ptr, expert, num_experts):
    """Logits of experts; one that is no number counts as the largest, none as the smallest."""
    logit = tl.load(logits_ptr + expert, mask=expert < num_experts, other=-float("inf"))
    logit = logit.to(tl.float32)
    return tl.where(logit != logit, float("inf"), logit)


@triton.jit
def choose_experts_kernel(
    index_ptr,  # int32 [T, C]
    weights_ptr,  # [T, C]
    logits_ptr,  # [T, E]
    num_experts,
    num_chosen,
    EXPERTS: tl.constexpr,
    AMONG_CHOSEN: tl.constexpr,
):
    """The experts of one token, which have the largest logits, and their shares of the softmax.

    The place of an expert is the number of those before it, so that nothing waits for a maximum.
    """
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * num_experts
    e = tl.arange(0, EXPERTS)
    logit = _largest(logits_ptr, e, num_experts)
    other = _largest(logits_ptr, e, num_experts)[None, :]
    own = logit[:, None]
    is_before = (other > own) | ((other == own) & (e[None, :] < e[:, None]))
    place = tl.sum(is_before.to(tl.int32), 1)
    is_chosen = place < num_chosen
    share = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(tl.where(is_chosen, share, 0.0) if AMONG_CHOSEN else share, 0)
    to = token * num_chosen + place
    tl.store(index_ptr + to, e, mask=is_chosen)
    tl.store(weights_ptr + to, (share / total).to(weights_ptr.dtype.element_ty), mask=is_chosen)
