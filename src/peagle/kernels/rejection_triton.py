"""Verification of drawn drafts in a captured decode step: rejection sampling.

The reference is `speculation.verification.verify` with `draft_probs_BKV`. All other drafts are for
`verify_triton`.

Shapes: B sequences, K most drafts, R packed rows, V vocabulary, D draft vocabulary, C chunks of a
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draw_triton import draw_chunk, kept_weights, pick
from peagle.kernels.launch import launch
from peagle.kernels.random import Purpose
from peagle.kernels.random_triton import uniform
from peagle.kernels.sampling_triton import row_stats
from peagle.kernels.search_triton import is_kept, temperature_rate, weights_of
from peagle.kernels.step_state import NO_TOKEN, StepLimits, StepRecord, StepState
from peagle.kernels.step_state_triton import advance, state_arguments, state_sizes
from peagle.kernels.verify_triton import (
    SequenceSampling,
    SyntheticAcceptance,
    VerifyScratch,
    num_accepted_synthetically,
    synthetic_arguments,
)

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """q of drafts that were drawn, in the draft vocabulary.

    Attributes:
        probs_BKD: float32, contiguous; not read at or above a sequence's number of drafts.
        draft_index_V: int32, draft id of each target id, -1 for ids that cannot be drafted; None
            where both vocabularies are one.
    """

    probs_BKD: Tensor
    draft_index_V: Tensor | None = None


@triton.jit
def _num_accepted(
    b,
    num_drafts,
    first_row,
    temperature,
    logits_ptr,
    row_stride,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    drafts_ptr,
    max_drafts,
    seeds_ptr,
    num_outputs_ptr,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    HAS_INDEX: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """a of one sequence: drafts up to the first with u * q(x) >= p(x)."""
    j = tl.arange(0, COLUMNS)
    drafted = j < num_drafts
    rows = first_row + j
    x = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=0).to(tl.int64)
    logits = tl.load(logits_ptr + rows * row_stride + x, mask=drafted, other=0.0)
    best = tl.load(max_ptr + rows, mask=drafted, other=0.0)
    weights = weights_of(logits, best, temperature_rate(temperature))
    threshold = tl.load(threshold_ptr + rows, mask=drafted, other=0)
    last_tie = tl.load(last_tie_ptr + rows, mask=drafted, other=0)
    total = tl.load(total_ptr + rows, mask=drafted, other=1.0)
    p = tl.where(is_kept(weights, x, threshold, last_tie), weights / total, 0.0)
    argmax = tl.load(argmax_ptr + rows, mask=drafted, other=-1)
    p = tl.where(temperature == 0, tl.where(x == argmax, 1.0, 0.0), p)
    seed = tl.load(seeds_ptr + b)
    u = uniform(seed + j * 0, tl.load(num_outputs_ptr + b) + j, _ACCEPT)
    index = x
    if HAS_INDEX:
        index = tl.load(draft_index_ptr + x, mask=drafted, other=-1).to(tl.int64)
    at = (b * max_drafts + j).to(tl.int64) * draft_vocab + index
    q = tl.load(q_ptr + at, mask=drafted & (index >= 0), other=0.0)
    # A greedy sequence drafts by argmax.
    q = tl.where(temperature == 0, 1.0, q)
    accepted = drafted & (u * q.to(tl.float64) < p.to(tl.float64))
    return tl.min(tl.where(accepted, COLUMNS, j))


@triton.jit
def _chunk_weights(
    b,
    v,
    row,
    num_accepted,
    num_drafts,
    temperature,
    logits_ptr,
    row_stride,
    vocab_size,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    max_drafts,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    HAS_INDEX: tl.constexpr,
):
    """p and max(p - q, 0) of tokens v in the row that emits; q is 0 if no draft was rejected."""
    weights = kept_weights(
        logits_ptr + row * row_stride,
        v,
        vocab_size,
        tl.load(max_ptr + row),
        temperature,
        tl.load(threshold_ptr + row),
        tl.load(last_tie_ptr + row),
    )
    p = weights / tl.load(total_ptr + row)
    index = v
    has_q = v < tl.where(num_accepted < num_drafts, vocab_size, 0)
    if HAS_INDEX:
        index = tl.load(draft_index_ptr + v, mask=has_q, other=-1)
    at = (b * max_drafts + num_accepted).to(tl.int64) * draft_vocab + index
    q = tl.load(q_ptr + at, mask=has_q & (index >= 0), other=0.0)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def weigh_rejected_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    start_loc_ptr,
    active_ptr,
    temperature_ptr,
    seeds_ptr,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    num_chunks,
    weights_ptr,
    drafts_ptr,
    max_drafts,
    num_drafts_ptr,
    num_outputs_ptr,
    accepted_ptr,
    rates_ptr,
    synthetic_seeds_ptr,
    HAS_INDEX: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """a of a sequence, and the weight of one chunk of the row that emits its next token."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(active_ptr + b) != 0:
        num_drafts = tl.load(num_drafts_ptr + b).to(tl.int32)
        first_row = tl.load(start_loc_ptr + b).to(tl.int64)
        temperature = tl.load(temperature_ptr + b)
        num_accepted = _num_accepted(
            b,
            num_drafts,
            first_row,
            temperature,
            logits_ptr,
            row_stride,
            max_ptr,
            argmax_ptr,
            threshold_ptr,
            last_tie_ptr,
            total_ptr,
            drafts_ptr,
            max_drafts,
            seeds_ptr,
            num_outputs_ptr,
            q_ptr,
            draft_index_ptr,
            draft_vocab,
            HAS_INDEX,
            COLUMNS,
        )
        if SYNTHETIC:
            num_accepted = num_accepted_synthetically(
                b,
                num_accepted,
                num_drafts,
                rates_ptr,
                synthetic_seeds_ptr,
                num_outputs_ptr,
                COLUMNS,
            )
        if chunk == 0:
            tl.store(accepted_ptr + b, num_accepted.to(tl.int64))
        if temperature != 0:
            p, leftover = _chunk_weights(
                b,
                chunk * CHUNK + tl.arange(0, CHUNK),
                first_row + num_accepted,
                num_accepted,
                num_drafts,
                temperature,
                logits_ptr,
                row_stride,
                vocab_size,
                max_ptr,
                threshold_ptr,
                last_tie_ptr,
                total_ptr,
                max_drafts,
                q_ptr,
                draft_index_ptr,
                draft_vocab,
                HAS_INDEX,
            )
            at = (b * num_chunks + chunk) * 2
            tl.store(weights_ptr + at, tl.sum(p.to(tl.float64)))
            tl.store(weights_ptr + at + 1, tl.sum(leftover.to(tl.float64)))


@triton.jit
def draw_rejected_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    start_loc_ptr,
    active_ptr,
    temperature_ptr,
    seeds_ptr,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    num_chunks,
    weights_ptr,
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
    accepted_ptr,
    next_ptr,
    emitted_ptr,
    kept_ptr,
    masks_ptr,
    HAS_INDEX: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    """Draw the next token of a sequence by inverse CDF: first the chunk, then the token in it."""
    b = tl.program_id(0)
    is_active = tl.load(active_ptr + b) != 0
    num_drafts = tl.load(num_drafts_ptr + b).to(tl.int32)
    first_row = tl.load(start_loc_ptr + b).to(tl.int64)
    num_accepted = tl.load(accepted_ptr + b).to(tl.int32)
    temperature = tl.load(temperature_ptr + b)
    row = first_row + num_accepted
    next_token = tl.load(argmax_ptr + row, mask=is_active, other=0)
    if is_active & (temperature != 0):
        c = tl.arange(0, CHUNKS)
        at = (b * num_chunks + c) * 2
        plain = tl.load(weights_ptr + at, mask=c < num_chunks, other=0.0)
        leftover = tl.load(weights_ptr + at + 1, mask=c < num_chunks, other=0.0)
        # p = q to the last bit leaves nothing over: then p itself, as in the reference.
        use_leftover = (num_accepted < num_drafts) & (tl.sum(leftover) > 0)
        if SYNTHETIC:
            use_leftover = use_leftover & (num_accepted < 0)  # never, unknown to the compiler
        sums = tl.where(use_leftover, leftover, plain)
        position = tl.load(num_outputs_ptr + b) + num_accepted
        target = uniform(tl.load(seeds_ptr + b), position, _SAMPLE) * tl.sum(sums)
        chunk, before = pick(sums, c, target)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        p, rest = _chunk_weights(
            b,
            v,
            row,
            num_accepted,
            num_drafts,
            temperature,
            logits_ptr,
            row_stride,
            vocab_size,
            max_ptr,
            threshold_ptr,
            last_tie_ptr,
            total_ptr,
            max_drafts,
            q_ptr,
            draft_index_ptr,
            draft_vocab,
            HAS_INDEX,
        )
        next_token, _before = pick(tl.where(use_leftover, rest, p), v, target - before)
    peak = tl.load(max_ptr + row, mask=is_active, other=0.0)
    next_token = tl.where(tl.abs(peak) < float("inf"), next_token, _NO_TOKEN)
    advance(
        b,
        is_active,
        num_accepted.to(tl.int64),
        next_token.to(tl.int64),
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
        accepted_ptr,
        next_ptr,
        emitted_ptr,
        kept_ptr,
        masks_ptr,
        COLUMNS,
        STOP_IDS,
    )


def verify_drawn(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    sampling: SequenceSampling,
    state: StepState,
    limits: StepLimits,
    scratch: VerifyScratch,
    out: StepRecord,
    draft_probs: DraftProbs,
    *,
    synthetic: SyntheticAcceptance | None = None,
) -> None:
    """Rejection sampling of each sequence's drafts, its next token, its new state.

    Four launches: chunks of rows (softmax), rows (top-k, top-p, min-p), chunks of the row of each
    sequence that emits (weights), sequences (the draw). Draft x is accepted with
    min(1, p(x) / q(x)); the first rejected position is drawn from norm(max(p - q, 0)), after the
    last draft the bonus token from p. Arguments as in `verify_triton.verify_sampled`, and:

    Args:
        draft_probs: q; not read of sequences of temperature 0.
    """
    rows = scratch.rows
    row_stats(
        logits_RV,
        sequences_R,
        sampling.temperature_B,
        sampling.top_k_B,
        sampling.top_p_B,
        sampling.min_p_B,
        rows,
    )
    num_seqs, max_drafts = drafts_BK.shape
    vocab_size = logits_RV.shape[1]
    q_BKD, index_V = draft_probs.probs_BKD, draft_probs.draft_index_V
    assert q_BKD.is_contiguous(), "kernels step over whole rows"
    chunk = draw_chunk(vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    assert scratch.leftover_BC2.shape == (num_seqs, num_chunks, 2), "buffers of another shape"
    flags = {"HAS_INDEX": index_V is not None, "SYNTHETIC": synthetic is not None}
    sizes = state_sizes(max_drafts, limits)
    batch = (
        logits_RV,
        logits_RV.stride(0),
        vocab_size,
        start_loc,
        active_B,
        sampling.temperature_B,
        sampling.seeds_B,
        rows.max_R,
        rows.argmax_R,
        rows.threshold_R,
        rows.last_tie_R,
        rows.total_R,
        q_BKD,
        drafts_BK if index_V is None else index_V,
        q_BKD.shape[-1],
        num_chunks,
        scratch.leftover_BC2,
    )
    launch(
        weigh_rejected_kernel,
        (num_seqs, num_chunks),
        *batch,
        drafts_BK,
        max_drafts,
        state.num_drafts_B,
        state.num_outputs_B,
        out.num_accepted_B,
        *synthetic_arguments(synthetic, drafts_BK),
        COLUMNS=sizes["COLUMNS"],
        CHUNK=chunk,
        **flags,
        num_warps=8,
    )
    launch(
        draw_rejected_kernel,
        (num_seqs,),
        *batch,
        *state_arguments(drafts_BK, state, limits, out),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        **sizes,
        **flags,
        num_warps=8,
    )
