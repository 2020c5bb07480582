"""The serving side, and its comparison with the training side: prompts, outputs, drafts.

The same prompts go through our engine, vLLM or a server. Where drafts differ, the doctor names the
fault whose drafts, or whose counters, are those that were served.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch

from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.config import CandidateTrees, EngineConfig, SamplingParams, TreeShape
from peagle.config.engine import TARGET_DEFAULTS
from peagle.doctor.files import HeadFiles
from peagle.doctor.findings import Examination
from peagle.doctor.head import Head, HeadDrafts, drafted
from peagle.doctor.probe import Probe, Progress, Question
from peagle.doctor.repair import MASK_STATE, MIN_T, Change, serving_faults
from peagle.engine import SpeculationStats
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.vllm_server import vllm_backend
from peagle.llm import LLM
from peagle.models.checkpoint import read_correction, read_head
from peagle.models.target import TargetModel

# Every second prompt is enough.
_STEP = 2
# Shares of equal drafts (True), and of answers with equal counters (False), of a healthy serving
# side; types of 16 bits round differently from one batch to another.
_MIN_EQUAL_SHARE = {True: 0.95, False: 0.8}
_ENOUGH_ROUNDED = {True: 0.85, False: 0.5}
_SAME_TEXT, _SAME_TEXT_ROUNDED, _SAME_PROMPTS = 0.7, 0.3, 0.9
# Above this share of equal drafts no fault is looked for.
_EQUAL_SHARE = 0.995
# Single faults on top of which a second one is tried, unless one alone explains so much.
_FOR_PAIRS, _ENOUGH_ALONE = 6, 0.9
# A fault explains what was served if it leaves at most this share of the difference, and if that
# is at least so much of all.
_LEFT, _MIN_SHARE = 0.35, 0.5
# Draft tokens, or answers, that it must set right.
_MIN_COUNT = {True: 8, False: 2}
# A type is at fault only where drafts are accepted less for it.
_MAX_ACCEPTANCE_RATIO = 0.9
# A share of draft tokens that counts as a difference of acceptance.
_NOTABLE_SHARE = 0.05
_MASK_SLOTS = ("parallel_drafting", "mask_token_id", "mask_hidden")


class ServingFailed(UserError):
    """The serving side does not come up with this head, or does not last."""


@dataclass(slots=True)
class Served:
    """The answer to a question; None where the serving side does not report a figure.

    Attributes:
        num_prompt_tokens: prompt tokens that the server counted; 0 if it reports no count.
        stats: drafts of this answer.
        drafts: the tokens of each draft; the key is the number of output tokens before the draft.
    """

    text: str
    num_prompt_tokens: int = 0
    stats: SpeculationStats | None = None
    token_ids: list[int] | None = None
    drafts: dict[int, list[int]] | None = None


class Serving(Protocol):
    """A serving side: its name in reports, and notes on its missing reports."""

    name: str
    notes: Sequence[str]

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer each prompt greedily with a given number of tokens.

        Raises:
            UserError: the serving side cannot be reached, or refuses.
        """
        ...


@dataclass
class EngineServing:
    """Our engine in this process, which reports every draft token; K is `k`."""

    target: TargetModel
    head: Path
    k: int
    name: str = "the engine"
    notes: Sequence[str] = ()

    def _window(self) -> int | None:
        """Return 0 for a head without a window, or with several; else None, for the head's own."""
        config = read_head(self.head, num_target_layers=self.target.num_layers).config
        return None if len(set(config.windows)) == 1 else 0

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`.

        Raises:
            CheckpointError: the engine refuses the head.
        """
        speculative = {
            "model": str(self.head),
            "num_speculative_tokens": self.k,
            "check_target": False,
            # As the forward pass of the examination, and as vLLM.
            "draft_window": self._window(),
            "correction": False,
        }
        llm = LLM(model=self.target, speculative_config=speculative)
        prompts = [question.token_ids for question in questions]
        served = [Served("", len(prompt), token_ids=[], drafts={}) for prompt in prompts]
        for chunk in llm.stream(prompts, _greedy(max_tokens)):
            one = served[chunk.index]
            assert one.token_ids is not None and one.drafts is not None
            if chunk.num_drafted:
                draft = chunk.token_ids[: chunk.num_accepted]
                # An answer may end within a draft: accepted tokens beyond its end are not reported.
                if len(draft) + len(chunk.rejected_token_ids) == chunk.num_drafted:
                    draft = [*draft, *chunk.rejected_token_ids]
                one.drafts[len(one.token_ids)] = draft
            one.token_ids += chunk.token_ids
            if chunk.output is not None:
                one.text, one.stats = chunk.output.text, chunk.output.stats
        return served


class EndpointServing:
    """A server with OpenAI's interface, which reports counters of drafts at best."""

    def __init__(self, backend: EndpointBackend) -> None:
        self._backend, self.name = backend, backend.name
        self.notes: Sequence[str] = backend.notes

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`, one request at a time, so that counters are each one's."""
        served = []
        for number, question in enumerate(questions):
            request = Request(str(number), question.prompt, _greedy(max_tokens))
            run = self._backend.run([request], 1)
            one = run.answers[0]
            stats = one.stats if one.stats is not None else run.counters
            served.append(Served(one.text, one.num_prompt_tokens, stats))
        return served


class VllmServing:
    """vLLM, which serves the head for as long as it answers; it reports counters of drafts.

    Args:
        launch: the model and options that it serves.
        installation: vLLM's.
        extra_body: further fields of each request.
        progress: gets a line about each wait.

    Raises:
        UserError: vLLM is known to fail with such options. Faults of the head are found later.
    """

    def __init__(
        self,
        launch: VllmLaunch,
        installation: VllmInstallation,
        extra_body: Mapping[str, Any] | None = None,
        progress: Progress = lambda text: None,
    ) -> None:
        self.name = "vLLM"
        self.notes: Sequence[str] = []
        with suppress(CheckpointError):
            check_launch(launch, installation)
        # The examination finds out whether it drafts as asked.
        self._server = vllm_backend(
            launch,
            installation,
            say=progress,
            note=lambda text: progress(f"note: {text}"),
            extra_body=extra_body,
            as_asked=False,
        )

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`.

        Raises:
            ServingFailed: vLLM does not serve this head.
        """
        try:
            with self._server as backend:
                self.notes = backend.notes
                return EndpointServing(backend).answer(questions, max_tokens)
        except UserError as error:
            raise ServingFailed(str(error)) from None


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


# ---- the comparison ----


def examine_serving(serving: Serving, probe: Probe, files: HeadFiles) -> None:
    """Ask the serving side the same questions, compare, and report.

    Raises:
        UserError: it cannot be reached, or refuses.
    """
    report = files.report
    if not files.loads and serving.name == "the engine":
        text = "runtimes cannot load the head as it is; correct its files first"
        report.check("serving side", "not checked", text)
        return
    probe = probe.part(_STEP)
    probe.progress(f"{serving.name} answers {len(probe.questions)} prompts")
    try:
        served = serving.answer(probe.questions, probe.all_anchors_PC.shape[1] + 1)
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
    if _same_prompts(served, probe, files) and _same_outputs(served, probe, files):
        _compare_drafts(served, probe, files)


def examine_correction(head: Path, target: TargetModel, report: Examination) -> None:
    """Report whether our engine takes the correction beside a head, if there is one."""
    try:
        config = read_head(head, num_target_layers=target.num_layers).config
        correction = read_correction(head, config)
    except CheckpointError as error:
        report.check("correction", "differs", "the engine refuses it")
        report.blame("correction", "head", str(error), "Fit one again, or move the file away.")
        return
    if correction is not None:
        text = f"fits the head; rank {correction.rank}, width {correction.width}"
        report.check("correction", "agrees", text)


def examine_trees(
    target: TargetModel, head: Path, trees: TreeShape, engine: EngineConfig, report: Examination
) -> None:
    """Start our engine with candidate trees, and report its refusal, or its KV cache.

    Args:
        engine: its sizes; settings of the target are left out.
    """
    check = "candidate trees"
    if report.blames("weights", "correction"):
        report.check(check, "not checked", "the engine refuses the head")
        return
    speculative = {"model": str(head), "parallel_drafting_spec": trees, "check_target": False}
    try:
        sizes = asdict(replace(engine, **TARGET_DEFAULTS))
        llm = LLM(model=target, speculative_config=speculative, **sizes)
    except UserError as error:
        report.check(check, "differs", "the engine does not start with them")
        remedy = "Change the shape of the trees, the head or the sizes of the engine as it says."
        report.blame("trees", "serving", str(error), remedy)
        return
    plan = llm.engine.memory_plan
    most, slots = plan.longest_context, plan.num_lookahead_slots
    nodes = CandidateTrees.parse(trees).max_nodes
    text = f"{nodes} nodes a step; a request has {slots:,} KV slots ahead, and "
    text += f"{plan.concurrency(most):,} of {most:,} tokens run at once"
    report.check(check, "agrees", text)


def _same_prompts(served: Sequence[Served], probe: Probe, files: HeadFiles) -> bool:
    """Return whether prompts are rendered as here, by their numbers of tokens."""
    report, style, tokenizer = files.report, probe.style, probe.tokenizer
    theirs = [one.num_prompt_tokens for one in served]
    if not any(theirs):
        report.check("served prompts", "not checked", "numbers of prompt tokens are not told")
        return True

    def equal(ours: Sequence[int]) -> int:
        return sum(a == b for a, b in zip(theirs, ours, strict=True))

    ours, least = [len(one.token_ids) for one in probe.questions], _SAME_PROMPTS * len(theirs)
    if equal(ours) >= least:
        text = f"{equal(ours)} of {len(ours)} have as many tokens"
        report.check("served prompts", "agrees", text)
        return True
    mean, here = (sum(counts) / len(counts) for counts in (theirs, ours))
    text = f"{mean:.1f} tokens a prompt, {here:.1f} here {style}"
    report.check("served prompts", "differs", text)
    for other in style.others(tokenizer):
        if equal([len(other.ask(q.text, tokenizer).token_ids) for q in probe.questions]) >= least:
            cause = "thinking" if other.is_chat and style.is_chat else "chat_template"
            remedy = f"Have the server render prompts {style}, as the head was trained."
            report.blame(cause, "serving", f"{text}: the server has them {other}", remedy)
            return False
    cause = "chat_template" if style.is_chat else "tokenizer"
    remedy = "Give the server the tokenizer and the chat template of this target."
    report.blame(cause, "serving", f"the server makes {text}", remedy)
    return False


def _same_outputs(served: Sequence[Served], probe: Probe, files: HeadFiles) -> bool:
    """Return whether greedy outputs equal the target's here."""
    equal, report = 0, files.report
    for row, one in enumerate(served):
        answer = probe.answer(row)[: probe.all_anchors_PC.shape[1] + 1]
        if one.token_ids is not None:
            equal += one.token_ids == answer
        else:
            text = str(probe.tokenizer.decode(answer, skip_special_tokens=True)).strip()
            equal += text.startswith(one.text.strip()[: max(1, len(one.text) - 4)])
    text = f"{equal} of {len(served)} greedy outputs are the target's"
    enough = _SAME_TEXT if probe.target.dtype == torch.float32 else _SAME_TEXT_ROUNDED
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


def _compare_drafts(served: Sequence[Served], probe: Probe, files: HeadFiles) -> None:
    report, head = files.report, files.head
    assert head is not None
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
    head = replace(head, dtype=probe.target.dtype)
    ours = drafted(head, probe, every_anchor=True)
    base = agreement(served, ours, probe, chained=not head.config.is_parallel)
    rounded = head.dtype not in (torch.float32, torch.float64)
    enough = (_ENOUGH_ROUNDED if rounded else _MIN_EQUAL_SHARE)[base.by_tokens]
    line = f"{base}; acceptance length served {pooled.acceptance_length:.2f}"
    if base.count == 0:
        report.check("served drafts", "not checked", line)
        return
    found, explained = list[Change](), base
    if base.share < (enough if rounded else _EQUAL_SHARE):
        found, explained = _find_faults(head, served, files, probe, base)
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of served drafts with the training side's.

    Attributes:
        share: share of the draft tokens that are equal, or of the answers whose counters are.
        count: number of tokens or answers compared.
        by_tokens: tokens were compared.
        closeness: the share in finer steps: the part that the counters of answers share.
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
    """Compare served drafts, one answer a prompt, with the training side's at every anchor.

    With `chained` a draft token follows from the one before (EAGLE-3): tokens behind the first
    rejected one say nothing.
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
        answer = probe.answer(row)
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
    """Return the common part of two counters: sum of the lesser / sum of the greater."""
    counts = [(s.num_drafts, *s.num_accepted_tokens_per_pos) for s in (one, other)]
    pairs = list(zip_longest(*counts, fillvalue=0))
    return sum(map(min, pairs)) / max(1, sum(map(max, pairs)))


def _foreseen(ours: HeadDrafts) -> list[SpeculationStats]:
    """Return the counters of each prompt's answer from a head's drafts at all its anchors."""
    found = []
    for accepted_C in ours.accepted_PC.tolist():
        stats, anchor = SpeculationStats(), 0
        while anchor < len(accepted_C):
            stats.record(ours.matches.shape[2], accepted_C[anchor])
            anchor += accepted_C[anchor] + 1
        found.append(stats)
    return found


# ---- faults that explain served drafts ----


def _find_faults(
    head: Head, served: Sequence[Served], files: HeadFiles, probe: Probe, base: Agreement
) -> tuple[list[Change], Agreement]:
    """Return the fault, or the two, that explain served drafts best; none explaining little."""
    choices = serving_faults(files, probe)

    def tried(*chosen: Change) -> Agreement:
        changed = head
        for fault in chosen:
            changed = fault.apply(changed)
        ours = drafted(changed, probe, every_anchor=True)
        return agreement(served, ours, probe, chained=not changed.config.is_parallel)

    probe.progress(f"trying {len(choices)} faults of the serving side")
    singles = [(tried(fault), fault) for fault in choices]
    singles.sort(key=lambda one: (-one[0].share, -one[0].closeness))
    best, chosen = singles[0][0], [singles[0][1]]
    if best.share < _ENOUGH_ALONE:
        probe.progress("trying pairs of faults")
        singles.sort(key=lambda one: -one[0].closeness)
        for _, first in singles[:_FOR_PAIRS]:
            for second in choices:
                if _go_together(first, second):
                    found = tried(first, second)
                    if found.share > best.share + 0.1:
                        best, chosen = found, [first, second]
    set_right = (best.share - base.share) * best.count
    left = 1 - best.share <= _LEFT * (1 - base.share)
    explains = left and best.share >= _MIN_SHARE and set_right >= _MIN_COUNT[best.by_tokens]
    return (chosen, best) if explains else ([], base)


def _go_together(first: Change, second: Change) -> bool:
    """Return whether two faults can be there at once: token by token there are no mask slots."""
    in_mask_slots = first.cause in _MASK_SLOTS and second.cause in _MASK_SLOTS
    one_by_one = "parallel_drafting" in (first.cause, second.cause)
    return first.cause != second.cause and not (in_mask_slots and one_by_one)


def _is_worse(served: SpeculationStats, ours: HeadDrafts) -> bool:
    """Return whether drafts are accepted clearly less than foreseen."""
    expected = SpeculationStats.pooled(_foreseen(ours)).acceptance_length
    return served.acceptance_length - 1 < _MAX_ACCEPTANCE_RATIO * (expected - 1)


def _mask_slot_figures(served: SpeculationStats, ours: HeadDrafts) -> str:
    """Return figures if first draft tokens are accepted as foreseen, second ones less; else ""."""
    # The first token of a draft comes from a slot with a real token and state, the others do not.
    accepted, matches = served.num_accepted_tokens_per_pos, ours.matches
    if len(accepted) < 2 or matches.shape[2] < 2 or not matches[..., 0].any():
        return ""

    def by_chance(rate: float, foreseen: float, count: int) -> float:
        """Return the most that may be missing by chance, or that does not matter."""
        mean = (rate + foreseen) / 2
        return max(MIN_T * (mean * (1 - mean) / max(1, count)) ** 0.5, _NOTABLE_SHARE)

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
