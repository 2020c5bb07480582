"""Kernels of rejection sampling; `verify_triton` launches them and says what comes out.

Shapes: B sequences, K most drafts, R packed rows, V vocabulary, D draft vocabulary, C chunks of a
row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.random import Purpose
from peagle.kernels.random_triton import uniform
from peagle.kernels.search_triton import is_kept, temperature_rate, weights_of
from peagle.kernels.step_state import NO_TOKEN
from peagle.kernels.step_state_triton import advance

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_SYNTHETIC = tl.constexpr(int(Purpose.SYNTHETIC))
_FAR = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def num_accepted_synthetically(
    b, real, num_drafts, rates_ptr, seeds_ptr, num_outputs_ptr, COLUMNS: tl.constexpr
):
    """a of one sequence, whatever its drafts are: how many rates lie above its one number.

    `real` is the a that the drafts deserve; it changes nothing.
    """
    j = tl.arange(0, COLUMNS)
    rates = tl.load(rates_ptr + j, mask=j < num_drafts, other=0.0)
    u = uniform(tl.load(seeds_ptr + b), tl.load(num_outputs_ptr + b), _SYNTHETIC)
    num_accepted = tl.sum((u < rates.to(tl.float64)).to(tl.int32))
    # Always so, but the compiler does not know: it must leave the work for `real` in.
    return tl.where(real >= 0, num_accepted, real)


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
    HAS_Q: tl.constexpr,
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
    if HAS_Q:
        index = x
        if HAS_INDEX:
            index = tl.load(draft_index_ptr + x, mask=drafted, other=-1).to(tl.int64)
        at = (b * max_drafts + j).to(tl.int64) * draft_vocab + index
        q = tl.load(q_ptr + at, mask=drafted & (index >= 0), other=0.0)
        q = tl.where(temperature == 0, 1.0, q)
        u = u * q.to(tl.float64)
    accepted = drafted & (u < p.to(tl.float64))
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
    drafts_ptr,
    max_drafts,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    HAS_Q: tl.constexpr,
    HAS_INDEX: tl.constexpr,
):
    """p and max(p - q, 0) of tokens v in the row that emits; q is 0 if no draft was rejected."""
    inside = v < vocab_size
    x = tl.load(logits_ptr + row * row_stride + v, mask=inside, other=-float("inf"))
    best = tl.load(max_ptr + row)
    weights = weights_of(x, best, temperature_rate(temperature))
    kept = is_kept(weights, v, tl.load(threshold_ptr + row), tl.load(last_tie_ptr + row))
    p = tl.where(kept & inside, weights / tl.load(total_ptr + row), 0.0)
    rejected = num_accepted < num_drafts
    if HAS_Q:
        index = v
        has_q = v < tl.where(rejected, vocab_size, 0)
        if HAS_INDEX:
            index = tl.load(draft_index_ptr + v, mask=has_q, other=-1)
        at = (b * max_drafts + num_accepted).to(tl.int64) * draft_vocab + index
        q = tl.load(q_ptr + at, mask=has_q & (index >= 0), other=0.0)
    else:
        at_draft = b * max_drafts + num_accepted
        token = tl.load(drafts_ptr + at_draft, mask=rejected, other=-1)
        q = tl.where(v == token, 1.0, 0.0)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def weigh_kernel(
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
    drafts_ptr,
    max_drafts,
    num_drafts_ptr,
    num_outputs_ptr,
    q_ptr,
    draft_index_ptr,
    draft_vocab,
    num_chunks,
    weights_ptr,
    accepted_ptr,
    rates_ptr,
    synthetic_seeds_ptr,
    HAS_Q: tl.constexpr,
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
            HAS_Q,
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
                drafts_ptr,
                max_drafts,
                q_ptr,
                draft_index_ptr,
                draft_vocab,
                HAS_Q,
                HAS_INDEX,
            )
            at = (b * num_chunks + chunk) * 2
            tl.store(weights_ptr + at, tl.sum(p.to(tl.float64)))
            tl.store(weights_ptr + at + 1, tl.sum(leftover.to(tl.float64)))


@triton.jit
def draw_kernel(
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
    HAS_Q: tl.constexpr,
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
        u = uniform(tl.load(seeds_ptr + b), position, _SAMPLE)
        through = tl.cumsum(sums, 0)
        target = u * tl.max(through)
        # Rounding may leave no chunk above the target: then the last that has weight.
        chunk = tl.min(tl.where((through > target) & (sums > 0), c, CHUNKS))
        chunk = tl.minimum(chunk, tl.max(tl.where(sums > 0, c, 0)))
        target -= tl.max(tl.where(c < chunk, through, 0.0))
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
            drafts_ptr,
            max_drafts,
            q_ptr,
            draft_index_ptr,
            draft_vocab,
            HAS_Q,
            HAS_INDEX,
        )
        weights = tl.where(use_leftover, rest, p)
        through_v = tl.cumsum(weights.to(tl.float64), 0)
        token = tl.min(tl.where((through_v > target) & (weights > 0), v, _FAR))
        next_token = tl.minimum(token, tl.max(tl.where(weights > 0, v, 0)))
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
