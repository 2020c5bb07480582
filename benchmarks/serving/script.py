"""What the scripts of this folder share: input that is wrong ends in status 2; sides take turns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

from peagle.errors import UserError


def check_positive(args: argparse.Namespace) -> None:
    """Refuse numbers that measure nothing; a seed may be any.

    Raises:
        UserError: a number is not above 0.
    """
    for name, value in vars(args).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "seed" and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected more than 0.")


def run_guarded(main: Callable[[], int]) -> None:
    """Run a script, and end with the status that it returns."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def take_turns(sides: Iterable[str], repeats: int) -> Iterator[str]:
    """Yield the name of each side for a round that warms up and for every repeat."""
    names = [*sides]
    for number in range(repeats + 1):
        yield from names[::-1] if number % 2 else names  # so none is always the first


def compare(
    rows: Mapping[str, Sequence[Mapping[str, float]]],
    over: Mapping[str, str | None],
    judged: str,
    bound: float,
) -> tuple[dict[str, Any], list[str]]:
    """Figures of sides, which are printed too, and what missed its bound.

    Args:
        rows: milliseconds of each side by name, `step_ms` among them, of a round that warms up and
            of all repeats.
        over: the side that each one is compared with, repeat by repeat.
        judged: the side that may add the share `bound` to a step, in the median.

    Returns:
        Median, least and greatest value of each time (`sides`), and of what it adds as a share of
        the other side's step (`added`).
    """
    found: dict[str, Any] = {"sides": {}, "added": {}}
    for (name, base), part in product(over.items(), next(iter(rows.values()))[0]):
        own = [row[part] for row in rows[name][1:]]
        spread = [round(f(own), 4) for f in (median, min, max)]
        found["sides"].setdefault(name, {})[part] = spread
        line = "{:6} {:12} {:9.4f} ({:.4f} to {:.4f})".format(name, part, *spread)
        if base is not None:
            pairs = zip(own, rows[base][1:])
            more = [(value - other[part]) / other["step_ms"] for value, other in pairs]
            spread = [round(f(more), 5) for f in (median, min, max)]
            found["added"].setdefault(name, {})[part] = spread
            line += "  over {}: {:+.2%} ({:+.2%} to {:+.2%})".format(base, *spread)
        print(line)
    share = found["added"][judged]["step_ms"][0]
    missed = [f"`{judged}` adds {share:.2%} to a step; bound {bound:.2%}"]
    return found, missed if share > bound else []
