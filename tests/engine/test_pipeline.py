"""A step in flight: when the next is launched before the last is read, and when it must not be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from peagle.engine.graph_runner import RowReport, read_report
from tests.engine.fake_pipeline import Engine, K, some_accepted, stream


def started(max_tokens: list[int], **options: Any) -> Engine:
    """Sequences whose prompts are computed, with a step in flight and one that went on."""
    engine = Engine(**options)
    for count in max_tokens:
        engine.add(count)
    assert not engine.step(), "prompts"
    assert not engine.step(), "a start"
    assert engine.step(), "nothing has happened"
    assert engine.runner.starts == [len(max_tokens)]
    return engine


# ---- going on -------------------------------------------------------------------------------


def test_one_step_is_in_flight_while_the_last_is_read() -> None:
    engine = started([9, 9])
    runner = engine.runner
    for _ in range(4):
        ahead = runner.num_launches - runner.num_reads
        assert ahead == 1
        lens = [s.num_output_tokens for s in engine.sequences]
        assert engine.step()
        assert [s.num_output_tokens for s in engine.sequences] == [n + 1 for n in lens]
    engine.run_to_the_end()
    # The step that was in flight when both ended brings nothing.
    assert runner.starts == [2]
    assert runner.num_launches == 9


def test_goes_on_past_ends_while_the_graph_is_tight() -> None:
    """4 rows: 3 need as many; 2 and 1 have graphs of their own."""
    engine = started([3, 6, 9, 12])
    engine.run_to_the_end()
    assert engine.runner.starts == [4, 2, 1]
    # Prompts, and a start each; all other steps went on, but the last, which found nobody left.
    assert engine.went_on.count(False) == 1 + 3


@pytest.mark.parametrize("num_ends", [1, 2, 3])
def test_ends_by_stop_ids_within_a_step(num_ends: int) -> None:
    engine = Engine(accept=lambda seq_id, index: K, max_num_seqs=8)
    for seq_id in range(8):
        # A step brings outputs 1 to 3, 4 to 6, ...: some stop at the second of three.
        stops = frozenset({stream(seq_id, 5)}) if seq_id < num_ends else frozenset()
        engine.add(20, stop_token_ids=stops)
    engine.run_to_the_end()
    assert engine.runner.starts == [8]
    lens = [s.num_output_tokens for s in engine.sequences]
    assert lens == [6] * num_ends + [20] * (8 - num_ends)


def test_somebody_who_waits_does_not_stop_those_who_run() -> None:
    """Until a place is free there is nothing for the host to decide."""
    engine = Engine(max_num_seqs=2)
    for max_tokens in [8, 8, 3]:
        engine.add(max_tokens)
    engine.step()
    engine.step()
    for _ in range(6):
        assert engine.step()
        assert len(engine.scheduler.waiting) == 1
    engine.run_to_the_end()
    assert engine.runner.starts == [2, 1]


# ---- stopping to look -----------------------------------------------------------------------


def arrival(engine: Engine) -> None:
    engine.add(4)


def cancel(engine: Engine) -> None:
    engine.end(engine.sequences[1])


def stop(engine: Engine) -> None:
    engine.end(engine.sequences[1], "stop", num_surplus=1)


def change(engine: Engine) -> None:
    """A change of a sequence, as the scheduler counts it."""
    engine.scheduler.version += 1


@pytest.mark.parametrize("event", [arrival, cancel, stop, change], ids=lambda e: e.__name__)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_restarts_when_the_host_changes_something(
    event: Callable[[Engine], None], num_steps: int
) -> None:
    engine = started([6, 20, 20, 20], max_num_seqs=6)
    for _ in range(num_steps):
        assert engine.step()
    launches, reads = engine.runner.num_launches, engine.runner.num_reads
    lens = [s.num_output_tokens for s in engine.sequences]
    event(engine)
    lens[1:2] = [engine.sequences[1].num_output_tokens]  # a stop takes some back
    assert not engine.pipeline.go_on()
    assert (engine.runner.num_launches, engine.runner.num_reads) == (launches, reads)
    # What is in flight counts for those who are there.
    engine.pipeline.drain()
    assert engine.runner.num_reads == reads + 1
    for sequence, before in zip(engine.sequences[:4], lens, strict=True):
        gained = sequence.num_output_tokens - before
        assert gained == (0 if sequence.finish_reason in ("cancelled", "stop") else 1)
    assert not engine.pipeline.go_on(), "nothing is in flight"
    ended = {s.seq_id: s.output_token_ids for s in engine.sequences if s.is_finished}
    engine.run_to_the_end()
    for seq_id, tokens in ended.items():
        assert engine.sequences[seq_id].output_token_ids == tokens


def test_restarts_when_something_changes_while_a_step_is_read() -> None:
    """One ends by itself, which alone would not matter, and another is cancelled on that."""
    engine = Engine(max_num_seqs=8)
    for max_tokens in [5] + [20] * 7:
        engine.add(max_tokens)
    first, last = engine.sequences[0], engine.sequences[-1]
    engine.on_take = lambda: engine.end(last) if first.is_finished else None
    while not first.is_finished:
        engine.step()
    assert engine.went_on[-1] and last.finish_reason == "cancelled"
    assert not engine.step(), "on the device the last one still runs"
    assert engine.runner.starts == [8, 6]
    engine.run_to_the_end()


def test_restarts_when_one_ends_and_somebody_waits() -> None:
    engine = Engine(max_num_seqs=4)
    for max_tokens in [5, 20, 20, 20, 3]:
        engine.add(max_tokens)
    first, waiting = engine.sequences[0], engine.sequences[4]
    while not first.is_finished:
        engine.step()
    assert engine.went_on[-1], "it ended while they went on"
    assert not engine.step(), "three of four would do, but for the one who waits"
    assert waiting in engine.scheduler.running
    engine.run_to_the_end()


@pytest.mark.parametrize(
    ("max_tokens", "starts"), [([9, 5], [2, 1]), ([5, 9, 9], [3, 2]), ([5, 9, 9, 9], [4])]
)
def test_restarts_when_a_smaller_graph_would_do(max_tokens: list[int], starts: list[int]) -> None:
    engine = started(max_tokens)
    while not any(s.is_finished for s in engine.sequences):
        assert engine.step(), "nobody has ended"
    assert engine.step() == (len(starts) == 1)
    assert engine.runner.starts == starts
    engine.run_to_the_end()


def test_one_with_a_prompt_under_way_joins_as_soon_as_it_can() -> None:
    """Each step brings a chunk of the prompt: the others must not go on without it."""
    engine = started([20, 20], budget=6)
    engine.add(3, prompt=15)
    for _ in range(3):
        assert not engine.step()
    assert engine.sequences[2].num_output_tokens == 1
    assert not engine.step()
    assert engine.runner.starts == [2, 2, 2, 2, 3]
    assert engine.step()
    engine.run_to_the_end()


def test_restarts_when_blocks_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_blocks=12)
    engine.add(24)
    engine.add(24)
    engine.step()
    engine.step()
    reserve = engine.scheduler.reserve
    reserved: list[bool] = []
    monkeypatch.setattr(
        engine.scheduler, "reserve", lambda ss: reserved.append(reserve(ss)) or reserved[-1]
    )
    while engine.pipeline.go_on():
        launches = engine.runner.num_launches
    assert reserved.count(False) == 1 and not reserved[-1]
    assert len(reserved) > 3, "for some time there were enough"
    assert not any(s.is_finished for s in engine.sequences)
    assert engine.runner.num_launches == launches, "launched without blocks"
    assert engine.runner.num_launches == engine.runner.num_reads + 1, "what is in flight stays"
    engine.run_to_the_end()
    assert engine.sequences[1].num_preemptions > 0


# ---- who has ended --------------------------------------------------------------------------


def test_who_has_ended_is_neither_read_nor_given_blocks() -> None:
    """The fakes refuse both; here for many steps behind the end, until the last one ends."""
    engine = started([3, 25, 25, 25])
    first = engine.sequences[0]
    while not first.is_finished:
        engine.step()
    for _ in range(15):
        assert engine.step()
        assert first.block_table == []
        assert first.num_output_tokens == 3
    # Its blocks went to others, and those keep them.
    held = [block for s in engine.sequences for block in s.block_table]
    assert len(held) == len(set(held))
    assert len(held) + engine.blocks.num_free_blocks == engine.blocks.num_blocks
    engine.run_to_the_end()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_end_at_once(count: int) -> None:
    engine = started([7] * count)
    engine.run_to_the_end()
    assert not engine.pipeline.go_on(), "nobody is left"
    assert engine.runner.num_launches == engine.runner.num_reads + 1, "nobody asks for it"
    engine.pipeline.drain()
    engine.pipeline.drain()
    assert engine.runner.num_launches == engine.runner.num_reads
    # And the next ones start afresh.
    engine.add(5)
    engine.run_to_the_end()
    assert engine.runner.starts == [count, 1]


def test_a_start_while_a_step_is_in_flight_is_an_assertion() -> None:
    engine = started([9])
    with pytest.raises(AssertionError, match="a step is in flight"):
        engine.pipeline.start(engine.sequences)


# ---- any workload ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_workload_gives_each_its_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(
        max_num_seqs=rng.randrange(1, 10),
        num_blocks=rng.choice([12, 20, 100]),
        budget=rng.choice([5, 50]),
        accept=some_accepted,
    )
    num_requests = rng.randrange(1, 14)
    arrivals = sorted(rng.choice([0, 0, rng.randrange(60)]) for _ in range(num_requests))
    step = 0
    while arrivals or engine.scheduler.has_unfinished:
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            seq_id = len(engine.sequences)
            stops = {stream(seq_id, rng.randrange(30))} if rng.random() < 0.3 else set()
            engine.add(
                rng.randrange(1, 26),
                rng.randrange(1, 20),
                priority=rng.randrange(2),
                stop_token_ids=frozenset(stops),
            )
        for sequence in engine.sequences:
            if sequence.num_output_tokens and rng.random() < 0.01:
                # Behind an end by itself too, as a stop string in its last tokens.
                surplus = 0 if sequence.finish_reason else rng.randrange(2)
                engine.end(sequence, "cancelled", num_surplus=surplus)
        if engine.scheduler.has_unfinished:
            engine.step()
        step += 1
        assert step < 3000, "somebody starves"
    engine.check()


# ---- reports --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([3, 0, 3, 7, -1, -1, -1, 4, 5, 6], RowReport(3, 0, [7], [4, 5, 6])),
        ([3, 3, 1, 7, 8, 9, 2, 4, 5, 6], RowReport(3, 3, [7, 8, 9, 2], [4])),
        ([0, 0, 0, 7, -1, -1, -1, 4, 5, 6], RowReport(0, 0, [7], [])),
        ([2, 1, 2, 7, 8, -1, -1, 4, 5, 6], RowReport(2, 1, [7, 8], [4, 5])),
    ],
)
def test_reading_a_report(row: list[int], expected: RowReport) -> None:
    assert read_report(row, 3) == expected
