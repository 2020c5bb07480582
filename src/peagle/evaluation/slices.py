"""Acceptance of some requests of an evaluation: pooled counters, figures and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peagle.engine import SpeculationStats
from peagle.evaluation.acceptance import conditional_acceptance, tokens_per_step
from peagle.evaluation.intervals import acceptance_intervals
from peagle.results import Slice


@dataclass(slots=True)
class Counted:
    """What one request, or a part of it, adds to a slice.

    Attributes:
        conversation: the prompt that it belongs to: its turns vary together.
        stats: its drafts.
        num_tokens: output tokens.
        num_steps: decode steps, those without a draft included.
        loops: whether the output falls into a loop; None where nobody looked.
        stats_before_loop: drafts before the loop, all of them where there is none.
    """

    conversation: str
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_tokens: int = 0
    num_steps: int = 0
    loops: bool | None = None
    stats_before_loop: SpeculationStats | None = None


def slice_of(counted: Sequence[Counted], k: int = 0, *, seed: int = 0) -> Slice:
    """Counters and figures of some requests.

    acceptance_length = 1 + accepted draft tokens / drafts, from pooled counters; tokens_per_step
    counts the steps that had nothing to verify too. Intervals are of 95%, null below 5
    conversations.

    Args:
        counted: the requests.
        k: positions to show at least, also where no draft was so long.
        seed: of the intervals.
    """
    total = SpeculationStats.pooled(one.stats for one in counted)
    num_steps = sum(one.num_steps for one in counted)
    return Slice(
        num_requests=len(counted),
        num_tokens=sum(one.num_tokens for one in counted),
        **_figures(total, k),
        **_intervals(counted, k, seed),
        tokens_per_step=tokens_per_step(total, num_steps),
        **_loops(counted),
    )


def slice_of_counters(
    stats: SpeculationStats | None, num_requests: int, num_tokens: int, k: int = 0
) -> Slice:
    """Counters and figures of a server, whose counters do not tell requests apart.

    The prompt pass gives a request its first token, and every further step gives the accepted
    drafts and one token; the number of steps follows. There are no intervals. Without counters
    (None) the acceptance length is None.
    """
    known = stats or SpeculationStats()
    decoded = num_tokens - num_requests
    num_steps = max(known.num_drafts, decoded - known.num_accepted_tokens)
    figures = _figures(known, k)
    if stats is None:
        figures["acceptance_length"] = None
    return Slice(
        num_requests=num_requests,
        num_tokens=num_tokens,
        **figures,
        tokens_per_step=tokens_per_step(known, num_steps),
    )


def _figures(stats: SpeculationStats, k: int) -> dict[str, Any]:
    per_pos = stats.num_accepted_tokens_per_pos
    if stats.num_drafts:
        per_pos.extend([0] * (k - len(per_pos)))
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": per_pos,
        "acceptance_length": stats.acceptance_length,
        "unconditional": stats.acceptance_per_pos,
        "conditional": conditional_acceptance(stats),
    }


def _intervals(counted: Iterable[Counted], k: int, seed: int) -> dict[str, Any]:
    clusters: dict[str, SpeculationStats] = {}
    for one in counted:
        clusters.setdefault(one.conversation, SpeculationStats()).add(one.stats)
    # In one order, so that the same requests have the same interval whatever order they came in.
    clusters = dict(sorted(clusters.items()))
    rows = [stats.num_accepted_tokens_per_pos for stats in clusters.values()]
    width = max([k, *map(len, rows)])
    accepted_NK = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    drafts_N = np.array([stats.num_drafts for stats in clusters.values()], dtype=np.int64)
    intervals = acceptance_intervals(drafts_N, accepted_NK.reshape(len(rows), width), seed=seed)
    return {
        "acceptance_length_ci": intervals.acceptance_length,
        "unconditional_ci": intervals.unconditional,
        "conditional_ci": intervals.conditional,
    }


def _loops(counted: Sequence[Counted]) -> dict[str, Any]:
    looked = [one.loops for one in counted if one.loops is not None]
    before = [one.stats_before_loop for one in counted if one.stats_before_loop is not None]
    pooled = SpeculationStats.pooled(before)
    return {
        "loop_share": sum(looked) / len(looked) if looked else None,
        "acceptance_length_before_loop": pooled.acceptance_length if pooled.num_drafts else None,
    }
