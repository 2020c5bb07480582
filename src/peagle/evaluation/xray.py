"""The figures of one way to decode that `peagle eval` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from peagle.engine import SpeculationStats
from peagle.evaluation.acceptance import before_loop
from peagle.evaluation.decoding import Answer, Observation
from peagle.evaluation.intervals import MIN_CLUSTERS
from peagle.evaluation.slices import Counted, slice_of, slice_of_counters
from peagle.evaluation.texts import coloured_samples, hardest_texts
from peagle.results import AcceptanceFigures, HistogramBin, RangeSlice, Slice

# Ranges of lengths begin at 0 and these powers of two.
FIRST_CONTEXT, FIRST_OUTPUT = 64, 32
_BIN = 0.5


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """The counters of a server while it answered the prompts of one group."""

    set: str
    group: str
    num_requests: int
    num_tokens: int
    stats: SpeculationStats | None


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A decode step, and the tokens before it; drafts count before stop conditions trim."""

    context: int  # tokens of prompt and output before the step
    output: int  # tokens of the output before the step
    num_tokens: int
    num_drafted: int
    num_accepted: int


def decode_steps(answer: Answer) -> Iterator[DraftedStep]:
    """The steps of an answer after the prompt pass; their drafts add up to its counters."""
    assert answer.steps is not None
    assert answer.stats is not None
    done, accepted = 0, 0
    last = len(answer.steps) - 1
    for number, step in enumerate(answer.steps):
        # Only the last step can have been trimmed: what the others accepted tells its share.
        true = answer.stats.num_accepted_tokens - accepted if number == last else step.num_accepted
        if number:
            context = answer.num_prompt_tokens + done
            yield DraftedStep(context, done, step.num_tokens, step.num_drafted, true)
        done += step.num_tokens
        accepted += true


def xray(
    observations: Sequence[Observation],
    k: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
) -> AcceptanceFigures:
    """All figures of one entry, from answers that tell their drafts.

    Args:
        observations: whole answers; those without steps give no figures by context or position.
        k: draft tokens of a step.
        tokenizer: of the target, for texts by token; None leaves these out.
        seed: of the intervals.
    """

    def by(key: Callable[[Observation], str]) -> dict[str, Slice]:
        names = dict.fromkeys(map(key, observations))
        return {
            name: slice_of([_counted(o) for o in observations if key(o) == name], k, seed=seed)
            for name in names
        }

    pooled = slice_of([_counted(one) for one in observations], k, seed=seed)
    stepped = [one for one in observations if one.answer.steps is not None]
    return AcceptanceFigures(
        pooled=pooled,
        by_set=by(lambda one: one.set),
        by_category=by(lambda one: one.group),
        by_context=_by_length(stepped, lambda s: s.context, FIRST_CONTEXT, k, seed),
        by_output_position=_by_length(stepped, lambda s: s.output, FIRST_OUTPUT, k, seed),
        histogram=histogram(o.answer.stats for o in observations if o.answer.stats),
        loop_share=pooled.loop_share,
        by_conversation=_by_conversation(observations),
        hardest=hardest_texts(stepped),
        samples=coloured_samples(stepped, tokenizer) if tokenizer else [],
    )


def _by_conversation(observations: Sequence[Observation]) -> dict[str, tuple[int, int, int]]:
    """(drafts, accepted draft tokens, decode steps) of each conversation."""
    found: dict[str, tuple[int, int, int]] = {}
    for one in observations:
        counted = _counted(one)
        drafts, accepted, steps = found.get(one.conversation, (0, 0, 0))
        found[one.conversation] = (
            drafts + counted.stats.num_drafts,
            accepted + counted.stats.num_accepted_tokens,
            steps + counted.num_steps,
        )
    return found


def xray_of_counters(groups: Sequence[GroupCounters], k: int) -> AcceptanceFigures:
    """The figures of one entry, from the counters that a server kept for each group of prompts."""

    def pooled(chosen: Sequence[GroupCounters]) -> Slice:
        known = [one.stats for one in chosen if one.stats is not None]
        return slice_of_counters(
            SpeculationStats.pooled(known) if known else None,
            sum(one.num_requests for one in chosen),
            sum(one.num_tokens for one in chosen),
            k,
        )

    sets = dict.fromkeys(one.set for one in groups)
    return AcceptanceFigures(
        pooled=pooled(groups),
        by_set={name: pooled([one for one in groups if one.set == name]) for name in sets},
        by_category={one.group: pooled([one]) for one in groups},
    )


def _counted(one: Observation) -> Counted:
    answer = one.answer
    assert answer.stats is not None
    counted = Counted(one.conversation, answer.stats, answer.num_tokens)
    if answer.steps is None or answer.token_ids is None:
        # Every step but the prompt pass brings one token beside the accepted ones.
        decoded = answer.num_tokens - 1 - answer.stats.num_accepted_tokens
        counted.num_steps = max(answer.stats.num_drafts, decoded)
        return counted
    counted.num_steps = len(answer.steps) - 1
    before = before_loop(answer.token_ids, answer.steps)
    counted.loops = before is not None
    counted.stats_before_loop = answer.stats if before is None else before[0]
    return counted


def _by_length(
    observations: Sequence[Observation],
    length: Callable[[DraftedStep], int],
    first: int,
    k: int,
    seed: int,
) -> list[RangeSlice]:
    """Slices of the steps by a length at which they begin, in ranges that double."""
    ranges = _sorted_into(observations, lambda step: (length(step) // first).bit_length())
    return [
        RangeSlice(
            first=first << (number - 1) if number else 0,
            last=first << number,
            slice=slice_of(counted, k, seed=seed),
        )
        for number, counted in sorted(ranges.items())
    ]


def _sorted_into(
    observations: Sequence[Observation], number_of: Callable[[DraftedStep], int]
) -> dict[int, list[Counted]]:
    """The counts of each request's steps, by a number of theirs."""
    found: dict[int, list[Counted]] = {}
    for one in observations:
        own: dict[int, Counted] = {}
        for step in decode_steps(one.answer):
            counted = own.setdefault(number_of(step), Counted(one.conversation))
            counted.stats.record(step.num_drafted, step.num_accepted)
            counted.num_tokens += step.num_tokens
            counted.num_steps += 1
        for number, counted in own.items():
            found.setdefault(number, []).append(counted)
    return found


def beyond_training(
    observations: Sequence[Observation], length: int, k: int, *, seed: int = 0
) -> str | None:
    """Say what contexts longer than those of training cost a head; None where nothing is lost.

    A loss shows where the intervals of the acceptance length on both sides do not touch, or where
    no draft passes any more.

    Args:
        observations: whole answers; those without steps tell nothing.
        length: tokens of the longest sequence of training.
        k: draft tokens of a step.
        seed: of the intervals.
    """
    stepped = [one for one in observations if one.answer.steps is not None]
    sides = _sorted_into(stepped, lambda step: int(step.context >= length))
    if len(sides) < 2:
        return None
    within, beyond = (slice_of(sides[number], k, seed=seed) for number in (0, 1))
    if not _is_shorter(beyond, within):
        return None
    share = beyond.num_drafts / (within.num_drafts + beyond.num_drafts)
    return (
        f"{share:.0%} of the drafts stand beyond the {length:,} tokens that the head was trained "
        f"on: acceptance length {beyond.acceptance_length:.2f} there, "
        f"{within.acceptance_length:.2f} before; train it on texts as long as those it serves"
    )


def _is_shorter(one: Slice, other: Slice) -> bool:
    """Whether the acceptance length of a slice is below another's, beyond doubt."""
    if one.num_requests < MIN_CLUSTERS or other.acceptance_length_ci is None:
        return False
    if one.acceptance_length_ci is None:
        # Where every draft was rejected there is no interval, and no doubt either.
        return one.num_drafts > 0 and not one.num_accepted_tokens
    return one.acceptance_length_ci[1] < other.acceptance_length_ci[0]


def histogram(every: Iterable[SpeculationStats]) -> list[HistogramBin]:
    """How many requests have an acceptance length from here to there, in bins of a half."""
    lengths = [stats.acceptance_length for stats in every if stats.num_drafts]
    if not lengths:
        return []
    bins = [0] * (int((max(lengths) - 1) / _BIN) + 1)
    for one in lengths:
        bins[int((one - 1) / _BIN)] += 1
    return [
        HistogramBin(first=1 + number * _BIN, last=1 + (number + 1) * _BIN, count=count)
        for number, count in enumerate(bins)
    ]
