"""Prompt lookup against a naive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.speculation import PromptLookup


def naive_lookup(history: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """What stands at the place before which the text agrees longest with its own end."""

    def agreement(place: int) -> int:
        n = 0
        while n < min(place, longest) and history[place - 1 - n] == history[-1 - n]:
            n += 1
        return n

    places = [(agreement(place), place) for place in range(1, len(history))]
    places = [found for found in places if found[0] >= shortest]
    if not places:
        return []
    best = max(places)[1]
    return history[best : best + k]


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    k=st.integers(0, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_lookup_equals_the_naive_search(
    history: list[int], k: int, shortest: int, more: int
) -> None:
    lookup = PromptLookup(shortest + more, shortest)
    assert lookup.find(history, k) == naive_lookup(history, k, shortest + more, shortest)


def test_lookup_leaves_the_tokens_alone() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2]
    PromptLookup(4, 1).find(tokens, 3)[0] = 7
    assert tokens == [1, 2, 3, 4, 9, 1, 2]
