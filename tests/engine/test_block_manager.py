"""KV blocks: every block has one owner or is free, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.sequence import Sequence


def make_sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1], SamplingParams(), seed=0, stop_token_ids=frozenset())


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40),
)
def test_no_block_is_lost_or_owned_twice(
    num_blocks: int, block_size: int, operations: list[tuple[bool, int]]
) -> None:
    blocks = BlockManager(num_blocks, block_size)
    owners: list[Sequence] = []
    for step, (give_back, number) in enumerate(operations):
        if give_back and owners:
            sequence = owners.pop(number % len(owners))
            blocks.free(sequence)
            assert sequence.block_table == []
        elif blocks.can_allocate(number):
            owners.append(make_sequence(step))
            blocks.allocate(owners[-1], number)
            held = len(owners[-1].block_table) * block_size
            assert number <= held < number + block_size, "enough, and no block too many"
        else:
            assert -(-number // block_size) > num_blocks - sum(len(o.block_table) for o in owners)
        taken = [block for owner in owners for block in owner.block_table]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_blocks))
        assert blocks.num_free_blocks == num_blocks - len(taken)
    for owner in owners:
        blocks.free(owner)
    everything = make_sequence(-1)
    blocks.allocate(everything, num_blocks * block_size)
    assert sorted(everything.block_table) == list(range(num_blocks)), "all of them came back"


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_a_number_of_tokens(tokens: int, expected: int) -> None:
    assert BlockManager(10, 4).blocks_for(tokens) == expected


def test_misuse_is_an_assertion() -> None:
    blocks, sequence = BlockManager(2, 4), make_sequence(0)
    with pytest.raises(AssertionError, match="not enough free blocks"):
        blocks.allocate(sequence, 9)
    blocks.allocate(sequence, 4)
    with pytest.raises(AssertionError, match="has blocks already"):
        blocks.allocate(sequence, 4)


def test_freeing_twice_does_nothing() -> None:
    blocks, sequence = BlockManager(2, 4), make_sequence(0)
    blocks.allocate(sequence, 4)
    blocks.free(sequence)
    blocks.free(sequence)
    assert blocks.num_free_blocks == 2
