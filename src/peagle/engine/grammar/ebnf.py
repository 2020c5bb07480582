"""Grammars in xgrammar's EBNF notation, put together from expressions and named rules."""

from __future__ import annotations

from collections.abc import Iterable

from peagle.errors import UserError

MAX_RULES = 20_000


class Rules:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._bodies: list[str] = []
        self._names: dict[str, str] = {}

    def add(self, body: str) -> str:
        """Return the name of the rule with this body; equal bodies share a rule."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self.define(self._names[body], body)
        return self._names[body]

    def reserve(self) -> str:
        """Return the name of a rule that is defined later, so that it can refer to itself.

        Raises:
            UserError: the grammar has too many rules.
        """
        if len(self._bodies) >= MAX_RULES:
            raise UserError(f"it needs more than {MAX_RULES} rules; make it smaller.")
        self._bodies.append("")
        return f"r{len(self._bodies) - 1}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[int(name[1:])] = body

    def grammar(self, root: str) -> str:
        """Return the whole grammar; its outputs are those of the expression `root`."""
        rules = (f"r{i} ::= {body}" for i, body in enumerate(self._bodies))
        return "\n".join([f"root ::= {root}", *rules])


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return f'"{"".join(escaped(ord(character)) for character in text)}"'


def escaped(point: int) -> str:
    """Return one code point as literals and character classes spell it."""
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\U{point:08X}"


def join_parts(*parts: str) -> str:
    """Return an expression for the parts one after another; neighbouring literals become one."""
    # Blanks inside literals are escaped, so `" "` stands between two literals only; a literal that
    # is repeated stands in brackets.
    return " ".join(part for part in parts if part not in ("", '""')).replace('" "', "") or '""'


def any_of(options: Iterable[str]) -> str:
    """Return an expression for one of the options."""
    options = list(options)
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def repeat_counts(least: int, most: int | None) -> str:
    """Return the suffix that repeats an expression; `most` is None for no bound."""
    # xgrammar is faster with the short forms.
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return short.get((least, most), f"{{{least},{'' if most is None else most}}}")
