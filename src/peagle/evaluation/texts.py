"""Texts of an evaluation: where drafts fail most, and outputs with their accepted tokens marked."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from peagle.engine.detokenizer import IncrementalDetokenizer
from peagle.evaluation.acceptance import DecodedStep
from peagle.evaluation.decoding import Observation
from peagle.results import HardText, OutputSample

WINDOW = 16  # drafts
MOST_TEXTS, MOST_SAMPLES = 12, 8
_BEFORE, _TAIL, _MOST_TOKENS = 240, 400, 400
ACCEPTED, TARGET = "accepted", "target"


def hardest_texts(
    observations: Sequence[Observation], window: int = WINDOW, most: int = MOST_TEXTS
) -> list[HardText]:
    """The stretches of so many drafts with the least accepted tokens, the worst of each request.

    Args:
        observations: answers with their steps.
        window: drafts of a stretch; fewer where no answer has so many.
        most: stretches, the hardest first.
    """
    drafted = [_drafted_steps(one.answer.steps or []) for one in observations]
    window = min(window, max(map(len, drafted), default=0))
    found: list[tuple[float, int, int, int]] = []
    for index, (one, numbers) in enumerate(zip(observations, drafted, strict=True)):
        if not window or len(numbers) < window:
            continue
        accepted, start = _least(one.answer.steps or [], numbers, window)
        first, last = numbers[start], numbers[start + window - 1]
        found.append((1 + accepted / window, index, first, last))
    return [
        _hard_text(observations[index], first, last, length, window)
        for length, index, first, last in sorted(found)[:most]
    ]


def _drafted_steps(steps: Sequence[DecodedStep]) -> list[int]:
    return [number for number, step in enumerate(steps) if step.num_drafted]


def _least(steps: Sequence[DecodedStep], numbers: Sequence[int], window: int) -> tuple[int, int]:
    """Fewest accepted tokens of so many drafts on end, and with which of them that begins."""
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + steps[number].num_accepted)
    return min(
        (sums[start + window] - sums[start], start) for start in range(len(numbers) - window + 1)
    )


def _hard_text(one: Observation, first: int, last: int, length: float, window: int) -> HardText:
    texts = one.answer.texts
    before = one.prompt + "".join(texts[:first])
    return HardText(
        set=one.set,
        id=one.id,
        text_before=before[-_BEFORE:],
        text="".join(texts[first : last + 1]),
        acceptance_length=length,
        num_drafts=window,
    )


def coloured_samples(
    observations: Sequence[Observation],
    tokenizer: PreTrainedTokenizerBase,
    most: int = MOST_SAMPLES,
) -> list[OutputSample]:
    """Outputs of every kind: the middle one of each set, then the best and the worst of all.

    Args:
        observations: answers with their steps and tokens.
        tokenizer: of the target.
        most: outputs.
    """
    ranked = sorted(
        (one for one in observations if one.answer.stats and one.answer.stats.num_drafts),
        key=_acceptance_length,
    )
    if not ranked:
        return []
    chosen: list[Observation] = []
    for name in dict.fromkeys(one.set for one in observations):
        if own := [one for one in ranked if one.set == name]:
            chosen.append(own[len(own) // 2])
    chosen = [*chosen[: most - 2], ranked[-1], ranked[0]]
    distinct = {id(one): one for one in chosen}
    return [_sample(one, tokenizer) for one in distinct.values()]


def _acceptance_length(one: Observation) -> float:
    assert one.answer.stats is not None
    return one.answer.stats.acceptance_length


def _sample(one: Observation, tokenizer: PreTrainedTokenizerBase) -> OutputSample:
    return OutputSample(
        set=one.set,
        id=one.id,
        acceptance_length=_acceptance_length(one),
        prompt_tail=one.prompt[-_TAIL:],
        pieces=pieces(one.answer.token_ids or [], one.answer.steps or [], tokenizer),
    )


def pieces(
    token_ids: Sequence[int],
    steps: Sequence[DecodedStep],
    tokenizer: PreTrainedTokenizerBase,
    most_tokens: int = _MOST_TOKENS,
) -> list[tuple[str, str]]:
    """The beginning of an output, cut where it changes from accepted drafts to the target's tokens.

    A character that spans tokens goes to the piece that completes it.

    Returns:
        pairs of a text and "accepted" or "target".
    """
    text = IncrementalDetokenizer(tokenizer)
    cut: list[tuple[str, str]] = []
    start = 0
    for step in steps:
        if start >= most_tokens:
            break
        middle, end = start + step.num_accepted, start + step.num_tokens
        for ids, kind in ((token_ids[start:middle], ACCEPTED), (token_ids[middle:end], TARGET)):
            if new := text.add(list(ids)):
                cut.append((new, kind))
        start = end
    if rest := text.add([], final=True):
        cut.append((rest, TARGET))
    return cut
