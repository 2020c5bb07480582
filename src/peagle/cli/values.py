"""Values that are more than a word or a number: of flags, of a file's tables, of variables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle.config import StructuredOutput
from peagle.errors import UserError

_STRUCTURE_KEYS = {"kind", "source"}


def json_object(text: str, example: str) -> dict[str, Any]:
    """JSON text of an object.

    Raises:
        UserError: it is not one; the message shows the example.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{text!r} is not a JSON object; expected one, like '{example}'.")
    return value


def one_of(*allowed: str) -> Callable[[str], str]:
    """Reads a word that must be one of these.

    Raises:
        UserError: it is another one.
    """

    def read(word: str) -> str:
        if word not in allowed:
            raise UserError(f"{word!r} is not known; expected {' or '.join(allowed)}.")
        return word

    return read


def whole_numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    """Numbers and ranges between commas, like 1-4,8: ascending, each once.

    Raises:
        UserError: it is not such a list, or a number is below 1 or above `most`.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:(?:-|\.\.)\s*(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= most:
            raise UserError(
                f"{flag} is {text!r}; expected whole numbers from 1 to {most}, like 1-4,8."
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def read_logit_bias(text: str) -> dict[int, Any]:
    """Biases by token id, of JSON text."""
    return logit_bias(json_object(text, '{"42": -5}'))


def logit_bias(pairs: Mapping[str, Any]) -> dict[int, Any]:
    """Biases by token id, of a table in which the ids are text, as in JSON and TOML.

    Raises:
        UserError: an id is not a whole number.
    """
    if wrong := [key for key in pairs if not str(key).isdecimal()]:
        raise UserError(f"logit_bias has the key {wrong[0]!r}; expected token ids, like '42'.")
    return {int(key): -math.inf if value == "-inf" else value for key, value in pairs.items()}


def structure(kind: str) -> Callable[[Any], StructuredOutput]:
    """What reads the source of a structure of this kind.

    A schema is JSON text or the name of a file with it, a grammar the name of a file.
    """

    def read(text: Any) -> StructuredOutput:
        if kind == "json":
            return StructuredOutput.json_object()
        is_file = kind == "ebnf" or (kind == "json_schema" and not text.lstrip().startswith("{"))
        return StructuredOutput(kind, _content(text) if is_file else text)  # type: ignore[arg-type]

    return read


def _content(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"the file {file!r} is not readable: {reason}. Check the path.") from None


def sampling(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a [sampling] table as SamplingParams takes them.

    Raises:
        UserError: one of them is not usable.
    """
    values = dict(table)
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = logit_bias(bias)
    if (shape := values.get("structured_output")) is not None:
        if not isinstance(shape, Mapping) or not {"kind"} <= set(shape) <= _STRUCTURE_KEYS:
            raise UserError(
                f"structured_output is {shape!r}; expected a table with kind and source, like "
                '{ kind = "regex", source = "[0-9]+" }.'
            )
        values["structured_output"] = StructuredOutput(**shape)
    return values


def as_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration as a user writes them in JSON."""
    bias = {str(k): "-inf" if v == -math.inf else v for k, v in values.get("logit_bias", ())}
    return {**values, "logit_bias": bias} if "logit_bias" in values else dict(values)
