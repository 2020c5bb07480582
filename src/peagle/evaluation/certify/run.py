"""The parts of the losslessness certificate, run one after the other, and their text."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle.config import SamplingParams
from peagle.config.speculative import NEVER
from peagle.engine.memory_plan import lookahead_slots
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.evaluation.certify.distribution import MIN_EXPECTED, Tokens, fit, joint_cells
from peagle.evaluation.certify.matrix import Case, Feature, difference, greedy_case, matrix_features
from peagle.evaluation.certify.options import Options
from peagle.evaluation.certify.reference import TargetReference
from peagle.evaluation.decoding import Answer
from peagle.evaluation.decoding_methods import NGRAM, PLAIN, DecodingMethod
from peagle.evaluation.engine_backend import build_llms, time_requests
from peagle.evaluation.prompt_sets import load
from peagle.llm import LLM
from peagle.models.target import TargetModel
from peagle.results import CertificateResults, CertifiedCase, Provenance, SampledTest

# Contexts of the sampled part: the last tokens of a prompt and some of its greedy continuation.
# Any context would do, and short ones are quick.
_TAIL_TOKENS, _MORE_TOKENS = 16, 24
_MARKS = {"passed": "ok", "near-ties": "ok*", "fault": "FAULT", "not applicable": "-"}
_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class _Subject:
    """The models and options of all parts."""

    target: TargetModel
    reference: TargetReference
    methods: list[DecodingMethod]
    k: int
    options: Options
    watch: Callable[[str], None]

    def depth(self, method: DecodingMethod) -> int:
        """Return the largest K of a method."""
        return max(method.depths((self.k,)))

    def engine(self, method: DecodingMethod, speculative: dict[str, Any], **options: Any) -> LLM:
        config = method.config(self.depth(method))
        if config is not None:
            config = replace(config, **speculative)
        return build_llms(self.target, {method.name: config}, **options)[method.name]


def run_certificate(
    target: TargetModel,
    folder: str | Path,
    methods: Sequence[DecodingMethod],
    k: int,
    options: Options,
    provenance: Mapping[str, Any],
    watch: Callable[[str], None] = lambda _: None,
) -> CertificateResults:
    """Test that drafts change nothing: greedy outputs, the feature matrix, sampled outputs.

    Greedy outputs are compared with transformers' own: each first difference is a near-tie of the
    reference or a fault. Sampled outputs are compared with the exact distribution of the target
    (`certify.distribution`). Drafts there have 1 to sampled_tokens - 1 tokens, so that each tested
    token comes from the prompt pass, an accepted draft, the correction of a rejected one, and a
    bonus token.

    Args:
        folder: folder of the target, which is loaded once more; transformers runs it.
        methods: methods to certify; plain decoding and prompt lookup are added.
        k: the largest K of chains.
        watch: gets a line before each test.

    Raises:
        UserError: a head does not fit the target, or a prompt is too long for it.
    """
    started = time.perf_counter()
    names = [method.name for method in methods]
    every = [*methods, *(DecodingMethod(name) for name in (PLAIN, NGRAM) if name not in names)]
    every.sort(key=lambda method: method.name != PLAIN)
    quantization: Any = target.quantization  # a method of stored weights, or the type asked for
    reference = TargetReference(folder, target.dtype, str(target.device), quantization)
    subject = _Subject(target, reference, every, k, options, watch)
    watch("greedy outputs of transformers")
    plain = subject.engine(DecodingMethod(PLAIN), {})
    params = SamplingParams(max_tokens=options.max_new_tokens)
    cases = [
        greedy_case(reference, prompt.id, plain.requests.encode(prompt.text), params)
        for prompt in load(options.prompt_set, options.prompts)
    ]
    in_matrix = cases[: options.matrix_prompts]
    matrix = matrix_features(reference, plain, in_matrix, k) if in_matrix else []
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
        identity=[_certify(subject, Feature("greedy", cases), method) for method in every],
        matrix=[_certify(subject, feature, method) for feature in matrix for method in every],
        distribution=list(_test_distribution(subject, cases)) if options.samples else [],
        seconds=time.perf_counter() - started,
    )


# ---- greedy ----


def _certify(subject: _Subject, feature: Feature, method: DecodingMethod) -> CertifiedCase:
    """Test one feature under one method."""
    result = CertifiedCase(feature=feature.name, method=method.name)
    if feature.needs_drafts and method.name == PLAIN:
        return result
    if not feature.cases:
        note = "grammars cannot be compiled here: pip install 'peagle[grammar]'"
        return result.model_copy(update={"note": note})
    subject.watch(f"{feature.name}, {method.name}")
    engine = dict(feature.engine)
    if feature.blocks_for is not None:
        engine["num_kv_blocks"] = feature.blocks_for(_slots_ahead(method, subject.k))
    llm = subject.engine(method, feature.speculative, **engine)
    most = subject.depth(method)
    cases = [one for one in feature.cases if (one.params.num_speculative_tokens or 0) <= most]
    size = feature.together or len(cases)
    outputs: list[RequestOutput] = []
    try:
        for _ in range(feature.rounds):
            outputs = []
            for i in range(0, len(cases), size):
                part = cases[i : i + size]
                outputs += llm.generate([c.prompt for c in part], [c.params for c in part])
    except UserError:
        raise
    except Exception as error:  # an engine that breaks is a fault to be named, not the end
        fault = f"the engine failed: {type(error).__name__}: {error}"
        return result.model_copy(update={"faults": [fault]})
    if feature.used and not feature.used(llm, outputs):
        return result.model_copy(update={"note": "not reached with these prompts"})
    differences, faults = [], []
    for case, output in zip(cases, outputs, strict=True):
        found = difference(case, output.token_ids, subject.reference.bound)
        differences += [found] if found else []
        if found is None and case.text is not None and output.text != case.text:
            faults.append(f"{case.id}: the text is {output.text!r}, expected {case.text!r}")
        if feature.check and (fault := feature.check(case, output, found)):
            faults.append(fault)
    return CertifiedCase(
        feature=feature.name,
        method=method.name,
        num_outputs=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        num_accepted_tokens=sum(output.stats.num_accepted_tokens for output in outputs),
        differences=differences,
        faults=faults,
    )


# ---- sampled ----


def _test_distribution(subject: _Subject, cases: Sequence[Case]) -> Iterator[SampledTest]:
    """Test every prompt under every method and draft sampling."""
    options, num_tokens = subject.options, subject.options.sampled_tokens
    cases = cases[: options.sampled_prompts]
    ways = [
        (method, sampling)
        for method in subject.methods
        for sampling in _draft_samplings(method, options)
    ]
    significance = options.alpha / max(1, len(ways) * len(cases))
    params = SamplingParams(
        # One token more than is tested, so that the last tested one may be a draft.
        max_tokens=num_tokens + 1,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        ignore_eos=True,
    )
    contexts = [_context(subject, case.prompt) for case in cases]
    cells = [_exact_cells(subject, context, params) for context in contexts]
    for method, sampling in ways:
        speculative = {"draft_sampling": sampling} if sampling else {}
        draws = sampling == "probabilistic" and method.trees is not None
        if method.trees is not None:
            speculative = {"drawn_chains_from": 0.0 if draws else NEVER}
        sizes = {"enable_prefix_caching": True, "max_num_seqs": 64, "seed": options.seed}
        llm = subject.engine(method, speculative, **sizes)
        depths = range(1, min(subject.depth(method), num_tokens - 1) + 1)
        ks = [None] if method.name == PLAIN else depths
        for number, (case, context) in enumerate(zip(cases, contexts, strict=True)):
            subject.watch(f"sampling, {method.name} {sampling}".rstrip() + f", {case.id}")
            first = (options.seed << 32) + number * options.samples
            # A seed would keep drawn chains away from trees.
            seeds = [None if draws else first + i for i in range(options.samples)]
            every = [
                replace(params, seed=seed, num_speculative_tokens=ks[i % len(ks)])
                for i, seed in enumerate(seeds)
            ]
            prompts: list[Any] = [context] * options.samples
            found = time_requests(llm, prompts, every)
            drafted, accepted = _count_drafts(found.answers, num_tokens)
            yield SampledTest(
                method=method.name,
                draft_sampling=sampling,
                prompt=case.id,
                num_tokens=num_tokens,
                **asdict(fit(cells[number], found.token_ids, num_tokens, significance)),
                significance=significance,
                num_draft_tokens=drafted,
                num_accepted_tokens=accepted,
            )


def _slots_ahead(method: DecodingMethod, k: int) -> int:
    """Return the KV slots that a request of an eager engine holds beyond its tokens."""
    if (trees := method.trees) is None:
        return lookahead_slots(k, is_pipelined=False)
    beam = 0 if method.is_parallel else trees.num_parallel_trees
    sizes = trees.prediction_depth, trees.max_nodes
    return lookahead_slots(*sizes, beam=beam, is_pipelined=False)


def _draft_samplings(method: DecodingMethod, options: Options) -> tuple[str, ...]:
    """Return the draft samplings of a method.

    Of trees "probabilistic" stands for those that a drawn chain leads, which P-EAGLE heads have.
    """
    if not method.source:
        return ("",)
    has_both = method.trees is None or method.is_parallel
    return options.draft_samplings if has_both else ("argmax",)


def _context(subject: _Subject, prompt: list[int]) -> list[int]:
    """Return a context after which drafts are as often right as wrong, where faults show most.

    p_j is the probability of token j of a greedy output. The context ends before the token with
    the greatest p_j (v_j+1 + p_j+1 v_j+2), v = p (1 - p): the first sampled token is likely the
    greedy one, and the tokens after it, which are drafted, are uncertain.
    """
    tail = prompt[-_TAIL_TOKENS:]
    found = subject.reference.greedy(tail, SamplingParams(max_tokens=_MORE_TOKENS))
    p = torch.softmax(found.logits_NV.double() / subject.options.temperature, -1).amax(-1).tolist()
    v = [one * (1 - one) for one in p]
    scores = [p[j] * (v[j + 1] + p[j + 1] * v[j + 2]) for j in range(len(p) - 2)]
    place = scores.index(max(scores)) if scores else 0
    return tail + found.token_ids[:place]


def _count_drafts(answers: Sequence[Answer], num_tokens: int) -> tuple[int, int]:
    """Count the draft tokens among the first tokens of outputs, and the accepted ones.

    A tree counts as its longest path.
    """
    drafted = accepted = 0
    for answer in answers:
        position = 0
        for step in answer.steps or []:
            room = max(0, num_tokens - position)
            depth = step.num_drafted if step.draft_depth is None else step.draft_depth
            drafted += min(depth, room)
            accepted += min(step.num_accepted, room)
            position += step.num_tokens
    return drafted, accepted


def _exact_cells(
    subject: _Subject, context: list[int], params: SamplingParams
) -> dict[Tokens, float]:
    def next_probs(beginnings: list[Tokens]) -> torch.Tensor:
        contexts = [[*context, *beginning] for beginning in beginnings]
        return subject.reference.next_token_probs(contexts, params)

    least = MIN_EXPECTED / subject.options.samples
    return joint_cells(next_probs, subject.options.sampled_tokens, least)


# ---- text ----


def certificate_text(certificate: CertificateResults) -> str:
    """Return a certificate as text for a terminal or a file."""
    settings = ", ".join(f"{key} {value}" for key, value in certificate.settings.items())
    identity = ["Greedy outputs against transformers' own generation"]
    width = max(12, *(len(case.method) for case in certificate.identity))
    for case in certificate.identity:
        identity.append(
            f"  {case.method:<{width}} {case.num_outputs} outputs, {case.num_tokens} tokens, "
            f"{case.num_accepted_tokens} from drafts: "
            f"{len(case.differences) - case.num_near_ties} faults, {case.num_near_ties} near-ties"
        )
    parts = [[f"Losslessness certificate: {settings}"], identity]
    if certificate.matrix:
        parts.append(_matrix_lines(certificate.matrix))
    if certificate.distribution:
        first = certificate.distribution[0]
        head = "Sampled outputs against the exact joint distribution of their first "
        parts.append([f"{head}{first.num_tokens} tokens (a fault is p < {first.significance:.2g})"])
    for test in certificate.distribution:
        way = f"{test.method} {test.draft_sampling}".strip()
        parts[-1].append(
            f"  {way:<24} {test.prompt}: p = {test.p_value:.3g}, {test.num_samples} "
            f"samples, {test.num_cells} cells, {test.num_accepted_tokens} of "
            f"{test.num_draft_tokens} drafts accepted; finds a shift of {test.detectable_shift:.1%}"
        )
    cases = [*certificate.identity, *certificate.matrix]
    found = [(case, one) for case in cases for one in case.differences]
    found.sort(key=lambda pair: pair[1].is_near_tie)
    if found:
        parts.append(["First differences"])
    for case, one in found[:_SHOWN_DIFFERENCES]:
        gap = "" if one.gap is None else f"gap {one.gap:.2g} "
        parts[-1].append(
            f"  {case.feature}, {case.method}, {one.prompt} at token {one.position}: {one.token} "
            f"in place of {one.reference_token}, "
            f"{gap}({'near-tie' if one.is_near_tie else 'FAULT'})"
        )
    if len(found) > _SHOWN_DIFFERENCES:
        parts[-1].append(f"  and {len(found) - _SHOWN_DIFFERENCES} more (in the JSON form)")
    verdict = "PASSED: drafts change nothing that was tested here."
    if not certificate.passed:
        verdict = "FAILED:\n" + "\n".join(f"  {fault}" for fault in certificate.faults)
    return "\n\n".join(["\n".join(lines) for lines in parts]) + (
        f"\n\n{verdict} ({certificate.seconds:.0f} s)"
    )


def _matrix_lines(cases: Sequence[CertifiedCase]) -> list[str]:
    by_feature: dict[str, dict[str, str]] = {}
    for case in cases:
        by_feature.setdefault(case.feature, {})[case.method] = _MARKS[case.status]
    methods = dict.fromkeys(case.method for case in cases)
    width = max(map(len, by_feature))
    lines = ["Greedy under every feature (ok* = near-ties only; - = not applicable)"]
    for feature, marks in {"": {method: method for method in methods}, **by_feature}.items():
        shown = [f"{marks.get(method, ''):<{max(len(method), 5)}}" for method in methods]
        lines.append("  ".join([f"  {feature:<{width}}", *shown]).rstrip())
    return lines + sorted({f"  {c.feature}, {c.method}: {c.note}" for c in cases if c.note})
