"""The serving side against the training side: prompts, outputs, drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peagle.doctor.faults import (
    MASK_STATE,
    Agreement,
    Fault,
    agreement,
    find_faults,
    is_worse,
    only_mask_slots_differ,
)
from peagle.doctor.findings import Cause, Examination
from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.head_files import HeadFiles
from peagle.doctor.probed_target import ProbedTarget
from peagle.doctor.questions import other_styles
from peagle.doctor.repairs import Known
from peagle.doctor.served import Question, Served, Serving, ServingFailed
from peagle.engine import SpeculationStats
from peagle.errors import CheckpointError

# Every second prompt is enough, and every fourth where each takes a request of its own.
_STEP = 2
# Shares of equal drafts, and of answers with equal counters, of a healthy serving side; types of 16
# bits round differently from one batch to another.
_ENOUGH = {True: 0.95, False: 0.8}
_ENOUGH_ROUNDED = {True: 0.85, False: 0.5}
_SAME_TEXT = 0.7
# Above this share of equal drafts no fault is looked for.
_ALL = 0.995


def examine_serving(
    serving: Serving, examiner: ProbedTarget, head: Head, files: HeadFiles, report: Examination
) -> None:
    """Ask the serving side the same questions and compare.

    Raises:
        UserError: it cannot be reached, or refuses.
    """
    if not files.loads and serving.name == "the engine":
        text = "runtimes cannot load the head as it is; correct its files first"
        report.check("serving side", "not checked", text)
        return
    probe = examiner.probe.part(_STEP)
    questions = examiner.questions[::_STEP]
    examiner.progress(f"{serving.name} answers {len(questions)} prompts")
    try:
        served = serving.answer(questions, probe.all_anchors_PC.shape[1] + 1)
    except CheckpointError as error:
        report.check("serving side", "not checked", f"the engine refuses the head: {error}")
        report.blame(Cause("weights", "head", str(error), "Correct the head's files."))
        return
    except ServingFailed as error:
        report.check("serving side", "differs", f"{serving.name} does not serve the head")
        remedy = "Correct what it says; the rest of this report is of the head alone."
        report.blame(Cause("serving", "serving", str(error), remedy))
        return
    for note in serving.notes:
        report.check("serving side", "not checked", note)
    if not _same_prompts(served, questions, examiner, report):
        return
    if not _same_outputs(served, examiner, report):
        return
    known = Known(files, examiner.target, examiner.tokenizer, probe)
    _same_drafts(serving, served, head, known, examiner, report)


def _same_prompts(
    served: Sequence[Served],
    questions: Sequence[Question],
    examiner: ProbedTarget,
    report: Examination,
) -> bool:
    """Whether prompts are rendered as here, by their numbers of tokens."""
    told = [one.num_prompt_tokens for one in served]
    ours = [len(question.token_ids) for question in questions]
    if not any(told):
        report.check("served prompts", "not checked", "numbers of prompt tokens are not told")
        return True
    equal = sum(a == b for a, b in zip(told, ours, strict=True))
    if equal >= 0.9 * len(ours):
        report.check("served prompts", "agrees", f"{equal} of {len(ours)} have as many tokens")
        return True
    mean = [sum(counts) / len(counts) for counts in (told, ours)]
    text = f"{mean[0]:.1f} tokens a prompt, {mean[1]:.1f} here {examiner.style}"
    report.check("served prompts", "differs", text)
    asked = [examiner.texts.index(_text_of(question)) for question in questions]
    for style in other_styles(examiner.style, examiner.tokenizer):
        sizes = [len(style.ask(examiner.texts[i], examiner.tokenizer).token_ids) for i in asked]
        if sum(a == b for a, b in zip(told, sizes, strict=True)) >= 0.9 * len(sizes):
            cause = "thinking" if style.is_chat and examiner.style.is_chat else "chat_template"
            remedy = f"Have the server render prompts {examiner.style}, as the head was trained."
            evidence = f"{text}: the server has them {style}"
            report.blame(Cause(cause, "serving", evidence, remedy))
            return False
    cause = "chat_template" if examiner.style.is_chat else "tokenizer"
    remedy = "Give the server the tokenizer and the chat template of this target."
    report.blame(Cause(cause, "serving", f"the server makes {text}", remedy))
    return False


def _text_of(question: Question) -> str:
    return question.prompt if isinstance(question.prompt, str) else question.prompt[-1]["content"]


def _same_outputs(served: Sequence[Served], examiner: ProbedTarget, report: Examination) -> bool:
    """Whether greedy outputs are those of the target here."""
    probe, equal = examiner.probe.part(_STEP), 0
    most = probe.all_anchors_PC.shape[1] + 1
    for row, one in enumerate(served):
        start = probe.prompt_lens[row]
        answer = probe.tokens_PN[row, start : start + most].tolist()
        if one.token_ids is not None:
            equal += one.token_ids == answer
        else:
            text = examiner.tokenizer.decode(answer, skip_special_tokens=True)
            equal += str(text).strip().startswith(one.text.strip()[: max(1, len(one.text) - 4)])
    text = f"{equal} of {len(served)} greedy outputs are the target's"
    enough = _SAME_TEXT if examiner.target.dtype == torch.float32 else 0.3
    if equal >= enough * len(served):
        report.check("served outputs", "agrees", text)
        return True
    report.check("served outputs", "differs", text)
    report.blame(
        Cause(
            "wrong_target",
            "serving",
            f"{text}: speculative decoding changes no output, so the server runs other weights, "
            "another type or a quantised form",
            "Serve the target that the head was trained for, or give --target the one served.",
        )
    )
    return False


def _same_drafts(
    serving: Serving,
    served: Sequence[Served],
    head: Head,
    known: Known,
    examiner: ProbedTarget,
    report: Examination,
) -> None:
    told = [one.stats for one in served if one.stats is not None]
    if not told:
        text = "it counts no drafts: whether they are right cannot be told, outputs can"
        report.check("served drafts", "not checked", text)
        return
    pooled = SpeculationStats.pooled(told)
    report.figures["served"] = _counters(pooled)
    if not pooled.num_drafts:
        report.check("served drafts", "differs", "nothing is drafted")
        remedy = "Give the server the head: --draft, or speculative_config with its folder."
        evidence = "the serving side drafts nothing: speculation is off"
        report.blame(Cause("parallel_drafting", "serving", evidence, remedy))
        return
    head = head.read(dtype=examiner.target.dtype)
    ours = drafted(head, known.probe, every_anchor=True)
    base = agreement(served, ours, known.probe, chained=not head.config.is_parallel)
    rounded = examiner.target.dtype not in (torch.float32, torch.float64)
    enough = (_ENOUGH_ROUNDED if rounded else _ENOUGH)[base.by_tokens]
    line = f"{base}; acceptance length served {pooled.acceptance_length:.2f}"
    if base.count == 0:
        report.check("served drafts", "not checked", line)
        return
    found: list[Fault] = []
    explained = base
    if base.share < (enough if rounded else _ALL):
        found, explained = find_faults(head, served, known, base, examiner.progress)
        if not is_worse(pooled, ours):
            found = [fault for fault in found if fault.cause != "dtype"]
    agrees = base.share >= enough and not found
    report.check("served drafts", "agrees" if agrees else "differs", line)
    for fault in found:
        evidence = f"{fault.what}: so explained {explained}, otherwise {base.share:.0%}"
        report.blame(Cause(fault.cause, "serving", evidence, fault.remedy))
    if not agrees and not found:
        report.blame(_unexplained(base, pooled, ours, head))


def _unexplained(base: Agreement, pooled: SpeculationStats, ours: HeadDrafts, head: Head) -> Cause:
    """What can be said where none of the known faults makes such drafts."""
    evidence = f"{base}, acceptance length {pooled.acceptance_length:.2f}"
    signature = only_mask_slots_differ(pooled, ours) if head.config.is_parallel else None
    if signature is not None:
        return Cause(
            "mask_slots",
            "serving",
            f"{evidence}; {signature}",
            f"Have the server fill mask slots with token {head.config.mask_token_id} and with the "
            f"state {MASK_STATE}.",
        )
    return Cause(
        "serving",
        "serving",
        f"{evidence}; no known fault explains it",
        "The serving side runs the head in a way of its own: compare its drafter with "
        "docs/architecture.md step by step.",
    )


def _counters(stats: SpeculationStats) -> dict[str, object]:
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": stats.acceptance_length,
        "unconditional_acceptance_per_pos": stats.acceptance_per_pos,
    }
