"""Scheduling: first come first served, within the seats, the blocks and the token budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence, SequenceStatus

MAX_MODEL_LEN = 24


def make_sequence(seq_id: int, prompt_len: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(seq_id, [1] * prompt_len, params, seed=0, stop_token_ids=frozenset())


@dataclass
class Workload:
    """Requests and the limits they are served under."""

    requests: list[tuple[int, int, int]]  # prompt length, max_tokens, step of arrival
    num_blocks: int = 20
    block_size: int = 4
    max_num_seqs: int = 3
    budget: int = 16
    lookahead: int = 6
    cancelled: dict[int, int] = field(default_factory=dict)  # request: step

    def scheduler(self) -> Scheduler:
        return Scheduler(
            BlockManager(self.num_blocks, self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=MAX_MODEL_LEN,
            num_lookahead_slots=self.lookahead,
        )


def check_blocks(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    owned = [block for sequence in sequences for block in sequence.block_table]
    assert len(set(owned)) == len(owned), "a block has two owners"
    assert len(owned) + scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    for sequence in sequences:
        running = sequence.status is SequenceStatus.RUNNING
        assert running == bool(sequence.block_table)
        assert running == (sequence in scheduler.running)
        if running:
            held = len(sequence.block_table) * scheduler.blocks.block_size
            longest = len(sequence.prompt_token_ids) + sequence.params.max_tokens
            assert held >= min(longest, MAX_MODEL_LEN) + scheduler.num_lookahead_slots


def serve(load: Workload) -> list[list[int]]:
    """Run the workload to its end, checking every step; returns the prefills as lists of ids."""
    scheduler = load.scheduler()
    sequences = [make_sequence(i, p, m) for i, (p, m, _) in enumerate(load.requests)]
    prefills: list[list[int]] = []
    arrived: set[int] = set()
    for step in range(1000):
        for i, (_, _, arrival) in enumerate(load.requests):
            if arrival <= step and i not in arrived:
                arrived.add(i)
                scheduler.add(sequences[i])
        for i, when in load.cancelled.items():
            if when == step and i in arrived:
                scheduler.cancel(sequences[i])
        check_blocks(scheduler, sequences)
        if not scheduler.has_unfinished:
            if len(arrived) == len(sequences):
                break
            continue
        waiting = list(scheduler.waiting)
        free, seats = scheduler.blocks.num_free_blocks, load.max_num_seqs - len(scheduler.running)
        batch = scheduler.schedule()
        ids = [s.seq_id for s in batch.sequences]
        assert ids, "an empty step"
        assert len(scheduler.running) <= load.max_num_seqs
        if batch.is_prefill:
            assert batch.sequences == waiting[: len(ids)], "first come, first served"
            lens = [len(s.prompt_token_ids) for s in batch.sequences]
            assert sum(lens) <= load.budget or len(lens) == 1
            prefills.append(ids)
        else:
            assert set(ids) == {s.seq_id for s in scheduler.running}, "every sequence moves on"
            if waiting:
                needed = scheduler.blocks.blocks_for(scheduler.slots_needed(waiting[0]))
                assert seats == 0 or needed > free, "a prompt waits though it would fit"
        check_blocks(scheduler, sequences)
        for sequence in batch.sequences:
            sequence.append([7], MAX_MODEL_LEN)
        scheduler.retire_finished()
    assert all(s.is_finished for s in sequences)
    assert not scheduler.has_unfinished
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    return prefills


requests = st.tuples(st.integers(1, MAX_MODEL_LEN - 1), st.integers(1, 30), st.integers(0, 20))


@settings(deadline=None, max_examples=200)
@given(
    st.builds(
        Workload,
        requests=st.lists(requests, min_size=1, max_size=10),
        num_blocks=st.integers(8, 30),  # the longest request takes 8
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 40),
        cancelled=st.dictionaries(st.integers(0, 9), st.integers(0, 40), max_size=4).map(dict),
    )
)
def test_every_request_is_served_within_the_limits(load: Workload) -> None:
    load.cancelled = {i: step for i, step in load.cancelled.items() if i < len(load.requests)}
    served = [i for ids in serve(load) for i in ids]
    assert len(served) == len(set(served)), "a prompt ran twice"
    # In the order of arrival, of those not cancelled while they waited.
    order = sorted(range(len(load.requests)), key=lambda i: (load.requests[i][2], i))
    assert served == [i for i in order if i in served]
    assert set(range(len(load.requests))) - set(served) <= set(load.cancelled)


def test_prompts_share_a_pass_within_the_budget() -> None:
    load = Workload([(6, 2, 0), (10, 2, 0), (1, 2, 0), (20, 2, 0)], num_blocks=40, max_num_seqs=9)
    assert serve(load) == [[0, 1], [2], [3]]


def test_a_prompt_longer_than_the_budget_runs_alone() -> None:
    assert serve(Workload([(20, 2, 0), (1, 2, 0)])) == [[0], [1]]


def test_a_large_request_is_not_overtaken() -> None:
    # The second needs more blocks than are free while the first runs; the third would fit.
    load = Workload([(4, 6, 0), (20, 4, 0), (1, 1, 0)], num_blocks=8, budget=100)
    assert serve(load) == [[0], [1], [2]]


def test_seats_limit_the_batch() -> None:
    load = Workload([(1, 3, 0)] * 5, num_blocks=100, max_num_seqs=2, budget=100)
    assert serve(load) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
def test_cancel(state: str) -> None:
    scheduler = Workload([], max_num_seqs=1).scheduler()
    sequence, other = make_sequence(0, 4, 8), make_sequence(1, 4, 8)
    if state == "waiting":
        scheduler.add(other)
        scheduler.add(sequence)
        scheduler.schedule()
        scheduler.cancel(sequence)
        assert list(scheduler.waiting) == []
        assert scheduler.running == [other]
    else:
        scheduler.add(sequence)
        scheduler.schedule()
        if state == "finished":
            sequence.append([7] * 8, MAX_MODEL_LEN)
            scheduler.retire_finished()
        scheduler.cancel(sequence)
        assert not scheduler.has_unfinished
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    assert sequence.is_finished
    assert sequence.finish_reason == ("length" if state == "finished" else "cancelled")
    scheduler.cancel(sequence)  # once more changes nothing
    assert sequence.block_table == []


def test_nothing_to_schedule_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="nothing runs and nothing fits"):
        Workload([]).scheduler().schedule()
