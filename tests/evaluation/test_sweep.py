"""Sweeps: their order, their log, and what they amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request, Run
from peagle.evaluation.journal import Journal
from peagle.evaluation.sweep import LOG_NAME, Arm, Sweep, SweepProgress

SETTINGS = {"max_new_tokens": 64, "target": "t"}


@dataclass
class FakeBackend:
    """Answers at once, at a speed that is made up."""

    speed: float = 100.0
    name: str = "peagle"
    tells_steps: bool = False
    fails_at: int = -1
    calls: list[tuple[int, list[str], int]] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        tokens = requests[0].params.max_tokens
        if tokens > 16:  # no warm-up
            if self.fails_at == len(self.calls):
                raise KeyboardInterrupt
            self.calls.append((concurrency, [one.id for one in requests], tokens))
        each = tokens / self.speed
        answers = [Answer(num_tokens=tokens, chunks=[(each, tokens)], seconds=each)] * len(requests)
        return Run(answers, each * len(requests) / concurrency)


def requests(count: int, max_tokens: int = 64) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(str(number), "text", params) for number in range(count)]


def sweep_of(arms: Sequence[Arm], **options: Any) -> Sweep:
    options = {"sets": {"a": requests(3)}, "concurrencies": (1, 4), "repeats": 2, **options}
    return Sweep(arms, **options)


def two_arms(backend: FakeBackend) -> list[Arm]:
    return [Arm("plain", "", 0, backend), Arm("peagle", "head", 3, backend)]


# ---- the order ------------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_every_cell_once_a_round_in_rotating_order(
    num_arms: int, loads: list[int], num_sets: int, repeats: int
) -> None:
    backend = FakeBackend()
    arms = [Arm(f"m{i}", "", i, backend) for i in range(num_arms)]
    sets = {f"s{i}": requests(2) for i in range(num_sets)}
    sweep = Sweep(arms, sets, loads, repeats)
    order, cells = sweep.order(), list(sweep.cells)
    assert len(cells) == num_arms * len(loads) * num_sets
    rounds = [[cell for r, cell in order if r == repeat] for repeat in range(repeats)]
    assert [repeat for repeat, _ in order] == sorted(repeat for repeat, _ in order)
    for one in rounds:
        assert sorted(map(str, one)) == sorted(map(str, cells))
    # A cell's mean place differs by less than a round's length over the repeats.
    if len(cells) >= repeats:
        assert len({str(one[0]) for one in rounds}) == repeats


def test_prompts_come_again_until_every_slot_had_three() -> None:
    backend = FakeBackend()
    sweep_of(two_arms(backend)[:1], repeats=1).run(Journal(None, SETTINGS))
    assert backend.calls == [(1, ["0", "1", "2"], 64), (4, 4 * ["0", "1", "2"], 64)]


def test_warm_up_is_short_and_once_for_each_arm_and_load() -> None:
    seen: list[tuple[int, int, int]] = []

    class Watching(FakeBackend):
        def run(self, requests: Sequence[Request], concurrency: int, watch: Any = None) -> Run:
            seen.append((concurrency, len(requests), requests[0].params.max_tokens))
            return super().run(requests, concurrency, watch)

    sets = {"a": requests(3), "b": requests(2)}
    sweep = sweep_of([Arm("plain", "", 0, Watching())], sets=sets, warm_up=2)
    sweep.run(Journal(None, SETTINGS))
    assert seen[:4] == [(1, 1, 16), (1, 1, 16), (4, 4, 16), (4, 4, 16)]
    assert all(tokens == 64 for _, _, tokens in seen[4:]) and len(seen) == 4 + 2 * 4


def test_progress_tells_what_is_left() -> None:
    told: list[SweepProgress] = []
    sweep_of(two_arms(FakeBackend()), warm_up=0).run(Journal(None, SETTINGS), told.append)
    assert [one.done for one in told] == list(range(1, 9)) and {one.total for one in told} == {8}
    left = [one.seconds_left for one in told]
    assert left[-1] == 0 and all(seconds is not None and seconds >= 0 for seconds in left)


def test_a_cell_without_any_answer_is_an_error(tmp_path: Path) -> None:
    class Failing(FakeBackend):
        def run(self, requests: Sequence[Request], concurrency: int, watch: Any = None) -> Run:
            return Run([Answer(error="The prompt is too long.") for _ in requests], 0.0)

    log = Journal(tmp_path / LOG_NAME, SETTINGS)
    with pytest.raises(UserError, match=r"plain, concurrency 1, a: no request .*: The prompt is"):
        sweep_of([Arm("plain", "", 0, Failing())]).run(log)
    assert len(log) == 0


# ---- the journal ----------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    whole = sweep_of(two_arms(FakeBackend())).run(Journal(None, SETTINGS))
    backend = FakeBackend(fails_at=5)
    with pytest.raises(KeyboardInterrupt):
        sweep_of(two_arms(backend)).run(Journal(tmp_path / LOG_NAME, SETTINGS))
    assert len(Journal(tmp_path / LOG_NAME, SETTINGS)) == 5
    again = FakeBackend()
    found = sweep_of(two_arms(again)).run(Journal(tmp_path / LOG_NAME, SETTINGS))
    assert len(again.calls) == 3 and found == whole
    # Nothing is left to do, not even a warm-up.
    idle = FakeBackend(fails_at=0)
    assert sweep_of(two_arms(idle)).run(Journal(tmp_path / LOG_NAME, SETTINGS)) == whole


def test_more_of_the_same_is_added(tmp_path: Path) -> None:
    sweep_of(two_arms(FakeBackend())).run(Journal(tmp_path / LOG_NAME, SETTINGS))
    more = FakeBackend()
    found = sweep_of(two_arms(more), repeats=3, concurrencies=(1, 4, 8)).run(
        Journal(tmp_path / LOG_NAME, SETTINGS)
    )
    assert len(more.calls) == 2 * (3 * 3 - 2 * 2)
    assert {len(repeats) for repeats in found.values()} == {3}


@settings(max_examples=12, deadline=None)
@given(cut=st.integers(1, 400))
def test_a_cut_last_line_is_measured_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    sweep_of(two_arms(FakeBackend())).run(Journal(folder / LOG_NAME, SETTINGS))
    file = folder / LOG_NAME
    raw = file.read_bytes()
    last = raw[raw.rfind(b"\n", 0, -1) + 1 :]
    file.write_bytes(raw[: -min(cut, len(last))])
    again = FakeBackend()
    sweep_of(two_arms(again)).run(Journal(folder / LOG_NAME, SETTINGS))
    assert len(again.calls) == 1 and file.read_bytes() == raw
