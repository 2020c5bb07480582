"""Logits processing of packed verification rows: masks, bias, penalties, min-p and typical-p.

Row j of a sequence predicts the token after its drafts 0..j-1, so every rule counts those drafts
as if they were output: row j is then what plain decoding gives in that context, and rejection
sampling on the processed rows stays exact. Whoever wires it in hands the processed logits to
`probs_from_logits` or `verify` in place of the raw ones.

Order:
    1. logit bias, then the masks (allowed ids, bad words, minimum length): `apply_masks`;
    2. repetition, presence and frequency penalties: `apply_penalties`;
    3. at the request's temperature min-p, then typical-p: `apply_probability_filters`;
    4. temperature, top-k and top-p: `probs_from_logits`.

A row that step 1 leaves without a token keeps one: the most likely allowed token by the raw
logits (the most likely of all where the allowed ids are an empty set), whatever bias, bad words
and minimum length say. The later steps always leave a token. Nothing here waits for the device,
but for the two checks inside `probs_from_logits` in step 3. Logits may be -inf, never +inf or NaN.

Shapes: B sequences, R packed rows (k_b + 1 of each sequence), J = K + 1 columns of the widest
sequence, K most drafts, V vocabulary, S count slots, N entries of a sparse rule, W prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.sampling import probs_from_logits

NO_TOKEN = -1
_ANY_TOKEN = -2


@dataclass(frozen=True, slots=True)
class VerificationRows:
    """Which context each packed row stands in.

    Attributes:
        sequences_R: int64, the sequence of a row.
        offsets_R: int64, the drafts before a row: its j.
        first_row_B: int64, row 0 of each sequence.
        num_drafts_B: int64, k_b.
        drafts_BK: int64, 0 in the columns at or above num_drafts.
        num_outputs_B: int64, output tokens before row 0.
        tails_BW: last context tokens before row 0, see `context_tails`; needed by bad words only.
    """

    sequences_R: Tensor
    offsets_R: Tensor
    first_row_B: Tensor
    num_drafts_B: Tensor
    drafts_BK: Tensor
    num_outputs_B: Tensor
    tails_BW: Tensor | None = None

    @classmethod
    def pack(
        cls,
        draft_tokens_BK: Tensor,
        num_drafts_B: Tensor,
        num_outputs_B: Tensor,
        num_rows: int,
        tails_BW: Tensor | None = None,
    ) -> VerificationRows:
        """Rows in the order of `verify`, whose arguments the first two are.

        num_rows is R, the sum of k_b + 1, known to the host from the logits' shape.
        """
        num_rows_B = num_drafts_B + 1
        first_row_B = num_rows_B.cumsum(0) - num_rows_B
        sequences_R = torch.repeat_interleave(num_rows_B, output_size=num_rows)
        rows_R = torch.arange(num_rows, device=num_drafts_B.device)
        column_K = torch.arange(draft_tokens_BK.shape[1], device=num_drafts_B.device)
        return cls(
            sequences_R=sequences_R,
            offsets_R=rows_R - first_row_B[sequences_R],
            first_row_B=first_row_B,
            num_drafts_B=num_drafts_B,
            drafts_BK=torch.where(column_K < num_drafts_B.unsqueeze(1), draft_tokens_BK, 0),
            num_outputs_B=num_outputs_B,
            tails_BW=tails_BW,
        )

    def of(self, sequences_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns [J], packed rows [N, J] and their existence [N, J] in the given sequences.

        Past a sequence's own rows stand repeats of its last, which do not exist.
        """
        columns_J = torch.arange(self.drafts_BK.shape[1] + 1, device=sequences_N.device)
        num_drafts_N1 = self.num_drafts_B[sequences_N].unsqueeze(1)
        within_NJ = torch.minimum(columns_J, num_drafts_N1)
        rows_NJ = self.first_row_B[sequences_N].unsqueeze(1) + within_NJ
        return columns_J, rows_NJ, columns_J <= num_drafts_N1


@dataclass(frozen=True, slots=True)
class LogitBias:
    """values_N (finite or -inf) to add to the logits of tokens_N in sequences_N, int64.

    Entries of one token add up.
    """

    sequences_N: Tensor
    tokens_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Token ids outside of which a sequence may not generate.

    mask_AV holds one bool row for each distinct set of ids; index_B, int64, is the row that
    applies to a sequence, below 0 where all ids are allowed.
    """

    mask_AV: Tensor
    index_B: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not appear; the last token is banned after the others.

    The prefix is looked for in prompt and output alike, as transformers does. sequences_N is where
    a word is banned, prefixes_NW its tokens but the last (right-aligned behind wildcards), last_N
    the last; int64.
    """

    sequences_N: Tensor
    prefixes_NW: Tensor
    last_N: Tensor

    @classmethod
    def build(
        cls, words: Sequence[Sequence[Sequence[int]]], device: torch.device | str = "cpu"
    ) -> BadWords:
        """From the words of each sequence; a word is a non-empty list of token ids."""
        flat = [(index, list(word)) for index, of in enumerate(words) for word in of]
        width = max((len(word) for _, word in flat), default=1) - 1
        prefixes = [[_ANY_TOKEN] * (width + 1 - len(word)) + word[:-1] for _, word in flat]
        return cls(
            torch.tensor([index for index, _ in flat], dtype=torch.int64, device=device),
            torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(flat), width),
            torch.tensor([word[-1] for _, word in flat], dtype=torch.int64, device=device),
        )

    @property
    def prefix_len(self) -> int:
        """W, the least width of `context_tails`."""
        return self.prefixes_NW.shape[1]


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Stop ids tokens_N are banned in sequences_N while they have fewer output tokens than
    min_tokens_B; int64.
    """

    min_tokens_B: Tensor
    sequences_N: Tensor
    tokens_N: Tensor


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """The rules of a batch, one entry a sequence; None where nobody uses the feature.

    Attributes:
        repetition_penalty_B: above 0; 1 changes nothing.
        presence_penalty_B, frequency_penalty_B: in logits; 0 changes nothing.
        count_slots_B: int64, the slot of TokenCounts that a sequence has, below 0 for none: such a
            sequence is not penalised. None: slot b for sequence b.
        min_p_B: 0 keeps all tokens.
        typical_p_B: 1 keeps all tokens.
        bias, allowed, bad_words, min_tokens: see the classes.
    """

    repetition_penalty_B: Tensor | None = None
    presence_penalty_B: Tensor | None = None
    frequency_penalty_B: Tensor | None = None
    count_slots_B: Tensor | None = None
    min_p_B: Tensor | None = None
    typical_p_B: Tensor | None = None
    bias: LogitBias | None = None
    allowed: AllowedTokens | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether somebody needs TokenCounts."""
        penalties = (self.repetition_penalty_B, self.presence_penalty_B, self.frequency_penalty_B)
        return any(penalty is not None for penalty in penalties)


class TokenCounts:
    """What each slot has in its prompt and how often in its output.

    S slots, as many as sequences are penalised together; in_prompt_SV is bool, outputs_SV int32,
    five bytes a slot and token.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt_SV = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.outputs_SV = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)

    def start(self, slot: int, prompt_N: Tensor) -> None:
        """Give a slot to a new sequence; prompt_N are its int64 prompt ids."""
        self.in_prompt_SV[slot] = False
        self.in_prompt_SV[slot, prompt_N] = True
        self.outputs_SV[slot] = 0

    def add(self, slots_N: Tensor, tokens_N: Tensor, keep_N: Tensor | None = None) -> None:
        """Count output tokens; the arguments have one shape.

        Slots below 0 and entries that keep_N leaves out (rejected drafts, padding) count nothing.
        """
        counted_N = slots_N >= 0 if keep_N is None else keep_N & (slots_N >= 0)
        at_N = (slots_N.clamp_min(0), torch.where(counted_N, tokens_N, 0))
        self.outputs_SV.index_put_(at_N, counted_N.int(), accumulate=True)


def context_tails(
    contexts: Sequence[Sequence[int]], width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The last `width` tokens (prompt and output) of each sequence, int64 [B, width].

    Right-aligned, with NO_TOKEN before the start of a sequence.
    """
    ends = [list(context[max(0, len(context) - width) :]) for context in contexts]
    padded = [[NO_TOKEN] * (width - len(end)) + end for end in ends]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(contexts), width)


def process_logits(
    logits_RV: Tensor,
    rows: VerificationRows,
    rules: LogitsRules,
    temperature_B: Tensor,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Steps 1 to 3 of the module's order, for raw target logits.

    Args:
        temperature_B: 0 is greedy; scales what min-p and typical-p see, not the result.
        counts: counts up to row 0; needed where the rules have penalties.

    Returns:
        [R, V] in at least float32 for `probs_from_logits` or `verify`; removed tokens are -inf.
        Rows of sequences without a rule keep their bits.
    """
    logits_RV = apply_masks(logits_RV, rows, rules)
    if rules.has_penalties:
        assert counts is not None, "penalties need the token counts"
        logits_RV = apply_penalties(logits_RV, rows, rules, counts)
    if rules.min_p_B is None and rules.typical_p_B is None:
        return logits_RV
    of_R = rows.sequences_R
    return apply_probability_filters(
        logits_RV,
        temperature_B[of_R],
        None if rules.min_p_B is None else rules.min_p_B[of_R],
        None if rules.typical_p_B is None else rules.typical_p_B[of_R],
    )


def apply_masks(logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules) -> Tensor:
    """Add the bias, then set what allowed ids, bad words and minimum length forbid to -inf.

    Returns [R, V] in at least float32; the module says what a row that would be empty keeps.
    """
    raw_RV = _at_least_float32(logits_RV)
    masks = (rules.allowed, rules.bad_words, rules.min_tokens)
    if rules.bias is None and all(rule is None for rule in masks):
        return raw_RV
    result_RV = raw_RV if rules.bias is None else _biased(raw_RV, rows, rules.bias)
    banned_RV = _banned(result_RV, rows, rules)
    if banned_RV is not None:
        result_RV = result_RV.masked_fill(banned_RV, -torch.inf)
    candidates_RV = raw_RV.clamp_min(torch.finfo(raw_RV.dtype).min)
    best_R1 = candidates_RV.argmax(-1, keepdim=True)
    if rules.allowed is not None:
        allowed_RV = _allowed(rules.allowed, rows)
        result_RV = result_RV.masked_fill(~allowed_RV, -torch.inf)
        best_allowed_R1 = candidates_RV.masked_fill(~allowed_RV, -torch.inf).argmax(-1, True)
        best_R1 = torch.where(allowed_RV.any(-1, keepdim=True), best_allowed_R1, best_R1)
    empty_R1 = result_RV.amax(-1, keepdim=True) == -torch.inf
    only_R1 = torch.where(empty_R1, candidates_RV.gather(1, best_R1), result_RV.gather(1, best_R1))
    return result_RV.scatter(1, best_R1, only_R1)


def _biased(logits_RV: Tensor, rows: VerificationRows, bias: LogitBias) -> Tensor:
    _, rows_NJ, exists_NJ = rows.of(bias.sequences_N)
    values_NJ = torch.where(exists_NJ, bias.values_N.to(logits_RV.dtype).unsqueeze(1), 0.0)
    tokens_NJ = bias.tokens_N.unsqueeze(1).expand_as(rows_NJ)
    return logits_RV.index_put((rows_NJ, tokens_NJ), values_NJ, accumulate=True)


def _allowed(allowed: AllowedTokens, rows: VerificationRows) -> Tensor:
    index_R = allowed.index_B[rows.sequences_R]
    return allowed.mask_AV[index_R.clamp_min(0)] | (index_R < 0).unsqueeze(1)


def _banned(logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules) -> Tensor | None:
    """What bad words and minimum length ban, bool [R, V]."""
    if rules.bad_words is None and rules.min_tokens is None:
        return None
    num_rows, vocab_size = logits_RV.shape
    # One slot past the logits takes what is not banned: nothing to count, no wait for the device.
    banned_Z = logits_RV.new_zeros(num_rows * vocab_size + 1, dtype=torch.bool)

    def ban(sequences_N: Tensor, tokens_N: Tensor, hit_NJ: Tensor) -> None:
        _, rows_NJ, exists_NJ = rows.of(sequences_N)
        slots_NJ = rows_NJ * vocab_size + tokens_N.unsqueeze(1)
        banned_Z[torch.where(hit_NJ & exists_NJ, slots_NJ, num_rows * vocab_size)] = True

    if (words := rules.bad_words) is not None:
        ban(words.sequences_N, words.last_N, _prefix_matches(words, rows))
    if (least := rules.min_tokens) is not None:
        missing_B = least.min_tokens_B - rows.num_outputs_B
        columns_J = rows.of(least.sequences_N)[0]
        short_NJ = columns_J < missing_B[least.sequences_N].unsqueeze(1)
        ban(least.sequences_N, least.tokens_N, short_NJ)
    return banned_Z[:-1].view(num_rows, vocab_size)


def _prefix_matches(words: BadWords, rows: VerificationRows) -> Tensor:
    """Whether the context before row j ends with the word's prefix, bool [N, J]."""
    width = words.prefix_len
    columns_J = rows.of(words.sequences_N)[0]
    if width == 0:
        return torch.ones_like(words.last_N.unsqueeze(1) + columns_J, dtype=torch.bool)
    assert rows.tails_BW is not None, "bad words of several tokens need the context's tail"
    tails_BW = rows.tails_BW[:, rows.tails_BW.shape[1] - width :]
    windows_BJW = torch.cat([tails_BW, rows.drafts_BK], 1).unfold(1, width, 1)
    prefixes_N1W = words.prefixes_NW.unsqueeze(1)
    same_NJW = windows_BJW[words.sequences_N] == prefixes_N1W
    return (same_NJW | (prefixes_N1W == _ANY_TOKEN)).all(-1)


def apply_penalties(
    logits_RV: Tensor, rows: VerificationRows, rules: LogitsRules, counts: TokenCounts
) -> Tensor:
    """Penalise tokens that were there before.

    Repetition (Keskar et al., 2019): x / r where x > 0, else x * r, for tokens of prompt or
    output. Then x - presence * (c > 0) - frequency * c with c the count in the output (OpenAI's
    definition). The drafts before a row count as output. Returns [R, V] in at least float32; what
    was finite stays finite, and what was -inf -inf.
    """
    logits_RV = _at_least_float32(logits_RV)
    of_R, dtype = rows.sequences_R, logits_RV.dtype
    slots_R = of_R if rules.count_slots_B is None else rules.count_slots_B[of_R]
    outputs_RV = _output_counts(rows, counts, slots_R.clamp_min(0))
    seen_RV = outputs_RV > 0
    result_RV = logits_RV
    if rules.repetition_penalty_B is not None:
        seen_RV = seen_RV | counts.in_prompt_SV[slots_R.clamp_min(0)]
        factor_R1 = rules.repetition_penalty_B[of_R].to(dtype).unsqueeze(1)
        result_RV = torch.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
        result_RV = torch.where(seen_RV, result_RV, logits_RV)
    if rules.presence_penalty_B is not None:
        presence_R1 = rules.presence_penalty_B[of_R].to(dtype).unsqueeze(1)
        result_RV = result_RV - presence_R1 * (outputs_RV > 0)
    if rules.frequency_penalty_B is not None:
        frequency_R1 = rules.frequency_penalty_B[of_R].to(dtype).unsqueeze(1)
        result_RV = result_RV - frequency_R1 * outputs_RV
    limits = torch.finfo(dtype)
    touched_RV = seen_RV & (slots_R >= 0).unsqueeze(1) & (logits_RV > -torch.inf)
    return torch.where(touched_RV, result_RV.clamp(limits.min, limits.max), logits_RV)


def _output_counts(rows: VerificationRows, counts: TokenCounts, slots_R: Tensor) -> Tensor:
    """Output tokens and drafts before each row, int32 [R, V]."""
    column_K = torch.arange(rows.drafts_BK.shape[1], device=slots_R.device)
    before_RK = column_K < rows.offsets_R.unsqueeze(1)
    drafts_RK = rows.drafts_BK[rows.sequences_R]
    return counts.outputs_SV[slots_R].scatter_add_(1, drafts_RK, before_RK.int())


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
    logits_NV = _at_least_float32(logits_NV)
    all_k_N = torch.zeros_like(temperature_N, dtype=torch.int64)
    all_p_N = torch.ones_like(temperature_N)
    for mask, limit_N in ((min_p_mask, min_p_N), (typical_p_mask, typical_p_N)):
        if limit_N is not None:
            probs_NV = probs_from_logits(logits_NV, temperature_N, all_k_N, all_p_N)
            keep_NV = mask(probs_NV, limit_N) | (temperature_N == 0).unsqueeze(1)
            logits_NV = logits_NV.masked_fill(~keep_NV, -torch.inf)
    return logits_NV


def min_p_mask(probs_NV: Tensor, min_p_N: Tensor) -> Tensor:
    """Tokens to keep: p >= min_p * max p (Nguyen et al., 2024); min_p 0 keeps all, bool [N, V]."""
    floor_N1 = min_p_N.to(probs_NV.dtype).unsqueeze(1) * probs_NV.amax(-1, keepdim=True)
    return probs_NV >= floor_N1


def typical_p_mask(probs_NV: Tensor, typical_p_N: Tensor) -> Tensor:
    """Tokens to keep of locally typical sampling (Meister et al., 2022).

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


def _at_least_float32(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
