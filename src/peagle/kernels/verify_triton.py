"""Verification of a captured decode step, and what follows from it for each sequence.

References: `speculation.verification.verify`, `kernels.step_state.advance`. Greedy takes two
launches: chunks of rows, then sequences. Sampling takes four: chunks of rows (softmax), rows
(top-k, top-p, min-p), chunks of the row of each sequence that emits (weights), sequences (the
draw). Greedy sequences, with temperature 0, may stand in a sampled batch.

Shapes: B sequences, K most drafts, J = K + 1, R packed rows (a bucket), V vocabulary, D draft
vocabulary, C chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.random import Purpose
from peagle.kernels.sampling_triton import (
    RowStats,
    chunk_size,
    chunk_stats,
    is_kept,
    row_stats,
    temperature_rate,
    uniform,
    weights_of,
)
from peagle.kernels.step_state import Finish, StepLimits, StepOutput, StepState

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_STOP = tl.constexpr(int(Finish.STOP))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_FAR = tl.constexpr(2147483647)


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How each sequence samples.

    Attributes:
        temperature_B, top_k_B, top_p_B: as in `probs_from_logits`.
        seeds_B: int64.
        min_p_B: None: nobody has one.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seeds_B: Tensor
    min_p_B: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class VerifyScratch:
    """Buffers between the launches.

    Attributes:
        rows: statistics of the rows.
        weights_BC2: float64, of each chunk of the row that emits: of p, and of max(p - q, 0).
    """

    rows: RowStats
    weights_BC2: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, num_rows: int, vocab_size: int, device: torch.device | str
    ) -> VerifyScratch:
        """Buffers for B sequences in R rows."""
        chunks = triton.cdiv(vocab_size, chunk_size(num_seqs, vocab_size))
        weights = torch.zeros(num_seqs, chunks, 2, dtype=torch.float64, device=device)
        return cls(RowStats.allocate(num_rows, vocab_size, device), weights)


# ---- the end of both ways -----------------------------------------------------------------


@triton.jit
def _advance(
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
    tl.store(next_out_ptr + b, next_token)

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
    is_long = is_long & is_emitted
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
    tl.store(last_tokens_ptr + b, next_token, mask=runs)
    tl.store(first_positions_ptr + b, first)
    tl.store(num_outputs_ptr + b, num_outputs + num_emitted)
    tl.store(num_drafts_ptr + b, drafts)
    tl.store(masks_ptr + b, tl.maximum(drafts - 1, 0))


def _state_arguments(
    drafts_BK: Tensor, state: StepState, limits: StepLimits, out: StepOutput
) -> tuple[Tensor | int, ...]:
    """Arguments of `_advance` from drafts_ptr to masks_ptr."""
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


def _state_sizes(max_drafts: int, limits: StepLimits) -> dict[str, int]:
    return {
        "COLUMNS": triton.next_power_of_2(max_drafts + 1),
        "STOP_IDS": triton.next_power_of_2(max(limits.stop_ids_BE.shape[1], 1)),
    }


# ---- greedy ---------------------------------------------------------------------------------


@triton.jit
def _greedy_kernel(
    start_loc_ptr,
    active_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    num_chunks,
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
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    b = tl.program_id(0)
    is_active = tl.load(active_ptr + b) != 0
    # -1 where inactive: such a sequence has no row.
    num_drafts = tl.where(is_active, tl.load(num_drafts_ptr + b).to(tl.int32), -1)
    first_row = tl.load(start_loc_ptr + b).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    c = tl.arange(0, CHUNKS)
    inside = (j[:, None] <= num_drafts) & (c[None, :] < num_chunks)
    at = (first_row + j[:, None]) * num_chunks + c[None, :]
    maxima = tl.load(chunk_max_ptr + at, mask=inside, other=-float("inf"))
    indices = tl.load(chunk_argmax_ptr + at, mask=inside, other=_FAR)
    best = tl.max(maxima, 1)
    argmax = tl.min(tl.where(maxima == best[:, None], indices, _FAR), 1)

    drafted = j < num_drafts
    drafts = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=-1)
    num_accepted = tl.min(tl.where(drafted & (drafts == argmax), COLUMNS, j))
    next_token = tl.sum(tl.where(j == num_accepted, argmax, 0))
    _advance(
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
        accepted_out_ptr,
        next_out_ptr,
        emitted_ptr,
        kept_ptr,
        masks_ptr,
        COLUMNS,
        STOP_IDS,
    )


def verify_greedy(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: StepState,
    limits: StepLimits,
    scratch: VerifyScratch,
    out: StepOutput,
) -> None:
    """Accept the longest prefix equal to the argmax, emit the argmax after it, advance the state.

    Two launches.

    Args:
        logits_RV: float32, bfloat16 or float16; row j of a sequence predicts its draft j.
        sequences_R, start_loc: as in `TargetBatch`.
        drafts_BK: as many of them as `state.num_drafts_B` says.
        active_B: bool.
        state: before the step; changed in place.
        limits, scratch, out: see the classes.
    """
    # Without sums the kernel reads no temperature; any tensor does.
    chunk_stats(logits_RV, sequences_R, start_loc, scratch.rows, sums=False)
    num_seqs, max_drafts = drafts_BK.shape
    num_chunks = scratch.rows.chunk_max_RC.shape[1]
    _greedy_kernel[(num_seqs,)](
        start_loc,
        active_B,
        scratch.rows.chunk_max_RC,
        scratch.rows.chunk_argmax_RC,
        num_chunks,
        *_state_arguments(drafts_BK, state, limits, out),
        CHUNKS=triton.next_power_of_2(num_chunks),
        **_state_sizes(max_drafts, limits),
        num_warps=4,
    )


# ---- sampling -------------------------------------------------------------------------------


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
def _weigh_kernel(
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
    HAS_Q: tl.constexpr,
    HAS_INDEX: tl.constexpr,
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
def _draw_kernel(
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
    _advance(
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


def verify_sampled(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    sampling: SequenceSampling,
    state: StepState,
    limits: StepLimits,
    scratch: VerifyScratch,
    out: StepOutput,
    draft_probs: DraftProbs | None = None,
) -> None:
    """Rejection sampling of each sequence's drafts, its next token, its new state.

    Four launches. Draft x is accepted with min(1, p(x) / q(x)); the first rejected position is
    drawn from norm(max(p - q, 0)), after the last draft the bonus token from p. Arguments as in
    `verify_greedy`, and:

    Args:
        logits_RV: every row has a finite logit; none is +inf or NaN.
        sampling: parameters of each sequence; temperature 0 is greedy.
        draft_probs: q; None when the drafts are argmax tokens, whose q is one-hot.
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
    index_V = None if draft_probs is None else draft_probs.draft_index_V
    q: Tensor = drafts_BK if draft_probs is None else draft_probs.probs_BKD
    assert q.is_contiguous(), "kernels step over whole rows"
    chunk = chunk_size(num_seqs, vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    assert scratch.weights_BC2.shape == (num_seqs, num_chunks, 2), "buffers of another shape"
    flags = {"HAS_Q": draft_probs is not None, "HAS_INDEX": index_V is not None}
    sizes = _state_sizes(max_drafts, limits)
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
    )
    of_q = (q, drafts_BK if index_V is None else index_V, q.shape[-1], num_chunks)
    _weigh_kernel[(num_seqs, num_chunks)](
        *batch,
        drafts_BK,
        max_drafts,
        state.num_drafts_B,
        state.num_outputs_B,
        *of_q,
        scratch.weights_BC2,
        out.num_accepted_B,
        COLUMNS=sizes["COLUMNS"],
        CHUNK=chunk,
        **flags,
        num_warps=8,
    )
    _draw_kernel[(num_seqs,)](
        *batch,
        *of_q,
        scratch.weights_BC2,
        *_state_arguments(drafts_BK, state, limits, out),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        **sizes,
        **flags,
        num_warps=8,
    )
