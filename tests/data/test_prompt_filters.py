"""Faults of written prompts, and near-duplicates."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.data.prompt_filters import NearDuplicates, find_fault, words_of
from peagle.evaluation.prompts import PROMPT_SETS, load_prompt_set


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("Why not?", "fewer than 3 words"),
        ("?!…", "fewer than 3 words"),
        ("What is that?", None),
        ("你好吗朋友", None),
        ("no " * 8, "looping: 6 words occur 3 times"),
        ("no " * 7, None),
        ("Please list the ten best ways. " * 3, "looping: 6 words occur 3 times"),
        ("Please list the ten best ways. " * 2, None),
    ],
)
def test_faults(text: str, fault: str | None) -> None:
    assert find_fault(text) == fault


def test_words() -> None:
    assert words_of("Don't STOP: 3×4, naïve 日本語!") == [
        *("don", "t", "stop", "3", "4", "naïve", "日", "本", "語"),
    ]


EARLIER = "Can you write a short poem about the sea and its many colours?"


@pytest.mark.parametrize(
    ("text", "is_like"),
    [
        (EARLIER, True),
        (EARLIER.upper().replace("?", " !"), True),
        ("Can you write a short poem about the sea and its waves?", True),
        (f"I am a sailor, and I would like this from you now. {EARLIER} Thank you.", True),
        ("Can you write a short poem about my grandmother and her garden?", False),
        ("How many colours has the sea?", False),
        ("", False),
    ],
)
def test_near_duplicates(text: str, is_like: bool) -> None:
    assert NearDuplicates([EARLIER]).has_like(text) is is_like


def test_short_texts_are_alike_as_wholes() -> None:
    """Words that begin many prompts make nothing alike."""
    short = NearDuplicates(["Can you explain this?", "Explain."])
    assert short.has_like("can you explain this") and short.has_like("explain")
    assert not short.has_like("Can you explain this map of the old town to my two children?")
    assert not short.has_like("Explain tides.")


PROMPTS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=25).map(" ".join)


@given(st.lists(PROMPTS, max_size=12), PROMPTS)
def test_near_duplicates_are_those_of_a_comparison_with_every_text(
    texts: list[str], text: str
) -> None:
    def shingles(one: str) -> set[tuple[str, ...]]:
        words = one.split()
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)} or {tuple(words)}

    def are_alike(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
        shorter, longer = sorted((len(one), len(other)))
        return len(one & other) >= 0.6 * (shorter if shorter >= 5 else longer)

    found = NearDuplicates(texts)
    assert found.has_like(text) == any(are_alike(shingles(one), shingles(text)) for one in texts)


def test_a_beginning_that_all_texts_share_costs_nothing() -> None:
    """A text is compared with few of those that begin as it does."""
    compared = 0

    class Watched(set[tuple[str, ...]]):
        def __rand__(self, other: Any) -> set[tuple[str, ...]]:
            nonlocal compared
            compared += 1
            return set(other).intersection(self)

    found = NearDuplicates(
        "Can you help me to write " + " ".join(f"w{number}x{i}" for i in range(30))
        for number in range(200)
    )
    found._texts = [Watched(one) for one in found._texts]
    assert not found.has_like("Can you help me to write " + " ".join(f"v{i}" for i in range(30)))
    assert compared <= 1, "the first text had nothing rarer"
    assert found.has_like("Can you help me to write " + " ".join(f"w7x{i}" for i in range(25)))
    assert 1 <= compared <= 3


def test_a_quotation_makes_texts_alike_where_it_is_asked_for() -> None:
    words = [f"w{number}" for number in range(40)]
    other = " ".join([*(f"x{n}" for n in range(30)), *words[5:18], *(f"y{n}" for n in range(30))])
    assert NearDuplicates([" ".join(words)], quotes=True).has_like(other)
    assert not NearDuplicates([" ".join(words)]).has_like(other)
    assert not NearDuplicates([" ".join(words)], quotes=True).has_like(other.replace("w9", "z"))


def test_every_evaluation_prompt_is_found_again() -> None:
    turns = [turn for name in PROMPT_SETS for one in load_prompt_set(name) for turn in one.turns]
    held_out = NearDuplicates(turns, quotes=True)
    assert all(held_out.has_like(turn) for turn in turns)
    assert not held_out.has_like("Which herbs grow well on a shady balcony in the north?")
