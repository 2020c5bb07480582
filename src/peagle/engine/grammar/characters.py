"""Sets of characters, and the EBNF expressions for one character out of a set.

To decide about tokens that end a rule, xgrammar looks ahead behind the rule. There it compares an
ASCII character with the last 8 bits of the bounds of a range. So "A" (0x41) seems to fit a class
from U+0430 to U+044F, and the mask allows a token that the matcher refuses, or the other way round.
Only classes in a sequence behind a rule are misread. A class that is a rule of its own is read as
it is written.
"""

Ranges = list[tuple[int, int]]  # inclusive code points, ascending, apart

LAST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LAST_ASCII = 0x7F


def merge(ranges: Ranges) -> Ranges:
    """Return the union of ranges in any order."""
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def complement(ranges: Ranges) -> Ranges:
    """Return all code points that are in none of the ranges."""
    found: Ranges = []
    start = 0
    for low, high in ranges:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return [*found, (start, LAST_CODE_POINT)] if start <= LAST_CODE_POINT else found


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Return the code points that are in both sets."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return [(low, high) for low, high in pairs if low <= high]


def without_surrogates(ranges: Ranges) -> Ranges:
    """Return the code points that are characters: no text holds half of a surrogate pair."""
    return intersect(ranges, complement([_SURROGATES]))


def escaped(point: int) -> str:
    """Return the spelling of a code point in literals and character classes."""
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\U{point:08X}"


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return f'"{"".join(escaped(ord(character)) for character in text)}"'


def character_options(ranges: Ranges) -> list[str]:
    """Return expressions for one character out of the ranges, as alternatives; [] for no ranges.

    A class that the matcher's look-ahead would misread is split into two options: alternatives have
    a rule of their own.
    """
    if not ranges:
        return []
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return [literal(chr(ranges[0][0]))]
    is_ascii = [any(low <= point <= high for low, high in ranges) for point in range(128)]
    ascii_part = intersect(ranges, [(0, _LAST_ASCII)])
    pieces = [
        piece
        for low, high in intersect(ranges, [(_LAST_ASCII + 1, LAST_CODE_POINT)])
        for piece in _pieces(low, high)
    ]
    if all(_reads_well(low, high, is_ascii) for low, high in pieces):
        return [_class(ascii_part + pieces)]
    if len(ranges) == 1:
        ((low, high),) = ranges
        middle = (low + high) // 2
        ranges = [(low, middle), (middle + 1, high)]
    half = len(ranges) // 2
    return [_class(ranges[:half]), _class(ranges[half:])]


def _class(ranges: Ranges) -> str:
    return f"[{''.join(f'{escaped(low)}-{escaped(high)}' for low, high in ranges)}]"


def _pieces(low: int, high: int) -> Ranges:
    """Return ranges beyond ASCII that together make up one range, and that read well if any do.

    The look-ahead takes no ASCII character for a range whose lower bound ends in more than its
    upper bound. So the first piece ends just before its own last byte in the next block of 256, and
    the other begins with ...FF.
    """
    if _reads_well(low, high, []) or low >> 8 == high >> 8:
        return [(low, high)]
    end = (low | 0xFF) + max(low & 0xFF, 1)
    return [(low, end), (low | 0xFF, high)]


def _reads_well(low: int, high: int, is_ascii: list[bool]) -> bool:
    """Return whether the look-ahead takes no ASCII character outside the set for one of the range.

    Args:
        is_ascii: whether each ASCII character is in the set; [] for none.
    """
    taken = range(low & 0xFF, min(high & 0xFF, _LAST_ASCII) + 1)
    return all(point < len(is_ascii) and is_ascii[point] for point in taken)
