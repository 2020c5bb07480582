"""Numbers between bounds, digit by digit, as EBNF expressions.

Integers have 64 bits at most and other numbers the digits that a double distinguishes, so that an
output cannot run away in digits and every reader gets the number that was written.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache

from peagle.engine.grammar.ebnf import Rules, any_of, join_parts

INT64 = (-(2**63), 2**63 - 1)

_EXACT_CONTEXT = Context(prec=2000)
# Most digits before and after the point: enough to write any double as Python and JavaScript do.
# The first shape is for numbers below 1.
_SHAPES = [(1, 20), *((n, 17 - n) for n in range(1, 17)), (17, 0), (18, 0), (19, 0)]
_MANTISSA = '[1-9] ("." [0-9]{1,16})? [eE]'
_ANY_EXPONENT = '([eE] [+\\-]? ([0-9]{1,2} | "1" [0-9]{2,2} | "2" [0-7] [0-9]))?'
_LARGE_EXPONENT = '[+\\-]? ("2" [89] [0-9] | "30" [0-7])'
_SMALLEST = Decimal("1e-307")
_FROM_20_TO_307 = '[2-9] [0-9] | [12] [0-9] [0-9] | "30" [0-7]'


def integers(rules: Rules, low: int, high: int, multiple: int = 1) -> str | None:
    """Return an expression for the multiples of `multiple` from `low` to `high`; None for none."""

    def unsigned(low: int, high: int) -> str | None:
        shapes = [
            _Shape(n, 0, max(low, 0 if n == 1 else 10 ** (n - 1)), min(high, 10**n - 1))
            for n in range(1, len(str(max(high, 0))) + 1)
        ]
        return _write(rules, shapes, multiple)

    return _signed(unsigned(max(low, 0), high), unsigned(max(-high, 1), -low))


def decimals(rules: Rules, low: Decimal | None, high: Decimal | None) -> str | None:
    """Return an expression for the numbers from `low` to `high`; None for none.

    Exponents reach 307. Beside a bound they are used only for numbers below 0.0001 and from 1e16
    on, and only if the bounds leave room for all of these.
    """

    def unsigned(low: Decimal, high: Decimal | None) -> str | None:
        shapes = []
        for i, (integer_digits, fraction_digits) in enumerate(_SHAPES):
            scale = 10**fraction_digits
            first = 0 if i == 0 else scale * 10 ** (integer_digits - 1)
            last = scale - 1 if i == 0 else scale * 10**integer_digits - 1
            first = max(first, int(_scaled(low, scale).to_integral_value(ROUND_CEILING)))
            if high is not None:
                last = min(last, int(_scaled(high, scale).to_integral_value(ROUND_FLOOR)))
            shapes.append(_Shape(integer_digits, fraction_digits, first, last))
        digits = _write(rules, shapes, 1)
        if is_free:
            return any_of([f"{digits} {_ANY_EXPONENT}", f"{_MANTISSA} {_LARGE_EXPONENT}"])
        options = [digits]
        if low <= _SMALLEST and (high is None or high >= Decimal("0.0001")):
            options.append(f'{_MANTISSA} "-" ("0"? [5-9] | "1" [0-9] | {_FROM_20_TO_307})')
        if low <= 10**16 and high is None:
            options.append(f'{_MANTISSA} "+"? ("1" [6-9] | {_FROM_20_TO_307})')
        found = [option for option in options if option]
        return any_of(found) if found else None

    is_free = low is None and high is None
    zero = Decimal(0)
    above = below = None
    if high is None or high >= 0:
        above = unsigned(max(low or zero, zero), high)
    if low is None or low < 0:
        below = unsigned(max(-(high or zero), zero), None if low is None else -low)
    return _signed(above, below)


def _scaled(number: Decimal, scale: int) -> Decimal:
    return _EXACT_CONTEXT.multiply(number, Decimal(scale))


def _signed(above: str | None, below: str | None) -> str | None:
    if below is None:
        return above
    return f'"-" {below}' if above is None else any_of([above, f'"-" {below}'])


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers of a given length between bounds.

    Attributes:
        integer_digits: digits before the point.
        fraction_digits: digits after the point at most; absent ones count as zeros.
        low: the least number, times 10 ** fraction_digits.
        high: the greatest number, times 10 ** fraction_digits.
    """

    integer_digits: int
    fraction_digits: int
    low: int
    high: int


# Index of the shape, number of digits read, whether they equal the first digits of each bound, the
# remainder by `multiple`, and whether the point was read.
_Part = tuple[int, int, bool, bool, int, bool]


def _following(
    part: _Part, shape: _Shape, low: str, high: str, multiple: int
) -> Iterator[tuple[str, _Part]]:
    """Yield each character that may come next, with the part behind it."""
    i, read, at_low, at_high, remainder, has_point = part
    if read == shape.integer_digits and shape.fraction_digits and not has_point:
        yield ".", (i, read, at_low, at_high, remainder, True)
    if read < shape.integer_digits or (has_point and read < len(low)):
        least, most = int(low[read]) if at_low else 0, int(high[read]) if at_high else 9
        for digit in range(least, most + 1):
            bounds = at_low and digit == least, at_high and digit == most
            yield str(digit), (i, read + 1, *bounds, (remainder * 10 + digit) % multiple, has_point)


def _write(rules: Rules, shapes: list[_Shape], multiple: int) -> str | None:
    """Return an expression for the numbers of all shapes, the rules of a deterministic automaton.

    A state has one part for each shape that the digits so far can still become.
    """
    kept = [shape for shape in shapes if shape.low <= shape.high]
    lengths = [shape.integer_digits + shape.fraction_digits for shape in kept]
    lows = [str(shape.low).zfill(n) for shape, n in zip(kept, lengths)]
    highs = [str(shape.high).zfill(n) for shape, n in zip(kept, lengths)]

    @cache
    def rule(parts: frozenset[_Part]) -> str | None:
        is_end = False
        after: dict[str, set[_Part]] = defaultdict(set)
        for part in parts:
            i, read, at_low, _, remainder, has_point = part
            shape = kept[i]
            if read >= shape.integer_digits and not (has_point and read == shape.integer_digits):
                is_end |= remainder == 0 and not (at_low and lows[i][read:].strip("0"))
            for character, next_part in _following(part, shape, lows[i], highs[i], multiple):
                after[character].add(next_part)
        # Characters that lead to the same rule make one class.
        options: dict[str, str] = {}
        for character in sorted(after):
            following = rule(frozenset(after[character]))
            if following is not None:
                options[following] = options.get(following, "") + character
        texts = [join_parts(f"[{found}]", name) for name, found in options.items()]
        if is_end:
            texts.append('""')
        if not texts:
            return None
        return '""' if texts == ['""'] else rules.add(any_of(texts))

    return rule(frozenset((i, 0, True, True, 0, False) for i in range(len(kept))))
