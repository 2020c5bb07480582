"""Pooled acceptance, and acceptance before loops, on outputs counted by hand."""

from __future__ import annotations

import pytest

from peagle.engine import SpeculationStats
from peagle.evaluation.acceptance import (
    acceptance_figures,
    conditional_acceptance,
    loop_start,
)
from peagle.evaluation.decoding import Completion, DecodedStep
from peagle.llm import RequestOutput


def completion(token_ids: list[int], steps: list[tuple[int, int]]) -> Completion:
    """An output that came as one prompt token and steps of (drafted, accepted)."""
    stats = SpeculationStats()
    for drafted, accepted in steps:
        stats.record(drafted, accepted)
    output = RequestOutput("", token_ids, [1], "length", stats, 0.1)
    return Completion(output, [DecodedStep(1, 0, 0), *(DecodedStep(a + 1, d, a) for d, a in steps)])


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([], None),
        ([1, 2, 3], None),
        ([1, 2, 3, 4, 5, 6, 7, 8], None),
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 3),
        ([9, 1, 2, 3, 4, 1, 2, 3], 5),
        ([9, 1, 2, 3, 4, 1, 2], None),
        ([7, 7, 7], None),
        ([7, 7, 7, 7], 1),  # occurrences may overlap
    ],
)
def test_loop_start(tokens: list[int], start: int | None) -> None:
    assert loop_start(tokens, ngram=3) == start


def test_pooled_not_averaged() -> None:
    short = completion([1, 2, 3], [(3, 1)])
    long = completion(list(range(9)), [(3, 3), (3, 0), (3, 2)])
    result = acceptance_figures([short, long])
    assert (result["num_outputs"], result["num_tokens"]) == (2, 12)
    assert result["num_drafts"] == 4
    assert result["acceptance_length"] == 1 + 6 / 4
    assert result["num_accepted_tokens_per_pos"] == [3, 2, 1]
    assert result["unconditional_acceptance_per_pos"] == [3 / 4, 2 / 4, 1 / 4]
    assert result["conditional_acceptance_per_pos"] == [3 / 4, 2 / 3, 1 / 2]
    assert result["loop_share"] == 0
    assert result["acceptance_length_before_loop"] == result["acceptance_length"]


def test_conditional_acceptance_where_nothing_got() -> None:
    stats = SpeculationStats()
    stats.record(3, 0)
    assert conditional_acceptance(stats) == [0, None, None]


def test_before_the_loop_only_steps_that_end_there_count() -> None:
    # 20 fresh tokens, then the same 20 again: the repeat of a 16-gram begins at index 20.
    tokens = [*range(20), *range(20)]
    # The prompt pass gives token 0; the steps end at 4, 12, 20 (counted), 28, 36, 40.
    steps = [(7, 2), (7, 7), (7, 7), (7, 7), (7, 7), (7, 3)]
    looping = completion(tokens, steps)
    assert sum(step.num_tokens for step in looping.steps) == len(tokens)
    result = acceptance_figures([looping])
    assert result["loop_share"] == 1
    assert result["num_drafts_before_loop"] == 3
    assert result["acceptance_length_before_loop"] == 1 + 16 / 3
    assert result["acceptance_length"] == 1 + 33 / 6
    # A step that ends one token later straddles the boundary and is left out.
    straddling = completion([*tokens, 99], [(7, 3), *steps[1:]])
    assert acceptance_figures([straddling])["num_drafts_before_loop"] == 2


def test_outputs_with_and_without_loops_pool() -> None:
    looping = completion([5] * 30, [(4, 4)] * 5 + [(4, 3)])
    fresh = completion(list(range(10)), [(4, 2), (4, 2), (4, 2)])
    pooled = acceptance_figures([looping, fresh])
    assert pooled["loop_share"] == 0.5
    # [5] * 17 repeats its first 16-gram at index 1: no step of that output ends that early.
    assert pooled["num_drafts_before_loop"] == 3


def test_steps_without_a_draft_count_as_steps() -> None:
    found_once = completion([1, 2, 3, 4, 5, 6], [(0, 0), (3, 2), (0, 0)])
    pooled = acceptance_figures([found_once])
    assert pooled["acceptance_length"] == 3
    assert pooled["tokens_per_step"] == 1 + 2 / 3


def test_nothing_at_all() -> None:
    result = acceptance_figures([])
    assert result["acceptance_length"] == 1 and result["loop_share"] == 0
