"""The examination of heads of one target: files, training side, prompts, serving side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from peagle.config import SamplingParams
from peagle.doctor.diagnosis import (
    MIN_MATCH,
    Gain,
    Progress,
    Repaired,
    features_matter,
    repair,
    starved_depth,
)
from peagle.doctor.files import examine_files
from peagle.doctor.findings import Cause, Examination
from peagle.doctor.forward import HeadDrafts, drafted
from peagle.doctor.head import Head
from peagle.doctor.head_files import HeadFiles
from peagle.doctor.probe import Probe, make_probe
from peagle.doctor.probed_target import ProbedTarget
from peagle.doctor.questions import Style, other_styles, questions_of
from peagle.doctor.repairs import MEAN_FEATURE, Known, aux_choices
from peagle.doctor.served import Question, Serving
from peagle.doctor.serving_side import examine_serving
from peagle.doctor.styles import better_style
from peagle.errors import UserError
from peagle.evaluation.training_record import read_training_record
from peagle.llm import LLM
from peagle.models.target import TargetModel, default_aux_layer_ids

# Output tokens of each prompt beyond K.
_ANSWER_TOKENS = 18
_FEWEST_PROMPTS = 8
# A target that knows its tokenizer is far from ln(V) on the texts that it knows best.
_BLIND_SHARE = 0.85
# Answers of healthy targets are spelled alike to 98% and more, with another tokenizer to 80%.
_SPELLED = 0.93
READS = "target reads the prompts"
# First drafts of a head that was trained to the end match at least so often.
_TRAINED_MATCH = 0.5
# The norm that moved most: 0.05 to 0.08 after 60 steps, 0.2 and 0.7 in the heads of both pairs.
_TRAINED_NORMS = 0.1
# First drafts of a head that does its work match more often, even on noise.
_POOR_MATCH = 0.3


class Examiner(ProbedTarget):
    """Examines heads of one target on the same texts, which are made once."""

    @classmethod
    def of(
        cls,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        style: Style,
        texts: Sequence[str],
        num_drafts: int,
        layers: Sequence[int] = (),
        progress: Progress = lambda text: None,
    ) -> Examiner:
        """Let the target answer.

        Args:
            target, tokenizer, style, texts, progress: see the attributes.
            num_drafts: K of the examination.
            layers: aux layers of the head, whose neighbours are kept too.

        Raises:
            UserError: the prompts do not fit the model.
        """
        count, usual = target.num_layers, default_aux_layer_ids(target.num_layers)
        kept = {*usual, *(i for i in layers if 0 <= i < count)}
        kept |= {i for ids in aux_choices(usual, count) for i in ids}
        if inside := tuple(i for i in layers if 0 <= i < count):
            kept |= {i for ids in aux_choices(inside, count) for i in ids}
        progress(f"the target answers {len(texts)} prompts")
        questions, probe = _probe(
            target, questions_of(texts, style, tokenizer), sorted(kept), num_drafts
        )
        return cls(target, tokenizer, style, tuple(texts), questions, probe, progress)

    def examine(self, folder: Path, serving: Serving | None = None) -> Examination:
        """Examine one head.

        Args:
            folder: of the head.
            serving: what serves it; None examines the training side only.

        Raises:
            UserError: the folder is not there, or the serving side cannot be reached.
        """
        report = Examination(training=read_training_record(folder))
        if report.training is not None:
            status = "not checked" if report.training.is_little else "agrees"
            report.check("training", status, str(report.training))
        self.progress("reading the head")
        files, head = examine_files(folder, self.target)
        self._check_target(report)
        report.checks += files.checks
        for cause in files.causes:
            report.blame(cause)
        if head is None:
            report.check("training side", "not checked", "the head cannot be run")
            report.check("serving side", "not checked", "the head cannot be run")
            return report
        known = Known(files, self.target, self.tokenizer, self.probe)
        self.progress("the head drafts on the training side")
        first = drafted(head, self.probe)
        repaired = self._try_repairs(head, first, known, report)
        report.figures["training_side"] = _figures(first, self.probe)
        report.figures["repaired"] = _figures(repaired.drafted, self.probe)
        if not report.blames("wrong_target", "tokenizer"):
            self._check_dtype(repaired, files, report)
            if not report.blames("chat_template", "thinking"):
                self._check_style(repaired.head, report)
        if serving is not None:
            examine_serving(serving, self, head, files, report)
        return report

    @cached_property
    def other_probes(self) -> dict[Style, Probe]:
        """The same texts, answered as prompts of other styles."""
        probes, layers = {}, sorted(self.probe.entering)
        for style in other_styles(self.style, self.tokenizer):
            self.progress(f"the target answers prompts {style}")
            questions = questions_of(self.texts, style, self.tokenizer)
            try:
                _, probes[style] = _probe(self.target, questions, layers, self.probe.num_drafts)
            except UserError:  # in this style they are too long
                continue
        return probes

    def _check_target(self, report: Examination) -> None:
        """That the target can read its prompts at all."""
        chance = float(torch.tensor(float(self.target.vocab_size)).log())
        nats = reading_nats(self.probe)
        text = f"{nats:.2f} nats a token on those it knows best, chance is {chance:.2f}"
        if nats < _BLIND_SHARE * chance:
            report.check(READS, "agrees", text)
            return
        # Models trained on answers alone are like this too, and may be in order.
        spelled = spelled_share(self.probe, self.tokenizer)
        noise = f"it predicts none of their text ({text})"
        if spelled >= _SPELLED:
            text = f"{noise}, like models trained on answers alone; these are in order"
            report.check(READS, "not checked", text)
            return
        report.check(READS, "differs", noise)
        report.blame(
            Cause(
                "tokenizer",
                "head",
                f"{noise}, and the tokenizer spells only {spelled:.0%} of its answers with the "
                "tokens that it wrote",
                "Put the tokenizer files that belong to the target's weights into its folder.",
            )
        )

    def _try_repairs(
        self, head: Head, first: HeadDrafts, known: Known, report: Examination
    ) -> Repaired:
        """Blame what a repair mends, and what no repair mends by how it looks."""
        if report.blames("wrong_target", "tokenizer"):
            text = f"{_line(first)}; nothing else can be told with this target"
            report.check("training side", "differs", text)
            return Repaired(head, first, ())
        repaired = repair(head, first, known, self.progress)
        matter, gain = features_matter(repaired.head, repaired.drafted, known)
        if not matter:
            report.check("features", "differs", f"another text's do as well: {gain}")
            elsewhere = self._try_other_styles(head, first, known, report)
            if elsewhere is None:
                report.blame(_has_not_learned(gain, report))
                return Repaired(head, first, ())
            repaired = elsewhere
        else:
            report.check("features", "agrees", f"against another text's: {gain}")
        if repaired.drafted.match_share[0] < _POOR_MATCH and _is_blind(report):
            report.blame(_has_not_learned(gain, report))
            return Repaired(head, first, ())
        self._blame_repairs(repaired, report)
        status = "differs" if report.causes else "agrees"
        report.check("training side", status, _line(first))
        if repaired.applied:
            report.check("training side, repaired", "agrees", _line(repaired.drafted))
        if not report.causes and repaired.drafted.match_share[0] < MIN_MATCH:
            report.check("acceptance", "differs", "low, and no repair helps")
            shown = f"{_line(repaired.drafted)}, and no repair helps"
            report.blame(_too_little_training(shown, report))
        return repaired

    def _try_other_styles(
        self, head: Head, first: HeadDrafts, known: Known, report: Examination
    ) -> Repaired | None:
        """A head that does nothing with these prompts may do something with others."""
        for style, probe in self.other_probes.items():
            there = replace(known, probe=probe)
            repaired = repair(head, drafted(head, probe), there, self.progress)
            if features_matter(repaired.head, repaired.drafted, there)[0]:
                lengths = repaired.drafted.acceptance_length, first.acceptance_length
                evidence = "acceptance length {:.2f} against {:.2f}".format(*lengths)
                self._blame_style(style, evidence, report)
                return repaired
        return None

    def _blame_style(self, style: Style, evidence: str, report: Examination) -> None:
        cause = "thinking" if style.is_chat and self.style.is_chat else "chat_template"
        report.blame(
            Cause(
                cause,
                "prompts",
                f"the head drafts prompts {style} better than {self.style}: {evidence}",
                f"Serve prompts {style}, as the head was trained, or train it on the others.",
            )
        )

    def _blame_repairs(self, repaired: Repaired, report: Examination) -> None:
        now = repaired.drafted
        for one, brought in repaired.applied:
            evidence = f"with {one.what}: {brought}"
            cause = one.cause
            if one.what == MEAN_FEATURE and _is_early(repaired, report):
                report.blame(_too_little_training(f"{_line(now)} {evidence}", report))
                continue
            # Which id is missing is no second mistake.
            if cause == "mask_token_id" and report.blames("parallel_drafting"):
                cause = "parallel_drafting"
            report.blame(Cause(cause, "head", evidence, one.remedy))
        depth = starved_depth(now) if repaired.head.config.is_parallel else None
        if depth is not None and not report.blames("mask_hidden", "training"):
            shares = ", ".join(f"{value:.0%}" for value in now.match_share)
            shown = f"drafts match by depth {shares}"
            if _is_early(repaired, report):
                shown += ": mask slots are learned last, and this head is not that far"
                report.blame(_too_little_training(shown, report))
                return
            report.blame(
                Cause(
                    "mask_hidden",
                    "head",
                    f"{shown}: depth 0 is fine, and from depth {depth} on nothing is, whatever "
                    "mask token is taken",
                    "Export mask_hidden and embed_tokens again from the trained head; if they are "
                    "right, mask slots were trained too little: train on.",
                )
            )

    def _check_dtype(self, repaired: Repaired, files: HeadFiles, report: Examination) -> None:
        """That the head does in the types it is served in what it does in float32."""
        told = str(files.data.get("dtype") or files.data.get("torch_dtype") or "")
        types = {self.target.dtype}
        if told == "float16":
            types.add(torch.float16)
        for dtype in types - {torch.float32, torch.float64}:
            name = str(dtype).removeprefix("torch.")
            rounded = drafted(repaired.head.read(dtype=dtype), self.probe)
            gain = Gain.of(rounded, drafted(repaired.head, self.probe))
            status = "differs" if gain.is_clear else "agrees"
            report.check(f"head in {name}", status, f"in float32: {gain}")
            if gain.is_clear:
                report.blame(
                    Cause(
                        "dtype",
                        "head",
                        f"in float32 instead of {name}: {gain}",
                        f"Serve the head in bfloat16 or float32 (--dtype); {name} cannot hold its "
                        "values.",
                    )
                )

    def _check_style(self, head: Head, report: Examination) -> None:
        """That prompts reach the model as those that the head was trained on."""
        if not self.other_probes:
            text = "there is one way to prompt this model"
            report.check("prompt style", "not checked", text)
            return
        now = drafted(head, self.probe)
        tried = {style: (probe, drafted(head, probe)) for style, probe in self.other_probes.items()}
        lines = [f"{self.style} {now.acceptance_length:.2f}"]
        lines += [f"{style} {one.acceptance_length:.2f}" for style, (_, one) in tried.items()]
        found = better_style((self.probe, now), tried)
        status = "agrees" if found is None else "differs"
        report.check("prompt style", status, "acceptance length " + ", ".join(lines))
        if found is not None:
            self._blame_style(*found, report)


def _is_blind(report: Examination) -> bool:
    """Whether the target's prompts are noise to it."""
    return any(check.name == READS and check.status == "not checked" for check in report.checks)


def _is_early(repaired: Repaired, report: Examination) -> bool:
    """Whether a head with poor mask slots is early in its training rather than damaged.

    The record of its training tells. Without one, two things do in which mask slots take no part:
    the first drafts, and how far the weights of the norms have moved from the 1 that they begin at.
    """
    if report.training is not None:
        return report.training.is_little
    tensors = repaired.head.tensors
    norms = [value.float() for name, value in tensors.items() if name.endswith("norm.weight")]
    moved = max(float((value - 1).abs().mean()) for value in norms)
    return repaired.drafted.match_share[0] < _TRAINED_MATCH or moved < _TRAINED_NORMS


def _too_little_training(shown: str, report: Examination) -> Cause:
    """The cause where a head drafts like one that is early in its training."""
    record = report.training
    told = "no record tells how long it was trained" if record is None else f"trained for {record}"
    remedy = "Train the head further, on more of the target's own answers."
    if record is None:
        remedy += " If it was trained to the end, export all of its weights again."
    return Cause("training", "head", f"{shown}; {told}", remedy)


def _has_not_learned(gain: Gain, report: Examination) -> Cause:
    """The cause where nothing of a head works."""
    marks = [one.status for one in report.checks if one.name == "fingerprint"]
    if marks == ["agrees"] and report.training is not None and report.training.is_little:
        shown = f"the head does little with the target's features yet ({gain})"
        return _too_little_training(shown, report)
    remedy = (
        "Serve it with the target it was trained for; if this is the one, the head has not learned "
        "to read its features: train it."
    )
    if _is_blind(report):
        remedy += " Or give prompts of a kind that the target knows (--prompts)."
    text = f"the head does little with the target's features ({gain}), whatever is repaired"
    return Cause("wrong_target", "head", text, remedy)


def spelled_share(probe: Probe, tokenizer: PreTrainedTokenizerBase) -> float:
    """How much of the target's answers the tokenizer makes of their text again, 0 to 1.

    A model writes its text with the tokens that its own tokenizer has for it; with another
    tokenizer its answers are words in pieces that nobody would cut so.
    """
    ratios = []
    for row, (start, end) in enumerate(zip(probe.prompt_lens, probe.lengths, strict=True)):
        ids = probe.tokens_PN[row, start:end].tolist()
        again = tokenizer(str(tokenizer.decode(ids)), add_special_tokens=False).input_ids
        ratios.append(SequenceMatcher(None, ids, again, autojunk=False).ratio())
    return sum(ratios) / max(1, len(ratios))


def reading_nats(probe: Probe) -> float:
    """-log p a token over the prompts that the target knows best (the lowest quarter), nats."""
    nats = []
    for row, length in enumerate(probe.prompt_lens):
        if length > 2:
            nats.append(float(-probe.confidence_PN[row, 1:length].clamp_min(1e-9).log().mean()))
    return float(torch.tensor(nats).quantile(0.25)) if nats else 0.0


def _probe(
    target: TargetModel,
    questions: Sequence[Question],
    layers: Sequence[int],
    num_drafts: int,
) -> tuple[tuple[Question, ...], Probe]:
    """Answers of the target; those that end early are left out, if enough others are there."""
    llm = LLM(model=target)
    room = llm.engine.max_model_len - num_drafts - _ANSWER_TOKENS
    fitting = [one for one in questions if 0 < len(one.token_ids) <= room]
    if len(fitting) < 2:
        raise UserError(
            f"{len(fitting)} of {len(questions)} prompts leave room for an answer within the "
            f"target's {llm.engine.max_model_len} positions; expected at least 2. Give shorter "
            "prompts (--prompts)."
        )
    tokens = num_drafts + _ANSWER_TOKENS
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    prompts = [one.token_ids for one in fitting]
    answers = [output.token_ids for output in llm.generate(prompts, params)]
    if sum(len(answer) == tokens for answer in answers) < min(_FEWEST_PROMPTS, len(fitting)):
        answers = [
            output.token_ids for output in llm.generate(prompts, replace(params, ignore_eos=True))
        ]
    pairs = zip(fitting, answers, strict=True)
    kept = [(one, answer) for one, answer in pairs if len(answer) == tokens]
    probe = make_probe(
        target, [one.token_ids for one, _ in kept], [a for _, a in kept], layers, num_drafts
    )
    return tuple(one for one, _ in kept), probe


def _line(one: HeadDrafts) -> str:
    share = " ".join(f"{value:.0%}" for value in one.match_share)
    return (
        f"acceptance length {one.acceptance_length:.2f} at every anchor, matches by depth {share}"
    )


def _figures(one: HeadDrafts, probe: Probe) -> dict[str, object]:
    return {
        "acceptance_length": one.acceptance_length,
        "match_per_depth": one.match_share,
        "num_prompts": len(probe.lengths),
        "num_anchors": probe.num_anchors,
        "num_speculative_tokens": probe.num_drafts,
    }
