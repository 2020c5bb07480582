"""Serving as the training side foresees it: which drafts are made, which are accepted."""

from __future__ import annotations

from peagle.doctor.forward import HeadDrafts
from peagle.engine import SpeculationStats


def foreseen(drafted: HeadDrafts) -> list[SpeculationStats]:
    """The counters of each prompt's answer, by a head's drafts at every anchor of it.

    Each draft starts behind the tokens that the one before it brought: of `a` accepted tokens, and
    the target's own, a + 1.
    """
    return [_walk(row, drafted.matches.shape[2]) for row in drafted.accepted_PC.tolist()]


def _walk(accepted_C: list[int], num_drafts: int) -> SpeculationStats:
    stats, anchor = SpeculationStats(), 0
    while anchor < len(accepted_C):
        stats.record(num_drafts, accepted_C[anchor])
        anchor += accepted_C[anchor] + 1
    return stats
