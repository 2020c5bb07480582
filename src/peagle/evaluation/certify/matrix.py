"""Features that must leave greedy output as it is, each tried under each way to decode.

A feature is some requests with the output that transformers gives for each, and the options of the
engine that runs them. Outputs are compared token by token; what a feature promises beside the
tokens (a text before a stop string, log-probabilities, a shape) is checked by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from peagle.config import SamplingParams, StructuredOutput
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.evaluation.certify.reference import TargetReference
from peagle.evaluation.identity import Difference, Reference, first_difference
from peagle.llm import LLM

PENALTIES: dict[str, float] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
}
# Both have an end, so that whole outputs can be held against them.
SHAPES = (r"[ -~\n]{40}", r"(yes|no|maybe)(, (yes|no|maybe)){5}")
_CHUNK_TOKENS = 16
_NUM_TOP = 3
_STOP_CHARACTERS = 3
# `generate` gives its scores in single precision, whatever the model's.
_LOGPROB_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what must come of it.

    Attributes:
        id: of the prompt, for reports.
        prompt: token ids.
        params: how it is asked for.
        reference: what transformers says, with the logits of each token.
        text: the text that must be shown; None leaves it unchecked.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    reference: Reference
    text: str | None = None


Check = Callable[[Case, RequestOutput, Difference | None], str]


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the matrix.

    Attributes:
        name: in the matrix.
        cases: the requests.
        engine: options of the engine.
        speculative: further fields of the speculative configuration.
        together: so many requests run at a time; None all.
        rounds: times that the requests run in one engine; the last outputs are compared.
        check: says what is wrong with an output beside its tokens; "" if nothing.
        used: says of an engine that has run whether the feature was met at all; None needs no
            proof.
        needs_drafts: not applicable to plain decoding.
    """

    name: str
    cases: Sequence[Case]
    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    together: int | None = None
    rounds: int = 1
    check: Check | None = None
    used: Callable[[LLM, Sequence[RequestOutput]], bool] | None = None
    needs_drafts: bool = False


class FeatureSource:
    """Makes the features of a target, with their references.

    Args:
        reference: the target as transformers runs it.
        plain: an engine without drafts: it tokenises, and says what grammars permit.
        prompts: ids and texts.
        max_new_tokens: of each output.
        k: the largest K.
    """

    def __init__(
        self,
        reference: TargetReference,
        plain: LLM,
        prompts: Sequence[tuple[str, str]],
        max_new_tokens: int,
        k: int,
    ) -> None:
        self._reference = reference
        self._plain = plain
        self._k = k
        params = SamplingParams(max_tokens=max_new_tokens)
        self.cases = [
            self._case(name, plain.requests.encode(text), params) for name, text in prompts
        ]

    def _case(self, name: str, prompt: list[int], params: SamplingParams) -> Case:
        return Case(name, prompt, params, self._reference.greedy(prompt, params))

    def features(self) -> list[Feature]:
        """All of them."""
        cases = self.cases
        longest = max(len(case.prompt) + case.params.max_tokens for case in cases)
        # For one sequence and a half, with what a step reserves ahead.
        blocks = math.ceil(1.5 * (longest + 2 * (self._k + 1)) / 16)
        schedule = [[1, 1, self._k], [2, 2, max(1, self._k // 2)], [3, 64, 0]]
        return [
            Feature("one at a time", cases, together=1),
            Feature("batched", cases),
            Feature("prefix caching", cases, {"enable_prefix_caching": True}, rounds=2,
                    used=lambda _, outputs: any(o.num_cached_tokens for o in outputs)),
            Feature("chunked prefill", cases, {"max_num_batched_tokens": _CHUNK_TOKENS}),
            Feature("preemption", cases, {"num_kv_blocks": blocks},
                    used=lambda llm, _: llm.stats.num_preemptions > 0),
            Feature(f"K 1 to {self._k}", self._depths(), needs_drafts=True),
            Feature("K schedule", cases, needs_drafts=True,
                    speculative={"num_speculative_tokens_per_batch_size": schedule}),
            Feature("penalties", [self._again(case, **PENALTIES) for case in cases]),
            Feature("min_tokens", [self._minimum(case) for case in cases]),
            Feature("stop strings", [self._stopped(case) for case in cases]),
            Feature("logprobs", [_with_logprobs(case) for case in cases], check=self._logprobs),
            Feature("grammar", self._structured(), check=_shape),
        ]  # fmt: skip

    def _again(self, case: Case, **asked: Any) -> Case:
        """The same prompt under other parameters that `generate` knows too."""
        return self._case(case.id, case.prompt, replace(case.params, **asked))

    def _depths(self) -> list[Case]:
        """Every K, on two prompts each."""
        return [
            replace(
                self.cases[(k + i) % len(self.cases)],
                id=f"K = {k}, {self.cases[(k + i) % len(self.cases)].id}",
                params=replace(self.cases[0].params, num_speculative_tokens=k),
            )
            for k in range(1, self._k + 1)
            for i in range(2)
        ]

    def _minimum(self, case: Case) -> Case:
        """Stop at a token that comes early, but not before half of the output."""
        tokens = case.reference.token_ids
        stop = tokens[len(tokens) // 4]
        asked = {"stop_token_ids": (stop,), "min_tokens": max(1, len(tokens) // 2)}
        return self._again(case, **asked)

    def _stopped(self, case: Case) -> Case:
        """Stop at some characters from the middle of the output's text."""
        tokens = case.reference.token_ids
        text = self._text(tokens)
        middle = len(text) // 2
        stop = text[middle : middle + _STOP_CHARACTERS]
        if not stop.strip() or "\ufffd" in stop:
            return case
        until = next(n for n in range(len(tokens) + 1) if stop in self._text(tokens[:n]))
        reference = Reference(tokens[:until], case.reference.logits_NV[:until])
        shown = text[: text.index(stop)]
        return Case(case.id, case.prompt, replace(case.params, stop=(stop,)), reference, shown)

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self._plain.tokenizer.decode([*token_ids], skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _logprobs(self, case: Case, output: RequestOutput, found: Difference | None) -> str:
        """Log-probabilities of the reference's raw logits, as far as the tokens agree."""
        until = len(output.token_ids) if found is None else found.position
        given = output.logprobs or []
        if len(given) != len(output.token_ids):
            return f"{case.id}: {len(given)} log-probabilities of {len(output.token_ids)} tokens"
        expected_NV = torch.log_softmax(case.reference.logits_NV.double(), -1).cpu()
        tolerance = max(10 * self._reference.bound, _LOGPROB_ROUNDING)
        for at in range(until):
            one = given[at]
            pairs = [(one.token_id, one.logprob), *one.top]
            worst = max(abs(value - float(expected_NV[at, token])) for token, value in pairs)
            if worst > tolerance or len(one.top) != _NUM_TOP:
                return f"{case.id}, token {at}: log-probabilities are off by {worst:.2g}"
        return ""

    def _structured(self) -> list[Case]:
        """Outputs of a given shape: plain decoding says which, transformers how near others are.

        Empty where the package that compiles grammars is missing.
        """
        every = [
            replace(case.params, structured_output=StructuredOutput.regex(SHAPES[i % 2]))
            for i, case in enumerate(self.cases)
        ]
        try:
            outputs = self._plain.generate([case.prompt for case in self.cases], every)
        except UserError:
            return []
        return [
            Case(case.id, case.prompt, params,
                 self._reference.scored(case.prompt, output.token_ids))
            for case, params, output in zip(self.cases, every, outputs, strict=True)
        ]  # fmt: skip


def _with_logprobs(case: Case) -> Case:
    return replace(case, params=replace(case.params, logprobs=_NUM_TOP))


def _shape(case: Case, output: RequestOutput, found: Difference | None) -> str:
    del found
    structure = case.params.structured_output
    assert structure is not None
    if output.finish_reason == "length" or re.fullmatch(structure.source, output.text):
        return ""
    return f"{case.id}: {output.text!r} is not of the shape {structure.source}"


def difference(case: Case, token_ids: Sequence[int], bound: float) -> Difference | None:
    """Where an output leaves its reference; see `first_difference`.

    Under a grammar the runner-up of the raw logits may be forbidden: there the two tokens that
    came are compared with each other alone.
    """
    found = first_difference(case.id, token_ids, case.reference, bound)
    if found is None or case.params.structured_output is None:
        return found
    gap = None if found.gap is None else abs(found.gap)
    return found.model_copy(update={"gap": gap, "top2_gap": gap})
