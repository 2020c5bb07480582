"""Bodies of requests as SamplingParams, and what they ask beside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peagle.config import SamplingParams, StructuredOutput
from peagle.errors import UserError
from peagle.serving.errors import ApiError
from peagle.serving.limits import LIMITS, most
from peagle.serving.messages import EngineInfo
from peagle.serving.protocol import (
    ChatBody,
    CompletionBody,
    GenerationFields,
    ResponseFormat,
    SamplingFields,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SAME_NAME = (
    "min_tokens",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "allowed_token_ids",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "prompt_logprobs",
)


_FIELDS = frozenset(SamplingFields.model_fields)
_GUIDED = "guided_"
_GRAMMARS = ("regex", "grammar")


@contextmanager
def as_api_error(param: str | None = None) -> Iterator[None]:
    """Let a user's mistake become an answer of status 400."""
    try:
        yield
    except UserError as error:
        # Messages about a value begin with its name.
        word = str(error).partition(" ")[0]
        is_field = word.partition(".")[0] in _FIELDS
        raise ApiError(400, str(error), param=word if is_field else param) from None


def completion_params(body: CompletionBody, info: EngineInfo, prompt_len: int) -> SamplingParams:
    """How a completion is sampled; `prompt_len` is that of its longest prompt, in tokens.

    Raises:
        ApiError: a value is out of range, or prompt and output do not fit the context.
    """
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported; leave it out.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of is {body.best_of} and n {body.n or 1}; expected the same. Ask for n outputs "
            "with logprobs and choose among them.",
            param="best_of",
        )
    wanted = body.max_tokens
    if wanted == 0 and body.echo:
        wanted = 1  # only the prompt is wanted; the answer drops this one
    elif wanted is None:
        wanted = min(DEFAULT_COMPLETION_TOKENS, max(1, info.max_model_len - prompt_len))
    given: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    return _params(body, info, prompt_len, wanted, given)


def chat_params(
    body: ChatBody, info: EngineInfo, prompt_len: int, constraint: StructuredOutput | None
) -> SamplingParams:
    """How an answer is sampled; `constraint` is what a forced tool call must look like.

    Raises:
        ApiError: as `completion_params`.
    """
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is None:
        wanted = max(1, info.max_model_len - prompt_len)
    given: dict[str, Any] = {}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise ApiError(
            400,
            f"top_logprobs is {body.top_logprobs} without logprobs; set logprobs to true.",
            param="top_logprobs",
        )
    if constraint is not None:
        for name in _structures(body):
            text = f"{name} and a forced tool_choice were both given; leave one of them out."
            raise ApiError(400, text, param=name)
        given["structured_output"] = constraint
    return _params(body, info, prompt_len, wanted, given)


def _params(
    body: SamplingFields,
    info: EngineInfo,
    prompt_len: int,
    max_tokens: int,
    given: dict[str, Any],
) -> SamplingParams:
    check_context(prompt_len, max_tokens, info.max_model_len)
    values: dict[str, Any] = {"temperature": 1.0, **info.defaults}
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.temperature is not None:
        values["temperature"] = body.temperature
    values["max_tokens"] = max_tokens
    values["min_tokens"] = min(values.get("min_tokens", 0), max_tokens)
    if body.min_tokens is not None:
        values["min_tokens"] = body.min_tokens
    if body.logit_bias is not None:
        values["logit_bias"] = _bias(body.logit_bias)
    _check_products(body)
    structures = _structures(body)
    if len(structures) > 1:
        first, second = list(structures)[:2]
        text = f"{first} and {second} were both given; leave one of them out."
        raise ApiError(400, text, param=second)
    values["structured_output"] = next(iter(structures.values()), None)
    with as_api_error():
        params = SamplingParams(**values | given)
    if (structure := params.structured_output) is not None:
        length, limit = len(structure.source), most("source_characters")
        if length > limit:
            raise ApiError(
                400,
                f"The {structure.kind} source has {length} characters; expected at most {limit} "
                "(limit source_characters). Shorten it.",
                param=next(iter(structures), "tools"),
            )
    return params


def _check_products(body: SamplingFields) -> None:
    """Bound what each step of the engine reads for all outputs of one prompt."""
    for name in ("stop", "bad_words", "logit_bias", "allowed_token_ids"):
        given = getattr(body, name) or ()
        total = (body.n or 1) * (1 if isinstance(given, str) else len(given))
        if name == "bad_words":  # all are as wide as the longest
            total *= max(map(len, given), default=0)
        if total > (limit := most(f"n_{name}")):
            what = LIMITS[f"n_{name}"].counts
            text = f"{name} and n are too much together: {what} is {total}; expected at most "
            tip = "Lower n, or send fewer entries."
            raise ApiError(400, f"{text}{limit} (limit n_{name}). {tip}", param=name)


def check_context(prompt_len: int, max_tokens: int, max_model_len: int) -> None:
    """Refuse what does not fit.

    Raises:
        ApiError: prompt and output are longer than the context.
    """
    if prompt_len + max_tokens > max_model_len:
        raise ApiError(
            400,
            f"The prompt has {prompt_len} tokens and {max_tokens} were asked for, "
            f"{prompt_len + max_tokens} in all; the model's context is {max_model_len}. Shorten "
            "the prompt or lower max_tokens.",
            param="max_tokens" if prompt_len < max_model_len else "prompt",
            code="context_length_exceeded",
        )


def _bias(bias: Mapping[str, float]) -> list[tuple[int, float]]:
    pairs = []
    for token, value in bias.items():
        # int() would take blanks, signs and underscores too.
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise ApiError(
                400,
                f"logit_bias has the key {token!r:.80}; expected token ids.",
                param="logit_bias",
            )
        pairs.append((int(token), value))
    return pairs


def _structures(body: SamplingFields) -> dict[str, StructuredOutput]:
    """The shapes that a body asks for, in OpenAI's and in vLLM's names, by their field."""
    found: dict[str, StructuredOutput] = {}
    if body.response_format is not None:
        structure = _structure(body.response_format)
        found |= {} if structure is None else {"response_format": structure}
    if body.structured_outputs is not None:
        with as_api_error("structured_outputs"):
            structure = StructuredOutput.from_vllm(body.structured_outputs, "structured_outputs.")
        found["structured_outputs"] = structure
    guided = {
        name: value
        for name in type(body).model_fields
        if name.startswith(_GUIDED) and (value := getattr(body, name)) not in (None, False)
    }
    if guided:
        first = next(iter(guided))
        named = {name.removeprefix(_GUIDED): value for name, value in guided.items()}
        with as_api_error(first):
            found[first] = StructuredOutput.from_vllm(named, _GUIDED)
    return found


def _structure(wanted: ResponseFormat) -> StructuredOutput | None:
    sources = {
        "json_schema": wanted.json_schema,
        "regex": wanted.pattern,
        "grammar": wanted.grammar,
    }
    kind = wanted.type
    names = {"regex": "pattern"}
    for other, source in sources.items():
        if (source is not None) != (other == kind):
            name = names.get(other, other)
            what = "needs" if other == kind else "has no"
            text = f"response_format of type {kind!r} {what} {name!r}."
            raise ApiError(400, text, param="response_format")
    with as_api_error("response_format"):
        if kind == "text":
            return None
        if kind == "json_object":
            return StructuredOutput.json_object()
        if kind == "json_schema":
            assert wanted.json_schema is not None
            schema = wanted.json_schema.schema_
            return StructuredOutput.json_schema(json.dumps({} if schema is None else schema))
        if kind == "regex":
            return StructuredOutput.regex(wanted.pattern or "")
        return StructuredOutput.ebnf(wanted.grammar or "")


def refuse_grammars(body: GenerationFields) -> None:
    """Refuse a body that brings a regular expression or a grammar of its own.

    Raises:
        ApiError: 400, naming the field.
    """
    wanted: ResponseFormat | None = getattr(body, "response_format", None)
    structures = body.structured_outputs or {}
    for field, is_given in (
        ("response_format", wanted is not None and wanted.type in ("regex", "grammar")),
        *((f"structured_outputs.{name}", bool(structures.get(name))) for name in _GRAMMARS),
        *((_GUIDED + name, bool(getattr(body, _GUIDED + name))) for name in _GRAMMARS),
    ):
        if is_given:
            raise ApiError(
                400,
                f"{field} asks for a regular expression or a grammar, which this server refuses "
                "(--no-user-grammars). Ask for a JSON schema or for choices, or have the "
                "operator leave that option out.",
                param=field,
                code="grammars_not_allowed",
            )
