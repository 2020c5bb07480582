"""Limits of a body: one table of them, the measuring of JSON, and types for fields.

A limit is applied before the work that it bounds: limits of JSON before a body is parsed, limits of
counts and lengths before an element is looked at, limits of texts before they are tokenised. The
values are far above the needs of a client of OpenAI or vLLM, and low enough that one body holds the
interpreter, or a step of the engine, for some milliseconds.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, StrictInt, StrictStr
from pydantic_core import from_json

from peagle.config.sampling import MAX_LOGPROBS, MAX_OUTPUTS, MAX_STOP_STRINGS
from peagle.engine.grammar.compiler import MAX_SOURCE
from peagle.serving.errors import ApiError


class Limit(NamedTuple):
    """The most that a body may hold of one thing, which `counts` names."""

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
    """Return the value of a limit."""
    return LIMITS[name].value


def limits_of_model(max_model_len: int, characters_per_token: int) -> dict[str, int]:
    """Return all limits by name, with the ones that depend on the model.

    Args:
        max_model_len: the context, in tokens.
        characters_per_token: the largest number in one token.
    """
    return {
        **{name: limit.value for name, limit in LIMITS.items()},
        "json_values": most_values(max_model_len),
        "prompt_tokens": max_model_len,
        "prompt_characters": max_model_len * characters_per_token,
    }


def most_values(max_model_len: int) -> int:
    """Return the limit `json_values`; two contexts of token ids always fit."""
    return max(most("json_values"), 2 * max_model_len)


def table() -> str:
    """Return the limits as the table of docs/safety.md."""
    rows = [f"| `{name}` | {limit.value:,} | {limit.counts} |" for name, limit in LIMITS.items()]
    return "\n".join(["| name | most | what is counted |", "|---|---|---|", *rows])


# ---- types of fields ----


def length_limit(name: str) -> Any:
    """Return the constraint of a limit on a text or an object."""
    return Field(max_length=most(name))


def bounded_list(name: str, least: int = 0) -> Any:
    """Return the constraint of a limit on a list; only its first wrong element is an error."""
    return Field(min_length=least, max_length=most(name), fail_fast=True)


Name = Annotated[StrictStr, length_limit("name_characters")]
Description = Annotated[StrictStr, length_limit("description_characters")]
Source = Annotated[StrictStr, length_limit("source_characters")]
StopString = Annotated[StrictStr, length_limit("stop_characters")]
BadWord = Annotated[StrictStr, length_limit("bad_word_characters")]
Options = Annotated[dict[str, Any], length_limit("options")]
Messages = Annotated[list[dict[str, Any]], bounded_list("messages", 1)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]


# ---- the text of a body ----

# Parsing and validation hold the interpreter, in whichever thread they run. So a body that holds
# more than any sensible one is refused by counting its bytes, at the speed of C, before it is
# parsed. Text within strings does not count: a long prompt may be full of commas.
LARGE_BYTES = 64 * 1024  # bytes; below that, handing a body to a thread costs more than parsing it
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def parse_body(body: bytes, max_model_len: int) -> Any:
    """Return the value of a JSON body.

    Raises:
        ApiError: 400, it holds more than `limits.LIMITS` allows, or is not JSON in UTF-8.
    """
    _check_sizes(body, max_model_len)
    try:
        value = from_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise _not_json(body, str(error)) from None
    if isinstance(value, dict):
        _check(len(value), "fields", "fields")
    return value


def check_calls(messages: Iterable[Mapping[str, Any]], max_model_len: int) -> None:
    """Bound the JSON that tool calls of messages hold as text, since it is parsed for the template.

    Raises:
        ApiError: 400, one of them holds more than `limits.LIMITS` allows.
    """
    for message in messages:
        for text in _long_texts(message.get("tool_calls")):
            _check_sizes(text.encode(errors="replace"), max_model_len)


def _long_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) >= LARGE_BYTES:
            yield value
    elif isinstance(value, list | dict):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _long_texts(element)


def _check_sizes(body: bytes, max_model_len: int) -> None:
    text = body
    if b"\\" in body:
        text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check(text.count(b'"') // 2, "json_strings", "strings")
    parts = text.split(b'"')
    outside = b"".join(parts[::2])
    num_values = sum(map(outside.count, (b",", b"[", b"{", b":")))
    most_allowed = most_values(max_model_len)
    _check(num_values, "json_values", "commas, brackets, braces and colons", most_allowed)
    brackets = outside.translate(None, _NO_BRACKETS)
    _check(len(brackets) // 2, "json_containers", "lists and objects")
    if len(brackets) > most("json_depth"):
        steps = _STEPS[np.frombuffer(brackets, np.uint8)]
        depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
        _check(depth, "json_depth", "lists and objects within each other")
    if (at := outside.translate(_DIGITS).find(b"0" * (most("json_digits") + 1))) >= 0:
        # The number begins `at` bytes into what is outside of strings.
        ends = accumulate(map(len, parts[::2]))
        number = next(number for number, end in enumerate(ends) if end > at)
        name = parts[2 * number - 1].decode(errors="replace")[:200] if number else ""
        place = f"{name!r:.80}" if name else "The body"
        text = f"{place} has a number of more than {most('json_digits')} digits; expected a"
        raise ApiError(400, f"{text} shorter one (limit json_digits).", param=name or None)


def _check(count: int, name: str, what: str, limit: int | None = None) -> None:
    limit = most(name) if limit is None else limit
    if count > limit:
        text = f"The JSON of the body has {count} {what}; expected at most {limit} (limit {name}). "
        raise ApiError(400, f"{text}Send less in one request.", code="body_too_complex")


def _not_json(body: bytes, reason: str) -> ApiError:
    """Return the error for a body that does not parse."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        text = f"The body is not JSON in UTF-8: byte {error.start} is no character's."
        return ApiError(400, text, code="invalid_unicode")
    if "surrogate" in reason or "hex escape" in reason:
        text = "The body has half of a surrogate pair (\\ud800 to \\udfff), or an escape that is "
        return ApiError(400, f"{text}none: {reason}; expected Unicode.", code="invalid_unicode")
    return ApiError(400, f"The body is not JSON: {reason}.", code="invalid_json")
