"""Acceptance of drafts, pooled over outputs, and what loops do to it.

A small model falls into loops, and a loop is easy to draft: the figures up to the first loop say
what a head is worth on text that goes somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Acceptance:
    """Pooled counters of a set of outputs.

    Attributes:
        stats: counters of the drafts, taken before stop conditions trim.
        num_outputs, num_tokens: outputs, and tokens in them.
        num_decode_steps: steps after the prompt pass, those without a draft included.
        num_loops: outputs with a repeated 16-gram of tokens.
        stats_before_loop: counters of the steps that end where the repeat begins or earlier.
        num_decode_steps_before_loop: those steps.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_outputs: int = 0
    num_tokens: int = 0
    num_decode_steps: int = 0
    num_loops: int = 0
    stats_before_loop: SpeculationStats = field(default_factory=SpeculationStats)
    num_decode_steps_before_loop: int = 0

    @classmethod
    def of(cls, completions: Iterable[Completion]) -> Acceptance:
        """Pool the counters of `completions`."""
        pooled = cls()
        for completion in completions:
            pooled._add(completion)
        return pooled

    def _add(self, completion: Completion) -> None:
        output, steps = completion.output, completion.steps
        self.num_outputs += 1
        self.num_tokens += len(output.token_ids)
        self.num_decode_steps += len(steps) - 1
        self.stats.add(output.stats)
        before = before_loop(output.token_ids, steps)
        if before is None:
            self.stats_before_loop.add(output.stats)
            self.num_decode_steps_before_loop += len(steps) - 1
            return
        self.num_loops += 1
        self.stats_before_loop.add(before[0])
        self.num_decode_steps_before_loop += before[1]

    @property
    def loop_share(self) -> float:
        """Share of the outputs that fall into a loop."""
        return self.num_loops / self.num_outputs if self.num_outputs else 0.0

    @property
    def tokens_per_step(self) -> float:
        """1 + accepted draft tokens / decode steps.

        The acceptance length with the steps counted that had nothing to verify: the same for
        heads, lower for prompt lookup, which does not always find a draft.
        """
        return _tokens_per_step(self.stats, self.num_decode_steps)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; the acceptance length is 1 + accepted draft tokens / drafts."""
        before = self.stats_before_loop
        return {
            "num_outputs": self.num_outputs,
            "num_tokens": self.num_tokens,
            "num_drafts": self.stats.num_drafts,
            "num_draft_tokens": self.stats.num_draft_tokens,
            "num_accepted_tokens": self.stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": self.stats.num_accepted_tokens_per_pos,
            "acceptance_length": self.stats.acceptance_length,
            "unconditional_acceptance_per_pos": self.stats.acceptance_per_pos,
            "conditional_acceptance_per_pos": conditional_acceptance(self.stats),
            "tokens_per_step": self.tokens_per_step,
            "loop_share": self.loop_share,
            "num_drafts_before_loop": before.num_drafts,
            "acceptance_length_before_loop": before.acceptance_length,
            "unconditional_acceptance_per_pos_before_loop": before.acceptance_per_pos,
            "tokens_per_step_before_loop": _tokens_per_step(
                before, self.num_decode_steps_before_loop
            ),
        }


def conditional_acceptance(stats: SpeculationStats) -> list[float | None]:
    """P(draft token i accepted | the ones before it accepted); None where that never came up."""
    reached = [stats.num_drafts, *stats.num_accepted_tokens_per_pos]
    accepted = stats.num_accepted_tokens_per_pos
    return [a / r if r else None for a, r in zip(accepted, reached, strict=False)]


def _tokens_per_step(stats: SpeculationStats, steps: int) -> float:
    return 1 + stats.num_accepted_tokens / steps if steps else 1.0
