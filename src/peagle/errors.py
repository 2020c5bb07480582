"""Errors that a user can act on.

Anything raised from here is a mistake in the input, not a fault of peagle: the message names the
value given, what was expected and what to do. Commands print it and exit with status 2.
"""

from collections.abc import Iterator
from typing import Any


class UserError(ValueError):
    """Input that peagle cannot work with: an option, a file, a prompt, a request."""


class CheckpointError(UserError):
    """A model or draft-head folder that is missing, incomplete, misshapen or of another target."""


def require_characters(name: str, text: str) -> None:
    """Refuse a text with half of a surrogate pair, which no tokenizer and no UTF-8 takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair; expected Unicode text. Remove it, or decode the text's bytes as UTF-8 with "
            'errors="replace".'
        ) from None


# Characters of a value that an error shows; what a client sends may have millions.
_SHOWN_CHARACTERS = 200


def short_repr(value: object) -> str:
    """Return the repr of a value up to its first 200 characters, and the length of a longer text.

    No more of the value is read than is shown.
    """
    text = ""
    for part in _parts(value):
        text += part
        if len(text) > _SHOWN_CHARACTERS + 2:  # of quotes
            size = f" ({len(value)} characters)" if isinstance(value, str) else ""
            return f"{text[:_SHOWN_CHARACTERS]}...{size}"
    return text


def _parts(value: Any) -> Iterator[str]:
    """Yield the repr of a value piece by piece."""
    if isinstance(value, str | bytes):
        yield repr(value[: _SHOWN_CHARACTERS + 1])
    elif type(value) in (list, tuple):
        yield "[" if type(value) is list else "("
        for i, element in enumerate(value):
            yield ", " if i else ""
            yield from _parts(element)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    elif type(value) is dict:
        yield "{"
        for i, (key, element) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _parts(key)
            yield ": "
            yield from _parts(element)
        yield "}"
    else:
        yield repr(value)
