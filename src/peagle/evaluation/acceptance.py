"""Acceptance of drafts, pooled over outputs, and what loops do to it.

A small model falls into loops, and a loop is easy to draft: the figures up to the first loop say
what a head is worth on text that goes somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.engine import SpeculationStats
from peagle.llm import RequestOutput

LOOP_NGRAM = 16


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """What one step of the engine gave one output.

    Attributes:
        num_tokens: tokens added.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens among the tokens added (the first ones).
    """

    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished output and the steps it came in; the first step is the prompt pass."""

    output: RequestOutput
    steps: list[DecodedStep]


def loop_start(token_ids: Sequence[int], ngram: int = LOOP_NGRAM) -> int | None:
    """Where the second occurrence of the first repeated n-gram begins; None without a repeat.

    [a b c a b c a], n = 3: "a b c" occurs again at index 3, so the answer is 3.
    """
    seen: set[tuple[int, ...]] = set()
    for start in range(len(token_ids) - ngram + 1):
        window = tuple(token_ids[start : start + ngram])
        if window in seen:
            return start
        seen.add(window)
    return None


def before_loop(
    token_ids: Sequence[int], steps: Sequence[DecodedStep]
) -> tuple[SpeculationStats, int] | None:
    """Counters and number of the decode steps that end where a loop begins or earlier.

    Args:
        token_ids: an output.
        steps: those that it came in, the first of them the prompt pass.

    Returns:
        None where the output has no loop (see `loop_start`).
    """
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
        stats.record(step.num_drafted, step.num_accepted)
    return stats, num_steps


def acceptance_figures(completions: Sequence[Completion]) -> dict[str, Any]:
    """Pooled figures of a set of outputs as a JSON object.

    The acceptance length is 1 + accepted draft tokens / drafts. tokens_per_step counts the steps
    that had nothing to verify too: it is the same for heads, and lower for prompt lookup, which
    does not always find a draft. Figures "before_loop" are of the steps that end before a loop.
    """
    total, before = SpeculationStats(), SpeculationStats()
    num_steps = num_steps_before = num_loops = 0
    for one in completions:
        whole = one.output.stats, len(one.steps) - 1
        early = before_loop(one.output.token_ids, one.steps)
        num_loops += early is not None
        for stats, found in ((total, whole), (before, early or whole)):
            stats.add(found[0])
        num_steps += whole[1]
        num_steps_before += (early or whole)[1]
    return {
        "num_outputs": len(completions),
        "num_tokens": sum(len(one.output.token_ids) for one in completions),
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "acceptance_length": total.acceptance_length,
        "unconditional_acceptance_per_pos": total.acceptance_per_pos,
        "conditional_acceptance_per_pos": conditional_acceptance(total),
        "tokens_per_step": tokens_per_step(total, num_steps),
        "loop_share": num_loops / len(completions) if completions else 0.0,
        "num_drafts_before_loop": before.num_drafts,
        "acceptance_length_before_loop": before.acceptance_length,
        "unconditional_acceptance_per_pos_before_loop": before.acceptance_per_pos,
        "tokens_per_step_before_loop": tokens_per_step(before, num_steps_before),
    }


def conditional_acceptance(stats: SpeculationStats) -> list[float | None]:
    """P(draft token i accepted | the ones before it accepted); None where that never came up."""
    reached = [stats.num_drafts, *stats.num_accepted_tokens_per_pos]
    accepted = stats.num_accepted_tokens_per_pos
    return [a / r if r else None for a, r in zip(accepted, reached, strict=False)]


def tokens_per_step(stats: SpeculationStats, steps: int) -> float:
    """1 + accepted draft tokens / decode steps."""
    return 1 + stats.num_accepted_tokens / steps if steps else 1.0
