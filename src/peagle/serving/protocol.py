"""Bodies of requests, as OpenAI has them, with vLLM's extensions and ours.

Unknown fields are refused: a misspelt one would silently change nothing. Fields of OpenAI's that
do not concern the output (`user`, `metadata`, ...) are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

from peagle.serving.limits import (
    AllowedIds,
    BadWords,
    Choices,
    Description,
    Messages,
    Name,
    Options,
    Source,
    StopIds,
    StopString,
    StopStrings,
    TokenIds,
    at_most,
    bounded_list,
    most,
)

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bound_fields(cls, given: Any) -> Any:
        # Each unknown field would become an error of its own.
        if isinstance(given, dict) and len(given) > most("fields"):
            raise ValueError(f"should have at most {most('fields')} fields, not {len(given)}")
        return given


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None
    continuous_usage_stats: StrictBool = False


class SpeculationOptions(_Body):
    """How this request is drafted, and whether the answer reports it.

    Attributes:
        proposer: one of those that /v1/models lists.
        num_speculative_tokens: K, at most the proposer's; 0 turns drafting off.
        report: report drafts in every chunk and in `usage`.
    """

    proposer: Name | None = None
    num_speculative_tokens: StrictInt | None = None
    report: StrictBool = False


class JsonSchema(_Body):
    """A named schema."""

    name: Name = "schema"
    description: Description | None = None
    schema_: dict[str, Any] | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    """What shape the answer must have; "regex" and "grammar" are ours."""

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


class GenerationFields(_Body):
    """What every route that generates takes; ranges are those of SamplingParams, which checks them.

    Of vLLM's names for structured outputs, `StructuredOutput.from_vllm` checks the values.
    """

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
    logit_bias: Annotated[dict[Name, Number], at_most("logit_bias")] | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None
    seed: StrictInt | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: StrictBool | None = None
    structured_outputs: Options | None = None
    guided_json: dict[StrictStr, Any] | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_json_object: StrictBool | None = None
    guided_whitespace_pattern: Source | None = None
    stream: StrictBool | None = None
    speculation: SpeculationOptions | None = None
    priority: StrictInt = 0
    cache_salt: Name | None = None
    # Of OpenAI's, without an effect on the output.
    user: Name | None = None
    metadata: Options | None = None
    store: StrictBool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None


class SamplingFields(GenerationFields):
    """What completions and chat completions share beyond that."""

    max_tokens: StrictInt | None = None
    n: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


PROMPT_KINDS = {"text", "ids", "texts", "lists"}


def _kind_of_prompt(prompt: Any) -> str:
    """Which form a prompt has, by its first element: no other form is tried."""
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


class ChatBody(SamplingFields):
    """POST /v1/chat/completions. Messages are checked against the chat template."""

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: Annotated[list[Tool], bounded_list("tools")] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: Options | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    modalities: Annotated[list[Literal["text"]], bounded_list("include")] | None = None


_STATELESS = "peagle stores no responses"
_NO_SUMMARY = "should be 'auto': peagle gives the reasoning itself, and no summary of it"
# Fields of POST /v1/responses with the one value that they may have, if any, and the reason.
_ONLY: dict[str, tuple[Any, str]] = {
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


class _Limited(_Body):
    @field_validator(*_ONLY, check_fields=False)
    @classmethod
    def _check_only(cls, value: Any, info: ValidationInfo) -> Any:
        allowed, reason = _ONLY[info.field_name or ""]
        if value not in (None, []) and (type(value), value) != (type(allowed), allowed):
            raise ValueError(reason)
        return value


class FunctionTool(_Limited):
    """A function that the model may call, as POST /v1/responses has it."""

    type: Name
    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class TextFormat(_Body):
    """What shape the text of a response must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name = "schema"
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(_Limited):
    """How the text of a response is written."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(_Limited):
    """How a response is reasoned about."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponseStreamOptions(_Body):
    """Options of a streamed response."""

    include_obfuscation: StrictBool | None = None


class ResponsesBody(_Limited, GenerationFields):
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
    """POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds
