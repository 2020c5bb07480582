"""Prompt lookup against a naive search."""

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from peagle.speculation import PromptLookup


def naive_lookup(
    history: list[int], given: list[int], k: int, longest: int, shortest: int
) -> list[int]:
    """What stands at the place before which a text agrees longest with the end of the history.

    Of equal ones the first in the prediction, else the latest.
    """

    def agreement(text: list[int], place: int) -> int:
        n, most = 0, min(place, longest, len(history))
        while n < most and text[place - 1 - n] == history[-1 - n]:
            n += 1
        return n

    places = [(agreement(history, place), 0, place) for place in range(1, len(history))]
    places += [(agreement(given, place), 1, -place) for place in range(1, len(given))]
    places = [found for found in places if found[0] >= shortest]
    if not places:
        return []
    _, is_given, best = max(places)
    return given[-best : -best + k] if is_given else history[best : best + k]


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@hypothesis.given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    given=st.lists(st.integers(0, 3), max_size=20),
    k=st.integers(0, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_lookup_equals_the_naive_search(
    history: list[int], given: list[int], k: int, shortest: int, more: int
) -> None:
    lookup = PromptLookup(shortest + more, shortest)
    wanted = naive_lookup(history, given, k, shortest + more, shortest)
    assert lookup.find(history, k, given) == wanted
    assert lookup.find(history, k) == naive_lookup(history, [], k, shortest + more, shortest)


def test_lookup_leaves_the_tokens_alone() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2]
    PromptLookup(4, 1).find(tokens, 3)[0] = 7
    assert tokens == [1, 2, 3, 4, 9, 1, 2]
