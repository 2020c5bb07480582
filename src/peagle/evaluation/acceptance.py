"""Acceptance of drafts: pooled counters, the figures computed from them, and their slices.

A small model falls into loops, and a loop is easy to draft. The figures up to the first loop tell
how well a head drafts other text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from peagle.engine import SpeculationStats
from peagle.evaluation.decoding import Answer, DecodeCounts, Observation
from peagle.evaluation.texts import coloured_samples, hardest_texts
from peagle.intervals import MIN_CLUSTERS, acceptance_intervals
from peagle.results import AcceptanceFigures, HistogramBin, RangeSlice, Slice

LOOP_NGRAM = 16
# Ranges of lengths begin at 0 and at these numbers times powers of two.
FIRST_CONTEXT, FIRST_OUTPUT = 64, 32
_BIN = 0.5


# ---- counters of a request ----


@dataclass(slots=True)
class RequestCounts:
    """The counters of one request, or of some of its steps."""

    conversation: str = ""  # the prompt of the request: the turns of a prompt vary together
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_tokens: int = 0
    num_steps: int = 0  # decode steps, those without a draft too
    loops: bool | None = None  # whether the output falls into a loop; None is unknown
    before_loop: tuple[SpeculationStats, int] | None = None  # drafts and steps up to the loop


def loop_start(token_ids: Sequence[int], ngram: int = LOOP_NGRAM) -> int | None:
    """Return the index at which the first repeated n-gram begins again; None without a repeat.

    [a b c a b c a], n = 3: "a b c" occurs again at index 3, so the result is 3.
    """
    seen: set[tuple[int, ...]] = set()
    for start in range(len(token_ids) - ngram + 1):
        window = tuple(token_ids[start : start + ngram])
        if window in seen:
            return start
        seen.add(window)
    return None


def _before_loop(
    token_ids: Sequence[int], steps: Sequence[DecodeCounts]
) -> tuple[SpeculationStats, int] | None:
    """Count the decode steps that end before a loop, and their drafts; None without a loop."""
    loop = loop_start(token_ids)
    if loop is None:
        return None
    # Every step counted here is followed by others, so stop conditions trimmed none of them.
    stats, num_steps, end = SpeculationStats(), 0, steps[0].num_tokens
    for step in steps[1:]:
        end += step.num_tokens
        if end > loop:
            break
        num_steps += 1
        stats.record(step.num_drafted, step.num_accepted, step.draft_depth, step.text_from)
    return stats, num_steps


def counts_of(answer: Answer, conversation: str = "") -> RequestCounts:
    """Return the counters of an answer that has drafts; those up to its loop if it has steps."""
    assert answer.stats is not None
    counts = RequestCounts(conversation, answer.stats, answer.num_tokens)
    if answer.steps is not None and answer.token_ids is not None:
        counts.num_steps = len(answer.steps) - 1
        found = _before_loop(answer.token_ids, answer.steps)
        counts.loops = found is not None
        counts.before_loop = found or (answer.stats, counts.num_steps)
    else:
        # Every step but the prompt pass brings one token beside the accepted ones.
        decoded = answer.num_tokens - 1 - answer.stats.num_accepted_tokens
        counts.num_steps = max(answer.stats.num_drafts, decoded)
    return counts


# ---- figures of some requests ----


def conditional_acceptance(stats: SpeculationStats) -> list[float | None]:
    """Return P(draft token i accepted | all before it accepted); None if never reached."""
    reached = [stats.num_drafts, *stats.num_accepted_tokens_per_pos]
    accepted = stats.num_accepted_tokens_per_pos
    return [a / r if r else None for a, r in zip(accepted, reached, strict=False)]


def tokens_per_step(stats: SpeculationStats, steps: int) -> float:
    """Return 1 + accepted draft tokens / decode steps."""
    return 1 + stats.num_accepted_tokens / steps if steps else 1.0


def acceptance_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the pooled figures of answers with their steps as a JSON object.

    acceptance_length = 1 + accepted draft tokens / drafts. tokens_per_step also counts the steps
    without a draft: both figures are equal for heads, and tokens_per_step is lower for prompt
    lookup. Figures "before_loop" count only the steps that end before a loop.
    """
    every = [counts_of(answer) for answer in answers]
    total = SpeculationStats.pooled(counts.stats for counts in every)
    early = [counts.before_loop for counts in every if counts.before_loop is not None]
    before = SpeculationStats.pooled(stats for stats, _ in early)
    return {
        "num_outputs": len(answers),
        "num_tokens": sum(one.num_tokens for one in every),
        **total.to_json(),
        "acceptance_length": total.acceptance_length,
        "unconditional_acceptance_per_pos": total.acceptance_per_pos,
        "conditional_acceptance_per_pos": conditional_acceptance(total),
        "tokens_per_step": tokens_per_step(total, sum(one.num_steps for one in every)),
        "loop_share": sum(bool(one.loops) for one in every) / len(every) if every else 0.0,
        "num_drafts_before_loop": before.num_drafts,
        "acceptance_length_before_loop": before.acceptance_length,
        "unconditional_acceptance_per_pos_before_loop": before.acceptance_per_pos,
        "tokens_per_step_before_loop": tokens_per_step(before, sum(steps for _, steps in early)),
    }


def slice_of(counts: Sequence[RequestCounts], k: int = 0, *, seed: int = 0) -> Slice:
    """Pool the counters of requests; 95% intervals are None below 5 conversations.

    The slice lists at least `k` positions, even if every draft was shorter.
    """
    total = SpeculationStats.pooled(one.stats for one in counts)
    clusters: dict[str, SpeculationStats] = {}
    for one in sorted(counts, key=lambda one: one.conversation):  # one order, one interval
        clusters.setdefault(one.conversation, SpeculationStats()).add(one.stats)
    rows = [stats.num_accepted_tokens_per_pos for stats in clusters.values()]
    width = max([k, *map(len, rows)])
    accepted_NK = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    drafts_N = np.array([stats.num_drafts for stats in clusters.values()], dtype=np.int64)
    intervals = acceptance_intervals(drafts_N, accepted_NK.reshape(len(rows), width), seed=seed)
    looked = [one.loops for one in counts if one.loops is not None]
    before = SpeculationStats.pooled(one.before_loop[0] for one in counts if one.before_loop)
    return Slice(
        num_requests=len(counts),
        num_tokens=sum(one.num_tokens for one in counts),
        **_figures(total, k),
        acceptance_length_ci=intervals.acceptance_length,
        unconditional_ci=intervals.unconditional,
        conditional_ci=intervals.conditional,
        tokens_per_step=tokens_per_step(total, sum(one.num_steps for one in counts)),
        loop_share=sum(looked) / len(looked) if looked else None,
        acceptance_length_before_loop=before.acceptance_length if before.num_drafts else None,
    )


def _figures(stats: SpeculationStats, k: int) -> dict[str, Any]:
    per_pos = stats.num_accepted_tokens_per_pos
    if stats.num_drafts:
        per_pos.extend([0] * (k - len(per_pos)))
    return {
        **stats.to_json(),
        "acceptance_length": stats.acceptance_length,
        "unconditional": stats.acceptance_per_pos,
        "conditional": conditional_acceptance(stats),
        **stats.shares_by_source,
    }


# ---- figures of an entry ----


def figures_of_answers(
    observations: Sequence[Observation],
    k: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
) -> AcceptanceFigures:
    """Compute all figures of one entry, at `k` draft tokens a step, from answers with their drafts.

    Answers without steps give no figures by context or position. The target's tokenizer is for
    texts by token; None leaves these out. `seed` seeds the resamples of the intervals.
    """
    counts = [counts_of(one.answer, one.conversation) for one in observations]

    def by(key: Callable[[Observation], str]) -> dict[str, Slice]:
        groups: dict[str, list[RequestCounts]] = {}
        for one, own in zip(observations, counts, strict=True):
            groups.setdefault(key(one), []).append(own)
        return {name: slice_of(group, k, seed=seed) for name, group in groups.items()}

    def by_length(length: Callable[[VerifiedDraft], int], first: int) -> list[RangeSlice]:
        """Slice the steps by a length at their beginning, in ranges that double."""
        ranges = _steps_by(stepped, lambda step: (length(step) // first).bit_length())
        return [
            RangeSlice(
                first=first << (number - 1) if number else 0,
                last=first << number,
                slice=slice_of(group, k, seed=seed),
            )
            for number, group in sorted(ranges.items())
        ]

    stepped = [one for one in observations if one.answer.steps is not None]
    pooled = slice_of(counts, k, seed=seed)
    conversations: dict[str, tuple[int, int, int]] = {}
    for one in counts:
        drafts, accepted, steps = conversations.get(one.conversation, (0, 0, 0))
        conversations[one.conversation] = (
            drafts + one.stats.num_drafts,
            accepted + one.stats.num_accepted_tokens,
            steps + one.num_steps,
        )
    return AcceptanceFigures(
        pooled=pooled,
        by_set=by(lambda one: one.set),
        by_category=by(lambda one: one.group),
        by_context=by_length(lambda step: step.context, FIRST_CONTEXT),
        by_output_position=by_length(lambda step: step.output, FIRST_OUTPUT),
        histogram=histogram(one.stats for one in counts),
        loop_share=pooled.loop_share,
        by_conversation=conversations,
        hardest=hardest_texts(stepped),
        samples=coloured_samples(stepped, tokenizer) if tokenizer else [],
    )


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """The counters of a server while it answered the prompts of one set and category."""

    set: str
    group: str
    num_requests: int
    num_tokens: int
    stats: SpeculationStats | None


def figures_of_counters(groups: Sequence[GroupCounters], k: int) -> AcceptanceFigures:
    """Compute the figures of one entry from counters that do not tell requests apart.

    The prompt pass gives a request its first token, and every later step gives the accepted
    drafts and one token; the number of steps follows. There are no intervals. Where a server has
    no counters the acceptance length is None.
    """

    def pooled(chosen: Sequence[GroupCounters]) -> Slice:
        known = [one.stats for one in chosen if one.stats is not None]
        stats = SpeculationStats.pooled(known)
        num_requests = sum(one.num_requests for one in chosen)
        num_tokens = sum(one.num_tokens for one in chosen)
        num_steps = max(stats.num_drafts, num_tokens - num_requests - stats.num_accepted_tokens)
        figures = _figures(stats, k)
        if not known:
            figures["acceptance_length"] = None
        return Slice(
            num_requests=num_requests,
            num_tokens=num_tokens,
            **figures,
            tokens_per_step=tokens_per_step(stats, num_steps),
        )

    sets = dict.fromkeys(one.set for one in groups)
    return AcceptanceFigures(
        pooled=pooled(groups),
        by_set={name: pooled([one for one in groups if one.set == name]) for name in sets},
        by_category={one.group: pooled([one]) for one in groups},
    )


def histogram(every: Iterable[SpeculationStats]) -> list[HistogramBin]:
    """Count requests by their own acceptance length, in bins of a half."""
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


# ---- figures by step ----


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """A decode step and the number of tokens before it.

    `num_accepted` counts the accepted drafts before stop conditions trim them.
    """

    context: int  # tokens of prompt and output before the step
    output: int  # tokens of the output before the step
    num_tokens: int
    num_drafted: int
    num_accepted: int
    draft_depth: int | None
    text_from: int | None


def decode_steps(answer: Answer) -> Iterator[VerifiedDraft]:
    """Yield the steps of an answer after the prompt pass; their drafts add up to its counters."""
    assert answer.steps is not None and answer.stats is not None
    done, accepted = 0, 0
    last = len(answer.steps) - 1
    for number, step in enumerate(answer.steps):
        # Stop conditions trim the last step alone: it accepted the total less the others' drafts.
        true = answer.stats.num_accepted_tokens - accepted if number == last else step.num_accepted
        if number:
            context = answer.num_prompt_tokens + done
            counts = step.num_tokens, step.num_drafted, true
            yield VerifiedDraft(context, done, *counts, step.draft_depth, step.text_from)
        done += step.num_tokens
        accepted += true


def _steps_by(
    observations: Sequence[Observation], number_of: Callable[[VerifiedDraft], int]
) -> dict[int, list[RequestCounts]]:
    """Count the steps of each request, grouped by the number that `number_of` gives a step."""
    found: dict[int, list[RequestCounts]] = {}
    for one in observations:
        own: dict[int, RequestCounts] = {}
        for step in decode_steps(one.answer):
            counts = own.setdefault(number_of(step), RequestCounts(one.conversation))
            drafts = step.num_drafted, step.num_accepted, step.draft_depth, step.text_from
            counts.stats.record(*drafts)
            counts.num_tokens += step.num_tokens
            counts.num_steps += 1
        for number, counts in own.items():
            found.setdefault(number, []).append(counts)
    return found


def beyond_training(
    observations: Sequence[Observation], length: int, k: int, *, seed: int = 0
) -> str | None:
    """Describe how much acceptance a head loses in contexts of `length` tokens and more.

    None without a loss. A loss shows where the intervals of the acceptance length on both sides do
    not overlap, or where no draft is accepted any more. Answers without steps do not count.
    """
    stepped = [one for one in observations if one.answer.steps is not None]
    sides = _steps_by(stepped, lambda step: int(step.context >= length))
    if len(sides) < 2:
        return None
    within, beyond = (slice_of(sides[number], k, seed=seed) for number in (0, 1))
    if beyond.num_requests < MIN_CLUSTERS or within.acceptance_length_ci is None:
        return None
    if beyond.acceptance_length_ci is None:
        # There is no interval if every draft was rejected, and no doubt either.
        is_lost = beyond.num_drafts > 0 and not beyond.num_accepted_tokens
    else:
        is_lost = beyond.acceptance_length_ci[1] < within.acceptance_length_ci[0]
    if not is_lost:
        return None
    share = beyond.num_drafts / (within.num_drafts + beyond.num_drafts)
    return (
        f"{share:.0%} of the drafts stand beyond the {length:,} tokens that the head was trained "
        f"on: acceptance length {beyond.acceptance_length:.2f} there, "
        f"{within.acceptance_length:.2f} before; train it on texts as long as those it serves"
    )
