"""Kept features against a plain list."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.features import FeatureRing


@given(
    capacity=st.integers(1, 9),
    position=st.integers(0, 30),
    puts=st.lists(st.integers(0, 20), max_size=8),
)
def test_keeps_the_last_positions(capacity: int, position: int, puts: list[int]) -> None:
    ring = FeatureRing(torch.empty(capacity, 2, dtype=torch.float64), position)
    kept: list[int] = []
    end = position
    for count in puts:
        new = list(range(end, end + count))
        end += count
        ring.put(torch.tensor([[p, -p] for p in new], dtype=torch.float64).view(-1, 2))
        kept = (kept + new)[-capacity:]
        assert (ring.first, ring.end) == (end - len(kept), end)
        assert ring.get().tolist() == [[p, -p] for p in kept]
        assert ring.get().dtype == torch.float64


def test_what_was_got_outlives_what_is_put_later() -> None:
    ring = FeatureRing(torch.empty(2, 1), 0)
    ring.put(torch.tensor([[1.0], [2.0]]))
    before = ring.get()
    ring.put(torch.tensor([[3.0]]))
    assert before.tolist() == [[1.0], [2.0]]
    assert ring.get().tolist() == [[2.0], [3.0]]
