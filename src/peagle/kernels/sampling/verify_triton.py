"""Verification of a captured decode step, and what follows from it for each sequence.

References: `speculation.verification.verify`, `kernels.drafts.step_state.advance`. The target has a
token of its own for each row (`own_tokens`); a sequence accepts its drafts while they equal these
(`match_drafts`). The first takes two launches where all are greedy: chunks of rows, then rows.
Otherwise it takes four: chunks of rows (softmax), rows (top-k, top-p, min-p), chunks of rows
(weights), rows (the draw); greedy sequences, with temperature 0, may stand in such a batch. The
second is one launch over the sequences. Drawn drafts are for `rejection_triton`.

Shapes: B sequences, K most drafts, J = K + 1, R packed rows (a bucket), V vocabulary, C chunks of a
row.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.step_state import NO_TOKEN, DecodeLimits, DecodeResult, DecodeState
from peagle.kernels.drafts.step_state_triton import advance, state_arguments, state_sizes
from peagle.kernels.launch import launch
from peagle.kernels.sampling.draw_triton import allocate_weights, draw_rows
from peagle.kernels.sampling.probabilities_triton import RowStats, chunk_stats, row_stats
from peagle.kernels.sampling.random import Purpose
from peagle.kernels.sampling.random_triton import uniform

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
    """Rates that replace verification for measurements: see `speculation.verification.verify`.

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
    """

    rows: RowStats
    weights_RC: Tensor
    tokens_R: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Self:
        """Allocate buffers for R rows."""
        return cls(
            RowStats.allocate(num_rows, vocab_size, device),
            allocate_weights(num_rows, vocab_size, device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


@triton.jit
def argmax_kernel(
    sequences_ptr, chunk_max_ptr, chunk_argmax_ptr, num_chunks, tokens_ptr, CHUNKS: tl.constexpr
):
    """Store the argmax of one row from its chunks; NO_TOKEN if the maximum is not finite."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(sequences_ptr + row) >= 0:
        c = tl.arange(0, CHUNKS)
        at = row * num_chunks + c
        maxima = tl.load(chunk_max_ptr + at, mask=c < num_chunks, other=-float("inf"))
        indices = tl.load(chunk_argmax_ptr + at, mask=c < num_chunks, other=_FAR)
        best = tl.max(maxima)
        token = tl.min(tl.where(maxima == best, indices, _FAR))
        # NaN compares as false; so does the maximum of a row of NaN alone, whichever it is.
        token = tl.where(tl.abs(best) < float("inf"), token, _NO_TOKEN)
        tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def num_accepted_synthetically(
    b, real, num_draft_tokens, rates_ptr, seeds_ptr, num_outputs_ptr, COLUMNS: tl.constexpr
):
    """a of one sequence, whatever its drafts are: how many rates lie above its one number.

    `real` is the a that the drafts deserve; it changes nothing.
    """
    j = tl.arange(0, COLUMNS)
    rates = tl.load(rates_ptr + j, mask=j < num_draft_tokens, other=0.0)
    u = uniform(tl.load(seeds_ptr + b), tl.load(num_outputs_ptr + b), _SYNTHETIC)
    num_accepted = tl.sum((u < rates.to(tl.float64)).to(tl.int32))
    # Always so, but the compiler does not know: it must leave the work for `real` in.
    return tl.where(real >= 0, num_accepted, real)


@triton.jit
def match_kernel(
    start_loc_ptr,
    active_ptr,
    tokens_ptr,
    rates_ptr,
    synthetic_seeds_ptr,
    drafts_ptr,
    max_drafts,
    last_tokens_ptr,
    first_positions_ptr,
    num_outputs_ptr,
    num_draft_tokens_ptr,
    finish_ptr,
    stop_ids_ptr,
    num_stop_ids,
    min_tokens_ptr,
    max_tokens_ptr,
    k_ptr,
    max_model_len,
    draft_end,
    accepted_out_ptr,
    next_out_ptr,
    emitted_ptr,
    kept_ptr,
    masks_ptr,
    GIVEN: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    """Accept drafts that equal the target's own tokens; the number of them may be given."""
    b = tl.program_id(0)
    is_active = tl.load(active_ptr + b) != 0
    # -1 where inactive: such a sequence has no row.
    num_draft_tokens = tl.where(is_active, tl.load(num_draft_tokens_ptr + b).to(tl.int32), -1)
    first_row = tl.load(start_loc_ptr + b).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    # Count the drafts that equal the target's own tokens.
    own = tl.load(tokens_ptr + first_row + j, mask=j <= num_draft_tokens, other=_NO_TOKEN)
    drafted = j < num_draft_tokens
    drafts = tl.load(drafts_ptr + b * max_drafts + j, mask=drafted, other=0)
    num_accepted = tl.min(tl.where(drafted & (drafts == own), COLUMNS, j))
    if GIVEN:
        num_accepted = tl.load(accepted_out_ptr + b, mask=is_active, other=0).to(tl.int32)
    if SYNTHETIC:
        num_accepted = num_accepted_synthetically(
            b,
            num_accepted,
            num_draft_tokens,
            rates_ptr,
            synthetic_seeds_ptr,
            num_outputs_ptr,
            COLUMNS,
        )
    # Move the state over them.
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
        num_draft_tokens_ptr,
        finish_ptr,
        stop_ids_ptr,
        num_stop_ids,
        min_tokens_ptr,
        max_tokens_ptr,
        k_ptr,
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


def own_tokens(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    sampling: SequenceSampling | None,
    num_outputs_B: Tensor,
    scratch: VerifyScratch,
    *,
    offsets_R: Tensor | None = None,
) -> None:
    """scratch.tokens_R = the target's own token of each row; rows of padding keep their old token.

    The own token is the argmax, or the token that `draw_rows` draws for an output. NO_TOKEN stands
    for a row of NaN and for a row whose maximum is infinite. (A row that holds NaN beside numbers
    may get either.)

    Args:
        logits_RV: float32, bfloat16 or float16.
        sequences_R, start_loc: as in `TargetBatch`.
        sampling: how each sequence samples; None: all are greedy.
        num_outputs_B: output tokens before the first row of each sequence.
        scratch: see the class.
        offsets_R: int64, the drafts before each row; None: the offsets of chains.
    """
    stats = scratch.rows
    if sampling is None:
        # Without sums the kernel reads no temperature; any tensor does.
        chunk_stats(logits_RV, sequences_R, start_loc, stats, sums=False)
        num_rows, num_chunks = stats.chunk_max_RC.shape
        launch(
            argmax_kernel,
            (num_rows,),
            sequences_R,
            stats.chunk_max_RC,
            stats.chunk_argmax_RC,
            num_chunks,
            scratch.tokens_R,
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=1,
        )
        return
    row_stats(
        logits_RV,
        sequences_R,
        sampling.temperature_B,
        sampling.top_k_B,
        sampling.top_p_B,
        sampling.min_p_B,
        stats,
    )
    draw_rows(
        logits_RV,
        sequences_R,
        start_loc,
        sampling.temperature_B,
        sampling.seeds_B,
        num_outputs_B,
        stats,
        scratch.weights_RC,
        scratch.tokens_R,
        purpose=Purpose.SAMPLE,
        offsets_R=offsets_R,
    )


def match_drafts(
    tokens_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: DecodeState,
    limits: DecodeLimits,
    out: DecodeResult,
    *,
    synthetic: SyntheticAcceptance | None = None,
    given: bool = False,
) -> None:
    """Accept drafts, emit the target's own token behind them, advance the state; one launch.

    A token of NO_TOKEN is emitted as such, see `step_state.advance`.

    Args:
        tokens_R: the target's own token of each row; row j of a sequence predicts its draft j.
        start_loc: as in `TargetBatch`.
        drafts_BK: as many of them as `state.num_draft_tokens_B` says.
        active_B: bool or integers.
        state: before the step; changed in place.
        limits, out: see the classes.
        synthetic: accept so many drafts instead; None: acceptance is real.
        given: accept the first out.num_accepted_B drafts, not the ones that equal tokens_R.
    """
    launch(
        match_kernel,
        (len(drafts_BK),),
        start_loc,
        active_B,
        tokens_R,
        *_synthetic_arguments(synthetic, drafts_BK),
        *state_arguments(drafts_BK, state, limits, out),
        GIVEN=given,
        SYNTHETIC=synthetic is not None,
        **state_sizes(drafts_BK.shape[1], limits),
        num_warps=4,
    )
