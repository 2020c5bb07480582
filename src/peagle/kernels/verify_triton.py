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

from peagle.kernels.launch import launch
from peagle.kernels.rejection_triton import draw_kernel, num_accepted_synthetically, weigh_kernel
from peagle.kernels.sampling_triton import RowStats, chunk_size, chunk_stats, row_stats
from peagle.kernels.step_state import NO_TOKEN, StepLimits, StepRecord, StepState
from peagle.kernels.step_state_triton import advance, state_arguments, state_sizes

_FAR = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


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
class SyntheticAcceptance:
    """How many drafts pass, whatever they are: see `speculation.verification.verify`.

    Attributes:
        rates_K: float32, at least one a draft; must not rise.
        seeds_B: int64, of each sequence.
    """

    rates_K: Tensor
    seeds_B: Tensor


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
        """Allocate buffers for B sequences in R rows."""
        chunks = triton.cdiv(vocab_size, chunk_size(num_seqs, vocab_size))
        weights = torch.zeros(num_seqs, chunks, 2, dtype=torch.float64, device=device)
        return cls(RowStats.allocate(num_rows, vocab_size, device), weights)


@triton.jit
def _greedy_kernel(
    start_loc_ptr,
    active_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    num_chunks,
    rates_ptr,
    synthetic_seeds_ptr,
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
    SYNTHETIC: tl.constexpr,
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
    if SYNTHETIC:
        num_accepted = num_accepted_synthetically(
            b, num_accepted, num_drafts, rates_ptr, synthetic_seeds_ptr, num_outputs_ptr, COLUMNS
        )
    next_token = tl.sum(tl.where(j == num_accepted, argmax, 0))
    # NaN compares as false; so does the maximum of a row of NaN alone, whichever it is.
    peak = tl.sum(tl.where(j == num_accepted, best, 0.0))
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
        accepted_out_ptr,
        next_out_ptr,
        emitted_ptr,
        kept_ptr,
        masks_ptr,
        COLUMNS,
        STOP_IDS,
    )


def _synthetic_arguments(
    synthetic: SyntheticAcceptance | None, drafts_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rates and seeds; any tensor where the kernel reads none."""
    if synthetic is None:
        return drafts_BK, drafts_BK
    assert len(synthetic.rates_K) >= drafts_BK.shape[1], "a rate for every draft"
    return synthetic.rates_K, synthetic.seeds_B


def verify_greedy(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: StepState,
    limits: StepLimits,
    scratch: VerifyScratch,
    out: StepRecord,
    *,
    synthetic: SyntheticAcceptance | None = None,
) -> None:
    """Accept the longest prefix equal to the argmax, emit the argmax after it, advance the state.

    A row of NaN, or whose maximum is infinite, emits NO_TOKEN, see `step_state.advance`. (A row
    that holds NaN beside numbers may do so or not.) Two launches.

    Args:
        logits_RV: float32, bfloat16 or float16; row j of a sequence predicts its draft j.
        sequences_R, start_loc: as in `TargetBatch`.
        drafts_BK: as many of them as `state.num_drafts_B` says.
        active_B: bool.
        state: before the step; changed in place.
        limits, scratch, out: see the classes.
        synthetic: accept so many drafts instead; None: acceptance is real.
    """
    # Without sums the kernel reads no temperature; any tensor does.
    chunk_stats(logits_RV, sequences_R, start_loc, scratch.rows, sums=False)
    num_seqs, max_drafts = drafts_BK.shape
    num_chunks = scratch.rows.chunk_max_RC.shape[1]
    launch(
        _greedy_kernel,
        (num_seqs,),
        start_loc,
        active_B,
        scratch.rows.chunk_max_RC,
        scratch.rows.chunk_argmax_RC,
        num_chunks,
        *_synthetic_arguments(synthetic, drafts_BK),
        *state_arguments(drafts_BK, state, limits, out),
        SYNTHETIC=synthetic is not None,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **state_sizes(max_drafts, limits),
        num_warps=4,
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
    out: StepRecord,
    draft_probs: DraftProbs | None = None,
    *,
    synthetic: SyntheticAcceptance | None = None,
) -> None:
    """Rejection sampling of each sequence's drafts, its next token, its new state.

    Four launches. Draft x is accepted with min(1, p(x) / q(x)); the first rejected position is
    drawn from norm(max(p - q, 0)), after the last draft the bonus token from p. Arguments as in
    `verify_greedy`, and:

    Args:
        logits_RV: of the rows as in `verify_greedy`.
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
    flags = {
        "HAS_Q": draft_probs is not None,
        "HAS_INDEX": index_V is not None,
        "SYNTHETIC": synthetic is not None,
    }
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
    )
    of_q = (q, drafts_BK if index_V is None else index_V, q.shape[-1], num_chunks)
    launch(
        weigh_kernel,
        (num_seqs, num_chunks),
        *batch,
        drafts_BK,
        max_drafts,
        state.num_drafts_B,
        state.num_outputs_B,
        *of_q,
        scratch.weights_BC2,
        out.num_accepted_B,
        *_synthetic_arguments(synthetic, drafts_BK),
        COLUMNS=sizes["COLUMNS"],
        CHUNK=chunk,
        **flags,
        num_warps=8,
    )
    launch(
        draw_kernel,
        (num_seqs,),
        *batch,
        *of_q,
        scratch.weights_BC2,
        *state_arguments(drafts_BK, state, limits, out),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        **sizes,
        **flags,
        num_warps=8,
    )
