"""Markers in a text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence


def open_tail(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(m.startswith(end) for m in markers)), 0)
