"""The search for repairs that make a head better: one after the other, as long as one clearly does.

Statistics are paired by prompt: the same prompts, anchors and depths with and without a repair.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle.doctor.changes import Change, repairs
from peagle.doctor.files import HeadFiles
from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.probed_target import ProbedTarget

# A repair counts if it raises the log-probability of the target's tokens by so much (in nats), by
# so many standard errors; and matches too. Some 40 repairs are tried on a head: a healthy one
# passes by chance less than once in a hundred examinations.
MIN_GAIN, MIN_T = 0.03, 3.5
# It must raise the acceptance length so many times. A head that lost weights is off whatever is
# done, and wrong changes may help it a little on every text: there more is asked.
MIN_RATIO, MIN_RATIO_WITHOUT_WEIGHTS = 1.01, 1.05
# A head that matches less often than this with its repairs has not been repaired.
MIN_MATCH = 0.1
_MOST_ROUNDS = 5
# Repairs are tried on every fourth prompt first, and the best of them on all.
_SCREEN, _FINALISTS = 4, 4


@dataclass(frozen=True, slots=True)
class Gain:
    """What a repair brings.

    Attributes:
        logprob: mean gain of the log-probability of the target's tokens, nats.
        t: that in standard errors, over prompts.
        matches: gain of the share of drafts that are the target's tokens.
        before, after: acceptance lengths over all anchors.
        first_match: share of matching first drafts, after.
    """

    logprob: float
    t: float
    matches: float
    before: float
    after: float
    first_match: float

    @classmethod
    def of(cls, before: HeadDrafts, after: HeadDrafts, rows: slice | None = None) -> Gain:
        """Compare two runs over the same probe."""
        rows = rows or slice(None)
        gain_P = (after.score_P - before.score_P)[rows]
        spread = float(gain_P.std()) / len(gain_P) ** 0.5
        match_gain = after.matches[rows].double().mean() - before.matches[rows].double().mean()
        return cls(
            logprob=float(gain_P.mean()),
            t=float(gain_P.mean()) / max(spread, 1e-9),
            matches=float(match_gain),
            before=before.acceptance_length,
            after=after.acceptance_length,
            first_match=after.match_share[0],
        )

    @property
    def is_clear(self) -> bool:
        """Whether the head is better beyond doubt."""
        likelier = self.logprob >= MIN_GAIN and self.t >= MIN_T
        accepted = self.matches > 0 and self.ratio >= MIN_RATIO
        return likelier and accepted and self.first_match >= MIN_MATCH

    @property
    def ratio(self) -> float:
        """The acceptance length after over that before."""
        return self.after / self.before

    def __str__(self) -> str:
        return (
            f"acceptance length {self.before:.2f} to {self.after:.2f}, log-probability "
            f"{self.logprob:+.2f} nats ({self.t:.1f} standard errors)"
        )


@dataclass(frozen=True, slots=True)
class Repaired:
    """A head with all repairs that count, its drafts on the probe, and what each repair brought."""

    head: Head
    drafted: HeadDrafts
    applied: tuple[tuple[Change, Gain], ...] = ()


def repair(head: Head, first: HeadDrafts, files: HeadFiles, probed: ProbedTarget) -> Repaired:
    """Repair a head in memory until no candidate helps any more.

    Args:
        head: as its files have it.
        first: its drafts on the probe.
        files: its files.
        probed: the target and its answers.
    """
    repaired = Repaired(head, first)
    for number in range(1, _MOST_ROUNDS + 1):
        # The rows that drafts use are others once the head does better.
        done = {one.cause for one, _ in repaired.applied} - {"vocabulary_rebuilt"}
        candidates = [
            one
            for one in repairs(repaired.head, repaired.drafted, files, probed)
            if one.cause not in done
        ]
        probed.progress(f"trying {len(candidates)} repairs (round {number})")
        better = _best(repaired, candidates, files, probed)
        if better is None:
            break
        repaired = better
    return repaired


def _best(
    now: Repaired, candidates: list[Change], files: HeadFiles, probed: ProbedTarget
) -> Repaired | None:
    """Return the head with the repair that brings most, of those that clearly help."""
    part = probed.probe.part(_SCREEN)
    base = drafted(now.head, part)
    screened = [
        (float((drafted(one.apply(now.head), part).score_P - base.score_P).mean()), index)
        for index, one in enumerate(candidates)
    ]
    finalists = [index for gain, index in sorted(screened, reverse=True)[:_FINALISTS] if gain > 0]
    tried = []
    least = MIN_RATIO_WITHOUT_WEIGHTS if files.lost_weights else MIN_RATIO
    for index in finalists:
        chosen = candidates[index]
        head = chosen.apply(now.head)
        after = drafted(head, probed.probe)
        gain = Gain.of(now.drafted, after, chosen.rows)
        if gain.is_clear and gain.ratio >= least:
            applied = (*now.applied, (chosen, gain))
            tried.append((gain.logprob, index, Repaired(head, after, applied)))
    return max(tried, key=lambda one: one[:2])[2] if tried else None


def features_matter(now: Repaired, probed: ProbedTarget) -> tuple[bool, Gain]:
    """Whether a head does better with the features of its text than with another text's.

    Where it does not, they are not those that it learned from.
    """
    foreign = drafted(now.head, probed.probe, foreign_features=True)
    gain = Gain.of(foreign, now.drafted)
    return gain.logprob >= MIN_GAIN and gain.t >= MIN_T and gain.matches > 0.02, gain


def starved_depth(now: HeadDrafts) -> int | None:
    """The first depth whose drafts match far less often than those above it; None without one."""
    share = now.match_share
    if share[0] >= MIN_MATCH:
        for depth in range(1, min(3, len(share))):
            if share[depth] < 0.35 * share[depth - 1]:
                return depth
    return None
