"""Lossless verification: the output is distributed exactly as the target alone would give it.

Speculative sampling of Leviathan et al. (2023) and Chen et al. (2023). Shapes: B sequences, K most
drafts of a sequence, R packed target rows (k_b + 1 of each sequence), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    draft_tokens_BK: Tensor,
    num_drafts_B: Tensor,
    sampling: SamplingTensors,
    draft_probs_BKV: Tensor | None = None,
) -> Verified:
    """Accept a prefix of each sequence's drafts and emit one token of the target's own.

    Greedy: the longest prefix equal to the target's argmax. Sampled: draft x at each position is
    accepted with min(1, p(x) / q(x)); the first rejected position is drawn from
    norm(max(p - q, 0)), or after K acceptances the bonus token from p.

    Args:
        logits_RV: target logits; row j of a sequence predicts its draft j (the last, the bonus).
        draft_tokens_BK: the drafts; columns at or above num_drafts are ignored.
        num_drafts_B: k_b of each sequence, 0 where nothing was drafted.
        sampling: parameters of each sequence.
        draft_probs_BKV: q in the target vocabulary; None when the drafts are argmax tokens, whose
            q is one-hot.
    """
    max_drafts = draft_tokens_BK.shape[1]
    column_J = torch.arange(max_drafts + 1, device=logits_RV.device)
    first_row_B = torch.cumsum(num_drafts_B + 1, 0) - (num_drafts_B + 1)
    # Rows past a sequence's own are repeats of its last; the masks below leave them out.
    rows_BJ = first_row_B.unsqueeze(1) + torch.minimum(column_J, num_drafts_B.unsqueeze(1))
    drafted_BK = column_J[:-1] < num_drafts_B.unsqueeze(1)

    if sampling.all_greedy:
        best_BJ = logits_RV.argmax(-1)[rows_BJ]
        accepted_BK = (best_BJ[:, :-1] == draft_tokens_BK) & drafted_BK
        num_accepted_B = _prefix_length(accepted_BK)
        next_B = best_BJ.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
        return Verified(num_accepted_B, next_B)

    sequences_R = torch.repeat_interleave(num_drafts_B + 1)
    target_probs_RV = sampling.probs(logits_RV, sequences_R)
    output_BJ = sampling.num_outputs_B.unsqueeze(1) + column_J
    drafts_BK = torch.where(drafted_BK, draft_tokens_BK, 0)

    p_BK = target_probs_RV[rows_BJ[:, :-1], drafts_BK]
    if draft_probs_BKV is None:
        q_BK = torch.ones_like(p_BK)
    else:
        q_BK = draft_probs_BKV.gather(2, drafts_BK.unsqueeze(2)).squeeze(2)
    u_BK = uniform(sampling.seeds_B.unsqueeze(1), output_BJ[:, :-1], Purpose.ACCEPT)
    num_accepted_B = _prefix_length((u_BK * q_BK < p_BK) & drafted_BK)

    residual_BV = target_probs_RV[first_row_B + num_accepted_B]
    rejected_B = num_accepted_B < num_drafts_B
    if max_drafts > 0:
        at_B = num_accepted_B.clamp_max(max_drafts - 1)
        q_BV = _draft_distribution(drafts_BK, draft_probs_BKV, at_B, residual_BV)
        leftover_BV = (residual_BV - q_BV).clamp_min(0)
        # p = q to the last bit leaves nothing over; rejection then has probability 0 but for
        # rounding, and p itself is the right answer.
        usable_B1 = (rejected_B & (leftover_BV.sum(-1) > 0)).unsqueeze(1)
        residual_BV = torch.where(usable_B1, leftover_BV, residual_BV)
    position_B = sampling.num_outputs_B + num_accepted_B
    u_B = uniform(sampling.seeds_B, position_B, Purpose.SAMPLE)
    return Verified(num_accepted_B, sample_from_weights(residual_BV, u_B))


def _prefix_length(accepted_BK: Tensor) -> Tensor:
    return accepted_BK.long().cumprod(-1).sum(-1)


def _draft_distribution(
    drafts_BK: Tensor, draft_probs_BKV: Tensor | None, at_B: Tensor, like_BV: Tensor
) -> Tensor:
    """q at one position of each sequence, [B, V]."""
    batch_B = torch.arange(at_B.shape[0], device=at_B.device)
    if draft_probs_BKV is not None:
        return draft_probs_BKV[batch_B, at_B]
    token_B1 = drafts_BK[batch_B, at_B].unsqueeze(1)
    return torch.zeros_like(like_BV).scatter_(1, token_B1, 1.0)
