"""Lossless verification: the output is distributed exactly as the target alone would give it.

Drawn drafts are verified as blocks (Sun et al., 2024), which extends the speculative sampling of
Leviathan et al. (2023) and Chen et al. (2023); all others by the target's own tokens.

Shapes: B sequences, K most drafts of a sequence, J = K + 1, R packed target rows (k_b + 1 of each
sequence), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.paths import path_rows
from peagle.kernels.sampling.logits_rules import TreeRows, VerificationRows
from peagle.kernels.sampling.probabilities import probs_from_logits, sample_from_weights
from peagle.kernels.sampling.random import Purpose, of_step, uniform


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
        """Return target probabilities of rows that belong to the given sequences, [N, V]."""
        return probs_from_logits(
            logits_NV,
            self.temperature_B[sequences_N],
            self.top_k_B[sequences_N],
            self.top_p_B[sequences_N],
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification.

    Attributes:
        num_accepted_B: a_b, drafts accepted.
        next_tokens_B: the target's own token after them.
        order_BJ: the rows of each sequence, the newest token's and the accepted drafts' first;
            None where they stand first anyway, as in chains.
    """

    num_accepted_B: Tensor
    next_tokens_B: Tensor
    order_BJ: Tensor | None = None


def verify(
    logits_RV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    draft_probs_BKV: Tensor | None = None,
    synthetic_rates_K: Tensor | None = None,
) -> Verified:
    """Accept a prefix of each sequence's drafts and emit one token of the target's own.

    The target's own token x_j of row j is the argmax, or a draw from p with the random number of
    (seed, output position, SAMPLE). Drafts that were not drawn (argmax, prompt lookup) are accepted
    while x_j equals draft j, which has the probability p(draft). The next token is x_a. The output
    equals plain decoding token for token, whatever was drafted.

    In a tree (`TreeRows`) x is the own token of a node's row: verification descends to the child
    that equals x while there is one. Children of one node must differ. A chain is the tree of one
    branch. The first nodes of a tree may be a chain that was drawn: rejection sampling decides how
    many of them pass, and the token behind these is the own one of its row. So verification goes on
    where the token that replaces a rejected draft is another node. Rejection has used no random
    number of the rows below, so their own tokens are draws from p as ever.

    Drafts that were all drawn are verified as a block. p_0 = 1, and draft x of position j gives
    p_j = min(p_{j-1} p(x) / q(x), 1). It is tried with h_j = Z_j / (Z_j + 1 - p_j), where Z_j is
    the sum of max(p_j p - q, 0) over the tokens of the next position; the last one with h_k = p_k.
    All drafts up to the last one whose number is below its h pass, and the next token is drawn from
    norm(max(p_a p - q, 0)). Where only some drafts were drawn, one after the other passes with
    min(1, p(x) / q(x)), and p_a is 1. The output has the target's distribution, and depends on q.

    Synthetic acceptance measures speed with random weights, as in vLLM; the output is then NOT
    the target's. a_b = #{i in 1..k_b : u < r_i} with one number u of the step, and
    the next token is x_a. All else is computed as ever, so that a step takes the time that it would
    take.

    Args:
        logits_RV: target logits; row j of a sequence predicts its draft j (the last, the bonus).
        draft_probs_BKV: q in the target vocabulary, 0 for all tokens where a draft was not drawn;
            None when no draft was. Not read at or above a sequence's number of drafts. In trees
            [B, C, V], of the first C nodes.
        synthetic_rates_K: float32, r_1 to r_K: the probability that at least i drafts are accepted
            where so many were made; must not rise. None: acceptance is real.
    """
    if sampling.all_greedy:
        probs_RV, tokens_R = None, logits_RV.argmax(-1)
    else:
        probs_RV = sampling.probs(logits_RV, rows.sequences_R)
        position_R = sampling.num_outputs_B[rows.sequences_R] + rows.offsets_R
        u_R = uniform(sampling.seeds_B[rows.sequences_R], position_R, Purpose.SAMPLE)
        tokens_R = sample_from_weights(probs_RV, u_R)
    tokens_BJ = tokens_R[rows.rows_BJ]
    if isinstance(rows, TreeRows):
        assert synthetic_rates_K is None, "acceptance of trees is real"
        if probs_RV is not None and draft_probs_BKV is not None:
            tokens_BJ = _with_drawn(probs_RV, draft_probs_BKV, rows, sampling, tokens_BJ)
        reached_BJ = rows.reached(tokens_BJ)
        order_BJ = path_rows(reached_BJ)
        num_accepted_B = reached_BJ.sum(-1) - 1
        return Verified(num_accepted_B, _at(tokens_BJ, _at(order_BJ, num_accepted_B)), order_BJ)
    if probs_RV is None or draft_probs_BKV is None or not rows.max_drafts:
        matches_BK = tokens_BJ[:, :-1] == rows.drafts_BK
        num_accepted_B = _count_first(matches_BK & rows.drafted_BK)
        next_tokens_B = _at(tokens_BJ, num_accepted_B)
    else:
        verified = _verify_drawn(probs_RV, draft_probs_BKV, rows, sampling, tokens_BJ)
        num_accepted_B, next_tokens_B = verified.num_accepted_B, verified.next_tokens_B
    if synthetic_rates_K is not None:
        num_accepted_B = _accept_synthetically(rows, sampling, synthetic_rates_K)
        next_tokens_B = _at(tokens_BJ, num_accepted_B)
    return Verified(num_accepted_B, next_tokens_B)


def _with_drawn(
    probs_RV: Tensor, q_BCV: Tensor, rows: TreeRows, sampling: SamplingTensors, tokens_BJ: Tensor
) -> Tensor:
    """Return the own tokens of trees, those of drawn chains by rejection sampling.

    The rows before the drafts that pass have these drafts, and the row behind them has the token
    that rejection sampling emits. Other rows keep their own tokens.
    """
    most = q_BCV.shape[1]
    drafts_BC1 = rows.drafts_BK[:, :most].unsqueeze(2)
    is_drawn_BC = (q_BCV.gather(2, drafts_BC1).squeeze(2) > 0) & rows.drafted_BK[:, :most]
    chains = rows.leading(_count_first(is_drawn_BC), most)
    found = _verify_drawn(probs_RV, q_BCV, chains, sampling, tokens_BJ[:, : most + 1])
    num_passed_B1 = found.num_accepted_B.unsqueeze(1)
    drafts_BJ = torch.nn.functional.pad(rows.drafts_BK, (0, 1))
    tokens_BJ = torch.where(rows.columns_J < num_passed_B1, drafts_BJ, tokens_BJ)
    return tokens_BJ.scatter(1, num_passed_B1, found.next_tokens_B.unsqueeze(1))


def _verify_drawn(
    probs_RV: Tensor,
    q_BKV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    tokens_BJ: Tensor,
) -> Verified:
    """Return the result of `verify` for chains of which some drafts were drawn.

    Args:
        tokens_BJ: the target's own tokens.
    """
    given = probs_RV, q_BKV, rows, sampling
    matches_BK = tokens_BJ[:, :-1] == rows.drafts_BK
    num_accepted_B, shares_BJ = _accept_drawn(*given, matches_BK)
    drawn_B = _draw_rejected(*given, num_accepted_B, _at(shares_BJ, num_accepted_B))
    is_rejected_B = num_accepted_B < rows.num_draft_tokens_B
    next_tokens_B = torch.where(is_rejected_B, drawn_B, _at(tokens_BJ, num_accepted_B))
    return Verified(num_accepted_B, next_tokens_B)


def _at(values_BJ: Tensor, column_B: Tensor) -> Tensor:
    return values_BJ.gather(1, column_B.unsqueeze(1)).squeeze(1)


def _count_first(passes_BK: Tensor) -> Tensor:
    """Return how many pass before the first one that does not, int64 [B]."""
    return passes_BK.long().cumprod(-1).sum(-1)


def _accept_drawn(
    probs_RV: Tensor,
    q_BKV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    matches_BK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a_b, and p_j of block verification for j = 0 to K; 1 where drafts pass one by one.

    Args:
        matches_BK: which drafts equal the target's own token.
    """
    p_BKV = probs_RV[rows.rows_BJ[:, :-1]]
    p_BK, q_BK = (x.gather(2, rows.drafts_BK.unsqueeze(2)).squeeze(2) for x in (p_BKV, q_BKV))
    position_BK = of_step(sampling.num_outputs_B.unsqueeze(1), rows.columns_J[:-1])
    u_BK = uniform(sampling.seeds_B.unsqueeze(1), position_BK, Purpose.ACCEPT)
    is_drawn_BK = q_BK > 0
    passes_BK = torch.where(is_drawn_BK, u_BK * q_BK < p_BK, matches_BK) & rows.drafted_BK
    by_draft_B = _count_first(passes_BK)

    is_block_B1 = (is_drawn_BK | ~rows.drafted_BK).all(-1, keepdim=True)
    ratios_BK = torch.where(is_drawn_BK & is_block_B1, p_BK / q_BK, 1)
    shares = [torch.ones_like(p_BK[:, 0])]
    for ratio_B in ratios_BK.unbind(1):
        shares.append((shares[-1] * ratio_B).clamp_max(1))
    shares_BJ = torch.stack(shares, 1)
    rest_BK = (shares_BJ[:, :-1].unsqueeze(2) * p_BKV - q_BKV).clamp_min(0).sum(-1)
    # What draft j stands for stays with the rest behind it; behind the last one there is none.
    behind_BK, rest_BK = shares_BJ[:, 1:], rest_BK.roll(-1, 1)
    stays_BK = torch.where(behind_BK < 1, rest_BK / (rest_BK + 1 - behind_BK), 1)
    is_last_BK = rows.columns_J[1:] >= rows.num_draft_tokens_B.unsqueeze(1)
    passes_BK = (u_BK < torch.where(is_last_BK, behind_BK, stays_BK)) & rows.drafted_BK
    by_block_B = (passes_BK * rows.columns_J[1:]).amax(-1)
    return torch.where(is_block_B1.squeeze(1), by_block_B, by_draft_B), shares_BJ


def _draw_rejected(
    probs_RV: Tensor,
    q_BKV: Tensor,
    rows: VerificationRows,
    sampling: SamplingTensors,
    num_accepted_B: Tensor,
    shares_B: Tensor,
) -> Tensor:
    """Draw the token behind each sequence's accepted drafts from the excess of p_j p over q."""
    p_BV = probs_RV[rows.first_row_B + num_accepted_B]
    batch_B = torch.arange(len(p_BV), device=p_BV.device)
    q_BV = q_BKV[batch_B, num_accepted_B.clamp_max(rows.max_drafts - 1)]
    leftover_BV = (shares_B.unsqueeze(1) * p_BV - q_BV).clamp_min(0)
    # p = q to the last bit leaves nothing over; rejection then has probability 0 but for rounding,
    # and p itself is the right answer.
    is_left_B1 = leftover_BV.sum(-1, keepdim=True) > 0
    position_B = sampling.num_outputs_B + num_accepted_B
    u_B = uniform(sampling.seeds_B, position_B, Purpose.SAMPLE)
    return sample_from_weights(torch.where(is_left_B1, leftover_BV, p_BV), u_B)


def _accept_synthetically(
    rows: VerificationRows, sampling: SamplingTensors, rates_K: Tensor
) -> Tensor:
    """Return how many drafts pass, whatever they are; the rates do not rise. int64 [B]."""
    assert len(rates_K) >= rows.max_drafts, "a rate for every draft"
    u_B = uniform(sampling.seeds_B, sampling.num_outputs_B, Purpose.SYNTHETIC)
    passes_BK = (u_B.unsqueeze(1) < rates_K[: rows.max_drafts]) & rows.drafted_BK
    return passes_BK.sum(-1)
