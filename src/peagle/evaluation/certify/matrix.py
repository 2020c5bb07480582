"""Features that must not change greedy output, each tried under each decoding method.

A feature is some requests, the output that transformers gives for each, and the options of the
engine that runs them. Outputs are compared token by token; the other promises of a feature (a text
before a stop string, log-probabilities, a shape) have a check of their own.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from peagle.config import SamplingParams, StructuredOutput
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.evaluation.certify.reference import Reference, TargetReference, first_difference
from peagle.llm import LLM
from peagle.results import Difference

_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
# Both shapes end, so that whole outputs can be compared with them.
_SHAPES = (r"[ -~\n]{40}", r"(yes|no|maybe)(, (yes|no|maybe)){5}")
_CHUNK_TOKENS = 16
_NUM_TOP = 3
_STOP_CHARACTERS = 3
# `generate` gives its scores in single precision, whatever the model's.
_LOGPROB_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the output of transformers for it; a text of None is not checked."""

    id: str
    prompt: list[int]
    params: SamplingParams
    reference: Reference
    text: str | None = None


Check = Callable[[Case, RequestOutput, Difference | None], str]


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the matrix.

    `blocks_for` returns the KV blocks of an engine whose requests hold so many slots beyond their
    tokens; None takes all that fit. `check` returns a fault of an output beyond its tokens, "" if
    there is none. `used` returns whether an engine used the feature while it ran; None skips this
    check.
    """

    name: str
    cases: Sequence[Case]
    engine: dict[str, Any] = field(default_factory=dict)  # options of the engine
    speculative: dict[str, Any] = field(default_factory=dict)  # fields of its configuration
    together: int | None = None  # requests that run at a time; None runs all
    rounds: int = 1  # runs in one engine; the last outputs are compared
    blocks_for: Callable[[int], int] | None = None
    check: Check | None = None
    used: Callable[[LLM, Sequence[RequestOutput]], bool] | None = None
    needs_drafts: bool = False  # not applicable to plain decoding


def greedy_case(
    reference: TargetReference, id: str, prompt: list[int], params: SamplingParams
) -> Case:
    """Return a request with the greedy output of transformers."""
    return Case(id, prompt, params, reference.greedy(prompt, params))


def matrix_features(
    reference: TargetReference, plain: LLM, cases: Sequence[Case], k: int
) -> list[Feature]:
    """Return all features of a target, with their references, for K up to `k`.

    `plain` is an engine without drafts: it decodes text and gives outputs under grammars.
    """
    longest = max(len(case.prompt) + case.params.max_tokens for case in cases)
    schedule = [[1, 1, k], [2, 2, max(1, k // 2)], [3, 64, 0]]

    def few_blocks(slots_ahead: int) -> int:
        """Return the blocks of one sequence and a half."""
        return math.ceil(1.5 * (longest + slots_ahead) / 16)

    def again(case: Case, **options: Any) -> Case:
        """Return the same prompt under other parameters that `generate` supports too."""
        return greedy_case(reference, case.id, case.prompt, replace(case.params, **options))

    def stopped_late(case: Case) -> Case:
        """Return the request with an early stop token, and min_tokens of half its output."""
        tokens = case.reference.token_ids
        least = max(1, len(tokens) // 2)
        return again(case, stop_token_ids=(tokens[len(tokens) // 4],), min_tokens=least)

    def check_logprobs(case: Case, output: RequestOutput, found: Difference | None) -> str:
        return _logprobs_fault(case, output, found, reference.bound)

    stopped = [_with_stop(case, plain) for case in cases]
    return [
        Feature("one at a time", cases, together=1),
        Feature("batched", cases),
        Feature("prefix caching", cases, {"enable_prefix_caching": True}, rounds=2,
                used=lambda _, outputs: any(o.num_cached_tokens for o in outputs)),
        Feature("chunked prefill", cases, {"max_num_batched_tokens": _CHUNK_TOKENS}),
        Feature("preemption", cases, blocks_for=few_blocks,
                used=lambda llm, _: llm.stats.num_preemptions > 0),
        Feature(f"K 1 to {k}", _every_k(cases, k), needs_drafts=True),
        Feature("K schedule", cases, needs_drafts=True,
                speculative={"num_speculative_tokens_per_batch_size": schedule}),
        Feature("penalties", [again(case, **_PENALTIES) for case in cases]),
        Feature("min_tokens", [stopped_late(case) for case in cases]),
        Feature("stop strings", stopped,
                used=lambda *_: any(case.params.stop for case in stopped)),
        Feature("logprobs", check=check_logprobs, cases=[
            replace(case, params=replace(case.params, logprobs=_NUM_TOP)) for case in cases]),
        Feature("grammar", _with_shapes(reference, plain, cases), check=_shape_fault),
    ]  # fmt: skip


def _every_k(cases: Sequence[Case], most: int) -> list[Case]:
    """Return two prompts for every K up to `most`."""
    chosen = [(k, cases[(k + i) % len(cases)]) for k in range(1, most + 1) for i in range(2)]
    return [
        replace(
            case, id=f"K = {k}, {case.id}", params=replace(case.params, num_speculative_tokens=k)
        )
        for k, case in chosen
    ]


def _with_stop(case: Case, plain: LLM) -> Case:
    """Return the request with some characters from the middle of the output as its stop string."""

    def text_of(token_ids: Sequence[int]) -> str:
        return str(plain.tokenizer.decode([*token_ids], skip_special_tokens=True))

    tokens, text = case.reference.token_ids, text_of(case.reference.token_ids)
    middle = len(text) // 2
    stop = text[middle : middle + _STOP_CHARACTERS]
    if not stop.strip() or "\ufffd" in stop:
        return case
    until = next(n for n in range(len(tokens) + 1) if stop in text_of(tokens[:n]))
    reference = Reference(tokens[:until], case.reference.logits_NV[:until])
    params = replace(case.params, stop=(stop,))
    return Case(case.id, case.prompt, params, reference, text[: text.index(stop)])


def _logprobs_fault(
    case: Case, output: RequestOutput, found: Difference | None, bound: float
) -> str:
    """Compare log-probabilities with the reference's raw logits, up to the first other token."""
    until = len(output.token_ids) if found is None else found.position
    given = output.logprobs or []
    if len(given) != len(output.token_ids):
        return f"{case.id}: {len(given)} log-probabilities of {len(output.token_ids)} tokens"
    expected_NV = torch.log_softmax(case.reference.logits_NV.double(), -1).cpu()
    tolerance = max(10 * bound, _LOGPROB_ROUNDING)
    for at, one in enumerate(given[:until]):
        pairs = [(one.token_id, one.logprob), *one.top]
        worst = max(abs(value - float(expected_NV[at, token])) for token, value in pairs)
        if worst > tolerance or len(one.top) != _NUM_TOP:
            return f"{case.id}, token {at}: log-probabilities are off by {worst:.2g}"
    return ""


def _with_shapes(reference: TargetReference, plain: LLM, cases: Sequence[Case]) -> list[Case]:
    """Return requests for outputs of a given shape, with the reference's logits of their tokens.

    Plain decoding gives the tokens. The result is empty without the package that compiles grammars.
    """
    shapes = [StructuredOutput.regex(_SHAPES[i % 2]) for i in range(len(cases))]
    every = [replace(case.params, structured_output=shape) for case, shape in zip(cases, shapes)]
    try:
        outputs = plain.generate([case.prompt for case in cases], every)
    except UserError:
        return []
    return [
        Case(case.id, case.prompt, params, reference.scored(case.prompt, output.token_ids))
        for case, params, output in zip(cases, every, outputs, strict=True)
    ]


def _shape_fault(case: Case, output: RequestOutput, found: Difference | None) -> str:
    structure = case.params.structured_output
    assert structure is not None
    if output.finish_reason == "length" or re.fullmatch(structure.source, output.text):
        return ""
    return f"{case.id}: {output.text!r} is not of the shape {structure.source}"


def difference(case: Case, token_ids: Sequence[int], bound: float) -> Difference | None:
    """Return where an output leaves its reference; see `first_difference`.

    A grammar may forbid the runner-up of the raw logits. So its gap is only between the token of
    the output and the token of the reference.
    """
    found = first_difference(case.id, token_ids, case.reference, bound)
    if found is None or case.params.structured_output is None:
        return found
    gap = None if found.gap is None else abs(found.gap)
    return found.model_copy(update={"gap": gap, "top2_gap": gap})
