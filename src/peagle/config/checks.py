"""Checks of values that a user gave."""

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from peagle.errors import UserError, short_repr

_LONGEST_NAME = 128  # of those that are compared
_NAMED_VALUE = re.compile(r"([^=:/\s][^=:/]*)=(.+)")  # the name of "http://x?k=v" would be an URL


def require(condition: bool, name: str, value: object, expected: str, remedy: str = "") -> None:
    """Raise a UserError that names value, expectation and remedy, unless the condition holds."""
    if not condition:
        raise UserError(
            f"{name} is {short_repr(value)}; expected {expected}."
            + (f" {remedy}" if remedy else "")
        )


class FieldCheck(NamedTuple):
    """A predicate for a field of a configuration, and its good values as a phrase."""

    accepts: Callable[[Any], bool]
    expected: str


def whole(
    least: int, most: int | None = None, *, note: str = "", optional: bool = False
) -> FieldCheck:
    """Accept a whole number from `least` to `most`, and None where it is optional."""
    powers = {-(2**63): "-2**63", 2**63 - 1: "2**63 - 1"}
    first, last = powers.get(least, least), None if most is None else powers.get(most, most)
    span = f"of at least {first}" if last is None else f"from {first} to {last}"

    def accepts(value: Any) -> bool:
        if value is None:
            return optional
        return is_int(value) and least <= value and (most is None or value <= most)

    return FieldCheck(accepts, f"a whole number {span}{note}{', or none' if optional else ''}")


def number_check(accepts: Callable[[Any], bool], expected: str) -> FieldCheck:
    """Accept a finite number with a further condition."""
    return FieldCheck(lambda value: is_number(value) and accepts(value), expected)


def choice_of(*allowed: object) -> FieldCheck:
    """Accept one of some words, or None if that is among them."""
    words = ", ".join(str(value) for value in allowed if value is not None)
    or_none = ", or none" if None in allowed else ""
    return FieldCheck(lambda value: value in allowed, f"one of {words}{or_none}")


BOOLEAN = FieldCheck(lambda value: isinstance(value, bool), "true or false")
OPTIONAL_BOOLEAN = FieldCheck(
    lambda value: value is None or isinstance(value, bool), "true, false or none"
)


def check_fields(config: object, checks: Mapping[str, FieldCheck]) -> None:
    """Raise a UserError that names the first field whose check fails, and its value."""
    for name, check in checks.items():
        value = getattr(config, name)
        require(check.accepts(value), name, value, check.expected)


def require_neutral(name: str, given: object, neutral: object, reason: str) -> None:
    """Refuse an argument of vLLM's, unless it is None, empty, or asks for what happens anyway."""
    if given not in (None, [], {}) and (given != neutral or type(given) is not type(neutral)):
        shown = short_repr(given)
        raise UserError(f"{name} is {shown}; expected {neutral!r} or nothing: {reason}")


def unique_keys(source: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook for `json.loads` (`object_pairs_hook`) that refuses a key given twice.

    `source` names the JSON text in the UserError.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{source} has the key {short_repr(key)} twice. Keep one of them.")
            found[key] = value
        return found

    return unique


def named_values(texts: Iterable[str], form: str, example: str, source: str = "") -> dict[str, str]:
    """Return the values of texts NAME=VALUE by their names.

    Args:
        form: what is expected, such as "NAME=URL".
        source: where the texts are from, for errors, such as "--endpoint: ".

    Raises:
        UserError: a text has another form, or a name comes again.
    """
    found: dict[str, str] = {}
    for text in texts:
        match = _NAMED_VALUE.fullmatch(text)
        if match is None:
            raise UserError(
                f"{source}{text!r} is not {form}, with a name without =, : and /; give one like "
                f"{example}."
            )
        if match[1] in found:
            raise UserError(f"{source}{text!r} gives the name {match[1]!r} again; leave one out.")
        found[match[1]] = match[2]
    return found


def near_names(name: str, known: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Return the known names closest to `name`, the closest first.

    The time of a comparison grows with the square of the length: a name of more than 128
    characters is close to none.

    Args:
        most: number of names to return.
        likeness: the least that counts, from 0 to 1 for equal names.
    """
    return [] if len(name) > _LONGEST_NAME else get_close_matches(name, known, most, likeness)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'X'?" with the known name that `name` may stand for, or "".

    Dots separate the tables of a nested key. A key of this name in other tables comes first, then
    the closest one in the same table, then the closest of all.
    """
    known = [*known]
    table, dot, last = name.rpartition(".")
    near = [one for one in known if one.rpartition(".")[2] == last]
    if not near:
        beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == table]
        near = [table + dot + one for one in near_names(last, beside)]
    # The table itself, and other keys of it, have only the table's name in common with it.
    rest = [one for one in known if table not in (one, one.rpartition(".")[0])]
    near = near or near_names(name, rest)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def is_int(value: object) -> bool:
    """Return whether the value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether the value is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def require_folder(path: str | Path, what: str) -> Path:
    """Return `path` as an existing folder, or raise a UserError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    found = "a file, not a folder" if folder.exists() else "not there"
    raise UserError(f"{what} {str(path)!r} is {found}; expected a folder with config.json.")


def require_writable_folder(path: str | Path, what: str) -> Path:
    """Return `path` as a folder that can be written or made, or raise a UserError.

    Nothing is made: the nearest folder above that exists is tried with a file that has no name.
    """
    folder = Path(path)
    try:
        found = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=found):
            return folder
    except OSError as error:
        raise UserError(
            f"{what} {str(path)!r} cannot be written: {error.strerror or error}. Name a folder "
            "that you may write to."
        ) from None


def require_writable_file(path: str | Path, what: str) -> Path:
    """Return `path` as a file that can be written, or raise a UserError."""
    file = Path(path)
    require_writable_folder(file.absolute().parent, f"The folder of {what[0].lower()}{what[1:]}")
    if file.is_dir():
        raise UserError(f"{what} {str(path)!r} is a folder; expected the name of a file.")
    return file


def token_ids(values: Sequence[int], vocab_size: int, what: str) -> list[int]:
    """Return `values` as a list of token ids below `vocab_size`, or raise a UserError."""
    ids = list(values)
    for value in ids:
        ok = is_int(value) and 0 <= value < vocab_size
        require(ok, what, value, f"token ids from 0 to {vocab_size - 1}")
    return ids
