"""Grammars of users, checked before they are compiled: what makes the matcher explode is refused.

The matcher follows all ways to read a text at once. Nested counts, repeats of something that may be
empty and rules that are put together of themselves have so many ways that one mask takes seconds.
Whether a grammar is ambiguous cannot be decided in general; these forms can be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property

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
    | (?P<mark>[|()*+?.])
    """,
    re.VERBOSE,
)
# Rules over token ids bypass the text, and xgrammar's tags match nothing or anything.
_EXTENSION = re.compile(r"\b(Token|ExcludeToken|TagDispatch|TokenTagDispatch)\s*\(")


def check_ebnf(source: str) -> None:
    """Refuse a grammar in EBNF notation whose texts can be read in too many ways.

    What does not parse here is left to the compiler, which says why.

    Raises:
        UserError: naming the rule, and how to write it.
    """
    if extension := _EXTENSION.search(source):
        raise UserError(f"{extension[1]}(...) is not supported; write the text itself.")
    try:
        rules = _Parser(source).rules()
    except _NotRead:
        return
    _Grammar(rules).check()


# ---- what a grammar is made of ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ref:
    """The name of a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class _Text:
    """A literal or a character of a class."""

    is_empty: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of several sequences."""

    options: tuple[tuple[_Node, ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Something several times; `most` is None for no bound."""

    item: _Node
    least: int
    most: int | None


_Node = _Ref | _Text | _Choice | _Repeat


class _NotRead(Exception):
    """The source is not read here."""


class _Parser:
    """Reads the rules of a source."""

    def __init__(self, source: str) -> None:
        self._tokens: list[re.Match[str]] = []
        at = 0
        while at < len(source):
            if (token := _TOKEN.match(source, at)) is None:
                raise _NotRead
            at = token.end()
            if token.lastgroup != "skip":
                self._tokens.append(token)
        self._at = 0

    def rules(self) -> dict[str, _Choice]:
        """The body of each rule by its name."""
        found: dict[str, _Choice] = {}
        while (token := self._next()) is not None:
            if token["define"] is None or token["rule"] in found:
                raise _NotRead
            found[token["rule"]] = self._choice(0)
        return found

    def _peek(self) -> re.Match[str] | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> re.Match[str] | None:
        token = self._peek()
        self._at += 1
        return token

    def _choice(self, depth: int) -> _Choice:
        if depth > _MAX_DEPTH:
            raise UserError(f"its brackets are nested deeper than {_MAX_DEPTH}; use rules instead.")
        options: list[tuple[_Node, ...]] = []
        items: list[_Node] = []
        while (token := self._peek()) is not None:
            mark = token["mark"]
            if token["define"] is not None or mark == ")":
                break
            self._at += 1
            if mark == "|":
                options.append(tuple(items))
                items = []
            elif mark in ("*", "+", "?") or token["count"] is not None:
                if not items:
                    raise _NotRead
                if isinstance(items[-1], _Repeat):
                    raise UserError("a repeat stands behind another one; leave one of them out.")
                items.append(_repeated(items.pop(), token))
            else:
                items += self._item(token, depth)
        return _Choice((*options, tuple(items)))

    def _item(self, token: re.Match[str], depth: int) -> list[_Node]:
        if token["name"] is not None:
            return [_Ref(token["name"])]
        if token["text"] is not None or token["class"] is not None or token["mark"] == ".":
            return [_Text(token["text"] == '""')]
        inner = self._choice(depth + 1)
        closing = self._next()
        if closing is None or closing["mark"] != ")":
            raise _NotRead
        return [] if token["ahead"] is not None else [inner]


def _repeated(item: _Node, token: re.Match[str]) -> _Repeat:
    bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if token["mark"] is not None:
        return _Repeat(item, *bounds[token["mark"]])
    least = int(token["least"])
    most = least if token["range"] is None else int(token["most"]) if token["most"] else None
    return _Repeat(item, least, most)


# ---- what is wrong with one ---------------------------------------------------------------------


@dataclass
class _Grammar:
    """The rules of a grammar, and what follows from them."""

    rules: dict[str, _Choice]
    _rounds: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what has too many readings."""
        for name, body in self.rules.items():
            for node in _nodes(body):
                if isinstance(node, _Repeat):
                    self._check_repeat(name, node)
        self._check_cycles()
        for name in self.rules:
            self._check_row(name)
            self._check_sides(name)
            self._check_rounds(name)

    @cached_property
    def empty(self) -> frozenset[str]:
        """Names of the rules that may be empty."""
        found: set[str] = set()
        users: dict[str, set[str]] = {}
        for name, names in self._uses.items():
            for used in names:
                users.setdefault(used, set()).add(name)
        left = set(self.rules)
        while left:
            name = left.pop()
            if name not in found and _may_be_empty(self.rules[name], found):
                found.add(name)
                left |= users.get(name, set())
        return frozenset(found)

    def _check_repeat(self, name: str, node: _Repeat) -> None:
        if node.most != 1 and _may_be_empty(node.item, self.empty):
            raise UserError(
                f"rule {name!r} repeats something that may be empty, so that a text can be read in "
                "endlessly many ways; leave the empty case out of what is repeated."
            )

    def _check_cycles(self) -> None:
        """Refuse rules that derive themselves and nothing else."""
        unit: dict[str, set[str]] = {name: set() for name in self.rules}
        for name, body in self.rules.items():
            for items in _sequences(body):
                firm = [item for item in items if not _may_be_empty(item, self.empty)]
                alone = items if not firm else firm if len(firm) == 1 else ()
                unit[name] |= {item.name for item in alone if isinstance(item, _Ref)}
        components = _components(unit)
        for name in self.rules:
            if any(components.get(other) == components[name] for other in unit[name]):
                raise UserError(
                    f"rule {name!r} may stand for itself alone, so that a text can be read in "
                    "endlessly many ways; leave that alternative out, or what may be empty beside "
                    "it."
                )

    @cached_property
    def _uses(self) -> dict[str, set[str]]:
        return {
            name: {node.name for node in _nodes(body) if isinstance(node, _Ref)}
            for name, body in self.rules.items()
        }

    def _check_sides(self, name: str) -> None:
        """Refuse a rule that may begin and end with itself in one alternative."""
        for items in _sequences(self.rules[name]):
            left, right = (self._recursive_at(name, items, side) for side in (1, -1))
            if left and right and min(left) < max(right):
                raise UserError(
                    f"rule {name!r} may begin and end with itself, so that a text can be read in "
                    "very many ways; write a part of its own and repeat that, as in "
                    'part ("+" part)*.'
                )

    def _check_row(self, name: str) -> None:
        for items in _sequences(self.rules[name]):
            row = 0
            for item in items:
                row = row + 1 if _may_be_empty(item, self.empty) else 0
                if row > MAX_OPEN_IN_A_ROW:
                    raise UserError(
                        f"rule {name!r} has more than {MAX_OPEN_IN_A_ROW} parts in a row that may "
                        "be empty; put something between them that may not."
                    )

    def _recursive_at(self, name: str, items: tuple[_Node, ...], side: int) -> list[int]:
        """Where a sequence may begin (1) or end (-1) with what begins or ends with its rule."""
        edges, component = self._corners[side]
        return [
            at
            for at in _outer(items, side, self.empty)
            for corner in _corner_names(items[at], side, self.empty)
            if component.get(corner) == component[name] and corner in edges[name]
        ]

    @cached_property
    def _corners(self) -> dict[int, tuple[dict[str, set[str]], dict[str, int]]]:
        """For both sides the rules that each rule may begin or end with, and the cycles of that."""
        found = {}
        for side in (1, -1):
            edges = {
                name: set(_corner_names(body, side, self.empty))
                for name, body in self.rules.items()
            }
            found[side] = edges, _components(edges)
        return found

    def _check_rounds(self, name: str) -> None:
        counts = self._rounds_of(name, ())
        if len(counts) > 1 and math.prod(counts) > MAX_ROUNDS:
            shown = " x ".join(map(str, counts))
            raise UserError(
                f"rule {name!r} repeats within repeats, {shown} times together; expected at most "
                f"{MAX_ROUNDS}. Lower the counts, or repeat without a bound (* or +)."
            )

    def _rounds_of(self, name: str, above: tuple[str, ...]) -> tuple[int, ...]:
        """The counts along the nesting with the largest product; recursion counts once."""
        if name in above or name not in self.rules:
            return ()
        if name not in self._rounds:
            self._rounds[name] = self._most_rounds(self.rules[name], (*above, name))
        return self._rounds[name]

    def _most_rounds(self, node: _Node, above: tuple[str, ...]) -> tuple[int, ...]:
        match node:
            case _Ref(name):
                return self._rounds_of(name, above) if len(above) <= _MAX_DEPTH else ()
            case _Text():
                return ()
            case _Choice(options):
                parts = [self._most_rounds(item, above) for items in options for item in items]
                return max(parts, key=math.prod, default=())
            case _Repeat(item, least, most):
                inner = self._most_rounds(item, above)
                bound = least if most is None else most
                return (bound, *inner) if bound > 1 and least != most else inner


def _nodes(node: _Node) -> Iterator[_Node]:
    yield node
    if isinstance(node, _Repeat):
        yield from _nodes(node.item)
    elif isinstance(node, _Choice):
        for items in node.options:
            for item in items:
                yield from _nodes(item)


def _sequences(node: _Node) -> Iterator[tuple[_Node, ...]]:
    """All sequences of a body, those in brackets too."""
    for inner in _nodes(node):
        if isinstance(inner, _Choice):
            yield from inner.options


def _may_be_empty(node: _Node, empty: Set[str]) -> bool:
    match node:
        case _Ref(name):
            return name in empty
        case _Text(is_empty):
            return is_empty
        case _Repeat(item, least, _):
            return least == 0 or _may_be_empty(item, empty)
        case _Choice(options):
            return any(all(_may_be_empty(item, empty) for item in items) for items in options)


def _outer(items: tuple[_Node, ...], side: int, empty: Set[str]) -> Iterator[int]:
    """Indices of the items that may come first (1) or last (-1)."""
    for at in range(len(items))[::side]:
        yield at
        if not _may_be_empty(items[at], empty):
            return


def _corner_names(node: _Node, side: int, empty: Set[str]) -> Iterator[str]:
    """The rules that a node may begin (1) or end (-1) with."""
    match node:
        case _Ref(name):
            yield name
        case _Repeat(item):
            yield from _corner_names(item, side, empty)
        case _Choice(options):
            for items in options:
                for at in _outer(items, side, empty):
                    yield from _corner_names(items[at], side, empty)


def _components(edges: dict[str, set[str]]) -> dict[str, int]:
    """The strongly connected component of each node, by a number (Tarjan, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    for root in edges:
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack.append(root)
        path = [(root, iter(edges[root]))]
        while path:
            name, others = path[-1]
            for other in others:
                if other not in edges:
                    continue
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    path.append((other, iter(edges[other])))
                    break
                if other not in component:
                    low[name] = min(low[name], order[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[name])
                if low[name] == order[name]:
                    while name not in component:
                        component[stack.pop()] = order[name]
    return component
