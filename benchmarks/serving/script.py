"""What the scripts of this folder share: input that is wrong ends in status 2; sides take turns."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import mean, median, stdev
from typing import Any

from peagle.errors import UserError
from peagle.intervals import MIN_CLUSTERS, student_quantile

_ANY = -math.inf, math.inf  # an interval of which nothing is known


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
    equal: str,
    bound: float,
) -> tuple[dict[str, Any], list[str]]:
    """Figures of sides, which are printed too, and what missed its bound or is undecided.

    Args:
        rows: milliseconds of each side by name, `step_ms` among them, of a round that warms up and
            of all repeats.
        over: the side that each one is compared with, repeat by repeat.
        judged: the side that may add the share `bound` to a step.
        equal: a side of equal work as the other one, so that all that it adds is noise.

    Returns:
        Median, least and greatest value of each time (`sides`), and of what it adds as a share of
        the other side's step (`added`); 95% intervals of the mean that is added to a step (`ci`);
        and the `verdict`. It is "passed" where the intervals of both sides end within the bound,
        "missed" where that of `judged` begins above the bound and all of the noise, else
        "undecided".
    """
    found: dict[str, Any] = {"sides": {}, "added": {}}
    ends: dict[str, tuple[float, float]] = {}
    for (name, base), part in product(over.items(), next(iter(rows.values()))[0]):
        own = [row[part] for row in rows[name][1:]]
        spread = [round(f(own), 4) for f in (median, min, max)]
        found["sides"].setdefault(name, {})[part] = spread
        line = "{:6} {:12} {:9.4f} ({:.4f} to {:.4f})".format(name, part, *spread)
        if base is not None:
            pairs = zip(own, rows[base][1:])
            more = [(value - other[part]) / other["step_ms"] for value, other in pairs]
            if part == "step_ms":
                ends[name] = mean_interval(more)
            spread = [round(f(more), 5) for f in (median, min, max)]
            found["added"].setdefault(name, {})[part] = spread
            line += "  over {}: {:+.2%} ({:+.2%} to {:+.2%})".format(base, *spread)
        print(line)
    (low, high), noise = ends[judged], max(map(abs, ends[equal]))
    found["ci"] = {name: [round(end, 5) for end in of] for name, of in ends.items() if of != _ANY}
    is_missed, is_passed = low > max(bound, noise), max(high, noise) <= bound
    found["verdict"] = "missed" if is_missed else "passed" if is_passed else "undecided"
    text = f"`{judged}` adds {low:.2%} to {high:.2%} to a step; bound {bound:.2%}"
    if not is_missed:
        text = f"undecided: {text}, and equal work adds up to {noise:.2%}; raise --repeats"
    return found, [] if is_passed else [text]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of a mean by Student's t; endless below 5 values."""
    count = len(values)
    if count < MIN_CLUSTERS:
        return _ANY
    half = student_quantile(0.975, count - 1) * stdev(values) / math.sqrt(count)
    return mean(values) - half, mean(values) + half
