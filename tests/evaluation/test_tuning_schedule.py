"""K by batch size: properties of the schedule against every schedule there is."""

import math
from itertools import groupby, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.evaluation.tuning.schedule import (
    best_single_k,
    choose_schedule,
    k_at,
    speculative_config,
    vllm_config,
)

KS = (0, 1, 3, 7)
speeds = st.lists(st.fixed_dictionaries({k: st.floats(1, 2) for k in KS}), min_size=1, max_size=5)
thresholds = st.sampled_from([0.0, 0.03, 0.2, 1.0])


def speed_of(table: list[dict[int, float]]):
    return lambda batch, k: table[batch - 1][k]


@given(speeds, thresholds)
def test_against_all_schedules(table: list[dict[int, float]], threshold: float) -> None:
    found = choose_schedule(speed_of(table), len(table), KS, threshold)
    sizes = [size for first, last, _ in found for size in range(first, last + 1)]
    assert sizes == list(range(1, len(table) + 1))
    assert all(a[2] != b[2] for a, b in pairwise(found))

    def key(ks: tuple[int, ...]) -> tuple[int, float]:
        loss = sum(math.log(max(row.values()) / row[k]) for row, k in zip(table, ks, strict=True))
        return len(list(groupby(ks))), loss

    allowed = [
        ks
        for ks in product(KS, repeat=len(table))
        if all(
            row[k] * (1 + threshold) >= max(row.values()) for row, k in zip(table, ks, strict=True)
        )
    ]
    ours = tuple(k_at(found, size) for size in sizes)
    assert ours in allowed
    assert key(ours) == pytest.approx(min(map(key, allowed)), abs=1e-9)


@given(speeds)
def test_without_a_threshold_every_size_has_its_best(table: list[dict[int, float]]) -> None:
    found = choose_schedule(speed_of(table), len(table), KS, 0.0)
    for size, row in enumerate(table, 1):
        assert row[k_at(found, size)] == max(row.values())


def test_small_gains_do_not_change_k() -> None:
    table = [{3: 100.0, 7: 101.0}, {3: 101.0, 7: 100.0}, {3: 100.0, 7: 101.0}, {3: 110.0, 7: 100.0}]
    assert choose_schedule(speed_of(table), 4, (3, 7), 0.03) == [(1, 4, 3)]
    assert choose_schedule(speed_of(table), 4, (3, 7), 0.0) == [
        (1, 1, 7),
        (2, 2, 3),
        (3, 3, 7),
        (4, 4, 3),
    ]


def test_equal_speeds_draft_least() -> None:
    assert choose_schedule(lambda b, k: 5.0, 4, (0, 3, 7)) == [(1, 4, 0)]


def test_the_best_single_k_is_of_the_geometric_mean() -> None:
    table = {1: {0: 100.0, 3: 200.0}, 16: {0: 1000.0, 3: 600.0}}
    assert best_single_k(lambda b, k: table[b][k], (1, 16), (0, 3)) == 3
    table[16][3] = 499.0
    assert best_single_k(lambda b, k: table[b][k], (1, 16), (0, 3)) == 0


def test_beyond_the_last_range_k_stays() -> None:
    assert [k_at([(1, 2, 7), (3, 4, 0)], n) for n in (1, 2, 3, 4, 99)] == [7, 7, 0, 0, 0]


def test_configurations() -> None:
    assert speculative_config("h", [(1, 8, 0)]) is None
    assert speculative_config("h", [(1, 8, 5)]) == {
        "method": "eagle3",
        "model": "h",
        "num_speculative_tokens": 5,
    }
    ours = speculative_config("h", [(1, 8, 5), (9, 16, 0)])
    assert ours is not None
    assert ours["num_speculative_tokens_per_batch_size"] == [[1, 8, 5], [9, 16, 0]]
    assert vllm_config("h", [(1, 8, 5), (9, 16, 0)], is_parallel=False) == ours


@pytest.mark.parametrize(("largest", "ks", "threshold"), [(0, KS, 0.0), (1, (), 0.0), (1, KS, -1)])
def test_nothing_to_choose(largest: int, ks: tuple[int, ...], threshold: float) -> None:
    with pytest.raises(UserError, match="make no schedule"):
        choose_schedule(lambda b, k: 1.0, largest, ks, threshold)
