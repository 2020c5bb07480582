"""Verification of a captured decode step, and what follows from it for each sequence.

References: `speculation.verification.verify`, `kernels.step_state.advance`. The target has a token
of its own for each row; a sequence accepts its drafts while they equal these. Greedy takes two
launches: chunks of rows, then sequences. Sampling takes five: chunks of rows (softmax), rows
(top-k, top-p, min-p), chunks of rows (weights), rows (the draw), sequences. Greedy sequences, with
temperature 0, may stand in a sampled batch. Drawn drafts are for `rejection_triton`.

Shapes: B sequences, K most drafts, J = K + 1, R packed rows (a bucket), V vocabulary, C chunks of a
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draw_triton import allocate_weights, draw_rows
from peagle.kernels.launch import launch
from peagle.kernels.random import Purpose
from peagle.kernels.random_triton import uniform
from peagle.kernels.sampling_triton import RowStats, chunk_stats, row_stats
from peagle.kernels.step_state import NO_TOKEN, StepLimits, StepRecord, StepState
from peagle.kernels.step_state_triton import advance, state_arguments, state_sizes

_FAR = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_SYNTHETIC = tl.constexpr(int(Purpose.SYNTHETIC))


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
        weights_RC: float64, of each chunk of each row.
        tokens_R: int64, the target's own.
        leftover_BC2: float64, of each chunk of the row that emits: of p, and of max(p - q, 0).
    """

    rows: RowStats
    weights_RC: Tensor
    tokens_R: Tensor
    leftover_BC2: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, num_rows: int, vocab_size: int, device: torch.device | str
    ) -> VerifyScratch:
        """Allocate buffers for B sequences in R rows."""
        weights_RC = allocate_weights(num_rows, vocab_size, device)
        return cls(
            RowStats.allocate(num_rows, vocab_size, device),
            weights_RC,
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            weights_RC.new_zeros(num_seqs, weights_RC.shape[1], 2),
        )


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
def match_kernel(
    start_loc_ptr,
    active_ptr,
    tokens_ptr,
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
    DRAWN: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    """Accept drafts that equal the target's own tokens: those drawn, or the argmax of chunks."""
    b = tl.program_id(0)
    is_active = tl.load(active_ptr + b) != 0
    # -1 where inactive: such a sequence has no row.
    num_drafts = tl.where(is_active, tl.load(num_drafts_ptr + b).to(tl.int32), -1)
    first_row = tl.load(start_loc_ptr + b).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    if DRAWN:
        own = tl.load(tokens_ptr + first_row + j, mask=j <= num_drafts, other=_NO_TOKEN)
    else:
        c = tl.arange(0, CHUNKS)
        inside = (j[:, None] <= num_drafts) & (c[None, :] < num_chunks)
        at = (first_row + j[:, None]) * num_chunks + c[None, :]
        maxima = tl.load(chunk_max_ptr + at, mask=inside, other=-float("inf"))
        indices = tl.load(chunk_argmax_ptr + at, mask=inside, other=_FAR)
        best = tl.max(maxima, 1)
        own = tl.min(tl.where(maxima == best[:, None], indices, _FAR), 1)
        # NaN compares as false; so does the maximum of a row of NaN alone, whichever it is.
        own = tl.where(tl.abs(best) < float("inf"), own, _NO_TOKEN)

    drafted = j < num_drafts
    drafts = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=0)
    num_accepted = tl.min(tl.where(drafted & (drafts == own), COLUMNS, j))
    if SYNTHETIC:
        num_accepted = num_accepted_synthetically(
            b, num_accepted, num_drafts, rates_ptr, synthetic_seeds_ptr, num_outputs_ptr, COLUMNS
        )
    next_token = tl.sum(tl.where(j == num_accepted, own, 0))
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


def synthetic_arguments(
    synthetic: SyntheticAcceptance | None, drafts_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rates and seeds; any tensor where the kernel reads none."""
    if synthetic is None:
        return drafts_BK, drafts_BK
    assert len(synthetic.rates_K) >= drafts_BK.shape[1], "a rate for every draft"
    return synthetic.rates_K, synthetic.seeds_B


def _match(
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: StepState,
    limits: StepLimits,
    scratch: VerifyScratch,
    out: StepRecord,
    synthetic: SyntheticAcceptance | None,
    *,
    drawn: bool,
) -> None:
    num_seqs, max_drafts = drafts_BK.shape
    num_chunks = scratch.rows.chunk_max_RC.shape[1]
    launch(
        match_kernel,
        (num_seqs,),
        start_loc,
        active_B,
        scratch.tokens_R,
        scratch.rows.chunk_max_RC,
        scratch.rows.chunk_argmax_RC,
        num_chunks,
        *synthetic_arguments(synthetic, drafts_BK),
        *state_arguments(drafts_BK, state, limits, out),
        DRAWN=drawn,
        SYNTHETIC=synthetic is not None,
        CHUNKS=triton.next_power_of_2(num_chunks),
        **state_sizes(max_drafts, limits),
        num_warps=4,
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
    _match(start_loc, drafts_BK, active_B, state, limits, scratch, out, synthetic, drawn=False)


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
    *,
    synthetic: SyntheticAcceptance | None = None,
) -> None:
    """Draw a token from each row, accept the longest prefix of drafts that equals them, and so on.

    Five launches. Rows and arguments as in `verify_greedy`; temperature 0 of `sampling` is greedy.
    Which token a row draws, and how little other rows change it, says `draw_rows`.
    """
    row_stats(
        logits_RV,
        sequences_R,
        sampling.temperature_B,
        sampling.top_k_B,
        sampling.top_p_B,
        sampling.min_p_B,
        scratch.rows,
    )
    draw_rows(
        logits_RV,
        sequences_R,
        start_loc,
        sampling.temperature_B,
        sampling.seeds_B,
        state.num_outputs_B,
        scratch.rows,
        scratch.weights_RC,
        scratch.tokens_R,
        purpose=Purpose.SAMPLE,
    )
    _match(start_loc, drafts_BK, active_B, state, limits, scratch, out, synthetic, drawn=True)
