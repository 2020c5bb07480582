"""Texts of an evaluation: the hardest to draft, and outputs with their accepted tokens marked."""

from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from peagle.engine.detokenizer import IncrementalDetokenizer
from peagle.evaluation.decoding import DecodeCounts, Observation
from peagle.results import HardText, OutputSample

WINDOW_DRAFTS = 16  # drafts
MAX_TEXTS, MAX_SAMPLES = 12, 8
_BEFORE, _TAIL, _MAX_TOKENS = 240, 400, 400
ACCEPTED, TARGET = "accepted", "target"


def hardest_texts(
    observations: Sequence[Observation], window: int = WINDOW_DRAFTS
) -> list[HardText]:
    """Find the stretch with the fewest accepted tokens in each output, the hardest first.

    A stretch has `window` drafts, or fewer if no answer has so many. At most MAX_TEXTS stretches
    are returned.
    """
    drafting = [
        [number for number, step in enumerate(one.answer.steps or []) if step.num_drafted]
        for one in observations
    ]
    window = min(window, max(map(len, drafting), default=0))
    found: list[tuple[int, int, int, int]] = []  # accepted, observation, first and last step
    for index, numbers in enumerate(drafting):
        if not window or len(numbers) < window:
            continue
        steps = observations[index].answer.steps or []
        sums = [0, *accumulate(steps[number].num_accepted for number in numbers)]
        accepted, start = min(
            (sums[start + window] - sums[start], start)
            for start in range(len(numbers) - window + 1)
        )
        found.append((accepted, index, numbers[start], numbers[start + window - 1]))
    texts = []
    for accepted, index, first, last in sorted(found)[:MAX_TEXTS]:
        one = observations[index]
        before = one.prompt + "".join(one.answer.texts[:first])
        texts.append(
            HardText(
                set=one.set,
                id=one.id,
                text_before=before[-_BEFORE:],
                text="".join(one.answer.texts[first : last + 1]),
                acceptance_length=1 + accepted / window,
                num_drafts=window,
            )
        )
    return texts


def coloured_samples(
    observations: Sequence[Observation], tokenizer: PreTrainedTokenizerBase
) -> list[OutputSample]:
    """Cut some outputs into pieces: the middle one of each set, then the best and the worst of all.

    `observations` are answers with their steps and tokens. At most MAX_SAMPLES are cut.
    """
    lengths = {
        number: one.answer.stats.acceptance_length
        for number, one in enumerate(observations)
        if one.answer.stats and one.answer.stats.num_drafts
    }
    ranked = sorted(lengths, key=lambda number: lengths[number])
    if not ranked:
        return []
    chosen: list[int] = []
    for name in dict.fromkeys(one.set for one in observations):
        if own := [number for number in ranked if observations[number].set == name]:
            chosen.append(own[len(own) // 2])
    chosen = [*chosen[: MAX_SAMPLES - 2], ranked[-1], ranked[0]]
    samples = []
    for number in dict.fromkeys(chosen):
        one = observations[number]
        samples.append(
            OutputSample(
                set=one.set,
                id=one.id,
                acceptance_length=lengths[number],
                prompt_tail=one.prompt[-_TAIL:],
                pieces=pieces(one.answer.token_ids or [], one.answer.steps or [], tokenizer),
            )
        )
    return samples


def pieces(
    token_ids: Sequence[int],
    steps: Sequence[DecodeCounts],
    tokenizer: PreTrainedTokenizerBase,
    most_tokens: int = _MAX_TOKENS,
) -> list[tuple[str, str]]:
    """Cut the beginning of an output into runs of accepted drafts and of the target's tokens.

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
