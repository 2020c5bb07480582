"""Runs the parts of the losslessness certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peagle.config import SamplingParams
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.evaluation.acceptance import Completion
from peagle.evaluation.certify.distribution import MIN_EXPECTED, Tokens, fit, joint_cells
from peagle.evaluation.certify.matrix import Case, Feature, FeatureSource, difference
from peagle.evaluation.certify.reference import TargetReference
from peagle.evaluation.compare import build, measure
from peagle.evaluation.decoding_methods import NGRAM, PLAIN, DecodingMethod
from peagle.evaluation.prompt_sets import load
from peagle.llm import LLM
from peagle.models.target import TargetModel
from peagle.results import (
    CertificateResults,
    CertifiedCase,
    Provenance,
    SampledTest,
)

Watch = Callable[[str], None]
# Contexts of the sampled part: the last tokens of a prompt and some of what greedily follows them.
# Any context would do, and short ones are quick.
_TAIL_TOKENS, _MORE_TOKENS = 16, 24


@dataclass(frozen=True, slots=True)
class Options:
    """How much is tested.

    Attributes:
        prompts: of the greedy part.
        matrix_prompts: of each cell of the matrix; 0 leaves it out.
        prompt_set: where all of them come from.
        max_new_tokens: of each greedy output.
        samples: outputs of each prompt in the sampled part; 0 leaves it out.
        sampled_prompts: of that part.
        sampled_tokens: first tokens whose joint distribution is tested.
        temperature, top_k, top_p: how they are sampled.
        draft_samplings: of the heads; prompt lookup has none.
        alpha: probability of a false alarm of the whole sampled part.
        seed: the samples depend on it.

    Raises:
        UserError: a number is out of range.
    """

    prompts: int = 8
    matrix_prompts: int = 3
    prompt_set: str = "humaneval"
    max_new_tokens: int = 48
    samples: int = 1000
    sampled_prompts: int = 2
    sampled_tokens: int = 3
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    draft_samplings: tuple[str, ...] = ("argmax", "probabilistic")
    alpha: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "prompts": 1, "matrix_prompts": 0, "max_new_tokens": 8, "samples": 0,
            "sampled_prompts": 1, "sampled_tokens": 2, "seed": 0,
        }  # fmt: skip
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(
                    f"{name} of the certificate is {getattr(self, name)}; expected at least "
                    f"{number}."
                )
        if not 0 < self.alpha < 1:
            raise UserError(f"alpha is {self.alpha}; expected a number between 0 and 1.")
        if self.temperature <= 0:
            raise UserError(
                f"The certificate's temperature is {self.temperature}; expected more than 0: "
                "greedy outputs are tested by themselves."
            )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all parts run on."""

    target: TargetModel
    reference: TargetReference
    methods: list[DecodingMethod]
    k: int
    options: Options
    watch: Watch

    def engine(self, method: DecodingMethod, *, speculative: dict[str, Any] | None = None,
               **options: Any) -> LLM:  # fmt: skip
        """An engine of its own, without prefix caching unless asked for."""
        config = method.config(self.k, **(speculative or {}) if method.source else {})
        if config is not None and speculative and not method.source:
            config = replace(config, **speculative)
        return build(self.target, {method.name: config}, **options)[method.name]


def run(
    target: TargetModel,
    folder: str | Path,
    methods: Sequence[DecodingMethod],
    k: int,
    *,
    provenance: Mapping[str, Any],
    options: Options | None = None,
    watch: Watch | None = None,
) -> CertificateResults:
    """Test that drafts change nothing: greedy outputs, the feature matrix, sampled outputs.

    Greedy outputs are held against transformers' own: each first difference is a near-tie (the
    reference was that undecided itself) or a fault. Sampled outputs are held against the exact
    distribution of the target (`certify.distribution`); drafts there are of 1 to sampled_tokens - 1
    tokens, so that each tested token is the prompt pass's own, an accepted draft, the correction of
    a refused one, and a bonus token.

    Args:
        target: as our engine runs it.
        folder: of the same target; transformers loads it once more.
        methods: to certify; plain decoding and prompt lookup are added.
        k: the largest K.
        provenance: of the measurement.
        options: how much is tested.
        watch: told what is done next.

    Raises:
        UserError: a head does not fit the target, or a prompt is too long for it.
    """
    options = options or Options()
    started = time.perf_counter()
    names = [method.name for method in methods]
    every = [*methods, *(DecodingMethod(name) for name in (PLAIN, NGRAM) if name not in names)]
    every.sort(key=lambda method: not method.is_plain)
    reference = TargetReference(folder, target.dtype, str(target.device))
    bench = _Bench(target, reference, every, k, options, watch or (lambda _: None))
    prompts = [(p.id, p.text) for p in load(options.prompt_set, options.prompts)]
    bench.watch("greedy outputs of transformers")
    plain = bench.engine(DecodingMethod(PLAIN))
    source = FeatureSource(reference, plain, prompts, options.max_new_tokens, k)
    greedy = Feature("greedy", source.cases)
    identity = [_cell(bench, greedy, method) for method in every]
    sampled = source.cases[: options.sampled_prompts] if options.samples else []
    source.cases = source.cases[: options.matrix_prompts]
    features = source.features() if source.cases else []
    return CertificateResults(
        provenance=Provenance(**provenance),
        settings={
            "target": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "k": k,
            "near_tie_bound": reference.bound,
            **asdict(options),
        },
        identity=identity,
        matrix=[_cell(bench, feature, method) for feature in features for method in every],
        distribution=list(_distribution(bench, sampled)),
        seconds=time.perf_counter() - started,
    )


# ---- greedy ---------------------------------------------------------------------------------


def _cell(bench: _Bench, feature: Feature, method: DecodingMethod) -> CertifiedCase:
    """One feature under one method."""
    cell = CertifiedCase(feature=feature.name, method=method.name)
    if feature.needs_drafts and method.is_plain:
        return cell
    if not feature.cases:
        missing = "grammars cannot be compiled here: pip install 'peagle[grammar]'"
        return cell.model_copy(update={"note": missing})
    bench.watch(f"{feature.name}, {method.name}")
    llm = bench.engine(method, speculative=feature.speculative, **feature.engine)
    outputs: list[RequestOutput] = []
    try:
        for _ in range(feature.rounds):
            outputs = _generate(llm, feature)
    except UserError:
        raise
    except Exception as error:  # whatever breaks in an engine is a fault to be named, not the end
        fault = f"the engine failed: {type(error).__name__}: {error}"
        return cell.model_copy(update={"faults": [fault]})
    if feature.used and not feature.used(llm, outputs):
        return cell.model_copy(update={"note": "not reached with these prompts"})
    return _compared(cell, feature, outputs, bench.reference.bound)


def _generate(llm: LLM, feature: Feature) -> list[RequestOutput]:
    cases = feature.cases
    size = feature.together or len(cases)
    outputs: list[RequestOutput] = []
    for i in range(0, len(cases), size):
        part = cases[i : i + size]
        outputs += llm.generate([c.prompt for c in part], [c.params for c in part])
    return outputs


def _compared(
    cell: CertifiedCase, feature: Feature, outputs: Sequence[RequestOutput], bound: float
) -> CertifiedCase:
    differences, faults = [], []
    for case, output in zip(feature.cases, outputs, strict=True):
        found = difference(case, output.token_ids, bound)
        differences += [found] if found else []
        if found is None and case.text is not None and output.text != case.text:
            faults.append(f"{case.id}: the text is {output.text!r}, expected {case.text!r}")
        if feature.check and (wrong := feature.check(case, output, found)):
            faults.append(wrong)
    return CertifiedCase(
        feature=cell.feature,
        method=cell.method,
        num_outputs=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        num_accepted_tokens=sum(output.stats.num_accepted_tokens for output in outputs),
        differences=differences,
        faults=faults,
    )


# ---- sampled --------------------------------------------------------------------------------


def _distribution(bench: _Bench, cases: Sequence[Case]) -> Iterator[SampledTest]:
    """Every prompt under every method and draft sampling."""
    options = bench.options
    ways = [
        (method, sampling)
        for method in bench.methods
        for sampling in (options.draft_samplings if method.source else ("",))
    ]
    significance = options.alpha / max(1, len(ways) * len(cases))
    params = SamplingParams(
        # One more than is tested, so that the last of them may be a draft.
        max_tokens=options.sampled_tokens + 1,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        ignore_eos=True,
    )
    depths = range(1, min(bench.k, options.sampled_tokens - 1) + 1)
    cases = [replace(case, prompt=_context(bench, case.prompt)) for case in cases]
    cells = [_cells(bench, case, params) for case in cases]
    for method, sampling in ways:
        fields = {"draft_sampling": sampling} if sampling else None
        llm = bench.engine(method, speculative=fields, enable_prefix_caching=True, max_num_seqs=64)
        for number, (case, exact) in enumerate(zip(cases, cells, strict=True)):
            bench.watch(f"sampling, {method.name} {sampling}".rstrip() + f", {case.id}")
            first = (options.seed << 32) + number * options.samples
            every = [
                replace(params, seed=first + i, num_speculative_tokens=depths[i % len(depths)])
                for i in range(options.samples)
            ]
            if method.is_plain:
                every = [replace(one, num_speculative_tokens=None) for one in every]
            prompts: list[Any] = [case.prompt] * len(every)
            found = measure(llm, prompts, every).completions
            result = fit(
                exact,
                [one.output.token_ids for one in found],
                options.sampled_tokens,
                significance,
            )
            drafted, accepted = _drafted(found, options.sampled_tokens)
            yield SampledTest(
                method=method.name,
                draft_sampling=sampling,
                prompt=case.id,
                num_tokens=options.sampled_tokens,
                **asdict(result),
                significance=significance,
                num_draft_tokens=drafted,
                num_accepted_tokens=accepted,
            )


def _context(bench: _Bench, prompt: list[int]) -> list[int]:
    """A context behind which drafts are as often right as wrong, where a fault would show most.

    Of the places in a greedy output, with p_j the probability of its token there, that of the
    greatest p_j (v_j+1 + p_j+1 v_j+2), v = p (1 - p): the first sampled token is likely the greedy
    one, and those after it, which are drafted, are in doubt.
    """
    tail = prompt[-_TAIL_TOKENS:]
    found = bench.reference.greedy(tail, SamplingParams(max_tokens=_MORE_TOKENS))
    p = torch.softmax(found.logits_NV.double() / bench.options.temperature, -1).amax(-1).tolist()
    v = [one * (1 - one) for one in p]
    scores = [p[j] * (v[j + 1] + p[j + 1] * v[j + 2]) for j in range(len(p) - 2)]
    place = scores.index(max(scores)) if scores else 0
    return tail + found.token_ids[:place]


def _drafted(completions: Sequence[Completion], num_tokens: int) -> tuple[int, int]:
    """Draft tokens for the first tokens of outputs, and how many of them were accepted."""
    drafted = accepted = 0
    for completion in completions:
        position = 0
        for step in completion.steps:
            room = max(0, num_tokens - position)
            drafted += min(step.num_drafted, room)
            accepted += min(step.num_accepted, room)
            position += step.num_tokens
    return drafted, accepted


def _cells(bench: _Bench, case: Case, params: SamplingParams) -> dict[Tokens, float]:
    def next_probs(prompt: list[int], beginnings: list[Tokens]) -> Any:
        contexts = [[*prompt, *beginning] for beginning in beginnings]
        return bench.reference.next_token_probs(contexts, params)

    least = MIN_EXPECTED / bench.options.samples
    return joint_cells(partial(next_probs, case.prompt), bench.options.sampled_tokens, least)
