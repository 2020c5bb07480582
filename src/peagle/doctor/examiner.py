"""The examination of a head: files, training side, prompts, serving side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch

from peagle.config import EngineConfig, TreeShape
from peagle.doctor.files import HeadFiles, examine_files
from peagle.doctor.findings import Examination
from peagle.doctor.head import Head, HeadDrafts, drafted
from peagle.doctor.probe import Probe, Progress, PromptStyle, choose_texts, usual_style
from peagle.doctor.repair import (
    MEAN_FEATURE,
    MIN_MATCH,
    Gain,
    Repaired,
    features_matter,
    repair,
    starved_depth,
)
from peagle.doctor.serving import (
    EndpointServing,
    EngineServing,
    Serving,
    examine_correction,
    examine_serving,
    examine_trees,
)
from peagle.engine.placement import load_target
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.training_record import read_training_record
from peagle.models.checkpoint import read_head
from peagle.models.head_json import default_k
from peagle.models.loading import resolve_model
from peagle.models.target import load_tokenizer
from peagle.models.target_facts import precision_of

_MAX_DRAFTS = 16
# A target that knows its tokenizer is far from ln(V) on the texts that it knows best.
_BLIND_SHARE = 0.85
# Answers of healthy targets are spelled alike to 98% and more, with another tokenizer to 80%.
_MIN_SPELLED_SHARE = 0.93
# First drafts of a head that was trained to the end match at least so often.
_TRAINED_MATCH = 0.5
# The norm that moved most: 0.05 to 0.08 after 60 steps, 0.2 and 0.7 in the heads of both pairs.
_TRAINED_NORMS = 0.1
# First drafts of a head that does its work match more often, even on noise.
_POOR_MATCH = 0.3
# Before a style is blamed, first drafts must match more often by this difference, which must be so
# many standard errors, and the acceptance length must be so many times higher.
_MIN_DIFFERENCE, _MIN_T, _MIN_RATIO = 0.1, 4.0, 1.15
_CONFIDENCE_BINS = torch.tensor([0.3, 0.6, 0.9, 0.99])


def run_doctor(
    target: str,
    draft: str,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    vllm: Callable[[Path, Path, int], Serving] | None = None,
    num_speculative_tokens: int | None = None,
    trees: TreeShape | None = None,
    prompts: Path | None = None,
    plain: bool = False,
    chat_template: str | None = None,
    thinking: bool | None = None,
    engine: EngineConfig,
    progress: Progress = lambda text: None,
) -> Examination:
    """Examine a head, with its serving side: our engine, unless `endpoint` or `vllm` is given.

    Args:
        target, draft: folders or hub ids.
        endpoint, endpoint_model: URL of a server, and the model's name there; None takes the first.
        vllm: makes the serving side in vLLM of a target, a head and K.
        num_speculative_tokens: K; None takes the server's, else the head's trained depth.
        trees: the shape of candidate trees that our engine shall start with; None: chains.
        prompts: a file; None takes bundled prompts.
        plain, chat_template, thinking: the style of the prompts, as they are served.
        engine: dtype and device; with `trees` the sizes of the engine too.
        progress: gets a line about each step.

    Raises:
        UserError: a folder is not there, the target does not load, options contradict each other,
            or the server cannot be reached. A broken head is no mistake but a finding.
    """
    k = num_speculative_tokens
    if k is not None and not 1 <= k <= _MAX_DRAFTS:
        raise UserError(f"K is {k}; expected 1 to {_MAX_DRAFTS} draft tokens.")
    backend = None
    if endpoint is not None:
        template = {"chat_template_kwargs": {"enable_thinking": thinking}}
        extra = None if thinking is None else template
        backend = EndpointBackend(endpoint, endpoint_model, extra_body=extra)
    progress("loading the target")
    target_folder = resolve_model(target, revision)
    try:
        folder = resolve_model(draft, draft_revision, role="draft")
    except CheckpointError as error:
        report = Examination()
        report.check("files", "differs", str(error))
        report.blame("weights", "head", str(error), "Copy or fetch the head again.")
        return report
    tokenizer = load_tokenizer(target_folder)
    style = usual_style(tokenizer, plain=plain, chat_template=chat_template, thinking=thinking)
    texts = choose_texts(prompts, tokenizer)
    model = load_target(target_folder, engine)
    try:
        config = read_head(folder, num_target_layers=model.num_layers).config
    except CheckpointError:  # the examination of the files says why
        config = None
    served = backend.num_speculative_tokens() if backend else None
    k = min(k or served or default_k(config.trained_depth if config else None), _MAX_DRAFTS)
    layers = config.aux_layer_ids if config else ()
    probe = Probe.of(model, tokenizer, style, texts, k, layers, progress)
    if vllm is not None:
        serving: Serving = vllm(target_folder, folder, k)
    else:
        serving = EndpointServing(backend) if backend else EngineServing(model, folder, k)
    report = examine(probe, folder, serving)
    if isinstance(serving, EngineServing) and report.is_healthy:
        examine_correction(folder, model, report)
    if trees is not None:
        progress("the engine starts with candidate trees")
        examine_trees(model, folder, trees, engine, report)
    report.figures = {
        "target": target,
        "draft": draft,
        "serving": serving.name,
        "dtype": precision_of(model),
        "prompt_style": str(style),
        "num_speculative_tokens": k,
        **report.figures,
    }
    return report


def examine(probe: Probe, folder: Path, serving: Serving | None = None) -> Examination:
    """Examine the head in a folder, and its serving side unless that is None.

    Raises:
        UserError: the folder is not there, or the serving side cannot be reached.
    """
    report = Examination(training=read_training_record(folder))
    if report.training is not None:
        status = "not checked" if report.training.is_little else "agrees"
        report.check("training", status, str(report.training))
    probe.progress("reading the head")
    knows_prompts = _check_target(probe, report)
    files = examine_files(folder, probe.target, report)
    if files.head is None:
        report.check("training side", "not checked", "the head cannot be run")
        report.check("serving side", "not checked", "the head cannot be run")
        return report
    probe.progress("the head drafts on the training side")
    first = Repaired(files.head, drafted(files.head, probe))
    repaired = _TrainingSide(probe, files, first, report, knows_prompts).repair()
    report.figures["training_side"] = _figures(first.drafted, probe)
    report.figures["repaired"] = _figures(repaired.drafted, probe)
    if not report.blames("wrong_target", "tokenizer"):
        _check_dtype(repaired, files, probe)
        if not report.blames("chat_template", "thinking"):
            _check_style(repaired.head, probe, report)
    if serving is not None:
        examine_serving(serving, probe, files)
    return report


def _figures(one: HeadDrafts, probe: Probe) -> dict[str, object]:
    return {
        "acceptance_length": one.acceptance_length,
        "match_per_depth": one.match_share,
        "num_prompts": len(probe.lengths),
        "num_anchors": probe.anchors_PC.numel(),
        "num_speculative_tokens": probe.k,
    }


def _check_target(probe: Probe, report: Examination) -> bool:
    """Check that the target can read its prompts, and return whether it knows such texts."""
    check = "target reads the prompts"
    chance, nats = log(probe.target.vocab_size), probe.reading_nats()
    text = f"{nats:.2f} nats a token on those it knows best, chance is {chance:.2f}"
    if nats < _BLIND_SHARE * chance:
        report.check(check, "agrees", text)
        return True
    # Models trained on answers alone are like this too, and may be in order.
    spelled = probe.spelled_share()
    noise = f"it predicts none of their text ({text})"
    if spelled >= _MIN_SPELLED_SHARE:
        text = f"{noise}, like models trained on answers alone; these are in order"
        report.check(check, "not checked", text)
        return False
    report.check(check, "differs", noise)
    report.blame(
        "tokenizer",
        "head",
        f"{noise}, and the tokenizer spells only {spelled:.0%} of its answers with the tokens that "
        "it wrote",
        "Put the tokenizer files that belong to the target's weights into its folder.",
    )
    return True


# ---- the training side ----


@dataclass(frozen=True, slots=True)
class _TrainingSide:
    """The examination of a head's drafts with the forward pass of training."""

    probe: Probe
    files: HeadFiles
    first: Repaired
    report: Examination
    knows_prompts: bool

    def repair(self) -> Repaired:
        """Blame the faults that a repair mends, and by their figures the faults that none mends."""
        report, first = self.report, self.first
        if report.blames("wrong_target", "tokenizer"):
            text = f"{first.drafted}; nothing else can be told with this target"
            report.check("training side", "differs", text)
            return first
        repaired = repair(first, self.files, self.probe)
        matter, gain = features_matter(repaired, self.probe)
        if not matter:
            report.check("features", "differs", f"another text's do as well: {gain}")
            elsewhere = self._in_other_styles()
            if elsewhere is None:
                self._blame_unlearned(gain)
                return first
            repaired = elsewhere
        else:
            report.check("features", "agrees", f"against another text's: {gain}")
        if repaired.drafted.match_share[0] < _POOR_MATCH and not self.knows_prompts:
            self._blame_unlearned(gain)
            return first
        self._blame_repairs(repaired)
        report.check("training side", "differs" if report.causes else "agrees", str(first.drafted))
        if repaired.applied:
            report.check("training side, repaired", "agrees", str(repaired.drafted))
        if not report.causes and repaired.drafted.match_share[0] < MIN_MATCH:
            report.check("acceptance", "differs", "low, and no repair helps")
            self._blame_training(f"{repaired.drafted}, and no repair helps")
        return repaired

    def _in_other_styles(self) -> Repaired | None:
        """Repair the head on prompts of another style, where it may do something."""
        for style, probe in self.probe.in_other_styles.items():
            first = replace(self.first, drafted=drafted(self.first.head, probe))
            repaired = repair(first, self.files, probe)
            if features_matter(repaired, probe)[0]:
                there, here = repaired.drafted, self.first.drafted
                evidence = f"acceptance length {there.acceptance_length:.2f} against "
                evidence += f"{here.acceptance_length:.2f}"
                _blame_style(style, evidence, self.probe, self.report)
                return repaired
        return None

    def _blame_repairs(self, repaired: Repaired) -> None:
        now, report = repaired.drafted, self.report
        for one, gain in repaired.applied:
            evidence = f"with {one.what}: {gain}"
            if one.what == MEAN_FEATURE and self._is_early(repaired):
                self._blame_training(f"{now} {evidence}")
                continue
            # Which id is missing is no second mistake.
            is_second = one.cause == "mask_token_id" and report.blames("parallel_drafting")
            cause = "parallel_drafting" if is_second else one.cause
            report.blame(cause, "head", evidence, one.remedy)
        depth = starved_depth(now) if repaired.head.config.is_parallel else None
        if depth is None or report.blames("mask_hidden", "training"):
            return
        shares = ", ".join(f"{value:.0%}" for value in now.match_share)
        shown = f"drafts match by depth {shares}"
        if self._is_early(repaired):
            shown += ": mask slots are learned last, and this head is not that far"
            self._blame_training(shown)
            return
        report.blame(
            "mask_hidden",
            "head",
            f"{shown}: depth 0 is fine, and from depth {depth} on nothing is, whatever mask token "
            "is taken",
            "Export mask_hidden and embed_tokens again from the trained head; if they are right, "
            "mask slots were trained too little: train on.",
        )

    def _is_early(self, repaired: Repaired) -> bool:
        """Return whether a head with poor mask slots is little trained rather than damaged."""
        if self.report.training is not None:
            return self.report.training.is_little
        tensors = repaired.head.tensors
        norms = [value.float() for name, value in tensors.items() if name.endswith("norm.weight")]
        moved = max(float((value - 1).abs().mean()) for value in norms)
        return repaired.drafted.match_share[0] < _TRAINED_MATCH or moved < _TRAINED_NORMS

    def _blame_training(self, shown: str) -> None:
        """Blame the training of a head that drafts like one that is early in it."""
        record = self.report.training
        length = f"trained for {record}"
        remedy = "Train the head further, on more of the target's own answers."
        if record is None:
            length = "no record tells how long it was trained"
            remedy += " If it was trained to the end, export all of its weights again."
        self.report.blame("training", "head", f"{shown}; {length}", remedy)

    def _blame_unlearned(self, gain: Gain) -> None:
        """Blame the target or the training if no part of a head works."""
        report = self.report
        marks = [one.status for one in report.checks if one.name == "fingerprint"]
        if marks == ["agrees"] and report.training is not None and report.training.is_little:
            self._blame_training(f"the head does little with the target's features yet ({gain})")
            return
        remedy = (
            "Serve it with the target it was trained for; if this is the one, the head has not "
            "learned to read its features: train it."
        )
        if not self.knows_prompts:
            remedy += " Or give prompts of a kind that the target knows (--prompts)."
        text = f"the head does little with the target's features ({gain}), whatever is repaired"
        report.blame("wrong_target", "head", text, remedy)


def _check_dtype(repaired: Repaired, files: HeadFiles, probe: Probe) -> None:
    """Check that the head computes the same in the types it is served in as in float32."""
    in_files = str(files.data.get("dtype") or files.data.get("torch_dtype") or "")
    report = files.report
    types = {files.target.dtype} | ({torch.float16} if in_files == "float16" else set())
    for dtype in types - {torch.float32, torch.float64}:
        name = str(dtype).removeprefix("torch.")
        rounded = drafted(replace(repaired.head, dtype=dtype), probe)
        gain = Gain.of(rounded, drafted(repaired.head, probe))
        status = "differs" if gain.is_clear else "agrees"
        report.check(f"head in {name}", status, f"in float32: {gain}")
        if gain.is_clear:
            remedy = f"Serve the head in bfloat16 or float32 (--dtype); {name} cannot hold its "
            remedy += "values."
            report.blame("dtype", "head", f"in float32 instead of {name}: {gain}", remedy)


# ---- the style of the prompts ----


def _check_style(head: Head, probe: Probe, report: Examination) -> None:
    """Check that prompts reach the model in the style that the head was trained on."""
    # Some texts are easier for any head: first drafts are compared at equal confidence.
    if not probe.in_other_styles:
        report.check("prompt style", "not checked", "there is one way to prompt this model")
        return
    now = drafted(head, probe)
    lines = [f"{probe.style} {now.acceptance_length:.2f}"]
    best: tuple[float, PromptStyle, str] | None = None
    for style, other in probe.in_other_styles.items():
        there = drafted(head, other)
        lines.append(f"{style} {there.acceptance_length:.2f}")
        difference, error = _matched_difference(there, other, now, probe)
        ratio = there.acceptance_length / now.acceptance_length
        is_clear = difference >= _MIN_DIFFERENCE and difference >= _MIN_T * error
        if is_clear and ratio >= _MIN_RATIO and (best is None or difference > best[0]):
            text = (
                f"acceptance length {there.acceptance_length:.2f} against "
                f"{now.acceptance_length:.2f}; at equal confidence of the target first drafts "
                f"match {difference:+.0%} (standard error {error:.1%})"
            )
            best = (difference, style, text)
    status = "agrees" if best is None else "differs"
    report.check("prompt style", status, "acceptance length " + ", ".join(lines))
    if best is not None:
        _blame_style(best[1], best[2], probe, report)


def _blame_style(style: PromptStyle, evidence: str, probe: Probe, report: Examination) -> None:
    report.blame(
        "thinking" if style.is_chat and probe.style.is_chat else "chat_template",
        "prompts",
        f"the head drafts prompts {style} better than {probe.style}: {evidence}",
        f"Serve prompts {style}, as the head was trained, or train it on the others.",
    )


def _matched_difference(
    one: HeadDrafts, one_probe: Probe, other: HeadDrafts, other_probe: Probe
) -> tuple[float, float]:
    """Return how much more often first drafts match at equal confidence, and its standard error."""

    def bins(probe: Probe) -> torch.Tensor:
        """Return the bin of the target's confidence at first drafts, [P, C]."""
        confidence_PC = probe.confidence_PN.gather(1, probe.anchors_PC + 2).cpu()
        return torch.bucketize(confidence_PC, _CONFIDENCE_BINS)

    def mean(matches_PC: torch.Tensor, chosen_PC: torch.Tensor) -> tuple[float, float]:
        """Return the mean of the chosen, and its standard error with prompts as the units."""
        mean = float(matches_PC[chosen_PC].mean())
        rest_P = ((matches_PC - mean) * chosen_PC).sum(1)
        return mean, float(rest_P.square().sum().sqrt()) / float(chosen_PC.sum())

    # sum over bins of w_b * (match_b(one) - match_b(other)), with weights of both together.
    ones, others = one.matches[..., 0].double(), other.matches[..., 0].double()
    bins_one, bins_other = bins(one_probe), bins(other_probe)
    total = bins_one.numel() + bins_other.numel()
    difference = variance = weights = 0.0
    for index in range(len(_CONFIDENCE_BINS) + 1):
        in_one, in_other = bins_one == index, bins_other == index
        if min(int(in_one.sum()), int(in_other.sum())) < 8:
            continue
        weight = float(in_one.sum() + in_other.sum()) / total
        mean_one, error_one = mean(ones, in_one)
        mean_other, error_other = mean(others, in_other)
        difference += weight * (mean_one - mean_other)
        variance += weight**2 * (error_one**2 + error_other**2)
        weights += weight
    return (difference / weights, variance**0.5 / weights) if weights else (0.0, 1.0)
