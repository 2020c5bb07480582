"""Grammars in xgrammar's EBNF notation, composed of expressions and named rules."""

from collections.abc import Iterable, Mapping

from peagle.errors import UserError

MAX_RULES = 20_000
# Each round of a class is a state with a mask, of up to 50 KB for 50,000 tokens.
MAX_CLASS_ROUNDS = 10_000
# A larger count is composed of blocks of _BLOCK rounds.
_LARGEST_COUNT = 128
_BLOCK = 32


class Rules:
    """The rules of one grammar, named by a prefix and a number."""

    def __init__(self, prefix: str = "r") -> None:
        self._prefix = prefix
        self._bodies: list[str] = []
        self._names: dict[str, str] = {}
        self._class_rounds: dict[str, int] = {}

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
        return f"{self._prefix}{len(self._bodies) - 1}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[int(name[len(self._prefix) :])] = body

    def add_class_rounds(self, expression: str, num_rounds: int) -> None:
        """Record the number of repeats of a class; equal expressions count once.

        Raises:
            UserError: the classes of the grammar have too many rounds together.
        """
        self._class_rounds[expression] = num_rounds
        if (total := sum(self._class_rounds.values())) > MAX_CLASS_ROUNDS:
            raise UserError(
                f"the counts behind its character classes make {total} or more rounds; expected "
                f"{MAX_CLASS_ROUNDS} at most. Lower them, or repeat without a bound (* or +)."
            )

    def grammar(self, named: Mapping[str, str]) -> str:
        """Return the whole grammar: the `named` rules, "root" among them, and these rules."""
        rules = {f"{self._prefix}{i}": body for i, body in enumerate(self._bodies)}
        return "\n".join(f"{name} ::= {body}" for name, body in {**named, **rules}.items())


def join_parts(*parts: str) -> str:
    """Return an expression for the parts one after another; neighbouring literals become one."""
    # Blanks inside literals are escaped, so `" "` occurs only between two literals; a repeated
    # literal is in brackets.
    return " ".join(part for part in parts if part not in ("", '""')).replace('" "', "") or '""'


def any_of(options: Iterable[str]) -> str:
    """Return an expression for any one of the options."""
    options = list(options)
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def repeated(item: str, least: int, most: int | None, rules: Rules) -> str:
    """Return an expression for an item from `least` to `most` times; `most` is None for no bound.

    In a large count xgrammar's matcher follows more than a hundred ways at a time, and a class gets
    a state for each round. So a large count is composed of blocks of rounds, and of blocks of
    blocks: then few ways are open, and there are as many states as rounds in a block.
    """
    if max(least, most or 0) <= _LARGEST_COUNT:
        return _counted(item, least, most, rules)
    if " " in item or "(" in item:  # an item that is written several times gets a rule
        item = rules.add(item)
    more = _counted(item, 0, None, rules) if most is None else _at_most(item, most - least, rules)
    return join_parts(_exactly(item, least, rules), more)


def _exactly(item: str, count: int, rules: Rules) -> str:
    if count <= _BLOCK:
        return _counted(item, count, count, rules)
    num_blocks, rest = divmod(count, _BLOCK)
    block = rules.add(_counted(item, _BLOCK, _BLOCK, rules))
    return join_parts(_exactly(block, num_blocks, rules), _counted(item, rest, rest, rules))


def _at_most(item: str, count: int, rules: Rules) -> str:
    """Return an expression for at most `count` items.

    It is either fewer blocks and a part of one more, or all blocks and at most the rest.
    """
    if count <= _BLOCK:
        return _counted(item, 0, count, rules)
    num_blocks, rest = divmod(count, _BLOCK)
    block = rules.add(_counted(item, _BLOCK, _BLOCK, rules))
    part = _counted(item, 0, _BLOCK - 1, rules)
    fewer = join_parts(_at_most(block, num_blocks - 1, rules), part)
    every = join_parts(_exactly(block, num_blocks, rules), _counted(item, 0, rest, rules))
    return rules.add(any_of([fewer, every]))


def _counted(item: str, least: int, most: int | None, rules: Rules) -> str:
    if most == 0:
        return '""'
    # xgrammar is faster with the short forms.
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    count = f"{{{least},{'' if most is None else most}}}"
    expression = f"({item}){short.get((least, most), count)}"
    if item.strip("()").startswith("[") and " " not in item:
        rules.add_class_rounds(expression, most or least)
    return expression
