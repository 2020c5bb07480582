"""Sweeps: their order, their log, and going on after an interruption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request, Run
from peagle.evaluation.journal import BENCH_LOG, Journal
from peagle.evaluation.sweep import Arm, Sweep, SweepProgress

SETTINGS = {"max_new_tokens": 64, "target": "t"}


@dataclass
class FakeBackend:
    """Answers at once, at a speed that is made up."""

    name: str = "peagle"
    tells_steps: bool = False
    fails_at: int = -1
    error: str = ""
    calls: list[tuple[int, list[str]]] = field(default_factory=list)
    warm_ups: list[tuple[int, int]] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        tokens = requests[0].params.max_tokens
        if tokens == 16:
            assert not self.calls, "warm-ups come first"
            self.warm_ups.append((concurrency, len(requests)))
        else:
            if self.fails_at == len(self.calls):
                raise KeyboardInterrupt
            self.calls.append((concurrency, [one.id for one in requests]))
        each = tokens / 100.0
        answer = Answer(num_tokens=tokens, chunks=[(each, tokens)], seconds=each, error=self.error)
        return Run([answer] * len(requests), each * len(requests) / concurrency)


def requests(count: int) -> list[Request]:
    return [Request(str(number), "text", SamplingParams(max_tokens=64)) for number in range(count)]


def sweep_of(backend: FakeBackend, num_arms: int = 2, **options: Any) -> Sweep:
    arms = [Arm(f"m{i}", "", i, backend) for i in range(num_arms)]
    given: dict[str, Any] = {"sets": {"a": requests(3)}, "concurrencies": (1, 4), "repeats": 2}
    return Sweep(arms, **{**given, **options})


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_every_cell_once_a_round_in_rotating_order(
    num_arms: int, loads: list[int], num_sets: int, repeats: int
) -> None:
    sets = {f"s{i}": requests(2) for i in range(num_sets)}
    sweep = sweep_of(
        FakeBackend(), num_arms, sets=sets, concurrencies=tuple(loads), repeats=repeats
    )
    (order,), cells = sweep.stages(), list(sweep.points)
    assert len(cells) == num_arms * len(loads) * num_sets
    assert [repeat for repeat, _ in order] == sorted(repeat for repeat, _ in order)
    rounds = [[point for r, point in order if r == repeat] for repeat in range(repeats)]
    assert all(sorted(map(str, one)) == sorted(map(str, cells)) for one in rounds)
    # A point's mean place differs by less than a round's length over the repeats.
    if len(cells) >= repeats:
        assert len({str(one[0]) for one in rounds}) == repeats


def test_prompts_come_again_until_every_slot_had_three() -> None:
    backend = FakeBackend()
    sweep_of(backend, 1, repeats=1).run(Journal(None, SETTINGS))
    assert backend.calls == [(1, ["0", "1", "2"]), (4, 4 * ["0", "1", "2"])]


def test_warm_up_is_short_and_once_for_each_arm_and_load() -> None:
    backend = FakeBackend()
    sweep_of(backend, 1, sets={"a": requests(3), "b": requests(2)}, warm_up=2).run(
        Journal(None, SETTINGS)
    )
    assert backend.warm_ups == [(1, 1), (1, 1), (4, 4), (4, 4)] and len(backend.calls) == 2 * 4


def test_progress_tells_what_is_left() -> None:
    told: list[SweepProgress] = []
    sweep_of(FakeBackend(), warm_up=0).run(Journal(None, SETTINGS), told.append)
    assert [one.done for one in told] == list(range(1, 9)) and {one.total for one in told} == {8}
    left = [one.seconds_left for one in told]
    assert left[-1] == 0 and all(seconds is not None and seconds >= 0 for seconds in left)


def test_an_arm_with_the_machine_to_itself_runs_alone(tmp_path: Path) -> None:
    """Its backend begins with its first run and is closed behind the last, or behind an error."""
    events: list[str] = []

    class Server(FakeBackend):
        def run(self, *args: Any, **options: Any) -> Run:
            events.append(self.name)
            return super().run(*args, **options)

    def sweep(**fails_at: int) -> Sweep:
        servers = [Server(name, fails_at=fails_at.get(name, -1)) for name in ("a", "b", "c", "d")]
        arms = [
            Arm(one.name, "", 0, one, None, partial(events.append, f"close {one.name}"))
            if one.name in "bd"
            else Arm(one.name, "", 0, one)
            for one in servers
        ]
        return Sweep(arms, {"a": requests(3)}, (1,), repeats=2, warm_up=1)

    with pytest.raises(KeyboardInterrupt):
        sweep(b=1).run(Journal(tmp_path / BENCH_LOG, SETTINGS))
    warm_up = ["c", "a"]
    assert events == [*warm_up, "a", "c", "c", "a", "b", "b", "b", "close b"]
    events.clear()
    found = sweep().run(Journal(tmp_path / BENCH_LOG, SETTINGS))
    assert events == ["b", "b", "close b", "d", "d", "d", "close d"]
    assert {point.method: len(runs) for point, runs in found.items()} == dict.fromkeys("abcd", 2)


def test_a_cell_without_any_answer_is_an_error(tmp_path: Path) -> None:
    log = Journal(tmp_path / BENCH_LOG, SETTINGS)
    with pytest.raises(UserError, match=r"m0, concurrency 1, a: no request .*: The prompt is"):
        sweep_of(FakeBackend(error="The prompt is too long.")).run(log)
    assert len(log) == 0


def test_an_interrupted_sweep_goes_on_and_takes_more(tmp_path: Path) -> None:
    def run(backend: FakeBackend, **options: Any) -> Any:
        return sweep_of(backend, **options).run(Journal(tmp_path / BENCH_LOG, SETTINGS))

    with pytest.raises(KeyboardInterrupt):
        run(FakeBackend(fails_at=5))
    assert len(Journal(tmp_path / BENCH_LOG, SETTINGS)) == 5
    again = FakeBackend()
    found = run(again)
    assert {one.sitting for repeats in found.values() for one in repeats} == {1, 2}
    alike = {
        point: [one.model_copy(update={"sitting": 1}) for one in repeats]
        for point, repeats in found.items()
    }
    assert alike == sweep_of(FakeBackend()).run(Journal(None, SETTINGS))
    assert len(again.calls) == 3
    idle = FakeBackend(fails_at=0)
    run(idle)
    assert not idle.warm_ups, "nothing is left to do, not even a warm-up"
    more = FakeBackend()
    found = run(more, repeats=3, concurrencies=(1, 4, 8))
    assert len(more.calls) == 2 * (3 * 3 - 2 * 2)
    assert {len(repeats) for repeats in found.values()} == {3}


@settings(max_examples=12, deadline=None)
@given(cut=st.integers(1, 400))
def test_a_cut_last_line_is_measured_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    file = tmp_path_factory.mktemp("log") / BENCH_LOG
    sweep_of(FakeBackend()).run(Journal(file, SETTINGS))
    raw = file.read_bytes()
    last = raw[raw.rfind(b"\n", 0, -1) + 1 :]
    file.write_bytes(raw[: -min(cut, len(last))])
    again = FakeBackend()
    sweep_of(again).run(Journal(file, SETTINGS))
    assert len(again.calls) == 1
    assert file.read_bytes().replace(b'"sitting": 2', b'"sitting": 1') == raw
