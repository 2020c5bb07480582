"""The best K at a load, defined once: the smallest K that is not shown to be slower than another.

Runs of one configuration differ, so the fastest median may be luck. Two speeds tie where the ranges
of their repeats overlap, and of the K that tie with the fastest the smallest is the best one: it
drafts and verifies the fewest tokens for the same speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second: the median of some repeats, and the least and the most of them."""

    median: float
    least: float
    most: float


def tied_fastest(speeds: Mapping[T, Speed]) -> list[T]:
    """The fastest by its median, and all whose repeats overlap those of the fastest, in order.

    Args:
        speeds: at one load; not empty.
    """
    fastest = max(speeds.values(), key=lambda one: one.median)
    return [name for name, one in speeds.items() if one.most >= fastest.least]


def best_k(speeds: Mapping[int, Speed]) -> int:
    """The best K of one method at one load, from its speeds by K."""
    return min(tied_fastest(speeds))
