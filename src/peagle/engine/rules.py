"""The rules of a batch's requests for the logits, as tensors, and the slots of their token counts.

Shapes: B sequences, V vocabulary, A sets of allowed ids, N entries of a sparse rule.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from peagle.engine.sequence import Sequence
from peagle.kernels.sampling.logits_rules import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsRules,
    MinTokens,
    TokenCounts,
)
from peagle.kernels.upload import upload, upload_floats, upload_ints


class CountSlots:
    """Hands out the slots of the token counts, one to each sequence with penalties.

    Args:
        num_slots: most sequences that hold a slot at once.

    Attributes:
        counts: the counts; None until the first sequence needs them.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.counts: TokenCounts | None = None
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._free = list(range(num_slots))
        self._slot_of: dict[int, int] = {}

    def of(self, sequence: Sequence) -> int:
        """Return the slot of a sequence; a new one starts with all its tokens so far."""
        slot = self._slot_of.get(sequence.seq_id)
        if slot is not None:
            return slot
        if self.counts is None:
            self.counts = TokenCounts(self._num_slots, self._vocab_size, self._device)
        assert self._free, "more sequences hold counts than may run: one was not released"
        slot = self._slot_of[sequence.seq_id] = self._free.pop()
        self.counts.start(slot, upload_ints(sequence.prompt_token_ids, self._device))
        output_N = upload_ints(sequence.output_token_ids, self._device)
        self.counts.add(torch.full_like(output_N, slot), output_N)
        return slot

    def release(self, sequence: Sequence) -> bool:
        """Take back the slot of a sequence, which may come again; return whether it had one."""
        slot = self._slot_of.pop(sequence.seq_id, None)
        if slot is not None:
            self._free.append(slot)
        return slot is not None


def has_penalties(sequence: Sequence) -> bool:
    """Return whether the request needs token counts."""
    params = sequence.params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1, 0, 0)


def has_masks(sequence: Sequence) -> bool:
    """Return whether the request forbids tokens, or adds to the logits of some."""
    params = sequence.params
    return bool(
        sequence.grammar is not None
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or (params.min_tokens > sequence.num_output_tokens and sequence.stop_token_ids)
    )


def has_rules(sequence: Sequence) -> bool:
    """Return whether the request has a grammar or a rule that `build_rules` finds.

    Min-p alone does not count.
    """
    params = sequence.params
    is_typical = params.typical_p < 1 and not params.is_greedy
    return has_masks(sequence) or has_penalties(sequence) or is_typical


def build_rules(
    sequences: SequenceOf[Sequence], slots: CountSlots, vocab_size: int, device: torch.device
) -> LogitsRules | None:
    """Return the rules of a batch, whose bad words are token ids; None if no request has any.

    Sequences with penalties get a slot of the token counts. The host does not wait for the device.
    """
    params = [s.params for s in sequences]
    count_slots = [slots.of(s) if has_penalties(s) else -1 for s in sequences]

    def numbers(values: list[float], neutral: float) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        return upload_floats(values, device)

    rules = LogitsRules(
        repetition_penalty_B=numbers([p.repetition_penalty for p in params], 1),
        presence_penalty_B=numbers([p.presence_penalty for p in params], 0),
        frequency_penalty_B=numbers([p.frequency_penalty for p in params], 0),
        count_slots_B=upload_ints(count_slots, device) if max(count_slots) >= 0 else None,
        # Greedy rows are not filtered: a greedy batch needs neither of the two.
        min_p_B=numbers([0 if p.is_greedy else p.min_p for p in params], 0),
        typical_p_B=numbers([1 if p.is_greedy else p.typical_p for p in params], 1),
        bias=_bias(sequences, device),
        allowed=_allowed(sequences, vocab_size, device),
        bad_words=_bad_words(sequences, device),
        min_tokens=_min_tokens(sequences, device),
    )
    return None if rules.is_empty else rules


def _bias(sequences: SequenceOf[Sequence], device: torch.device) -> LogitBias | None:
    entries = [
        (row, token, value)
        for row, sequence in enumerate(sequences)
        for token, value in sequence.params.logit_bias
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return LogitBias(
        upload_ints(rows, device), upload_ints(tokens, device), upload_floats(values, device)
    )


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
    return AllowedTokens(upload(mask_AV, device), upload_ints(index, device))


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
    least_B = upload_ints([s.params.min_tokens for s in sequences], device)
    return MinTokens(least_B, upload_ints(rows, device), upload_ints(tokens, device))


def without_reached_minimum(
    rules: LogitsRules, sequences: SequenceOf[Sequence]
) -> LogitsRules | None:
    """Return the rules without min_tokens once it bans nothing more: outputs only grow.

    None if no other rule is left.
    """
    if rules.min_tokens is None:
        return rules
    if any(s.num_output_tokens < s.params.min_tokens for s in sequences):
        return rules
    rules = replace(rules, min_tokens=None)
    return None if rules.is_empty else rules
