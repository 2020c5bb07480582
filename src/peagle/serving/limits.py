"""The one table of what a body may hold, and how the models of bodies take it.

A limit is applied before the work that it bounds: those of JSON before a body is parsed, those of
counts and lengths before an element is looked at, those of texts before they are tokenised. The
values are far above what a client of OpenAI or vLLM sends, and low enough that one body holds the
interpreter, or a step of the engine, for some milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr

from peagle.config.sampling import MAX_LOGPROBS, MAX_OUTPUTS, MAX_STOP_STRINGS
from peagle.engine.grammar.compiler import MAX_SOURCE


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a body may hold of one thing.

    Attributes:
        value: the most that is allowed.
        counts: what is counted, as a phrase.
    """

    value: int
    counts: str


LIMITS: dict[str, Limit] = {
    # Of the JSON text, before it is parsed.
    "json_values": Limit(262_144, "commas, brackets, braces and colons outside of strings"),
    "json_strings": Limit(65_536, "strings, names of fields included"),
    "json_containers": Limit(32_768, "lists and objects"),
    "json_depth": Limit(96, "lists and objects within each other"),
    "json_digits": Limit(100, "digits of a number"),
    "fields": Limit(128, "fields of the body, or of an object in it that has fixed fields"),
    # Counts of lists and objects.
    "prompts": Limit(256, "prompts of one completion"),
    "messages": Limit(4_096, "messages of a chat, or items of `input`"),
    "tools": Limit(128, "tools"),
    "stop": Limit(MAX_STOP_STRINGS, "strings in `stop`"),
    "stop_token_ids": Limit(256, "ids in `stop_token_ids`"),
    "bad_words": Limit(256, "texts in `bad_words`"),
    "logit_bias": Limit(1_024, "entries of `logit_bias`"),
    "allowed_token_ids": Limit(16_384, "ids in `allowed_token_ids`"),
    "choices": Limit(1_024, "texts in `guided_choice`"),
    "options": Limit(64, "entries of `chat_template_kwargs`, `metadata` and `structured_outputs`"),
    "include": Limit(16, "entries of `include` and `modalities`"),
    "n": Limit(MAX_OUTPUTS, "outputs of one prompt, `n`"),
    "logprobs": Limit(MAX_LOGPROBS, "log-probabilities at each position"),
    # What a step of the engine reads of one request.
    "n_stop": Limit(256, "`n` times the strings in `stop`"),
    "n_bad_words": Limit(
        8_192, "`n` times the texts in `bad_words` times the longest's characters"
    ),
    "n_logit_bias": Limit(4_096, "`n` times the entries of `logit_bias`"),
    "n_allowed_token_ids": Limit(65_536, "`n` times the ids in `allowed_token_ids`"),
    # Lengths of texts.
    "name_characters": Limit(1_024, "characters of a name: `model`, `user`, `cache_salt`, ..."),
    "description_characters": Limit(65_536, "characters of the description of a tool or schema"),
    "stop_characters": Limit(256, "characters of a string in `stop`"),
    "bad_word_characters": Limit(64, "characters of a text in `bad_words`"),
    "source_characters": Limit(MAX_SOURCE, "characters of a schema, a regex or a grammar"),
    "template_seconds": Limit(2, "seconds that a chat template may render"),
}


def most(name: str) -> int:
    """The value of a limit."""
    return LIMITS[name].value


def limits_of_model(max_model_len: int, characters_per_token: int) -> dict[str, int]:
    """All limits by their name, with those that depend on the model.

    Args:
        max_model_len: the context, in tokens.
        characters_per_token: the most that one token stands for.
    """
    return {
        **{name: limit.value for name, limit in LIMITS.items()},
        "json_values": most_values(max_model_len),
        "prompt_tokens": max_model_len,
        "prompt_characters": max_model_len * characters_per_token,
    }


def most_values(max_model_len: int) -> int:
    """The limit `json_values`; two contexts of token ids always fit."""
    return max(most("json_values"), 2 * max_model_len)


def table() -> str:
    """The limits as the table of docs/serving.md."""
    rows = [f"| `{name}` | {limit.value:,} | {limit.counts} |" for name, limit in LIMITS.items()]
    return "\n".join(["| name | most | what is counted |", "|---|---|---|", *rows])


# ---- types of fields ----------------------------------------------------------------------------


def at_most(name: str) -> Any:
    """The constraint on a text or an object that a limit says."""
    return Field(max_length=most(name))


def bounded_list(name: str, least: int = 0) -> Any:
    """The same for a list, of which the first wrong element is told alone."""
    return Field(min_length=least, max_length=most(name), fail_fast=True)


Name = Annotated[StrictStr, at_most("name_characters")]
Description = Annotated[StrictStr, at_most("description_characters")]
Source = Annotated[StrictStr, at_most("source_characters")]
StopString = Annotated[StrictStr, at_most("stop_characters")]
StopStrings = Annotated[list[StopString], bounded_list("stop")]
StopIds = Annotated[list[StrictInt], bounded_list("stop_token_ids")]
BadWord = Annotated[StrictStr, at_most("bad_word_characters")]
BadWords = Annotated[list[BadWord], bounded_list("bad_words")]
AllowedIds = Annotated[list[StrictInt], bounded_list("allowed_token_ids")]
Choices = Annotated[list[Source], bounded_list("choices")]
Options = Annotated[dict[str, Any], at_most("options")]
Messages = Annotated[list[dict[str, Any]], bounded_list("messages", 1)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]
