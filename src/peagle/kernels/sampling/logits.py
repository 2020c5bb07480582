"""Logits processing of verification rows: masks, bias, penalties, min-p and typical-p.

Row j of a sequence predicts the token after its drafts 0..j-1, so every rule counts those drafts as
if they were output: row j is then what plain decoding gives in that context, and verification of
the processed rows stays exact.

Order:
    1. logit bias, then the masks (grammar, allowed ids, bad words, minimum length): `apply_masks`;
    2. repetition, presence and frequency penalties: `apply_penalties`;
    3. at the request's temperature min-p, then typical-p: `apply_probability_filters`;
    4. temperature, top-k and top-p: `probs_from_logits`.

A row that step 1 leaves without a token keeps one, whatever bias, bad words and minimum length say:
the most likely by the raw logits of the tokens that grammar and allowed ids permit. Where they
share none, the grammar alone counts; where the grammar permits none, all tokens do. The later steps
always leave a token. So no token outside the grammar is ever left, but in a row where the grammar
permits nothing: a row behind a draft that it refuses, which is never reached. Nothing here waits
for the device. Logits may be -inf, never +inf or NaN.

Shapes: B sequences, R rows (packed or padded, see `kernels.sampling.logits_rules`), J = K + 1
columns of the widest sequence, K most drafts, V vocabulary, S count slots, N entries of a sparse
rule, W prefix tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.kernels.sampling.logits_rules import (
    ANY_TOKEN,
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsRules,
    TokenCounts,
    VerificationRows,
)
from peagle.kernels.sampling.probabilities import at_least_float32, tempered_probs

Penalise = Callable[[Tensor, VerificationRows, LogitsRules, TokenCounts], Tensor]


def process_logits(
    logits_RV: Tensor,
    rows: VerificationRows,
    rules: LogitsRules,
    temperature_B: Tensor,
    counts: TokenCounts | None = None,
    grammar_RV: Tensor | None = None,
    penalise: Penalise | None = None,
) -> Tensor:
    """Apply steps 1 to 3 of the module's order to raw target logits.

    Args:
        temperature_B: 0 is greedy; scales the input of min-p and typical-p, not the result.
        counts: counts up to row 0; needed where the rules have penalties.
        grammar_RV: bool, tokens that a grammar permits; rows of other sequences are all true.
        penalise: computes the result of `apply_penalties`; None: that function.

    Returns:
        [R, V] in at least float32 for `probs_from_logits` or `verify`; removed tokens are -inf.
        Rows of sequences without a rule keep their bits.
    """
    logits_RV = apply_masks(logits_RV, rows, rules, grammar_RV)
    if rules.has_penalties:
        assert counts is not None, "penalties need the token counts"
        logits_RV = (penalise or apply_penalties)(logits_RV, rows, rules, counts)
    if rules.min_p_B is None and rules.typical_p_B is None:
        return logits_RV
    of_R = rows.sequences_R
    return apply_probability_filters(
        logits_RV,
        temperature_B[of_R],
        None if rules.min_p_B is None else rules.min_p_B[of_R],
        None if rules.typical_p_B is None else rules.typical_p_B[of_R],
    )


def apply_masks(
    logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules, grammar_RV: Tensor | None = None
) -> Tensor:
    """Add the bias, then forbid (-inf) tokens by grammar, allowed ids, bad words, minimum length.

    Returns [R, V] in at least float32; the module says what a row that would be empty keeps.
    """
    raw_RV = at_least_float32(logits_RV)
    masks = (grammar_RV, rules.allowed, rules.bad_words, rules.min_tokens)
    if rules.bias is None and all(mask is None for mask in masks):
        return raw_RV
    result_RV = raw_RV if rules.bias is None else _biased(raw_RV, rows, rules.bias)
    banned_RV = _banned(result_RV, rows, rules)
    if banned_RV is not None:
        result_RV = result_RV.masked_fill(banned_RV, -torch.inf)
    candidates_RV = raw_RV.clamp_min(torch.finfo(raw_RV.dtype).min)
    allowed_RV = None if rules.allowed is None else _allowed(rules.allowed, rows)
    for permitted_RV in (grammar_RV, allowed_RV):
        if permitted_RV is not None:
            result_RV = result_RV.masked_fill(~permitted_RV, -torch.inf)
            fewer_RV = candidates_RV.masked_fill(~permitted_RV, -torch.inf)
            some_R1 = fewer_RV.amax(-1, keepdim=True) > -torch.inf
            candidates_RV = torch.where(some_R1, fewer_RV, candidates_RV)
    best_R1 = candidates_RV.argmax(-1, keepdim=True)
    empty_R1 = result_RV.amax(-1, keepdim=True) == -torch.inf
    only_R1 = torch.where(empty_R1, candidates_RV.gather(1, best_R1), result_RV.gather(1, best_R1))
    return result_RV.scatter(1, best_R1, only_R1)


def _biased(logits_RV: Tensor, rows: VerificationRows, bias: LogitBias) -> Tensor:
    _, rows_NJ, exists_NJ = rows.of(bias.sequences_N)
    # Far below the greatest number, so that biases of one token do not add up to inf.
    limit = torch.finfo(logits_RV.dtype).max
    values_N1 = bias.values_N.clamp_max(limit / 2**10).to(logits_RV.dtype).unsqueeze(1)
    values_NJ = torch.where(exists_NJ, values_N1, 0.0)
    tokens_NJ = bias.tokens_N.unsqueeze(1).expand_as(rows_NJ)
    biased_RV = logits_RV.index_put((rows_NJ, tokens_NJ), values_NJ, accumulate=True)
    return biased_RV.clamp_max(limit)


def _allowed(allowed: AllowedTokens, rows: VerificationRows) -> Tensor:
    index_R = allowed.index_B[rows.sequences_R]
    return allowed.mask_AV[index_R.clamp_min(0)] | (index_R < 0).unsqueeze(1)


def _banned(logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules) -> Tensor | None:
    """Return the tokens that bad words and minimum length ban, bool [R, V]."""
    if rules.bad_words is None and rules.min_tokens is None:
        return None
    num_rows, vocab_size = logits_RV.shape
    # One slot past the logits takes what is not banned: nothing to count, no wait for the device.
    banned_Z = logits_RV.new_zeros(num_rows * vocab_size + 1, dtype=torch.bool)

    def ban(sequences_N: Tensor, tokens_N: Tensor, hit_NJ: Tensor) -> None:
        _, rows_NJ, exists_NJ = rows.of(sequences_N)
        slots_NJ = rows_NJ * vocab_size + tokens_N.unsqueeze(1)
        slots_NJ = torch.where(hit_NJ & exists_NJ, slots_NJ, num_rows * vocab_size)
        banned_Z.index_fill_(0, slots_NJ.flatten(), True)

    if (words := rules.bad_words) is not None:
        ban(words.sequences_N, words.last_N, _prefix_matches(words, rows))
    if (least := rules.min_tokens) is not None:
        missing_B = least.min_tokens_B - rows.num_outputs_B
        before_NJ = rows.of(least.sequences_N)[0]
        short_NJ = before_NJ < missing_B[least.sequences_N].unsqueeze(1)
        ban(least.sequences_N, least.tokens_N, short_NJ)
    return banned_Z[:-1].view(num_rows, vocab_size)


def _prefix_matches(words: BadWords, rows: VerificationRows) -> Tensor:
    """Return whether the context before row j ends with the word's prefix, bool [N, J]."""
    width = words.prefix_len
    if width == 0:
        return torch.ones_like(words.last_N.unsqueeze(1) + rows.columns_J, dtype=torch.bool)
    prefixes_N1W = words.prefixes_NW.unsqueeze(1)
    same_NJW = rows.windows(width)[words.sequences_N] == prefixes_N1W
    return (same_NJW | (prefixes_N1W == ANY_TOKEN)).all(-1)


def apply_penalties(
    logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules, counts: TokenCounts
) -> Tensor:
    """Penalise tokens that were there before.

    Repetition (Keskar et al., 2019): x / r where x > 0, else x * r, for tokens of prompt or
    output. Then x - presence * (c > 0) - frequency * c with c the count in the output (OpenAI's
    definition). The drafts before a row count as output. Returns [R, V] in at least float32; what
    was finite stays finite, and what was -inf -inf.
    """
    logits_RV = at_least_float32(logits_RV)
    of_R, dtype = rows.sequences_R, logits_RV.dtype
    limits = torch.finfo(dtype)
    slots_R = of_R if rules.count_slots_B is None else rules.count_slots_B[of_R]
    outputs_RV = _output_counts(rows, counts, slots_R.clamp_min(0))
    seen_RV = outputs_RV > 0
    result_RV = logits_RV
    if rules.repetition_penalty_B is not None:
        seen_RV = seen_RV | counts.in_prompt_SV[slots_R.clamp_min(0)]
        # Within the numbers of the dtype, so that no 0 * inf is NaN.
        factor_B = rules.repetition_penalty_B.to(dtype).clamp(limits.tiny, limits.max)
        factor_R1 = factor_B[of_R].unsqueeze(1)
        result_RV = torch.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
        result_RV = torch.where(seen_RV, result_RV, logits_RV)
    if rules.presence_penalty_B is not None:
        presence_R1 = rules.presence_penalty_B[of_R].to(dtype).unsqueeze(1)
        result_RV = result_RV - presence_R1 * (outputs_RV > 0)
    if rules.frequency_penalty_B is not None:
        frequency_R1 = rules.frequency_penalty_B[of_R].to(dtype).unsqueeze(1)
        result_RV = result_RV - frequency_R1 * outputs_RV
    touched_RV = seen_RV & (slots_R >= 0).unsqueeze(1) & (logits_RV > -torch.inf)
    return torch.where(touched_RV, result_RV.clamp(limits.min, limits.max), logits_RV)


def _output_counts(rows: VerificationRows, counts: TokenCounts, slots_R: Tensor) -> Tensor:
    """Count the output tokens and drafts before each row, int32 [R, V]."""
    drafts_RK = rows.drafts_BK[rows.sequences_R]
    return counts.outputs_SV[slots_R].scatter_add_(1, drafts_RK, rows.before_RK.int())


def apply_probability_filters(
    logits_NV: Tensor,
    temperature_N: Tensor,
    min_p_N: Tensor | None = None,
    typical_p_N: Tensor | None = None,
) -> Tensor:
    """Set the tokens to -inf that min-p, and of the rest typical-p, remove at the temperature.

    Greedy rows (temperature 0) are left alone. Returns [N, V] in at least float32; the logits that
    stay keep their bits.
    """
    logits_NV = at_least_float32(logits_NV)
    for mask, limit_N in ((min_p_mask, min_p_N), (typical_p_mask, typical_p_N)):
        if limit_N is not None:
            probs_NV = tempered_probs(logits_NV, temperature_N)
            keep_NV = mask(probs_NV, limit_N) | (temperature_N == 0).unsqueeze(1)
            logits_NV = logits_NV.masked_fill(~keep_NV, -torch.inf)
    return logits_NV


def min_p_mask(probs_NV: Tensor, min_p_N: Tensor) -> Tensor:
    """Keep tokens with p >= min_p * max p (Nguyen et al., 2024), bool [N, V]; min_p 0 keeps all."""
    floor_N1 = min_p_N.to(probs_NV.dtype).unsqueeze(1) * probs_NV.amax(-1, keepdim=True)
    return probs_NV >= floor_N1


def typical_p_mask(probs_NV: Tensor, typical_p_N: Tensor) -> Tensor:
    """Keep the tokens of locally typical sampling (Meister et al., 2022).

    The smallest set in ascending order of |-log p - H|, H the row's entropy, whose mass reaches
    typical_p (above 0; 1 keeps all); tokens that tie with its last one stay too, as in
    transformers. Returns bool [N, V], at least one token a row.
    """
    entropy_N1 = torch.special.entr(probs_NV).sum(-1, keepdim=True)
    distance_NV = (-probs_NV.log() - entropy_N1).abs()
    sorted_NV, order_NV = distance_NV.sort(dim=-1, stable=True)
    mass_NV = probs_NV.gather(1, order_NV).cumsum(-1)
    p_N1 = typical_p_N.to(probs_NV.dtype).unsqueeze(1)
    last_N1 = torch.searchsorted(mass_NV, p_N1).clamp_max(probs_NV.shape[1] - 1)
    return (distance_NV <= sorted_NV.gather(1, last_N1)) | (p_N1 >= 1)
