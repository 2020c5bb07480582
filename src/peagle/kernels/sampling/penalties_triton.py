"""Penalties of a captured decode step, in one pass over the logits.

The reference is `kernels.sampling.logits.apply_penalties`.

Shapes: B sequences, R rows, K most drafts, V vocabulary, S count slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.sampling.logits_rules import LogitsRules, TokenCounts, VerificationRows

_BLOCK = 2048
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit(do_not_specialize=["num_draft_tokens"])
def penalise_kernel(
    logits_ptr,
    sequences_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    in_prompt_ptr,
    outputs_ptr,
    drafts_ptr,
    before_ptr,
    out_ptr,
    vocab_size,
    num_draft_tokens,
    BLOCK: tl.constexpr,
):
    """Apply the penalties to one vocabulary block of one row.

    Count each token in the prompt, the output and the earlier drafts.
    """
    row = tl.program_id(0).to(tl.int64)
    b = tl.load(sequences_ptr + row)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + v, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + b)
    if slot >= 0:
        at = slot * vocab_size + v
        count = tl.load(outputs_ptr + at, mask=inside, other=0)
        for k in range(num_draft_tokens):
            is_before = tl.load(before_ptr + row * num_draft_tokens + k).to(tl.int32)
            draft = tl.load(drafts_ptr + b * num_draft_tokens + k)
            count += is_before * (v == draft).to(tl.int32)
        is_output = count > 0
        is_seen = is_output | (tl.load(in_prompt_ptr + at, mask=inside, other=0) != 0)
        factor = tl.load(repetition_ptr + b).to(tl.float32)
        factor = tl.minimum(tl.maximum(factor, _TINY), _MAX)
        y = tl.where(x > 0, x / factor, x * factor)
        y = y - tl.load(presence_ptr + b).to(tl.float32) * is_output.to(tl.float32)
        y = y - tl.load(frequency_ptr + b).to(tl.float32) * count.to(tl.float32)
        y = tl.minimum(tl.maximum(y, -_MAX), _MAX)
        x = tl.where(is_seen & (x > -float("inf")), y, x)
    tl.store(out_ptr + row * vocab_size + v, x, mask=inside)


def penalise(
    logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules, counts: TokenCounts
) -> Tensor:
    """Return the logits of `apply_penalties`, in float32, up to its rounding.

    One variant of the kernel serves all rules: no request waits while another one compiles.

    Args:
        logits_RV: float32, bfloat16 or float16.
        rules: have penalties, and the count slot of each sequence.
    """
    assert logits_RV.dtype != torch.float64, "the kernel computes in float32"
    assert rules.count_slots_B is not None, "penalties need the slots of their counts"
    num_rows, vocab_size = logits_RV.shape
    out_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits_RV.device)
    slots_B, drafts_BK = rules.count_slots_B, rows.drafts_BK.contiguous()
    nothing_B = torch.zeros(len(slots_B), dtype=torch.float64, device=slots_B.device)
    repetition_B, presence_B = rules.repetition_penalty_B, rules.presence_penalty_B
    frequency_B = rules.frequency_penalty_B
    launch(
        penalise_kernel,
        (num_rows, triton.cdiv(vocab_size, _BLOCK)),
        logits_RV.contiguous(),
        rows.sequences_R,
        slots_B,
        nothing_B + 1 if repetition_B is None else repetition_B,
        nothing_B if presence_B is None else presence_B,
        nothing_B if frequency_B is None else frequency_B,
        counts.in_prompt_SV,
        counts.outputs_SV,
        drafts_BK,
        rows.before_RK.contiguous(),
        out_RV,
        vocab_size,
        drafts_BK.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out_RV
