"""Grammars of users in EBNF notation: checked, and written anew for the compiler.

The matcher follows all ways to read a text at once. Nested counts, repeats of something that may be
empty and rules that derive themselves have so many ways that one mask takes seconds. Whether a
grammar is ambiguous cannot be decided in general; these forms can be found.

Classes and large counts are written anew by `characters` and `ebnf.repeated`, without which the
compiled masks would be wrong or slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from peagle.engine.grammar.characters import (
    character_options,
    complement,
    merge,
    without_surrogates,
)
from peagle.engine.grammar.ebnf import Rules, any_of, repeated
from peagle.engine.grammar.regex import MAX_OPEN_IN_A_ROW, MAX_ROUNDS
from peagle.errors import UserError

_MAX_DEPTH = 100
_TOKEN = re.compile(
    r"""
      (?P<skip>\s+|\#[^\n]*)
    | (?P<define>(?P<rule>[A-Za-z_][\w.-]*)\s*::=)
    | (?P<name>[A-Za-z_][\w.-]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<count>\{\s*(?P<least>\d+)\s*(?P<range>,\s*(?P<most>\d*)\s*)?\})
    | (?P<ahead>\(=)
    | (?P<mark>[|()*+?])
    """,
    re.VERBOSE,
)
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
# Rules over token ids bypass the text, and xgrammar's tags match nothing or anything.
_EXTENSION = re.compile(r"\b(Token|ExcludeToken|TagDispatch|TokenTagDispatch)\s*\(")
# A code point of a class; xgrammar reads all digits behind \\x.
_POINT = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]+)|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<escape>.)|(?P<plain>.)",
    re.DOTALL,
)
_ESCAPES = dict(zip("abefnrtv0", "\a\b\x1b\f\n\r\t\v\0"))


class _Rule(NamedTuple):
    name: str


class _Text(NamedTuple):
    source: str  # a literal or a class

    @property
    def is_empty(self) -> bool:
        return self.source == '""'


class _Choice(NamedTuple):
    options: tuple[tuple[_Node, ...], ...]


class _Repeat(NamedTuple):
    item: _Node
    least: int
    most: int | None  # None: no bound


_Node = _Rule | _Text | _Choice | _Repeat


def user_grammar(source: str) -> str | None:
    """Return a grammar in EBNF notation, written for the compiler; None if it does not parse here.

    The compiler has the messages about a grammar that does not parse.

    Raises:
        UserError: its texts can be read in too many ways, or it has a forbidden extension; the
            message names the rule or extension, and says how to write it.
    """
    if extension := _EXTENSION.search(source):
        raise UserError(f"{extension[1]}(...) is not supported; write the text itself.")
    if (rules := _parse(source)) is None:
        return None
    _Grammar(rules).check()
    return _Writer(rules).grammar()


def _parse(source: str) -> dict[str, _Choice] | None:
    """Return the body of each rule by its name; None for a source that does not parse here."""
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(source):
        if (token := _TOKEN.match(source, at)) is None:
            return None
        at = token.end()
        if token.lastgroup != "skip":
            tokens.append(token)
    tokens.reverse()
    rules: dict[str, _Choice] = {}
    try:
        while tokens:
            token = tokens.pop()
            if token["define"] is None or token["rule"] in rules:
                return None
            rules[token["rule"]] = _choice(tokens, 0)
    except LookupError:
        return None
    return rules


def _choice(tokens: list[re.Match[str]], depth: int) -> _Choice:
    """Pop alternatives from the end of the tokens; raise a LookupError if they do not parse."""
    if depth > _MAX_DEPTH:
        raise UserError(f"its brackets are nested deeper than {_MAX_DEPTH}; use rules instead.")
    options: list[list[_Node]] = [[]]
    while tokens and tokens[-1]["define"] is None and tokens[-1]["mark"] != ")":
        token = tokens.pop()
        mark = token["mark"]
        if mark == "|":
            options.append([])
        elif mark in _COUNTS or token["count"] is not None:
            item = options[-1].pop()
            if isinstance(item, _Repeat):
                raise UserError("a repeat stands behind another one; leave one of them out.")
            if mark in _COUNTS:
                least, most = _COUNTS[mark]
            else:
                least = most = int(token["least"])
                if token["range"] is not None:
                    most = int(token["most"]) if token["most"] else None
            options[-1].append(_Repeat(item, least, most))
        elif token["ahead"] is not None:
            raise UserError(
                "(=...) is not supported: a text is all that a rule may say; leave it out."
            )
        elif token["name"] is not None:
            options[-1].append(_Rule(token["name"]))
        elif token["text"] is not None or token["class"] is not None:
            options[-1].append(_Text(token[0]))
        else:
            inner = _choice(tokens, depth + 1)
            if tokens.pop()["mark"] != ")":
                raise LookupError
            options[-1].append(inner)
    return _Choice(tuple(map(tuple, options)))


class _Grammar:
    """The rules of a grammar, with the checks on them."""

    def __init__(self, rules: dict[str, _Choice]) -> None:
        self.rules = rules
        self._rounds: dict[str, tuple[int, ...]] = {}
        # The names that each rule may begin (1) or end (-1) with, and their cycles.
        self._corners = {
            side: {name: set(self._corner_names(body, side)) for name, body in rules.items()}
            for side in (1, -1)
        }
        self._cycles = {side: _components(edges) for side, edges in self._corners.items()}

    def check(self) -> None:
        """Raise a UserError for a grammar with too many readings of a text."""
        for name, body in self.rules.items():
            for node in _nodes(body):
                if isinstance(node, _Repeat) and node.most != 1 and self._may_be_empty(node.item):
                    raise UserError(
                        f"rule {name!r} repeats something that may be empty, so that a text can be "
                        "read in endlessly many ways; leave the empty case out of what is repeated."
                    )
        self._check_cycles()
        for name, body in self.rules.items():
            for items in _sequences(body):
                self._check_row(name, items)
                self._check_sides(name, items)
            counts = self._rounds_of(name, ())
            if len(counts) > 1 and math.prod(counts) > MAX_ROUNDS:
                raise UserError(
                    f"rule {name!r} repeats within repeats, {' x '.join(map(str, counts))} times "
                    f"together; expected at most {MAX_ROUNDS}. Lower the counts, or repeat without "
                    "a bound (* or +)."
                )

    @cached_property
    def _empty(self) -> set[str]:
        """Return the names of the rules that may be empty."""
        users: dict[str, set[str]] = {}
        for name, body in self.rules.items():
            for node in _nodes(body):
                if isinstance(node, _Rule):
                    users.setdefault(node.name, set()).add(name)
        found: set[str] = set()
        left = set(self.rules)
        while left:
            name = left.pop()
            if name not in found and _may_be_empty(self.rules[name], found):
                found.add(name)
                left |= users.get(name, set())
        return found

    def _may_be_empty(self, node: _Node) -> bool:
        return _may_be_empty(node, self._empty)

    def _check_cycles(self) -> None:
        """Refuse a rule that may derive itself alone."""
        unit: dict[str, set[str]] = {name: set() for name in self.rules}
        for name, body in self.rules.items():
            for items in _sequences(body):
                firm = [item for item in items if not self._may_be_empty(item)]
                alone = items if not firm else firm if len(firm) == 1 else ()
                unit[name] |= {item.name for item in alone if isinstance(item, _Rule)}
        components = _components(unit)
        for name in self.rules:
            if any(components.get(other) == components[name] for other in unit[name]):
                raise UserError(
                    f"rule {name!r} may stand for itself alone, so that a text can be read in "
                    "endlessly many ways; leave that alternative out, or what may be empty beside "
                    "it."
                )

    def _check_row(self, name: str, items: tuple[_Node, ...]) -> None:
        row = 0
        for item in items:
            row = row + 1 if self._may_be_empty(item) else 0
            if row > MAX_OPEN_IN_A_ROW:
                raise UserError(
                    f"rule {name!r} has more than {MAX_OPEN_IN_A_ROW} parts in a row that may "
                    "be empty; put something between them that may not."
                )

    def _check_sides(self, name: str, items: tuple[_Node, ...]) -> None:
        """Refuse a rule that may begin and end with itself in one alternative."""
        left, right = (
            [
                at
                for at in self._outer(items, side)
                for corner in self._corner_names(items[at], side)
                if self._cycles[side].get(corner) == self._cycles[side][name]
                and corner in self._corners[side][name]
            ]
            for side in (1, -1)
        )
        if left and right and min(left) < max(right):
            raise UserError(
                f"rule {name!r} may begin and end with itself, so that a text can be read in "
                "very many ways; write a part of its own and repeat that, as in "
                'part ("+" part)*.'
            )

    def _outer(self, items: tuple[_Node, ...], side: int) -> Iterator[int]:
        """Yield the indices of the items that may come first (1) or last (-1)."""
        for at in range(len(items))[::side]:
            yield at
            if not self._may_be_empty(items[at]):
                return

    def _corner_names(self, node: _Node, side: int) -> Iterator[str]:
        """Yield the rules that a node may begin (1) or end (-1) with."""
        match node:
            case _Rule(name):
                yield name
            case _Repeat(item):
                yield from self._corner_names(item, side)
            case _Choice(options):
                for items in options:
                    for at in self._outer(items, side):
                        yield from self._corner_names(items[at], side)

    def _rounds_of(self, name: str, above: tuple[str, ...]) -> tuple[int, ...]:
        """Return the counts along the nesting with the largest product; recursion counts once."""
        if name in above or name not in self.rules:
            return ()
        if name not in self._rounds:
            self._rounds[name] = self._most_rounds(self.rules[name], (*above, name))
        return self._rounds[name]

    def _most_rounds(self, node: _Node, above: tuple[str, ...]) -> tuple[int, ...]:
        match node:
            case _Rule(name):
                return self._rounds_of(name, above) if len(above) <= _MAX_DEPTH else ()
            case _Choice(options):
                parts = [self._most_rounds(item, above) for items in options for item in items]
                return max(parts, key=math.prod, default=())
            case _Repeat(item, least, most):
                inner = self._most_rounds(item, above)
                bound = least if most is None else most
                return (bound, *inner) if bound > 1 and least != most else inner
        return ()


class _Writer:
    """Writes rules with classes and counts in a form that the matcher reads correctly."""

    def __init__(self, rules: dict[str, _Choice]) -> None:
        prefix = "r"
        while any(name.startswith(prefix) for name in rules):
            prefix += "_"
        self._rules = rules
        self._further = Rules(prefix)

    def grammar(self) -> str:
        """Return the whole grammar."""
        return self._further.grammar({name: self._node(body) for name, body in self._rules.items()})

    def _node(self, node: _Node) -> str:
        match node:
            case _Rule(name):
                if name not in self._rules:
                    raise UserError(f'rule "{name}" is not defined; define it, or quote a text.')
                return name
            case _Text(source):
                return any_of(_class_options(source)) if source.startswith("[") else source
            case _Repeat(item, least, most):
                return repeated(self._node(item), least, most, self._further)
            case _Choice(options):
                return any_of(" ".join(map(self._node, items)) or '""' for items in options)


def _class_options(source: str) -> list[str]:
    """Return expressions for one character out of a class such as `[^a-z]`, as alternatives."""
    inside = source[1:-1]
    is_negative = inside.startswith("^")
    points = [_point(found) for found in _POINT.finditer(inside, int(is_negative))]
    ranges = []
    while points:
        (low, _), *points = points
        high = low
        if len(points) > 1 and points[0] == (ord("-"), False):
            (high, _), *points = points[1:]
        ranges.append((low, high))
    ranges = merge(ranges)
    options = character_options(without_surrogates(complement(ranges) if is_negative else ranges))
    if not options:
        raise UserError(f"the character class {source} has no character; give it one.")
    return options


def _point(found: re.Match[str]) -> tuple[int, bool]:
    """Return the code point that a class spells, and whether it is escaped."""
    digits = found["x"] or found["u"] or found["U"]
    if digits:
        return int(digits, 16), True
    if found["escape"]:
        return ord(_ESCAPES.get(found["escape"], found["escape"])), True
    return ord(found["plain"]), False


def _nodes(node: _Node) -> Iterator[_Node]:
    yield node
    if isinstance(node, _Repeat):
        yield from _nodes(node.item)
    elif isinstance(node, _Choice):
        for items in node.options:
            for item in items:
                yield from _nodes(item)


def _sequences(node: _Node) -> Iterator[tuple[_Node, ...]]:
    """Yield all sequences of a body, those in brackets too."""
    for inner in _nodes(node):
        if isinstance(inner, _Choice):
            yield from inner.options


def _may_be_empty(node: _Node, empty: set[str]) -> bool:
    match node:
        case _Rule(name):
            return name in empty
        case _Text():
            return node.is_empty
        case _Repeat(item, least, _):
            return least == 0 or _may_be_empty(item, empty)
        case _Choice(options):
            return any(all(_may_be_empty(item, empty) for item in items) for items in options)


def _components(edges: dict[str, set[str]]) -> dict[str, str]:
    """Return the strongly connected component of each node, named by a node (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()
    users: dict[str, list[str]] = {name: [] for name in edges}
    for root in edges:
        stack = [(root, False)]
        while stack:
            name, is_left = stack.pop()
            if is_left:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                for other in edges[name] & edges.keys():
                    users[other].append(name)
                    stack.append((other, False))
    component: dict[str, str] = {}
    for root in reversed(order):
        found = [root]
        while found:
            name = found.pop()
            if name not in component:
                component[name] = root
                found += users[name]
    return component
