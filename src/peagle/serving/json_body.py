"""A body as JSON: measured as bytes first, then parsed once.

Parsing and validation hold the interpreter, in whichever thread they run. So a body that holds
more than any sensible one is refused by counting its bytes, at the speed of C, before it is parsed.
Text within strings does not count: a long prompt may be full of commas.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from pydantic_core import from_json

from peagle.serving.errors import ApiError
from peagle.serving.limits import most, most_values

LARGE = 64 * 1024  # bytes; below that, handing a body to a thread costs more than parsing it
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def parse_json(body: bytes, max_model_len: int) -> Any:
    """The value that a body says.

    Raises:
        ApiError: 400, it holds more than `limits.LIMITS` allows, or is not JSON in UTF-8.
    """
    _check_sizes(body, max_model_len)
    try:
        value = from_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise _not_json(body, str(error)) from None
    if isinstance(value, dict) and len(value) > most("fields"):
        raise _too_much(f"{len(value)} fields", "fields", most("fields"))
    return value


def _check_sizes(body: bytes, max_model_len: int) -> None:
    text = body
    if b"\\" in body:
        text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = text.count(b'"') // 2
    if num_strings > most("json_strings"):
        raise _too_much(f"{num_strings} strings", "json_strings", most("json_strings"))
    parts = text.split(b'"')
    outside = b"".join(parts[::2])
    num_values = sum(map(outside.count, (b",", b"[", b"{", b":")))
    if num_values > (limit := most_values(max_model_len)):
        what = f"{num_values} commas, brackets, braces and colons"
        raise _too_much(what, "json_values", limit)
    brackets = outside.translate(None, _NO_BRACKETS)
    if (count := len(brackets) // 2) > most("json_containers"):
        raise _too_much(f"{count} lists and objects", "json_containers", most("json_containers"))
    if len(brackets) > most("json_depth"):
        steps = _STEPS[np.frombuffer(brackets, np.uint8)]
        depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
        if depth > most("json_depth"):
            what = f"{depth} lists and objects within each other"
            raise _too_much(what, "json_depth", most("json_depth"))
    if (at := outside.translate(_DIGITS).find(b"0" * (most("json_digits") + 1))) >= 0:
        raise _too_many_digits(parts, at)


def _too_much(what: str, name: str, limit: int) -> ApiError:
    text = f"The JSON of the body has {what}; expected at most {limit} (limit {name}). "
    return ApiError(400, f"{text}Send less in one request.", code="body_too_complex")


def _too_many_digits(parts: list[bytes], at: int) -> ApiError:
    """The error for a number that begins `at` bytes into what is outside of strings."""
    ends = accumulate(map(len, parts[::2]))
    number = next(number for number, end in enumerate(ends) if end > at)
    name = parts[2 * number - 1].decode(errors="replace")[:200] if number else ""
    place = f"{name!r:.80}" if name else "The body"
    text = f"{place} has a number of more than {most('json_digits')} digits; expected a shorter one"
    return ApiError(400, f"{text} (limit json_digits).", param=name or None)


def _not_json(body: bytes, reason: str) -> ApiError:
    """Why a body does not parse, as the client may read it."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        text = f"The body is not JSON in UTF-8: byte {error.start} is no character's."
        return ApiError(400, text, code="invalid_unicode")
    if "surrogate" in reason or "hex escape" in reason:
        text = "The body has half of a surrogate pair (\\ud800 to \\udfff), or an escape that is "
        return ApiError(400, f"{text}none: {reason}; expected Unicode.", code="invalid_unicode")
    return ApiError(400, f"The body is not JSON: {reason}.", code="invalid_json")
