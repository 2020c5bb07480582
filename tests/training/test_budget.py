"""Segments are chosen from a budget: the fewest that fit, and numbers where none do."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.training.budget import MAX_SEGMENTS, Budget, available_ram, choose_memory
from peagle.training.config import RunSection
from peagle.training.memory import StepMemory, step_memory
from peagle.training.step_shape import StepShape
from tests.training.memory_runs import Case

GIB = 2**30
LONG = Case(rows=4, length=512, method={"depth": 8})


def run_section(**options: Any) -> RunSection:
    return RunSection(device="cpu", **options)  # type: ignore[call-arg]


def choose(shape: StepShape, size: float, **options: Any) -> StepMemory:
    budget = Budget(int(size), "run.memory_gib is so much", True)
    return choose_memory(shape, run_section(**options), budget)


def total(shape: StepShape, segments: int, recompute: bool) -> int:
    return step_memory(shape, segments, recompute).total


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 9])
def test_the_fewest_segments_that_fit(segments: int) -> None:
    shape = LONG.shape
    needed = total(shape, segments, False)
    found = choose(shape, needed)
    assert (found.segments, found.recompute, found.total) == (segments, False, needed)
    if segments > 1:
        more = choose(shape, needed - 1)
        assert more.segments > segments


def test_more_memory_never_takes_more_segments() -> None:
    shape = LONG.shape
    most, least = total(shape, 1, False), total(shape, MAX_SEGMENTS, True)
    ways = []
    for i in range(60):
        size = least + (most - least) * i / 59
        found = choose(shape, size)
        assert found.total <= size
        ways.append((found.recompute, found.segments))
    assert ways == sorted(ways, reverse=True)
    assert ways[-1] == (False, 1) and ways[0][0]


def test_layers_are_recomputed_only_where_nothing_else_fits() -> None:
    shape = LONG.shape
    without = min(total(shape, count, False) for count in range(1, MAX_SEGMENTS + 1))
    assert not choose(shape, without).recompute
    found = choose(shape, without - 1)
    assert found.recompute
    assert found.segments == 1 or total(shape, found.segments - 1, True) > without - 1


def test_what_is_written_stays() -> None:
    shape, ample = LONG.shape, 100 * GIB
    found = choose(shape, ample, segments=6, recompute_layers=True)
    assert (found.segments, found.recompute) == (6, True)
    # Recomputation makes room for a number that is written.
    found = choose(shape, total(shape, 2, False) - 1, segments=2)
    assert (found.segments, found.recompute) == (2, True)
    # A guess at the memory overrules nobody who has written everything.
    guess = Budget(1, "half", False)
    written = run_section(segments=2, recompute_layers=False)
    assert choose_memory(shape, written, guess).segments == 2
    with pytest.raises(UserError, match=r"A step may take 1 B \(half\)"):
        choose_memory(shape, run_section(), guess)


def test_eagle3_has_one_way() -> None:
    shape = Case(method={"name": "eagle3"}).shape
    found = choose_memory(shape, run_section(), Budget(1, "half", False))
    assert (found.segments, found.recompute) == (1, False)
    with pytest.raises(UserError, match=r"positions takes about [\d.]+ MiB \("):
        choose(shape, 1)


# ---- refusals -------------------------------------------------------------------------------


def refusal(shape: StepShape, size: float, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        choose(shape, size, **options)
    return str(caught.value)


def test_a_refusal_says_what_is_there_and_what_is_not() -> None:
    shape = LONG.shape
    size = total(shape, 2, False) - 1
    text = refusal(shape, size, recompute_layers=False, segments=1)
    assert text.startswith("A step may take ") and "(run.memory_gib is so much)" in text
    needed = step_memory(shape, 1, False)
    assert f"4 x 512 positions takes about {needed.total / 2**20:.1f} MiB in 1 segment (" in text
    assert f"segment {needed.parts['segment'] / 2**20:.1f} MiB" in text
    rows = re.search(r"data\.batch_tokens = (\d+) \(", text)
    assert rows is not None
    smaller = Case(rows=int(rows[1]) // 512, length=512, method={"depth": 8}).shape
    assert total(smaller, 1, False) <= size


def test_two_changes_where_one_is_not_enough() -> None:
    shape = LONG.shape
    size = total(shape, 8, True)
    assert min(total(shape, 1, True), total(shape, MAX_SEGMENTS, False)) > size
    text = refusal(shape, size, recompute_layers=False, segments=1)
    assert 'run.segments = "auto" and run.recompute_layers = true (' in text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"segments": 1}, 'run.segments = "auto" ('),
        ({"recompute_layers": False}, "run.recompute_layers = true ("),
    ],
)
def test_one_change_that_is_enough(options: dict[str, Any], advice: str) -> None:
    shape = LONG.shape
    size = total(shape, 8, True)
    text = refusal(shape, size, **options)
    assert advice in text
    update = {"segments": "auto"} if "segments" in options else {"recompute_layers": True}
    assert choose(shape, size, **{**options, **update}).total <= size


def test_a_long_row_is_told_to_be_shorter() -> None:
    shape = Case(rows=1, length=4096).shape
    size = total(shape, MAX_SEGMENTS, True) / 2
    text = refusal(shape, size)
    length = re.search(r"data\.max_length = data\.batch_tokens = (\d+) \(", text)
    assert length is not None and "data.batch_tokens = 4096" not in text
    assert choose(Case(rows=1, length=int(length[1])).shape, size).total <= size


def test_a_head_that_is_too_large_itself() -> None:
    shape = LONG.shape
    target = dataclasses.replace(shape.target, num_parameters=3 * GIB)
    text = refusal(dataclasses.replace(shape, target=target), 2 * GIB)
    assert "No shorter batch would fit" in text and "head.num_layers" in text
    assert "stored features (`peagle data features`) spare the target's 12.0 GiB" in text


# ---- budgets --------------------------------------------------------------------------------


def test_where_a_budget_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    given = Budget.of(run_section(memory_gib=1.5), cpu)
    assert given == Budget(3 * GIB // 2, "run.memory_gib is 1.5", True)
    half = Budget.of(run_section(), cpu)
    assert 0.3 < half.size / available_ram() < 0.7 and not half.is_given
    assert half.source.startswith("50% of the ")
    planned = Budget.of(run_section(), gpu, 80)
    assert planned.size == int(72 * GIB) and planned.source == "90% of the 80.0 GiB of a GPU"
    monkeypatch.setattr("peagle.training.budget.free_and_total", lambda _: (70 * GIB, 80 * GIB))
    monkeypatch.setattr("peagle.training.budget.device_name", lambda _: "Card 9")
    here = Budget.of(run_section(), gpu)
    assert here == Budget(int(63 * GIB), "90% of the 70.0 GiB free on Card 9", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, 'expected "auto" or a whole number of at least 1'),
        ({"segments": "many"}, 'expected "auto" or a whole number'),
        ({"segments": True}, 'expected "auto" or a whole number'),
        ({"recompute_layers": 3}, 'expected "auto", true or false'),
        ({"memory_gib": 0}, "greater than 0"),
    ],
)
def test_mistakes_in_the_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_section(**options)
