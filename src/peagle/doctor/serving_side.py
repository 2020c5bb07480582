"""The serving side against the training side: prompts, outputs, drafts.

Where drafts differ, the fault whose drafts, or whose counters, are those that were served is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from peagle.doctor.changes import MASK_STATE, Change, serving_faults
from peagle.doctor.files import HeadFiles
from peagle.doctor.findings import Examination
from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.probe import Probe
from peagle.doctor.probed_target import ProbedTarget
from peagle.doctor.questions import Question, other_styles
from peagle.doctor.repair import MIN_T
from peagle.doctor.served import Served, Serving, ServingFailed
from peagle.engine import SpeculationStats
from peagle.errors import CheckpointError

# Every second prompt is enough.
_STEP = 2
# Shares of equal drafts, and of answers with equal counters, of a healthy serving side; types of 16
# bits round differently from one batch to another.
_ENOUGH = {True: 0.95, False: 0.8}
_ENOUGH_ROUNDED = {True: 0.85, False: 0.5}
_SAME_TEXT, _SAME_TEXT_ROUNDED = 0.7, 0.3
# Above this share of equal drafts no fault is looked for.
_ALL = 0.995
# Single faults on top of which a second one is tried, unless one alone explains so much.
_FOR_PAIRS, _ENOUGH_ALONE = 6, 0.9
# A fault explains what was served if it leaves at most this share of the difference, and if that
# is at least so much of all.
_LEFT, _LEAST_SHARE = 0.35, 0.5
# Draft tokens, or answers, that it must set right.
_LEAST_COUNT = {True: 8, False: 2}
# A type is at fault only where drafts are accepted less for it.
_WORSE = 0.9
# A share of draft tokens that counts as a difference of acceptance.
_NOTABLE = 0.05
_MASK_SLOTS = ("parallel_drafting", "mask_token_id", "mask_hidden")


def examine_serving(
    serving: Serving, probed: ProbedTarget, head: Head, files: HeadFiles, report: Examination
) -> None:
    """Ask the serving side the same questions and compare.

    Raises:
        UserError: it cannot be reached, or refuses.
    """
    if not files.loads and serving.name == "the engine":
        text = "runtimes cannot load the head as it is; correct its files first"
        report.check("serving side", "not checked", text)
        return
    probed = replace(probed, probe=probed.probe.part(_STEP), questions=probed.questions[::_STEP])
    probed.progress(f"{serving.name} answers {len(probed.questions)} prompts")
    try:
        served = serving.answer(probed.questions, probed.probe.all_anchors_PC.shape[1] + 1)
    except CheckpointError as error:
        report.check("serving side", "not checked", f"the engine refuses the head: {error}")
        report.blame("weights", "head", str(error), "Correct the head's files.")
        return
    except ServingFailed as error:
        report.check("serving side", "differs", f"{serving.name} does not serve the head")
        remedy = "Correct what it says; the rest of this report is of the head alone."
        report.blame("serving", "serving", str(error), remedy)
        return
    for note in serving.notes:
        report.check("serving side", "not checked", note)
    if _same_prompts(served, probed, report) and _same_outputs(served, probed, report):
        _compare_drafts(served, head, files, probed, report)


def _same_prompts(served: Sequence[Served], probed: ProbedTarget, report: Examination) -> bool:
    """Whether prompts are rendered as here, by their numbers of tokens."""
    theirs = [one.num_prompt_tokens for one in served]
    ours = [len(question.token_ids) for question in probed.questions]
    if not any(theirs):
        report.check("served prompts", "not checked", "numbers of prompt tokens are not told")
        return True
    equal = sum(a == b for a, b in zip(theirs, ours, strict=True))
    if equal >= 0.9 * len(ours):
        report.check("served prompts", "agrees", f"{equal} of {len(ours)} have as many tokens")
        return True
    mean = [sum(counts) / len(counts) for counts in (theirs, ours)]
    text = f"{mean[0]:.1f} tokens a prompt, {mean[1]:.1f} here {probed.style}"
    report.check("served prompts", "differs", text)
    for style in other_styles(probed.style, probed.tokenizer):
        asked: list[Question] = [style.ask(q.text, probed.tokenizer) for q in probed.questions]
        sizes = [len(question.token_ids) for question in asked]
        if sum(a == b for a, b in zip(theirs, sizes, strict=True)) >= 0.9 * len(sizes):
            cause = "thinking" if style.is_chat and probed.style.is_chat else "chat_template"
            remedy = f"Have the server render prompts {probed.style}, as the head was trained."
            report.blame(cause, "serving", f"{text}: the server has them {style}", remedy)
            return False
    cause = "chat_template" if probed.style.is_chat else "tokenizer"
    remedy = "Give the server the tokenizer and the chat template of this target."
    report.blame(cause, "serving", f"the server makes {text}", remedy)
    return False


def _same_outputs(served: Sequence[Served], probed: ProbedTarget, report: Examination) -> bool:
    """Whether greedy outputs are those of the target here."""
    probe, equal = probed.probe, 0
    most = probe.all_anchors_PC.shape[1] + 1
    for row, one in enumerate(served):
        start = probe.prompt_lens[row]
        answer = probe.tokens_PN[row, start : start + most].tolist()
        if one.token_ids is not None:
            equal += one.token_ids == answer
        else:
            text = str(probed.tokenizer.decode(answer, skip_special_tokens=True)).strip()
            equal += text.startswith(one.text.strip()[: max(1, len(one.text) - 4)])
    text = f"{equal} of {len(served)} greedy outputs are the target's"
    enough = _SAME_TEXT if probed.target.dtype == torch.float32 else _SAME_TEXT_ROUNDED
    if equal >= enough * len(served):
        report.check("served outputs", "agrees", text)
        return True
    report.check("served outputs", "differs", text)
    report.blame(
        "wrong_target",
        "serving",
        f"{text}: speculative decoding changes no output, so the server runs other weights, "
        "another type or a quantised form",
        "Serve the target that the head was trained for, or give --target the one served.",
    )
    return False


def _compare_drafts(
    served: Sequence[Served],
    head: Head,
    files: HeadFiles,
    probed: ProbedTarget,
    report: Examination,
) -> None:
    counted = [one.stats for one in served if one.stats is not None]
    if not counted:
        text = "it counts no drafts: whether they are right cannot be told, outputs can"
        report.check("served drafts", "not checked", text)
        return
    pooled = SpeculationStats.pooled(counted)
    report.figures["served"] = {
        "num_drafts": pooled.num_drafts,
        "num_draft_tokens": pooled.num_draft_tokens,
        "num_accepted_tokens": pooled.num_accepted_tokens,
        "acceptance_length": pooled.acceptance_length,
        "unconditional_acceptance_per_pos": pooled.acceptance_per_pos,
    }
    if not pooled.num_drafts:
        report.check("served drafts", "differs", "nothing is drafted")
        remedy = "Give the server the head: --draft, or speculative_config with its folder."
        evidence = "the serving side drafts nothing: speculation is off"
        report.blame("parallel_drafting", "serving", evidence, remedy)
        return
    head = head.read(dtype=probed.target.dtype)
    ours = drafted(head, probed.probe, every_anchor=True)
    base = agreement(served, ours, probed.probe, chained=not head.config.is_parallel)
    rounded = probed.target.dtype not in (torch.float32, torch.float64)
    enough = (_ENOUGH_ROUNDED if rounded else _ENOUGH)[base.by_tokens]
    line = f"{base}; acceptance length served {pooled.acceptance_length:.2f}"
    if base.count == 0:
        report.check("served drafts", "not checked", line)
        return
    found: list[Change] = []
    explained = base
    if base.share < (enough if rounded else _ALL):
        found, explained = _find_faults(head, served, files, probed, base)
        if not _is_worse(pooled, ours):
            found = [fault for fault in found if fault.cause != "dtype"]
    agrees = base.share >= enough and not found
    report.check("served drafts", "agrees" if agrees else "differs", line)
    for fault in found:
        evidence = f"it has {fault.what}: so explained {explained}, otherwise {base.share:.0%}"
        report.blame(fault.cause, "serving", evidence, fault.remedy)
    if agrees or found:
        return
    # None of the known faults makes such drafts.
    evidence = f"{base}, acceptance length {pooled.acceptance_length:.2f}"
    signature = _mask_slot_figures(pooled, ours) if head.config.is_parallel else ""
    if signature:
        remedy = f"Have the server fill mask slots with token {head.config.mask_token_id} and with "
        remedy += f"the state {MASK_STATE}."
        report.blame("mask_slots", "serving", f"{evidence}; {signature}", remedy)
    else:
        remedy = "The serving side runs the head in a way of its own: compare its drafter with "
        remedy += "docs/architecture.md step by step."
        report.blame("serving", "serving", f"{evidence}; no known fault explains it", remedy)


# ---- agreement of drafts ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well served drafts are those of the training side.

    Attributes:
        share: share of the draft tokens that are equal, or of the answers whose counters are.
        count: number of tokens or answers compared.
        by_tokens: tokens were compared.
        closeness: the same in less coarse steps: what the counters of answers have in common.
    """

    share: float
    count: int
    by_tokens: bool
    closeness: float

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
    if not all(one.drafts is not None for one in served):
        common = [
            _common(one.stats, other)
            for one, other in zip(served, _foreseen(ours), strict=True)
            if one.stats is not None
        ]
        count = max(1, len(common))
        share = sum(value == 1 for value in common) / count
        return Agreement(share, len(common), by_tokens=False, closeness=sum(common) / count)
    equal = count = 0
    for row, one in enumerate(served):
        start = probe.prompt_lens[row]
        answer = probe.tokens_PN[row, start : probe.lengths[row]].tolist()
        for at, tokens in (one.drafts or {}).items():
            if (one.token_ids or [])[:at] != answer[:at] or at > ours.tokens.shape[1]:
                break
            expected, truth = ours.tokens[row, at - 1].tolist(), answer[at:]
            for depth, (token, mine) in enumerate(zip(tokens, expected, strict=False)):
                equal, count = equal + (token == mine), count + 1
                if chained and (depth >= len(truth) or mine != truth[depth]):
                    break
    share = equal / max(1, count)
    return Agreement(share, count, by_tokens=True, closeness=share)


def _common(one: SpeculationStats, other: SpeculationStats) -> float:
    """What two counters share: sum of the lesser / sum of the greater; 1 if they are equal."""
    counts = [(s.num_drafts, *s.num_accepted_tokens_per_pos) for s in (one, other)]
    pairs = list(zip_longest(*counts, fillvalue=0))
    return sum(map(min, pairs)) / max(1, sum(map(max, pairs)))


def _foreseen(ours: HeadDrafts) -> list[SpeculationStats]:
    """The counters of each prompt's answer, by a head's drafts at every anchor of it."""
    found = []
    for accepted_C in ours.accepted_PC.tolist():
        stats, anchor = SpeculationStats(), 0
        while anchor < len(accepted_C):
            stats.record(ours.matches.shape[2], accepted_C[anchor])
            anchor += accepted_C[anchor] + 1
        found.append(stats)
    return found


# ---- faults that explain served drafts -------------------------------------------------------


def _find_faults(
    head: Head,
    served: Sequence[Served],
    files: HeadFiles,
    probed: ProbedTarget,
    base: Agreement,
) -> tuple[list[Change], Agreement]:
    """Return the fault, or the two, that explain served drafts best; none explaining little."""
    choices = serving_faults(head, files, probed)

    def tried(*chosen: Change) -> Agreement:
        changed = head
        for fault in chosen:
            changed = fault.apply(changed)
        ours = drafted(changed, probed.probe, every_anchor=True)
        return agreement(served, ours, probed.probe, chained=not changed.config.is_parallel)

    probed.progress(f"trying {len(choices)} faults of the serving side")
    singles = [(tried(fault), fault) for fault in choices]
    singles.sort(key=lambda one: (-one[0].share, -one[0].closeness))
    best, chosen = singles[0][0], [singles[0][1]]
    if best.share < _ENOUGH_ALONE:
        probed.progress("trying pairs of faults")
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


def _go_together(first: Change, second: Change) -> bool:
    """Whether two faults can be there at once: drafting token by token knows no mask slots."""
    in_mask_slots = first.cause in _MASK_SLOTS and second.cause in _MASK_SLOTS
    one_by_one = "parallel_drafting" in (first.cause, second.cause)
    return first.cause != second.cause and not (in_mask_slots and one_by_one)


def _is_worse(served: SpeculationStats, ours: HeadDrafts) -> bool:
    """Whether drafts are accepted clearly less than foreseen."""
    expected = SpeculationStats.pooled(_foreseen(ours)).acceptance_length
    return served.acceptance_length - 1 < _WORSE * (expected - 1)


def _mask_slot_figures(served: SpeculationStats, ours: HeadDrafts) -> str:
    """Return figures if first draft tokens are accepted as foreseen, second ones less; else ""."""
    # The first token of a draft comes from a slot with a real token and state, the others do not.
    accepted, matches = served.num_accepted_tokens_per_pos, ours.matches
    if len(accepted) < 2 or matches.shape[2] < 2 or not matches[..., 0].any():
        return ""

    def by_chance(rate: float, foreseen: float, count: int) -> float:
        """The most that may be missing by chance, or that does not matter."""
        mean = (rate + foreseen) / 2
        return max(MIN_T * (mean * (1 - mean) / max(1, count)) ** 0.5, _NOTABLE)

    first, second = accepted[0] / served.num_drafts, accepted[1] / max(1, accepted[0])
    first_foreseen = float(matches[..., 0].double().mean())
    second_foreseen = float(matches[..., 1][matches[..., 0]].double().mean())
    missing = first_foreseen - first
    if missing > by_chance(first, first_foreseen, served.num_drafts):
        return ""
    least = max(by_chance(second, second_foreseen, accepted[0]), 2 * missing)
    if second_foreseen - second < least:
        return ""
    return (
        f"first draft tokens are accepted as foreseen ({first:.0%}, {first_foreseen:.0%}), "
        f"those behind them less ({second:.0%} of the second, {second_foreseen:.0%})"
    )
