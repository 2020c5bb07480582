"""Faults of a serving side, each as the head that would draft on the training side what it drafts.

The fault whose drafts, or whose counters, are those that were served is the one that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from peagle.doctor.diagnosis import MIN_T, Progress
from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.probe import Probe
from peagle.doctor.repairs import Known, aux_choices, mask_choices
from peagle.doctor.served import Served
from peagle.doctor.walk import foreseen
from peagle.engine import SpeculationStats

_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_THETAS = (1e4, 1e5, 5e5, 1e6)
# Single faults on top of which a second one is tried.
_FOR_PAIRS = 6
# A fault explains what was served if it leaves at most this share of the difference, and if that
# is at least so much of all.
_LEFT, _LEAST_SHARE = 0.35, 0.5
# Draft tokens, or answers, that it must set right.
_LEAST_COUNT = {True: 8, False: 2}
# A type is at fault only where drafts are accepted less for it.
_WORSE = 0.9
# Where one fault alone explains so much, no second one is looked for.
_ENOUGH_ALONE = 0.9
# A share of draft tokens that counts as a difference of acceptance.
_NOTABLE = 0.05
MASK_STATE = "fc(norm(mask_hidden)), with the norm before fc if any"
_MASK_SLOTS = ("parallel_drafting", "mask_token_id", "mask_hidden")


@dataclass(frozen=True, slots=True)
class Fault:
    """What a serving side may do wrong.

    Attributes:
        cause: key of CAUSES.
        what: in words; remedy: what to do about it.
        change: makes of a head the one that drafts so.
    """

    cause: str
    what: str
    remedy: str
    change: Callable[[Head], Head]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well served drafts are those of the training side.

    Attributes:
        share: of the draft tokens that are equal, or of the answers whose counters are.
        count: how many were compared.
        by_tokens: the former.
        closeness: the same in less coarse steps: what the counters of answers have in common.
    """

    share: float
    count: int
    by_tokens: bool
    closeness: float = 0.0

    def __str__(self) -> str:
        what = "draft tokens are equal" if self.by_tokens else "answers have equal counters"
        return f"{self.share:.0%} of {self.count} {what}"


def agreement(
    served: Sequence[Served], ours: HeadDrafts, probe: Probe, *, chained: bool
) -> Agreement:
    """Compare served drafts with those of the training side, at every anchor of the probe.

    Args:
        served: one a prompt of the probe.
        ours: drafts at every anchor.
        probe: the texts.
        chained: a draft token follows from the one before (EAGLE-3), so that what stands behind the
            first rejected one says nothing.
    """
    if all(one.drafts is not None for one in served):
        return _by_tokens(served, ours, probe, chained)
    common = [
        _common(one.stats, other)
        for one, other in zip(served, foreseen(ours), strict=True)
        if one.stats is not None
    ]
    count = max(1, len(common))
    share = sum(value == 1 for value in common) / count
    return Agreement(share, len(common), by_tokens=False, closeness=sum(common) / count)


def _common(one: SpeculationStats, other: SpeculationStats) -> float:
    """What two counters share: sum of the lesser / sum of the greater; 1 if they are equal."""
    counts = [(s.num_drafts, *s.num_accepted_tokens_per_pos) for s in (one, other)]
    pairs = list(zip_longest(*counts, fillvalue=0))
    return sum(map(min, pairs)) / max(1, sum(map(max, pairs)))


def _by_tokens(
    served: Sequence[Served], ours: HeadDrafts, probe: Probe, chained: bool
) -> Agreement:
    equal = count = 0
    for row, one in enumerate(served):
        start = probe.prompt_lens[row]
        answer = probe.tokens_PN[row, start : probe.lengths[row]].tolist()
        for at, tokens in (one.drafts or {}).items():
            if (one.token_ids or [])[:at] != answer[:at] or at > ours.tokens.shape[1]:
                break
            expected = ours.tokens[row, at - 1].tolist()
            truth = answer[at:]
            for depth, (token, mine) in enumerate(zip(tokens, expected, strict=False)):
                equal, count = equal + (token == mine), count + 1
                if chained and (depth >= len(truth) or mine != truth[depth]):
                    break
    share = equal / max(1, count)
    return Agreement(share, count, by_tokens=True, closeness=share)


def faults(head: Head, known: Known) -> Iterator[Fault]:
    """Every known fault of a serving side."""
    config = head.config
    for ids in aux_choices(config.aux_layer_ids, known.target.num_layers):
        if set(ids) <= set(known.probe.entering):
            yield Fault(
                "aux_layers",
                f"it reads aux layers {list(ids)} instead of {list(config.aux_layer_ids)}",
                "Correct its taps: the ids name layers whose entering states are taken, which are "
                "the outputs of the layers before.",
                lambda h, ids=ids: h.configured(aux_layer_ids=ids),
            )
    for name, what in (
        ("token_shift", "it pairs x[p] with g[p]"),
        ("feature_shift", "it pairs x[p+1] with g[p-1]"),
    ):
        remedy = "Slot p takes the token x[p+1] and the feature g[p], at position p."
        yield Fault("token_shift", what, remedy, lambda h, name=name: h.read(**{name: 1}))
    if config.is_parallel:
        yield from _parallel_faults(head, known)
    if config.is_pruned:
        yield from _map_faults()
    yield from _layer_faults(head, known)
    for dtype in (torch.bfloat16, torch.float16):
        yield Fault(
            "dtype",
            f"it computes in {str(dtype).removeprefix('torch.')}, where the head falls apart",
            "Serve it in bfloat16, or in float32.",
            lambda h, dtype=dtype: h.read(dtype=dtype),
        )


def _parallel_faults(head: Head, known: Known) -> Iterator[Fault]:
    remedy = 'Turn it on: "parallel_drafting": true in the speculative configuration.'
    yield Fault("parallel_drafting", "it drafts token by token", remedy, _autoregressive)
    current, eos = head.config.mask_token_id, known.target.eos_token_ids()
    for other in dict.fromkeys([*mask_choices(known, current), *eos, 0]):
        if other != current:
            yield Fault(
                "mask_token_id",
                f"it fills mask slots with token {other} instead of {current}",
                "Write mask_token_id, ptd_token_id and pard_token into config.json, all equal.",
                lambda h, other=other: h.configured(mask_token_id=other),
            )
    remedy = f"The state of mask slots is {MASK_STATE}."
    for kind in ("no fc", "fc without norm"):
        if kind == "no fc" or head.config.norm_before_fc or head.config.fc_norm:
            what = f"its mask slots have mask_hidden with {kind!r}"
            yield Fault("mask_hidden", what, remedy, lambda h, k=kind: h.read(shared_state=k))
    yield Fault("mask_hidden", "its mask slots have the state 0", remedy, _without_mask_hidden)


def _autoregressive(head: Head) -> Head:
    rest = {name: value for name, value in head.tensors.items() if name != "mask_hidden"}
    return Head(replace(head.config, mask_token_id=None), rest, head.reading)


def _without_mask_hidden(head: Head) -> Head:
    if not head.config.is_parallel:
        return head
    return head.filled(mask_hidden=torch.zeros_like(head.tensors["mask_hidden"]))


def _map_faults() -> Iterator[Fault]:
    remedy = "The target id of draft id i is i + d2t[i]."

    def moved(head: Head, by: int) -> Head:
        most = head.config.vocab_size - 1
        return head.with_target_ids((head.target_ids() + by).clamp(0, most))

    def unmapped(head: Head) -> Head:
        return head.with_target_ids(torch.arange(head.config.draft_vocab_size))

    def absolute(head: Head) -> Head:
        return head.with_target_ids(head.tensors["d2t"].clamp(0, head.config.vocab_size - 1))

    changes = {
        "it takes draft ids as target ids": unmapped,
        "it takes d2t as target ids, not as offsets": absolute,
        "its target ids are 1 too high": lambda head: moved(head, 1),
        "its target ids are 1 too low": lambda head: moved(head, -1),
    }
    for what, change in changes.items():
        yield Fault("draft_vocabulary", what, remedy, change)


def _layer_faults(head: Head, known: Known) -> Iterator[Fault]:
    config = head.config
    flag = not config.norm_before_residual
    yield Fault(
        "residual",
        f"it runs with norm_before_residual {flag}".lower(),
        "Write norm_before_residual into config.json: runtimes assume different defaults.",
        lambda h: h.configured(norm_before_residual=flag),
    )
    current = config.rope_parameters.get("rope_theta")
    of_target = dict(known.target.text_config.rope_parameters or {})
    theta = dict(of_target.get("full_attention", of_target)).get("rope_theta")
    for other in dict.fromkeys([theta, *_THETAS]):
        if other and other != current:
            rope = {"rope_type": "default", "rope_theta": float(other)}
            yield Fault(
                "rope",
                f"its RoPE theta is {other:g} instead of {current:g}",
                "Write the head's rope_theta both at the top level and in rope_parameters.",
                lambda h, rope=rope: h.configured(rope_parameters=rope),
            )
    for window in _WINDOWS:
        if window < max(known.probe.lengths):
            yield Fault(
                "sliding_window",
                f"its drafter looks back {window} positions only",
                "Take the target's sliding window out of the drafter's configuration.",
                lambda h, window=window: h.read(window=window),
            )
    yield Fault(
        "norms",
        "it leaves out the weight of the final norm",
        "Load norm.weight of the head.",
        lambda h: h.filled(norm__weight=torch.ones_like(h.tensors["norm.weight"])),
    )


def find_faults(
    head: Head, served: Sequence[Served], known: Known, base: Agreement, progress: Progress
) -> tuple[list[Fault], Agreement]:
    """The fault, or the two, that explain served drafts best; none where they explain little.

    Args:
        head: as its files have it.
        served: one a prompt of `known.probe`.
        known: the probe and what else there is.
        base: agreement of the head without a fault.
        progress: told what is being tried.
    """
    choices = list(faults(head, known))

    def tried(*chosen: Fault) -> Agreement:
        changed = head
        for fault in chosen:
            changed = fault.change(changed)
        ours = drafted(changed, known.probe, every_anchor=True)
        return agreement(served, ours, known.probe, chained=not changed.config.is_parallel)

    progress(f"trying {len(choices)} faults of the serving side")
    singles = [(tried(fault), fault) for fault in choices]
    singles.sort(key=lambda one: (-one[0].share, -one[0].closeness))
    best, chosen = singles[0][0], [singles[0][1]]
    if best.share < _ENOUGH_ALONE:
        progress("trying pairs of faults")
        singles.sort(key=lambda one: -one[0].closeness)
        for _, first in singles[:_FOR_PAIRS]:
            for second in choices:
                if _go_together(first, second):
                    found = tried(first, second)
                    if found.share > best.share + 0.1:
                        best, chosen = found, [first, second]
    set_right = (best.share - base.share) * best.count
    left = 1 - best.share <= _LEFT * (1 - base.share)
    explains = left and best.share >= _LEAST_SHARE and set_right >= _LEAST_COUNT[best.by_tokens]
    return (chosen, best) if explains else ([], base)


def _go_together(first: Fault, second: Fault) -> bool:
    """Whether two faults can be there at once: drafting token by token knows no mask slots."""
    alone = first.cause in _MASK_SLOTS and second.cause in _MASK_SLOTS
    one_by_one = "parallel_drafting" in (first.cause, second.cause)
    return first.cause != second.cause and not (alone and one_by_one)


def is_worse(served: SpeculationStats, ours: HeadDrafts) -> bool:
    """Whether drafts are accepted clearly less than foreseen."""
    expected = SpeculationStats.pooled(foreseen(ours)).acceptance_length
    return served.acceptance_length - 1 < _WORSE * (expected - 1)


@dataclass(frozen=True, slots=True)
class _Rate:
    """P(a draft token is accepted): as served, of so many, and as foreseen."""

    served: float
    foreseen: float
    count: int

    @property
    def missing(self) -> float:
        return self.foreseen - self.served

    @property
    def by_chance(self) -> float:
        """The most that may be missing by chance, or that does not matter."""
        mean = (self.served + self.foreseen) / 2
        return max(MIN_T * (mean * (1 - mean) / max(1, self.count)) ** 0.5, _NOTABLE)


def only_mask_slots_differ(served: SpeculationStats, ours: HeadDrafts) -> str | None:
    """Says so, with figures, if first draft tokens are accepted as foreseen, second ones less.

    The first token of a parallel draft comes from the slot that has a real token and a real state,
    the others from mask slots.

    Args:
        served: counters of all answers.
        ours: drafts of a parallel head at every anchor of the same answers.
    """
    accepted, matches = served.num_accepted_tokens_per_pos, ours.matches.double()
    if len(accepted) < 2 or matches.shape[2] < 2 or not matches[..., 0].any():
        return None
    all_drafts, first_right = matches[..., 0], matches[..., 1][ours.matches[..., 0]]
    first = _Rate(accepted[0] / served.num_drafts, float(all_drafts.mean()), served.num_drafts)
    second = _Rate(accepted[1] / max(1, accepted[0]), float(first_right.mean()), accepted[0])
    if first.missing > first.by_chance:
        return None
    if second.missing < max(second.by_chance, 2 * first.missing):
        return None
    return (
        f"first draft tokens are accepted as foreseen ({first.served:.0%}, {first.foreseen:.0%}), "
        f"those behind them less ({second.served:.0%} of the second, {second.foreseen:.0%})"
    )
