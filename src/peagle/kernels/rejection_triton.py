"""Verification of drawn drafts in a captured decode step: rejection sampling.

The reference is `speculation.verification.verify` with `draft_probs_BKV`. `verify_triton` draws the
target's own token of each row, then `reject_drafts` counts the drafts that pass by p / q and
replaces the token behind them, and `verify_triton.match_drafts` takes its count.

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
from peagle.kernels.search_triton import is_kept, temperature_rate, weights_of
from peagle.kernels.step_state import NO_TOKEN, StepState
from peagle.kernels.verify_triton import (
    SequenceSampling,
    VerifyScratch,
)

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """q of drafts that were drawn, in the draft vocabulary.

    Attributes:
        probs_BKD: float32, the distributions of a sequence one behind the other; 0 for a draft that
            was not drawn. Not read at or above a sequence's number of drafts, nor of sequences of
            temperature 0.
        draft_index_V: int32, draft id of each target id, -1 for ids that cannot be drafted; None
            where both vocabularies are one.
    """

    probs_BKD: Tensor
    draft_index_V: Tensor | None = None


@triton.jit
def _leftover(
    row_ptr,
    q_ptr,
    index_ptr,
    v,
    vocab_size,
    best,
    temperature,
    threshold,
    last_tie,
    total,
    HAS_INDEX: tl.constexpr,
):
    """max(p - q, 0) of tokens v in one row."""
    p = kept_weights(row_ptr, v, vocab_size, best, temperature, threshold, last_tie) / total
    index = v
    inside = v < vocab_size
    if HAS_INDEX:
        index = tl.load(index_ptr + v, mask=inside, other=-1)
    q = tl.load(q_ptr + index, mask=inside & (index >= 0), other=0.0)
    return tl.maximum(p - q, 0.0)


@triton.jit
def weigh_rejected_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    start_loc_ptr,
    active_ptr,
    temperature_ptr,
    seeds_ptr,
    num_outputs_ptr,
    num_drafts_ptr,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    tokens_ptr,
    q_ptr,
    q_stride,
    index_ptr,
    draft_vocab,
    weights_ptr,
    num_chunks,
    accepted_ptr,
    max_drafts,
    drafts_ptr,
    HAS_INDEX: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """a of a sequence, and the weight of max(p - q, 0) in one chunk of row a.

    The weight is 0 where no draft was rejected that was drawn. Where the target's own token is
    NO_TOKEN its logits mean nothing, and no draft passes.
    """
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(active_ptr + b) != 0:
        first_row = tl.load(start_loc_ptr + b).to(tl.int64)
        temperature = tl.load(temperature_ptr + b)
        j = tl.arange(0, COLUMNS)
        drafted = j < tl.load(num_drafts_ptr + b)
        rows = first_row + j
        x = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=0).to(tl.int64)
        logits = tl.load(logits_ptr + rows * row_stride + x, mask=drafted, other=0.0)
        best = tl.load(max_ptr + rows, mask=drafted, other=0.0)
        weights = weights_of(logits, best, temperature_rate(temperature))
        threshold = tl.load(threshold_ptr + rows, mask=drafted, other=0)
        last_tie = tl.load(last_tie_ptr + rows, mask=drafted, other=0)
        total = tl.load(total_ptr + rows, mask=drafted, other=1.0)
        p = tl.where(is_kept(weights, x, threshold, last_tie), weights / total, 0.0)
        index = x
        if HAS_INDEX:
            index = tl.load(index_ptr + x, mask=drafted, other=-1).to(tl.int64)
        at = b.to(tl.int64) * q_stride + j * draft_vocab + index
        q = tl.load(q_ptr + at, mask=drafted & (index >= 0), other=0.0)
        is_drawn = tl.where(temperature == 0, 0.0, q) > 0
        u = uniform(tl.load(seeds_ptr + b) + j * 0, tl.load(num_outputs_ptr + b) + j, _ACCEPT)
        passes = u * q.to(tl.float64) < p.to(tl.float64)
        own = tl.load(tokens_ptr + rows, mask=drafted, other=_NO_TOKEN)
        is_sound = drafted & (own != _NO_TOKEN)
        accepted = is_sound & tl.where(is_drawn, passes, x == own)
        num_accepted = tl.min(tl.where(accepted, COLUMNS, j))
        if chunk == 0:
            tl.store(accepted_ptr + b, num_accepted.to(tl.int64))
        weight = tl.full((), 0.0, tl.float64)
        if tl.max(tl.where(is_sound & is_drawn & (j == num_accepted), 1, 0)) > 0:
            row = first_row + num_accepted
            leftover = _leftover(
                logits_ptr + row * row_stride,
                q_ptr + b.to(tl.int64) * q_stride + num_accepted * draft_vocab,
                index_ptr,
                chunk * CHUNK + tl.arange(0, CHUNK),
                vocab_size,
                tl.load(max_ptr + row),
                temperature,
                tl.load(threshold_ptr + row),
                tl.load(last_tie_ptr + row),
                tl.load(total_ptr + row),
                HAS_INDEX,
            )
            weight = tl.sum(leftover.to(tl.float64))
        tl.store(weights_ptr + first_row * num_chunks + chunk, weight)


@triton.jit
def draw_rejected_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    start_loc_ptr,
    active_ptr,
    temperature_ptr,
    seeds_ptr,
    num_outputs_ptr,
    num_drafts_ptr,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    tokens_ptr,
    q_ptr,
    q_stride,
    index_ptr,
    draft_vocab,
    weights_ptr,
    num_chunks,
    accepted_ptr,
    max_drafts,
    HAS_INDEX: tl.constexpr,
    REPLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Replace the token of row a by a draw from max(p - q, 0), where a drawn draft was rejected."""
    b = tl.program_id(0)
    if tl.load(active_ptr + b) != 0:
        first_row = tl.load(start_loc_ptr + b)
        c = tl.arange(0, CHUNKS)
        sums = tl.load(weights_ptr + first_row * num_chunks + c, mask=c < num_chunks, other=0.0)
        total = tl.sum(sums)
        # p = q to the last bit leaves nothing over: then the draw from p stays, as in the
        # reference. NaN compares as false.
        if total > 0:
            num_accepted = tl.load(accepted_ptr + b)
            row = first_row + num_accepted
            position = tl.load(num_outputs_ptr + b) + num_accepted
            target = uniform(tl.load(seeds_ptr + b), position, _SAMPLE) * total
            chunk, before = pick(sums, c, target)
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            leftover = _leftover(
                logits_ptr + row * row_stride,
                q_ptr + b.to(tl.int64) * q_stride + num_accepted * draft_vocab,
                index_ptr,
                v,
                vocab_size,
                tl.load(max_ptr + row),
                tl.load(temperature_ptr + b),
                tl.load(threshold_ptr + row),
                tl.load(last_tie_ptr + row),
                tl.load(total_ptr + row),
                HAS_INDEX,
            )
            token, _before = pick(leftover, v, target - before)
            is_wanted = num_accepted >= 0
            if not REPLACES:
                is_wanted = num_accepted < 0  # never, unknown to the compiler
            tl.store(tokens_ptr + row, token.to(tl.int64), mask=is_wanted)


def reject_drafts(
    logits_RV: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: StepState,
    scratch: VerifyScratch,
    num_accepted_B: Tensor,
    *,
    sampling: SequenceSampling,
    draft_probs: DraftProbs,
    replaces: bool = True,
) -> None:
    """num_accepted_B = the drafts that pass; replace the target's own token behind them.

    Draft x passes with min(1, p(x) / q(x)); the first rejected position is drawn from
    norm(max(p - q, 0)). A draft that was not drawn passes where it equals the target's own token.
    Two launches.

    Args:
        logits_RV: as `own_tokens` got them.
        start_loc: first row of each active sequence.
        drafts_BK: as many of them as `state.num_drafts_B` says.
        active_B: bool or integers; the others keep what `num_accepted_B` holds.
        state: before the step.
        scratch: what `own_tokens` found with this `sampling`; its tokens change.
        num_accepted_B: int64.
        replaces: whether the token behind a rejected draft is replaced.
    """
    rows, q_BKD, index_V = scratch.rows, draft_probs.probs_BKD, draft_probs.draft_index_V
    assert q_BKD.stride()[1:] == (q_BKD.shape[2], 1), "kernels step over whole rows"
    num_seqs, max_drafts = drafts_BK.shape
    # The draws are done with the weights of their rows: those of its first row are a sequence's.
    num_chunks = scratch.weights_RC.shape[1]
    arguments = (
        logits_RV,
        logits_RV.stride(0),
        logits_RV.shape[1],
        start_loc,
        active_B,
        sampling.temperature_B,
        sampling.seeds_B,
        state.num_outputs_B,
        state.num_drafts_B,
        rows.max_R,
        rows.threshold_R,
        rows.last_tie_R,
        rows.total_R,
        scratch.tokens_R,
        q_BKD,
        q_BKD.stride(0),
        drafts_BK if index_V is None else index_V,
        q_BKD.shape[2],
        scratch.weights_RC,
        num_chunks,
        num_accepted_B,
        max_drafts,
    )
    sizes = {"HAS_INDEX": index_V is not None, "CHUNK": draw_chunk(logits_RV.shape[1])}
    columns = triton.next_power_of_2(max_drafts + 1)
    grid = (num_seqs, num_chunks)
    launch(weigh_rejected_kernel, grid, *arguments, drafts_BK, COLUMNS=columns, **sizes)
    launch(
        draw_rejected_kernel,
        (num_seqs,),
        *arguments,
        REPLACES=replaces,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **sizes,
    )
