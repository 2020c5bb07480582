"""Verification of drafts in one call: parts that a captured decode step runs one by one."""

from torch import Tensor

from peagle.kernels.drafts.step_state import DecodeLimits, DecodeResult, DecodeState
from peagle.kernels.sampling.rejection_triton import DraftProbs, reject_drafts
from peagle.kernels.sampling.verify_triton import (
    SequenceSampling,
    SyntheticAcceptance,
    VerifyScratch,
    match_drafts,
    own_tokens,
)


def verify_drafts(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    drafts_BK: Tensor,
    active_B: Tensor,
    state: DecodeState,
    limits: DecodeLimits,
    scratch: VerifyScratch,
    out: DecodeResult,
    *,
    sampling: SequenceSampling | None = None,
    draft_probs: DraftProbs | None = None,
    synthetic: SyntheticAcceptance | None = None,
) -> None:
    """Verify drafts: `own_tokens`, `reject_drafts` where they were drawn, then `match_drafts`."""
    own_tokens(logits_RV, sequences_R, start_loc, sampling, state.num_outputs_B, scratch)
    batch, is_drawn = (start_loc, drafts_BK, active_B), draft_probs is not None
    if draft_probs is not None:
        assert sampling is not None, "drawn drafts are sampled"
        reject_drafts(
            logits_RV,
            *batch,
            state,
            scratch,
            out.num_accepted_B,
            sampling=sampling,
            draft_probs=draft_probs,
            replaces=synthetic is None,
        )
    match_drafts(scratch.tokens_R, *batch, state, limits, out, synthetic=synthetic, given=is_drawn)
