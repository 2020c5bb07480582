"""Lossless verification: the output is distributed exactly as the target alone would give it.

Speculative sampling of Leviathan et al. (2023) and Chen et al. (2023). Shapes: B sequences, K most
drafts of a sequence, J = K + 1, R packed target rows (k_b + 1 of each sequence), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.logits_rules import VerificationRows
from peagle.kernels.random import Purpose, uniform
from peagle.kernels.sampling import probs_from_logits, sample_from_weights


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch, one entry a sequence.

    Attributes:
        temperature_B, top_k_B, top_p_B: as in SamplingParams.
        seeds_B: int64.
        num_outputs_B: int64, tokens that the sequence has generated so far.
        all_greedy: every temperature is 0; known to the host.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seeds_B: Tensor
    num_outputs_B: Tensor
    all_greedy: bool

    def probs(self, logits_NV: Tensor, sequences_N: Tensor) -> Tensor:
        """Target probabilities of rows that belong to the given sequences, [N, V]."""
        return probs_from_logits(
            logits_NV,
            self.temperature_B[sequences_N],
            self.top_k_B[sequences_N],
            self.top_p_B[sequences_N],
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification decided.

    Attributes:
        num_accepted_B: a_b, drafts accepted.
        next_tokens_B: the target's own token after them.
    """

    num_accepted_B: Tensor
    next_tokens_B: Tensor


def verify(
    logits_RV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    draft_probs_BKV: Tensor | None = None,
    synthetic_rates_K: Tensor | None = None,
) -> Verified:
    """Accept a prefix of each sequence's drafts and emit one token of the target's own.

    Greedy: the longest prefix equal to the target's argmax. Sampled: draft x at each position is
    accepted with min(1, p(x) / q(x)); the first rejected position is drawn from
    norm(max(p - q, 0)), or after K acceptances the bonus token from p.

    Synthetic acceptance measures speed with random weights, as in vLLM; the output is then NOT
    what the target would say. a_b = #{i in 1..k_b : u < r_i} with one number u of the step, and
    the target's own token is the argmax or a draw from p in the row behind those drafts. All else
    is computed as ever, so that a step takes the time that it would take.

    Args:
        logits_RV: target logits; row j of a sequence predicts its draft j (the last, the bonus).
        draft_probs_BKV: q in the target vocabulary; None when the drafts are argmax tokens, whose
            q is one-hot. Not read at or above a sequence's number of drafts.
        synthetic_rates_K: float32, r_1 to r_K: the probability that at least i drafts are accepted
            where so many were made; must not rise. None: acceptance is real.
    """
    if sampling.all_greedy:
        return _verify_greedy(logits_RV, rows, sampling, synthetic_rates_K)
    target_probs_RV = sampling.probs(logits_RV, rows.sequences_R)
    p_BK = target_probs_RV[rows.rows_BJ[:, :-1], rows.drafts_BK]
    q_BK = torch.ones_like(p_BK)
    if draft_probs_BKV is not None:
        q_BK = draft_probs_BKV.gather(2, rows.drafts_BK.unsqueeze(2)).squeeze(2)
    position_BK = sampling.num_outputs_B.unsqueeze(1) + rows.columns_J[:-1]
    u_BK = uniform(sampling.seeds_B.unsqueeze(1), position_BK, Purpose.ACCEPT)
    accepted_BK = (u_BK * q_BK < p_BK) & rows.drafted_BK
    if synthetic_rates_K is not None:
        accepted_BK = _accepted_synthetically(rows, sampling, synthetic_rates_K)
    num_accepted_B = _prefix_length(accepted_BK)
    weights_BV = target_probs_RV[rows.first_row_B + num_accepted_B]
    if rows.max_drafts > 0:
        at_B = num_accepted_B.clamp_max(rows.max_drafts - 1)
        batch_B = torch.arange(at_B.shape[0], device=at_B.device)
        if draft_probs_BKV is not None:
            q_BV = draft_probs_BKV[batch_B, at_B]
        else:
            token_B1 = rows.drafts_BK[batch_B, at_B].unsqueeze(1)
            q_BV = torch.zeros_like(weights_BV).scatter_(1, token_B1, 1.0)
        leftover_BV = (weights_BV - q_BV).clamp_min(0)
        # p = q to the last bit leaves nothing over; rejection then has probability 0 but for
        # rounding, and p itself is the right answer.
        rejected_B = num_accepted_B < rows.num_drafts_B
        usable_B1 = (rejected_B & (leftover_BV.sum(-1) > 0)).unsqueeze(1)
        if synthetic_rates_K is None:
            weights_BV = torch.where(usable_B1, leftover_BV, weights_BV)
    position_B = sampling.num_outputs_B + num_accepted_B
    u_B = uniform(sampling.seeds_B, position_B, Purpose.SAMPLE)
    return Verified(num_accepted_B, sample_from_weights(weights_BV, u_B))


def _verify_greedy(
    logits_RV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    synthetic_rates_K: Tensor | None,
) -> Verified:
    best_R = logits_RV.argmax(-1)
    if rows.max_drafts == 0:
        return Verified(torch.zeros_like(best_R), best_R)
    best_BJ = best_R[rows.rows_BJ]
    accepted_BK = (best_BJ[:, :-1] == rows.draft_tokens_BK) & rows.drafted_BK
    if synthetic_rates_K is not None:
        accepted_BK = _accepted_synthetically(rows, sampling, synthetic_rates_K)
    num_accepted_B = _prefix_length(accepted_BK)
    next_B = best_BJ.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return Verified(num_accepted_B, next_B)


def _accepted_synthetically(
    rows: VerificationRows, sampling: SamplingTensors, rates_K: Tensor
) -> Tensor:
    """Which drafts pass, whatever they are; a prefix, as the rates do not rise. Bool [B, K]."""
    assert len(rates_K) >= rows.max_drafts, "a rate for every draft"
    u_B = uniform(sampling.seeds_B, sampling.num_outputs_B, Purpose.SYNTHETIC)
    return (u_B.unsqueeze(1) < rates_K[: rows.max_drafts]) & rows.drafted_BK


def _prefix_length(accepted_BK: Tensor) -> Tensor:
    return accepted_BK.long().cumprod(-1).sum(-1)
