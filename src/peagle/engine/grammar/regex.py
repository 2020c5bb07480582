"""Regular expressions as grammars in xgrammar's EBNF notation.

Python's `re` parses an expression, and \\d, \\w and \\s have their ASCII meanings. xgrammar's own
parser ignores an anchor or an escape that it does not know, and it matches the patterns of a JSON
schema against the JSON text rather than against the string that the text denotes. Both would let
wrong outputs through.
"""

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from peagle.engine.grammar.characters import (
    LAST_CODE_POINT,
    Ranges,
    character_options,
    complement,
    intersect,
    literal,
    merge,
    without_surrogates,
)
from peagle.engine.grammar.ebnf import Rules, any_of, join_parts, repeated
from peagle.errors import UserError

MAX_OPEN_IN_A_ROW = 16
MAX_ROUNDS = 1000

_DIGIT = [(0x30, 0x39)]
_WORD = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20)]
_JSON_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_UNSUPPORTED = {
    op.ASSERT: "look-ahead and look-behind",
    op.ASSERT_NOT: "look-ahead and look-behind",
    op.GROUPREF: "references to groups",
    op.GROUPREF_EXISTS: "conditions on groups",
    op.AT: "word boundaries, and anchors in the middle,",
}
_JSON_PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, LAST_CODE_POINT)]


def translate(pattern: str, rules: Rules, *, json_string: bool = False) -> str:
    """Return an EBNF expression for the texts that a regular expression matches as a whole.

    Args:
        pattern: an expression of Python's `re`. Lazy repeats count as greedy ones, since they match
            the same texts.
        rules: takes the rules that the expression needs.
        json_string: write it for the inside of a JSON string, where a quote is `\\"`.

    Raises:
        UserError: it does not parse, or needs a feature that grammars lack: look-around, references
            to groups, flags, word boundaries, anchors in the middle.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
    except re.error as error:
        raise UserError(f"it does not parse: {error}.") from None
    except (RecursionError, OverflowError):
        raise UserError("it is nested too deeply or repeats too often.") from None
    if parsed.state.flags & ~re.UNICODE:
        raise UserError("flags such as (?i) are not supported; write out what they stand for.")
    try:
        return _RegexWriter(rules, json_string).sequence(parsed, first=True, last=True)
    except RecursionError:
        raise UserError("it is nested too deeply.") from None


def json_character(*, but: Iterable[str] = ()) -> str:
    """Return an EBNF expression for one character inside a JSON string, other than those in `but`.

    Each character has its shortest spelling.
    """
    excluded = merge([(ord(character), ord(character)) for character in but])
    return any_of(_json_options(complement(excluded)))


class _RegexWriter:
    """Writes parsed items; `first` and `last` say that nothing comes before or after them."""

    def __init__(self, rules: Rules, json_string: bool) -> None:
        self.rules = rules
        self.json_string = json_string
        self._rounds: list[int] = []  # most rounds of the open counts around the current item

    def sequence(self, items: Iterable[Any], *, first: bool, last: bool) -> str:
        items = list(items)
        _check_row(items)
        parts = [
            self.item(
                kind,
                value,
                first=first and all(k is op.AT for k, _ in items[:i]),
                last=last and all(k is op.AT for k, _ in items[i + 1 :]),
            )
            for i, (kind, value) in enumerate(items)
        ]
        return join_parts(*parts)

    def item(self, kind: Any, value: Any, *, first: bool, last: bool) -> str:
        if kind is op.LITERAL:
            return self.characters([(value, value)])
        if kind is op.NOT_LITERAL:
            return self.characters(complement([(value, value)]))
        if kind is op.ANY:
            return self.characters(complement([(0x0A, 0x0A)]))
        if kind is op.IN:
            return self.characters(_ranges(value))
        if kind is op.BRANCH:
            return any_of(self.sequence(part, first=first, last=last) for part in value[1])
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise UserError("flags such as (?i:...) are not supported.")
            return f"({self.sequence(inner, first=first, last=last)})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            most = None if most is op.MAXREPEAT else most
            if inner.getwidth()[0] == 0 and (least if most is None else most) > 1:
                raise UserError(
                    f"it repeats up to {most or least} times what may be empty; let the repeated "
                    "part have at least one character, or use *."
                )
            body = self.body(inner, most if most != least else None)
            return repeated(body, least, most, self.rules)
        at_start = value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
        at_end = value in (op.AT_END, op.AT_END_STRING)
        if kind is op.AT and ((at_start and first) or (at_end and last)):
            return ""  # an anchor at an end: the whole text is matched anyway
        what = _UNSUPPORTED.get(kind, f"the construct {str(kind).lower()}")
        raise UserError(f"{what} cannot be enforced; leave it out.")

    def body(self, inner: Iterable[Any], rounds: int | None) -> str:
        """Return the repeated part; `rounds` is the most rounds of an open count, else None."""
        self._rounds.append(rounds or 1)
        nested = [n for n in self._rounds if n > 1]
        if len(nested) > 1 and math.prod(nested) > MAX_ROUNDS:
            raise UserError(
                f"its nested counts multiply to {math.prod(nested)} rounds; expected {MAX_ROUNDS} "
                "at most."
            )
        body = self.sequence(inner, first=False, last=False)
        self._rounds.pop()
        return body

    def characters(self, ranges: Ranges) -> str:
        """Return an expression for one character out of the ranges."""
        if self.json_string:
            options = _json_options(ranges)
            if not options:
                raise UserError("it asks for a control character, which JSON writes as \\u....")
        else:
            options = character_options(without_surrogates(ranges))
            if not options:
                raise UserError("it asks for a character that does not exist.")
        return any_of(options)


def _json_options(ranges: Ranges) -> list[str]:
    """Return expressions for one character inside a JSON string, as alternatives."""
    escapes = [
        literal(f"\\{letter}")
        for point, letter in _JSON_ESCAPES.items()
        if any(low <= point <= high for low, high in ranges)
    ]
    return character_options(intersect(ranges, _JSON_PLAIN)) + escapes


# The matcher follows each way of dividing a text among repeats, so this limit bounds its time.
def _check_row(items: Sequence[Any]) -> None:
    repeats = (op.MAX_REPEAT, op.MIN_REPEAT)
    is_open = [kind in repeats and value[0] != value[1] for kind, value in items]
    for found, row in groupby(is_open):
        length = len(list(row))
        if found and length > MAX_OPEN_IN_A_ROW:
            raise UserError(
                f"it has {length} parts of open length in a row; expected {MAX_OPEN_IN_A_ROW} at "
                "most."
            )


def _ranges(items: Sequence[Any]) -> Ranges:
    """Return the code points of a character class."""
    found: Ranges = []
    negated = False
    for kind, value in items:
        if kind is op.NEGATE:
            negated = True
        elif kind is op.LITERAL:
            found.append((value, value))
        elif kind is op.RANGE:
            found.append(value)
        else:
            found.extend(_CATEGORIES[value])
    merged = merge(found)
    return complement(merged) if negated else merged


_CATEGORIES = {
    op.CATEGORY_DIGIT: _DIGIT,
    op.CATEGORY_WORD: _WORD,
    op.CATEGORY_SPACE: _SPACE,
    op.CATEGORY_NOT_DIGIT: complement(_DIGIT),
    op.CATEGORY_NOT_WORD: complement(_WORD),
    op.CATEGORY_NOT_SPACE: complement(_SPACE),
}
