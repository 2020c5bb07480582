"""Bodies of requests, as OpenAI has them, with vLLM's extensions and ours.

Unknown fields are refused: a misspelt one would silently change nothing. Fields of OpenAI's that
say nothing about the output (`user`, `metadata`, ...) are taken and left alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
MAX_PROMPTS = 256


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)


class StreamOptions(_Body):
    """What a stream tells beside text."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None
    continuous_usage_stats: StrictBool = False


class SpeculationOptions(_Body):
    """How this request is drafted, and whether the answer tells.

    Attributes:
        proposer: one of those that /v1/models lists.
        num_speculative_tokens: K, at most the proposer's; 0 turns drafting off.
        report: tell of drafts in every chunk and in `usage`.
    """

    proposer: StrictStr | None = None
    num_speculative_tokens: StrictInt | None = None
    report: StrictBool = False


class JsonSchema(_Body):
    """A named schema."""

    name: StrictStr = "schema"
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    """What shape the answer must have; "regex" and "grammar" are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: StrictStr | None = None
    grammar: StrictStr | None = None


class SamplingFields(_Body):
    """How a completion is sampled; ranges are those of SamplingParams, which checks them."""

    model: StrictStr | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    bad_words: list[StrictStr] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    # Of OpenAI's, without an effect on the output.
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        StrictStr
        | Annotated[list[StrictInt], Field(min_length=1)]
        | Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[list[StrictInt]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: StrictInt | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool = True


class FunctionSpec(_Body):
    """A function that the model may call."""

    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(_Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoiceFunction(_Body):
    """The name of a function."""

    name: StrictStr


class ToolChoice(_Body):
    """A function that must be called."""

    type: Literal["function"]
    function: ToolChoiceFunction


class ChatBody(SamplingFields):
    """POST /v1/chat/completions. Messages are checked against the chat template."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    modalities: list[Literal["text"]] | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: StrictBool = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[StrictInt]
