"""Makes the device's rules of a batch from what its requests ask for.

Shapes: B sequences, A sets of allowed ids, N entries of a sparse rule, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from peagle.engine.sequence import Sequence
from peagle.kernels.logits_rules import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsRules,
    MinTokens,
)


def has_penalties(sequence: Sequence) -> bool:
    """Whether the request needs token counts."""
    params = sequence.params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1, 0, 0)


def build_rules(
    sequences: SequenceOf[Sequence],
    count_slots: SequenceOf[int],
    vocab_size: int,
    device: torch.device,
) -> LogitsRules | None:
    """The rules of a batch; None if no request asks for any.

    Args:
        sequences: their ids of bias, allowed ids and bad words are in the vocabulary, and their
            bad words are token ids.
        count_slots: the slot of each in the token counts, below 0 for none.
    """
    params = [s.params for s in sequences]

    def numbers(values: list[float], neutral: float) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, dtype=torch.float64, device=device)

    rules = LogitsRules(
        repetition_penalty_B=numbers([p.repetition_penalty for p in params], 1),
        presence_penalty_B=numbers([p.presence_penalty for p in params], 0),
        frequency_penalty_B=numbers([p.frequency_penalty for p in params], 0),
        count_slots_B=_ints(count_slots, device) if max(count_slots) >= 0 else None,
        # Greedy rows are not filtered: a batch of them has no use for the two.
        min_p_B=numbers([0 if p.is_greedy else p.min_p for p in params], 0),
        typical_p_B=numbers([1 if p.is_greedy else p.typical_p for p in params], 1),
        bias=_bias(sequences, device),
        allowed=_allowed(sequences, vocab_size, device),
        bad_words=_bad_words(sequences, device),
        min_tokens=_min_tokens(sequences, device),
    )
    return None if rules.is_empty else rules


def _ints(values: SequenceOf[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _bias(sequences: SequenceOf[Sequence], device: torch.device) -> LogitBias | None:
    entries = [
        (row, token, value)
        for row, sequence in enumerate(sequences)
        for token, value in sequence.params.logit_bias
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    values_N = torch.tensor(values, dtype=torch.float64, device=device)
    return LogitBias(_ints(rows, device), _ints(tokens, device), values_N)


def _allowed(
    sequences: SequenceOf[Sequence], vocab_size: int, device: torch.device
) -> AllowedTokens | None:
    index_of: dict[tuple[int, ...], int] = {}
    index = [
        -1 if ids is None else index_of.setdefault(ids, len(index_of))
        for ids in (s.params.allowed_token_ids for s in sequences)
    ]
    if not index_of:
        return None
    mask_AV = torch.zeros(len(index_of), vocab_size, dtype=torch.bool)
    for ids, row in index_of.items():
        mask_AV[row, list(ids)] = True
    return AllowedTokens(mask_AV.to(device), _ints(index, device))


def _bad_words(sequences: SequenceOf[Sequence], device: torch.device) -> BadWords | None:
    if not any(s.params.bad_words for s in sequences):
        return None
    words: list[list[tuple[int, ...]]] = []
    for sequence in sequences:
        words.append([])
        for word in sequence.params.bad_words:
            assert not isinstance(word, str), "bad words are encoded when a request comes in"
            words[-1].append(word)
    return BadWords.build(words, device)


def _min_tokens(sequences: SequenceOf[Sequence], device: torch.device) -> MinTokens | None:
    entries = [
        (row, token)
        for row, sequence in enumerate(sequences)
        if sequence.params.min_tokens > sequence.num_output_tokens
        for token in sorted(sequence.stop_token_ids)
    ]
    if not entries:
        return None
    rows, tokens = zip(*entries, strict=True)
    least_B = _ints([s.params.min_tokens for s in sequences], device)
    return MinTokens(least_B, _ints(rows, device), _ints(tokens, device))
