"""K by the number of sequences that run together, as vLLM's configuration has it."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.config import SpeculativeConfig
from peagle.errors import UserError


def parse(schedule: Any, k: int = 7) -> SpeculativeConfig:
    keys = {"model": "head", "num_speculative_tokens": k}
    return SpeculativeConfig.parse({**keys, "num_speculative_tokens_per_batch_size": schedule})


@pytest.mark.parametrize("schedule", [[[2, 16, 7], [20, 64, 4]], {"2-16": 7, "20-64": 4}])
def test_ranges_and_gaps(schedule: Any) -> None:
    config = parse(schedule, k=6)
    found = [config.tokens_for(size) for size in (1, 2, 16, 17, 19, 20, 64, 500)]
    assert found == [6, 6, 6, 6, 6, 4, 4, 4], "gaps have the K before them, and K is the most"
    assert config.num_speculative_tokens_per_batch_size == ((2, 16, 7), (20, 64, 4))


def test_no_drafts_from_some_load_on() -> None:
    for schedule in ([[1, 16, 7], [17, 64, 0]], {"1-16": 7, "17-64": 0}):
        config = parse(schedule)
        assert [config.tokens_for(size) for size in (1, 16, 17, 500)] == [7, 7, 0, 0]


def test_without_a_schedule_k_is_k() -> None:
    assert {parse(None).tokens_for(size) for size in (1, 7, 1000)} == {7}
    assert [parse({"1": 3}).tokens_for(size) for size in (1, 2)] == [3, 3]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([], "expected ranges of batch sizes with their K, like [[1, 16, 7], [17, 64, 4]]"),
        (5, "is 5; expected ranges"),
        ([[1, 4]], "is [[1, 4]]; expected ranges"),
        ([[1, 4, "5"]], "expected ranges"),
        ({"1-": 3}, "is {'1-': 3}; expected ranges"),
        ({"one": 3}, "expected ranges"),
        ([[0, 4, 5]], "expected batch sizes from 1"),
        ([[5, 4, 3]], "last not below first"),
        ([[1, 4, -1]], "K of at least 0"),
        ([[1, 4, 5], [4, 8, 3]], "expected ascending ranges that do not overlap"),
    ],
    ids=str,
)
def test_what_is_refused(schedule: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(schedule)
    assert str(caught.value).startswith("num_speculative_tokens_per_batch_size is ")
    assert expected in str(caught.value)
