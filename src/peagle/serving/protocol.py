"""Bodies of requests, as OpenAI has them, with vLLM's extensions and ours, and what they ask for.

Unknown fields are refused: a misspelt one would silently change nothing. Fields of OpenAI's that
do not concern the output (`user`, `metadata`, ...) are accepted and ignored. A field that is null
counts as left out, whatever its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from peagle.config import SamplingParams, StructuredOutput
from peagle.errors import UserError, short_repr
from peagle.serving.errors import ApiError
from peagle.serving.limits import (
    LIMITS,
    BadWord,
    Description,
    Messages,
    Name,
    Options,
    Source,
    StopString,
    TokenIds,
    bounded_list,
    length_limit,
    most,
)

if TYPE_CHECKING:
    from peagle.serving.engine_process import EngineInfo

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, given: Any) -> Any:
        """Leave out nulls; bound the fields, each unknown one of which would be an error."""
        if not isinstance(given, dict):
            return given
        if len(given) > most("fields"):
            raise ValueError(f"should have at most {most('fields')} fields, not {len(given)}")
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None
    continuous_usage_stats: StrictBool = False


class SpeculationOptions(_Body):
    """How the server drafts for this request, and whether the answer reports it.

    Attributes:
        proposer: one of those that /v1/models lists.
        num_speculative_tokens: K, at most the proposer's; 0 turns drafting off.
        prompt_lookup: false keeps copies of the text out of the trees.
        correction: name of the correction of the drafts; the head's own if there is none.
        report: report drafts in every chunk and in `usage`; "trees" reports the tree of each step
            too, where drafts are trees.
    """

    proposer: Name | None = None
    num_speculative_tokens: StrictInt | None = None
    prompt_lookup: StrictBool = True
    correction: Name | None = None
    report: StrictBool | Literal["trees"] = False


class JsonSchema(_Body):
    """A JSON schema with a name, as the response format of a chat."""

    name: Name = "schema"
    description: Description | None = None
    schema_: dict[str, Any] | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    """The structure that the answer must have; "regex" and "grammar" are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: Source | None = None
    grammar: Source | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tags(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "structural_tag":
            raise ValueError("should be a JSON schema, a regex or a grammar of the whole output")
        return given


# Fields of OpenAI's and vLLM's with the values that change nothing, for routes without the field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
}


def _changes_nothing(name: str, value: Any) -> bool:
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


class GenerationFields(_Body):
    """Fields of every route that generates; SamplingParams checks the ranges.

    Of vLLM's names for structured outputs, `StructuredOutput.from_vllm` checks the values.
    """

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
        return {n: v for n, v in given.items() if n in own or not _changes_nothing(n, v)}

    model: Name | None = None
    min_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[Name, Number], length_limit("logit_bias")] | None = None
    bad_words: Annotated[list[BadWord], bounded_list("bad_words")] | None = None
    allowed_token_ids: Annotated[list[StrictInt], bounded_list("allowed_token_ids")] | None = None
    seed: StrictInt | None = None
    stop: StopString | Annotated[list[StopString], bounded_list("stop")] | None = None
    stop_token_ids: Annotated[list[StrictInt], bounded_list("stop_token_ids")] | None = None
    ignore_eos: StrictBool | None = None
    structured_outputs: Options | None = None
    guided_json: dict[StrictStr, Any] | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Annotated[list[Source], bounded_list("choices")] | None = None
    guided_grammar: Source | None = None
    guided_json_object: StrictBool | None = None
    guided_whitespace_pattern: Source | None = None
    stream: StrictBool | None = None
    speculation: SpeculationOptions | None = None
    priority: StrictInt = 0
    cache_salt: Name | None = None
    # OpenAI's fields without an effect on the output.
    user: Name | None = None
    metadata: Options | None = None
    store: StrictBool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None


class SamplingFields(GenerationFields):
    """Further fields that completions and chat completions share."""

    max_tokens: StrictInt | None = None
    n: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    return_tokens_as_token_ids: StrictBool = False
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


PROMPT_KINDS = {"text", "ids", "texts", "lists"}


def _kind_of_prompt(prompt: Any) -> str:
    """Return the form of a prompt, by its first element; pydantic tries no other form."""
    if not isinstance(prompt, list) or not prompt:
        return "ids" if isinstance(prompt, list) else "text"
    return {str: "texts", list: "lists"}.get(type(prompt[0]), "ids")


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[StrictStr, Tag("text")]
        | Annotated[list[StrictInt], Field(min_length=1, fail_fast=True), Tag("ids")]
        | Annotated[list[StrictStr], bounded_list("prompts", 1), Tag("texts")]
        | Annotated[list[TokenIds], bounded_list("prompts", 1), Tag("lists")],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: StrictInt | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: Name | None = None
    add_special_tokens: StrictBool = True


class FunctionSpec(_Body):
    """A function that the model may call."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(_Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoiceFunction(_Body):
    """The name of a function."""

    name: Name


class ToolChoice(_Body):
    """A function that must be called."""

    type: Literal["function"]
    function: ToolChoiceFunction


class FunctionChoice(ToolChoiceFunction):
    """A function that must be called, as POST /v1/responses has it."""

    type: Literal["function"]


class TextPart(_Body):
    """A part of the text of a prediction."""

    type: Literal["text"]
    text: StrictStr


class PredictedOutput(_Body):
    """The answer that a client expects, as one text or in parts."""

    type: Literal["content"]
    content: StrictStr | Annotated[list[TextPart], bounded_list("messages")]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(SamplingFields):
    """POST /v1/chat/completions. Messages are checked against the chat template."""

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: Annotated[list[Tool], bounded_list("tools")] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    prediction: PredictedOutput | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: Options | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    modalities: Annotated[list[Literal["text"]], bounded_list("include")] | None = None


_STATELESS = "peagle stores no responses"
_NO_SUMMARY = "should be 'auto': peagle gives the reasoning itself, and no summary of it"
# Fields of POST /v1/responses with the one value that they may have, if any, and the reason.
_ALLOWED_VALUES: dict[str, tuple[Any, str]] = {
    "type": ("function", "should be 'function': peagle runs no tools itself"),
    "verbosity": ("medium", "should be 'medium': ask for a length in the instructions"),
    "summary": ("auto", _NO_SUMMARY),
    "generate_summary": ("auto", _NO_SUMMARY),
    # The output has the reasoning as plain text; there is no encrypted copy.
    "include": (["reasoning.encrypted_content"], "should be ['reasoning.encrypted_content']"),
    "top_logprobs": (0, "should be 0: only /v1/chat/completions gives log-probabilities"),
    "truncation": ("disabled", "should be 'disabled': peagle shortens no input"),
    "store": (False, f"should be false: {_STATELESS}"),
    "background": (False, f"should be false: {_STATELESS}"),
    "previous_response_id": (None, f"should be left out: {_STATELESS}; send the whole input"),
    "conversation": (None, f"should be left out: {_STATELESS}; send the whole input"),
    "prompt": (None, "should be left out: peagle stores no prompts; send the text as input"),
}


class _Restricted(_Body):
    @field_validator(*_ALLOWED_VALUES, check_fields=False)
    @classmethod
    def _check_only(cls, value: Any, info: ValidationInfo) -> Any:
        allowed, reason = _ALLOWED_VALUES[info.field_name or ""]
        if value not in (None, []) and (type(value), value) != (type(allowed), allowed):
            raise ValueError(reason)
        return value


class FunctionTool(_Restricted):
    """A function that the model may call, as POST /v1/responses has it."""

    type: Name
    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class TextFormat(_Body):
    """The structure that the text of a response must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name = "schema"
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(_Restricted):
    """How the model writes the text of a response."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(_Restricted):
    """How the model reasons before a response."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponseStreamOptions(_Body):
    """Options of a streamed response."""

    include_obfuscation: StrictBool | None = None


class ResponsesBody(_Restricted, GenerationFields):
    """POST /v1/responses. The items of `input` are checked where they become messages."""

    input: StrictStr | Messages
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    tools: Annotated[list[FunctionTool], bounded_list("tools")] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Options | None = None
    max_tool_calls: StrictInt | None = None  # limits tools that the server runs: none here
    include: Annotated[list[Name], bounded_list("include")] | None = None
    top_logprobs: StrictInt | None = None
    truncation: Name | None = None
    store: StrictBool | None = None
    background: StrictBool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: Options | None = None
    tools: Annotated[list[Tool], bounded_list("tools")] | None = None
    return_token_strs: StrictBool = False


class DetokenizeBody(_Body):
    """The body of POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds


class TrialBody(_Body):
    """A trial of a head: its requests after which it stays, and its share of all requests."""

    requests: Annotated[StrictInt, Field(ge=1, le=100_000)] = 500
    share: Annotated[Number, Field(gt=0, lt=1)] = 0.5


class HeadBody(_Body):
    """The body of POST /admin/head."""

    head: Name
    trial: TrialBody | None = None


# ---- bodies as sampling parameters ----

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SAME_NAME = (
    *("top_p", "top_k", "min_p", "typical_p", "n", "seed", "temperature", "bad_words"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids"),
    *("stop", "stop_token_ids", "ignore_eos", "prompt_logprobs"),
)
_FIELDS = frozenset(ChatBody.model_fields)
_GUIDED = "guided_"
_GRAMMARS = ("regex", "grammar")


def api_error(text: str, param: str | None = None) -> ApiError:
    """Return the error of status 400 with a UserError's text; `param` is the field if it has none.

    Messages about a value begin with its name.
    """
    word = text.partition(" ")[0]
    return ApiError(400, text, param=word if word.partition(".")[0] in _FIELDS else param)


@contextmanager
def as_api_error(param: str | None = None) -> Iterator[None]:
    """Turn a UserError into an ApiError of status 400."""
    try:
        yield
    except UserError as error:
        raise api_error(str(error), param) from None


def tool_dicts(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Return tools in the form that the chat template and the parsers read."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def completion_params(body: CompletionBody, info: EngineInfo, prompt_len: int) -> SamplingParams:
    """Return how a completion is sampled; its longest prompt has `prompt_len` tokens.

    Raises:
        ApiError: a value is out of range, or prompt and output do not fit the context.
    """
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of is {body.best_of} and n {body.n or 1}; expected the same. Ask for n outputs "
            "with logprobs and choose among them.",
            param="best_of",
        )
    max_tokens = body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the client wants only the prompt; the answer drops this token
    elif max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, max(1, info.max_model_len - prompt_len))
    given: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    return _params(body, info, prompt_len, max_tokens, given)


def chat_params(
    body: ChatBody, info: EngineInfo, prompt_len: int, constraint: StructuredOutput | None
) -> SamplingParams:
    """Return how a chat is sampled; `constraint` is the form of a forced tool call.

    Raises:
        ApiError: as `completion_params`.
    """
    max_tokens = body.max_completion_tokens
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    if max_tokens is None:
        max_tokens = max(1, info.max_model_len - prompt_len)
    given: dict[str, Any] = {}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        text = f"top_logprobs is {body.top_logprobs} without logprobs; set logprobs to true."
        raise ApiError(400, text, param="top_logprobs")
    if body.prediction is not None:
        given["prediction"] = body.prediction.text
    if constraint is not None:
        for name in _structures(body):
            text = f"{name} and a forced tool_choice were both given; leave one of them out."
            raise ApiError(400, text, param=name)
        given["structured_output"] = constraint
    return _params(body, info, prompt_len, max_tokens, given)


def _params(
    body: SamplingFields, info: EngineInfo, prompt_len: int, max_tokens: int, given: dict[str, Any]
) -> SamplingParams:
    check_context(prompt_len, max_tokens, info.max_model_len)
    values: dict[str, Any] = {"temperature": 1.0, **info.defaults}
    values |= {name: v for name in _SAME_NAME if (v := getattr(body, name)) is not None}
    values["max_tokens"] = max_tokens
    values["min_tokens"] = min(values.get("min_tokens", 0), max_tokens)
    if body.min_tokens is not None:
        values["min_tokens"] = body.min_tokens
    if body.logit_bias is not None:
        # int() would take blanks, signs and underscores too.
        for token in body.logit_bias:
            if not (token.isascii() and token.isdigit() and len(token) < 12):
                text = f"logit_bias has the key {short_repr(token)}; expected token ids."
                raise ApiError(400, text, param="logit_bias")
        values["logit_bias"] = [(int(token), bias) for token, bias in body.logit_bias.items()]
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
    """Bound the work of each step of the engine for all outputs of one prompt."""
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
    """Refuse a prompt and an output that together are longer than the context."""
    if prompt_len + max_tokens > max_model_len:
        raise ApiError(
            400,
            f"The prompt has {prompt_len} tokens and {max_tokens} were asked for, "
            f"{prompt_len + max_tokens} in all; the model's context is {max_model_len}. Shorten "
            "the prompt or lower max_tokens.",
            param="max_tokens" if prompt_len < max_model_len else "prompt",
            code="context_length_exceeded",
        )


def _structures(body: SamplingFields) -> dict[str, StructuredOutput]:
    """Return the structured outputs of a body, in OpenAI's and vLLM's names, by field."""
    found: dict[str, StructuredOutput] = {}
    if body.response_format is not None:
        with as_api_error("response_format"):
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


def _structure(format: ResponseFormat) -> StructuredOutput | None:
    kind = format.type
    sources = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
    for other, name in sources.items():
        if (getattr(format, name) is not None) != (other == kind):
            text = "needs" if other == kind else "has no"
            text = f"response_format of type {kind!r} {text} {name!r}."
            raise ApiError(400, text, param="response_format")
    if kind == "json_object":
        return StructuredOutput.json_object()
    if format.json_schema is not None:
        schema = format.json_schema.schema_
        return StructuredOutput.json_schema(json.dumps({} if schema is None else schema))
    if format.pattern is not None:
        return StructuredOutput.regex(format.pattern)
    return None if format.grammar is None else StructuredOutput.ebnf(format.grammar)


def refuse_grammars(body: GenerationFields) -> None:
    """Refuse a body that brings a regular expression or a grammar, naming the field."""
    format: ResponseFormat | None = getattr(body, "response_format", None)
    structures = body.structured_outputs or {}
    for field, is_given in (
        ("response_format", format is not None and format.type in _GRAMMARS),
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
