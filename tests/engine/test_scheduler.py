"""Scheduling within the seats, the blocks and the token budget: order, waiting, preemption."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.scheduler import BLOCKS_AHEAD, Chunk, Schedule, Scheduler
from peagle.engine.sequence import Sequence, SequenceStatus

MAX_MODEL_LEN = 24
LOOKAHEAD = 4
WAITING = SequenceStatus.WAITING


def make_scheduler(
    num_blocks: int = 20, max_num_seqs: int = 3, budget: int = 100, block_size: int = 4
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        num_lookahead_slots=LOOKAHEAD,
    )


def make_sequence(
    seq_id: int, prompt: int | list[int], max_tokens: int = 4, **options: Any
) -> Sequence:
    tokens = [100 + seq_id] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(seq_id, tokens, params, seed=0, stop_token_ids=frozenset(), **options)


def finish(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.status = SequenceStatus.FINISHED
    scheduler.retire(sequence)


def run(scheduler: Scheduler) -> Schedule:
    """One step with what the engine does to the sequences; every token is 7."""
    plan = scheduler.schedule()
    for chunk in [*plan.prefill, *plan.decode]:
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_tokens
        if chunk.samples:
            sequence.append([7], MAX_MODEL_LEN)
            sequence.drafts = []
        settled = min(sequence.num_computed_tokens, len(sequence) - 1)
        scheduler.blocks.publish(sequence, settled, settled)
        if sequence.is_finished:
            scheduler.retire(sequence)
    return plan


def ids(chunks: list[Chunk]) -> list[tuple[int, int]]:
    """Which sequences, and how many tokens of each."""
    return [(chunk.sequence.seq_id, chunk.num_tokens) for chunk in chunks]


def prefills(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Run to the end: the prompt passes."""
    found = []
    while scheduler.has_unfinished:
        plan = run(scheduler)
        found += [ids(plan.prefill)] if plan.prefill else []
    return found


def test_a_plan_that_preempts_is_announced() -> None:
    """Where blocks end, and where a request of higher priority waits; never without either."""
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    assert not scheduler.may_preempt()
    scheduler.add(make_sequence(0, 6, 9))
    scheduler.add(make_sequence(1, 3, 9))
    found = list[tuple[bool, bool]]()
    while scheduler.has_unfinished:
        is_announced = scheduler.may_preempt()
        found.append((is_announced, bool(run(scheduler).preempted)))
    assert set(found) == {(False, False), (True, True)}
    scheduler.add(make_sequence(2, 3, 9, priority=1))
    run(scheduler)
    scheduler.add(make_sequence(3, 3, 9))
    assert scheduler.may_preempt()


@given(
    lengths=st.lists(st.integers(1, 16), max_size=8),
    num_blocks=st.integers(6, 20),
    max_num_seqs=st.integers(1, 8),
)
def test_load_counts_those_that_join_as_soon_as_their_prompts_may(
    lengths: list[int], num_blocks: int, max_num_seqs: int
) -> None:
    """A scheduler whose steps hold any number of prompt tokens admits as many at once."""
    small, large = (make_scheduler(num_blocks, max_num_seqs, budget) for budget in (4, 1000))
    for scheduler in (small, large):
        for seq_id, length in enumerate(lengths):
            scheduler.add(make_sequence(seq_id, length, 1))
    load = large.load
    assert small.load == load
    if lengths:
        assert len(large.schedule().admitted) == load
        small.schedule()
        assert small.load == load and len(small.running) <= load
    assert large.load == len(large.running)


def test_prompts_share_a_pass_and_are_cut_at_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=9, budget=16)
    for i, length in enumerate([6, 12, 1, 20]):
        scheduler.add(make_sequence(i, length, 9))
    assert prefills(scheduler) == [[(0, 6), (1, 10)], [(1, 2), (2, 1), (3, 13)], [(3, 7)]]


def test_a_step_computes_a_limited_number_of_prompts() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=9)
    scheduler.max_prompts = 2
    for i in range(5):
        scheduler.add(make_sequence(i, 3, 9))
    assert prefills(scheduler) == [[(0, 3), (1, 3)], [(2, 3), (3, 3)], [(4, 3)]]


def test_a_long_prompt_goes_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence(0, 2, 9))
    assert ids(run(scheduler).prefill) == [(0, 2)]
    scheduler.add(make_sequence(1, 20))
    for num_tokens, samples in [(8, False), (8, False), (4, True)]:
        plan = run(scheduler)
        assert ids(plan.decode) == [(0, 1)]
        assert plan.prefill == [Chunk(plan.prefill[0].sequence, num_tokens, samples=samples)]
    assert ids(run(scheduler).decode) == [(0, 1), (1, 1)]


def test_a_large_request_is_not_overtaken() -> None:
    # The second needs more blocks than are free while the first runs; the third would fit.
    scheduler = make_scheduler(num_blocks=7)
    for i, (length, max_tokens) in enumerate([(4, 6), (20, 4), (1, 1)]):
        scheduler.add(make_sequence(i, length, max_tokens))
    assert prefills(scheduler) == [[(0, 4)], [(1, 20)], [(2, 1)]]


def test_one_who_yields_is_not_overtaken_by_one_who_needs_less() -> None:
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=2)
    first, large, small = make_sequence(0, 4, 12), make_sequence(1, 10, 8), make_sequence(2, 1, 1)
    for sequence in (first, large, small):
        scheduler.add(sequence)
    while first.status is not SequenceStatus.FINISHED:
        plan = run(scheduler)
        if plan.preempted:
            assert plan.preempted == [large]
            break
    assert small.status is WAITING, "it would have fitted into what the large one gave up"


def test_a_shared_prompt_is_computed_once() -> None:
    scheduler = make_scheduler(budget=6)
    leader = make_sequence(0, list(range(11)))
    followers = [make_sequence(i, list(range(11)), leader=leader) for i in (1, 2)]
    other = make_sequence(3, 2)
    for sequence in (leader, *followers, other):
        scheduler.add(sequence)
    assert ids(run(scheduler).prefill) == [(0, 6)]
    assert ids(run(scheduler).prefill) == [(0, 5), (3, 1)], "those that do not wait may go on"
    assert ids(run(scheduler).prefill) == [(3, 1), (1, 3)], "two blocks of four are there"
    assert followers[0].block_table[:2] == leader.block_table[:2]
    assert followers[0].num_cached_tokens == 8


def test_the_last_in_order_yields_and_resumes_where_it_was() -> None:
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=2)
    first, last = make_sequence(0, 4, 16), make_sequence(1, 6, 12)
    scheduler.add(first)
    scheduler.add(last)
    while not (plan := run(scheduler)).preempted:
        last.drafts = [8, 9]
    assert plan.preempted == [last]
    assert (last.status, last.block_table, last.num_computed_tokens) == (WAITING, [], 0)
    assert last.num_preemptions == 1
    tokens = list(last.token_ids)
    assert len(tokens) > 7, "it had decoded"
    finish(scheduler, first)
    # Its tokens but the newest are computed again, as far as the KV is gone; then it goes on.
    chunks = []
    while last.token_ids == tokens:
        chunks.append(run(scheduler))
    computed = chunks[0].admitted[0].num_cached_tokens
    assert computed == 0, "counted at its first admission only"
    prefill = [chunk for plan in chunks for chunk in plan.prefill]
    assert not any(chunk.samples for chunk in prefill)
    assert sum(chunk.num_tokens for chunk in prefill) in range(1, len(tokens))
    assert chunks[-1].decode == [Chunk(last, 1, num_draft_tokens=2)], "with the drafts it had"


@pytest.mark.parametrize(("priority", "takes"), [(0, True), (1, False), (2, False)])
@pytest.mark.parametrize("scarce", ["seats", "blocks"])
def test_higher_priority_takes_seats_and_blocks_of_lower(
    scarce: str, priority: int, takes: bool
) -> None:
    limits = {"max_num_seqs": 2} if scarce == "seats" else {"num_blocks": 8, "max_num_seqs": 9}
    scheduler = make_scheduler(**limits)
    running = [make_sequence(i, 6, 4, priority=1) for i in range(2)]
    for sequence in running:
        scheduler.add(sequence)
    run(scheduler)
    urgent = make_sequence(2, 6, priority=priority)
    scheduler.add(urgent)
    plan = run(scheduler)
    assert plan.admitted == ([urgent] if takes else [])
    assert plan.preempted == ([running[1]] if takes else []), "the last to come goes first"
    assert running[1].seq_id not in dict(ids(plan.decode)) or not takes


@pytest.mark.parametrize(("num_blocks", "are_many"), [(200, True), (20, False)])
def test_blocks_come_ahead_and_for_all_together_where_many_are_free(
    num_blocks: int, are_many: bool
) -> None:
    """Lengths differ, so that each by itself would need its next block at another step."""
    scheduler = make_scheduler(num_blocks)
    sequences = [make_sequence(i, 2 + i, max_tokens=40) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler)
    seen: list[list[int]] = []
    for _ in range(BLOCKS_AHEAD * 4):
        run(scheduler)
        seen.append([len(one.block_table) for one in sequences])
        held = [one.block_table for one in sequences]
        assert len({block for table in held for block in table}) == sum(map(len, held))
        assert all(4 * len(one.block_table) <= MAX_MODEL_LEN for one in sequences)
    changes = sum(now != before for before, now in pairwise(seen))
    assert changes <= 1 if are_many else changes > 8


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
def test_retiring_frees_what_is_held(state: str) -> None:
    scheduler = make_scheduler(max_num_seqs=1, budget=3)
    sequence, other = make_sequence(0, 4), make_sequence(1, 4)
    scheduler.add(sequence)
    scheduler.add(other)
    for _ in range({"waiting": 1, "prefilling": 1, "running": 2}[state]):
        run(scheduler)
    leaving = other if state == "waiting" else sequence
    assert leaving.is_prefilling == (state != "running")
    finish(scheduler, leaving)
    finish(scheduler, leaving)  # once more changes nothing
    assert leaving.block_table == []
    assert [*scheduler.running, *scheduler.waiting] == [sequence if leaving is other else other]
    if leaving is sequence:
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
