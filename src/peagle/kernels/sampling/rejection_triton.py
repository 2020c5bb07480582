"""Verification of drawn drafts in a captured decode step: rejection sampling of whole blocks.

The reference is `speculation.verification.verify` with `draft_probs_BKV`, which says what p_j is.
`verify_triton` draws the target's own token of each row, then `reject_drafts` counts the drafts
that pass and replaces the token behind them, and `verify_triton.match_drafts` takes its count.

Shapes: B sequences, K most drafts, R packed rows, V vocabulary, D draft vocabulary, C chunks of a
row.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.step_state import NO_TOKEN, DecodeState
from peagle.kernels.launch import launch
from peagle.kernels.sampling.draw_triton import draw_chunk, kept_weights, pick_item
from peagle.kernels.sampling.random import DRAWS_PER_STEP, Purpose
from peagle.kernels.sampling.random_triton import uniform
from peagle.kernels.sampling.search_triton import is_kept, temperature_rate, weights_of
from peagle.kernels.sampling.verify_triton import SequenceSampling, VerifyScratch

_PER_STEP = tl.constexpr(DRAWS_PER_STEP)
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
    share,
    HAS_INDEX: tl.constexpr,
):
    """max(share * p - q, 0) of tokens v in one row."""
    p = kept_weights(row_ptr, v, vocab_size, best, temperature, threshold, last_tie) / total
    index = v
    inside = v < vocab_size
    if HAS_INDEX:
        index = tl.load(index_ptr + v, mask=inside, other=-1)
    q = tl.load(q_ptr + index, mask=inside & (index >= 0), other=0.0)
    return tl.maximum(share.to(tl.float32) * p - q, 0.0)


@triton.jit
def _load_drafts(
    b,
    j,  # [COLUMNS]
    logits_ptr,
    row_stride,
    start_loc_ptr,
    temperature_ptr,
    num_draft_tokens_ptr,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    tokens_ptr,
    q_ptr,
    q_stride,
    index_ptr,
    draft_vocab,
    drafts_ptr,
    max_drafts,
    HAS_INDEX: tl.constexpr,
):
    """Load p and q of a sequence's drafts, whether each was drawn, and whether it is the target's
    own token; and how many can pass: the drafts before the first row without an own token.
    """
    temperature = tl.load(temperature_ptr + b)
    drafted = j < tl.load(num_draft_tokens_ptr + b)
    rows = tl.load(start_loc_ptr + b).to(tl.int64) + j
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
    own = tl.load(tokens_ptr + rows, mask=drafted, other=_NO_TOKEN)
    num_sound = tl.min(tl.where(own == _NO_TOKEN, j, j + j.shape[0]))
    return p.to(tl.float64), q.to(tl.float64), is_drawn, x == own, num_sound


@triton.jit
def _shares(j, p, q, is_drawn, num_draft_tokens):
    """p_j of block verification before draft j and behind it; 1 where a draft was not drawn."""
    is_block = tl.min(tl.where(is_drawn | (j >= num_draft_tokens), 1, 0)) > 0
    ratio = tl.where(is_drawn, p / tl.where(is_drawn, q, 1.0), 1.0)
    share = tl.full((), 1.0, tl.float64)
    before = tl.full(j.shape, 1.0, tl.float64)
    behind = before
    if is_block:
        for i in range(num_draft_tokens):
            before = tl.where(j == i, share, before)
            share = tl.minimum(share * tl.sum(tl.where(j == i, ratio, 0.0)), 1.0)
            behind = tl.where(j == i, share, behind)
    return is_block, before, behind


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
    num_draft_tokens_ptr,
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
    """Store the sum of max(p_j p - q, 0) in one chunk of the row of each draft j that can pass."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(active_ptr + b) != 0:
        # Load p and q of the drafts.
        j = tl.arange(0, COLUMNS)
        p, q, is_drawn, _is_own, num_sound = _load_drafts(
            b, j, logits_ptr, row_stride, start_loc_ptr, temperature_ptr, num_draft_tokens_ptr,
            max_ptr, threshold_ptr, last_tie_ptr, total_ptr, tokens_ptr, q_ptr, q_stride, index_ptr,
            draft_vocab, drafts_ptr, max_drafts, HAS_INDEX,
        )  # fmt: skip
        num_draft_tokens = tl.load(num_draft_tokens_ptr + b)
        _is_block, before, _behind = _shares(j, p, q, is_drawn, num_draft_tokens)
        first_row = tl.load(start_loc_ptr + b).to(tl.int64)
        # Sum what the target gives above the drafter in this chunk, row by row.
        for i in range(tl.minimum(num_sound, num_draft_tokens)):
            row = first_row + i
            weight = tl.full((), 0.0, tl.float64)
            if tl.max(tl.where(is_drawn & (j == i), 1, 0)) > 0:
                leftover = _leftover(
                    logits_ptr + row * row_stride,
                    q_ptr + b.to(tl.int64) * q_stride + i * draft_vocab,
                    index_ptr,
                    chunk * CHUNK + tl.arange(0, CHUNK),
                    vocab_size,
                    tl.load(max_ptr + row),
                    tl.load(temperature_ptr + b),
                    tl.load(threshold_ptr + row),
                    tl.load(last_tie_ptr + row),
                    tl.load(total_ptr + row),
                    tl.sum(tl.where(j == i, before, 0.0)),
                    HAS_INDEX,
                )
                weight = tl.sum(leftover.to(tl.float64))
            tl.store(weights_ptr + row * num_chunks + chunk, weight)


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
    num_draft_tokens_ptr,
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
    REPLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """a of a sequence; replace the token of row a by a draw from max(p_a p - q, 0), where a drawn
    draft was rejected.
    """
    b = tl.program_id(0)
    if tl.load(active_ptr + b) != 0:
        # Load p and q of the drafts.
        j = tl.arange(0, COLUMNS)
        p, q, is_drawn, is_own, num_sound = _load_drafts(
            b, j, logits_ptr, row_stride, start_loc_ptr, temperature_ptr, num_draft_tokens_ptr,
            max_ptr, threshold_ptr, last_tie_ptr, total_ptr, tokens_ptr, q_ptr, q_stride, index_ptr,
            draft_vocab, drafts_ptr, max_drafts, HAS_INDEX,
        )  # fmt: skip
        num_draft_tokens = tl.load(num_draft_tokens_ptr + b)
        is_block, before, behind = _shares(j, p, q, is_drawn, num_draft_tokens)
        can_pass = j < tl.minimum(num_sound, num_draft_tokens)
        first_row = tl.load(start_loc_ptr + b).to(tl.int64)
        position = tl.load(num_outputs_ptr + b)
        seed = tl.load(seeds_ptr + b)
        # Count the accepted drafts.
        u = uniform(seed + j * 0, position * _PER_STEP + j, _ACCEPT)
        c = tl.arange(0, CHUNKS)
        if is_block:
            has_next = j + 1 < tl.minimum(num_sound, num_draft_tokens)
            next_ptrs = weights_ptr + (first_row + j + 1)[:, None] * num_chunks + c[None, :]
            mask = has_next[:, None] & (c < num_chunks)[None, :]
            rest = tl.sum(tl.load(next_ptrs, mask=mask, other=0.0), 1)
            # p_j = 1 always passes, also where nothing is left over behind it.
            lost = tl.where(behind < 1, 1.0 - behind, 1.0)
            stays = tl.where(behind < 1, rest / (rest + lost), 1.0)
            passes = can_pass & (u < tl.where(has_next, stays, behind))
            num_accepted = tl.max(tl.where(passes, j + 1, 0))
        else:
            passes = can_pass & tl.where(is_drawn, u * q < p, is_own)
            num_accepted = tl.min(tl.where(passes, COLUMNS, j))
        tl.store(accepted_ptr + b, num_accepted.to(tl.int64))
        # Weigh the leftover of the row behind them.
        is_rejected = tl.max(tl.where(is_drawn & can_pass & (j == num_accepted), 1, 0))
        row = first_row + num_accepted
        mask = c < num_chunks * is_rejected
        sums = tl.load(weights_ptr + row * num_chunks + c, mask=mask, other=0.0)
        total = tl.sum(sums)
        # p = q to the last bit leaves nothing over: then the draw from p stays, as in the
        # reference. NaN compares as false.
        if total > 0:
            # Draw the replacement: first the chunk, then the token in it.
            target = uniform(seed, position + num_accepted, _SAMPLE) * total
            chunk, passed = pick_item(sums, c, target)
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
                tl.sum(tl.where(j == num_accepted, before, 0.0)),
                HAS_INDEX,
            )
            token, _before = pick_item(leftover, v, target - passed)
            is_wanted = num_accepted >= 0
            if not REPLACES:
                is_wanted = num_accepted < 0  # never, unknown to the compiler
            tl.store(tokens_ptr + row, token.to(tl.int64), mask=is_wanted)


def reject_drafts(
    logits_RV: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: DecodeState,
    scratch: VerifyScratch,
    num_accepted_B: Tensor,
    *,
    sampling: SequenceSampling,
    draft_probs: DraftProbs,
    replaces: bool = True,
) -> None:
    """num_accepted_B = the drafts that pass; replace the target's own token behind them.

    Drafts that were all drawn are verified as a block, others one by one: draft x passes with
    min(1, p(x) / q(x)), or where it was not drawn and equals the target's own token. Two launches.

    Args:
        logits_RV: as `own_tokens` got them.
        start_loc: first row of each active sequence.
        drafts_BK: as many of them as `state.num_draft_tokens_B` says.
        active_B: bool or integers; the others keep their `num_accepted_B`.
        state: before the step.
        scratch: the result of `own_tokens` with this `sampling`; its tokens change.
        num_accepted_B: int64.
        replaces: whether the token behind a rejected draft is replaced.
    """
    rows, q_BKD, index_V = scratch.rows, draft_probs.probs_BKD, draft_probs.draft_index_V
    assert q_BKD.stride()[1:] == (q_BKD.shape[2], 1), "kernels step over whole rows"
    num_seqs, max_drafts = drafts_BK.shape
    # The draws are done with the weights of their rows.
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
        state.num_draft_tokens_B,
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
        drafts_BK,
    )
    sizes = {
        "HAS_INDEX": index_V is not None,
        "COLUMNS": triton.next_power_of_2(max_drafts + 1),
        "CHUNK": draw_chunk(logits_RV.shape[1]),
    }
    launch(weigh_rejected_kernel, (num_seqs, num_chunks), *arguments, **sizes)
    launch(
        draw_rejected_kernel,
        (num_seqs,),
        *arguments,
        REPLACES=replaces,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **sizes,
    )
