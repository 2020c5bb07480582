"""Which repairs make a head better: one after the other, as long as one clearly does.

Statistics are paired by prompt: the same prompts, anchors and depths with and without a repair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.repairs import Known, Repair, repairs

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

Progress = Callable[[str], None]


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
        """The head is better with it, and no doubt."""
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
    """A head with all repairs that count.

    Attributes:
        head: with them.
        drafted: what it then drafts on the probe.
        applied: the repairs and what each brought.
    """

    head: Head
    drafted: HeadDrafts
    applied: tuple[tuple[Repair, Gain], ...]


def repair(head: Head, first: HeadDrafts, known: Known, progress: Progress) -> Repaired:
    """Repair a head in memory until no candidate helps any more.

    Args:
        head: as its files have it.
        first: what it drafts on the probe.
        known: what repairs are made from.
        progress: told what is being tried.
    """
    applied: list[tuple[Repair, Gain]] = []
    now = first
    for number in range(1, _MOST_ROUNDS + 1):
        # The rows that drafts use are others once the head does better.
        done = {one.cause for one, _ in applied} - {"vocabulary_rebuilt"}
        candidates = [one for one in repairs(head, now, known) if one.cause not in done]
        progress(f"trying {len(candidates)} repairs (round {number})")
        best = _best(head, now, candidates, known)
        if best is None:
            break
        chosen, after, gain = best
        applied.append((chosen, gain))
        head, now = chosen.head, after
    return Repaired(head, now, tuple(applied))


def _best(
    head: Head, now: HeadDrafts, candidates: list[Repair], known: Known
) -> tuple[Repair, HeadDrafts, Gain] | None:
    """The repair that brings most, of those that clearly help."""
    part = known.probe.part(_SCREEN)
    base = drafted(head, part)
    screened = [
        (float((drafted(one.head, part).score_P - base.score_P).mean()), index)
        for index, one in enumerate(candidates)
    ]
    finalists = [index for gain, index in sorted(screened, reverse=True)[:_FINALISTS] if gain > 0]
    tried, least = [], MIN_RATIO_WITHOUT_WEIGHTS if known.files.lost_weights else MIN_RATIO
    for index in finalists:
        after = drafted(candidates[index].head, known.probe)
        gain = Gain.of(now, after, candidates[index].rows)
        if gain.is_clear and gain.ratio >= least:
            tried.append((gain.logprob, index, after, gain))
    if not tried:
        return None
    _, index, after, gain = max(tried, key=lambda one: one[:2])
    return candidates[index], after, gain


def features_matter(head: Head, now: HeadDrafts, known: Known) -> tuple[bool, Gain]:
    """Whether a head does better with the features of its text than with another text's.

    Where it does not, they are not those that it learned from.
    """
    foreign = drafted(head, known.probe, foreign_features=True)
    gain = Gain.of(foreign, now)
    return gain.logprob >= MIN_GAIN and gain.t >= MIN_T and gain.matches > 0.02, gain


def starved_depth(now: HeadDrafts) -> int | None:
    """The first depth whose drafts match far less often than those above it; None without one."""
    share = now.match_share
    if share[0] < MIN_MATCH:
        return None
    for depth in range(1, min(3, len(share))):
        if share[depth] < 0.35 * share[depth - 1]:
            return depth
    return None
