"""Sweeps: their order, their log, and what they amount to."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request, Run
from peagle.evaluation.gpu_busy import GpuBusy
from peagle.evaluation.sweep import Arm, Cell, Progress, Sweep
from peagle.evaluation.sweep_log import NAME, SweepLog
from peagle.evaluation.throughput import summarize
from peagle.evaluation.timing import Objective, figures_of

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


def test_prompts_come_again_until_every_slot_has_one() -> None:
    backend = FakeBackend()
    sweep_of(two_arms(backend)[:1], repeats=1).run(SweepLog(None, SETTINGS))
    assert backend.calls == [(1, ["0", "1", "2"], 64), (4, ["0", "1", "2", "0"], 64)]


def test_warm_up_is_short_and_once_for_each_arm_and_load() -> None:
    seen: list[tuple[int, int, int]] = []

    class Watching(FakeBackend):
        def run(self, requests: Sequence[Request], concurrency: int, watch: Any = None) -> Run:
            seen.append((concurrency, len(requests), requests[0].params.max_tokens))
            return super().run(requests, concurrency, watch)

    sets = {"a": requests(3), "b": requests(2)}
    sweep = sweep_of([Arm("plain", "", 0, Watching())], sets=sets, warm_up=2)
    sweep.run(SweepLog(None, SETTINGS))
    assert seen[:4] == [(1, 1, 16), (1, 1, 16), (4, 4, 16), (4, 4, 16)]
    assert all(tokens == 64 for _, _, tokens in seen[4:]) and len(seen) == 4 + 2 * 4


def test_progress_tells_what_is_left() -> None:
    told: list[Progress] = []
    sweep_of(two_arms(FakeBackend()), warm_up=0).run(SweepLog(None, SETTINGS), told.append)
    assert [one.done for one in told] == list(range(1, 9)) and {one.total for one in told} == {8}
    left = [one.seconds_left for one in told]
    assert left[-1] == 0 and all(seconds is not None and seconds >= 0 for seconds in left)


def test_a_cell_without_any_answer_is_an_error(tmp_path: Path) -> None:
    class Failing(FakeBackend):
        def run(self, requests: Sequence[Request], concurrency: int, watch: Any = None) -> Run:
            return Run([Answer(error="The prompt is too long.") for _ in requests], 0.0)

    log = SweepLog[Cell](tmp_path, SETTINGS)
    with pytest.raises(UserError, match=r"plain, concurrency 1, a: no request .*: The prompt is"):
        sweep_of([Arm("plain", "", 0, Failing())]).run(log)
    assert len(log) == 0


# ---- the log --------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    whole = sweep_of(two_arms(FakeBackend())).run(SweepLog(None, SETTINGS))
    backend = FakeBackend(fails_at=5)
    with pytest.raises(KeyboardInterrupt):
        sweep_of(two_arms(backend)).run(SweepLog(tmp_path, SETTINGS))
    assert len(SweepLog(tmp_path, SETTINGS)) == 5
    again = FakeBackend()
    found = sweep_of(two_arms(again)).run(SweepLog(tmp_path, SETTINGS))
    assert len(again.calls) == 3 and found == whole
    # Nothing is left to do, not even a warm-up.
    idle = FakeBackend(fails_at=0)
    assert sweep_of(two_arms(idle)).run(SweepLog(tmp_path, SETTINGS)) == whole


def test_more_of_the_same_is_added(tmp_path: Path) -> None:
    sweep_of(two_arms(FakeBackend())).run(SweepLog(tmp_path, SETTINGS))
    more = FakeBackend()
    found = sweep_of(two_arms(more), repeats=3, concurrencies=(1, 4, 8)).run(
        SweepLog(tmp_path, SETTINGS)
    )
    assert len(more.calls) == 2 * (3 * 3 - 2 * 2)
    assert {len(repeats) for repeats in found.values()} == {3}


@settings(max_examples=12, deadline=None)
@given(cut=st.integers(1, 400))
def test_a_cut_last_line_is_measured_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    sweep_of(two_arms(FakeBackend())).run(SweepLog(folder, SETTINGS))
    file = folder / NAME
    raw = file.read_bytes()
    last = raw[raw.rfind(b"\n", 0, -1) + 1 :]
    file.write_bytes(raw[: -min(cut, len(last))])
    again = FakeBackend()
    sweep_of(two_arms(again)).run(SweepLog(folder, SETTINGS))
    assert len(again.calls) == 1 and file.read_bytes() == raw


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({**SETTINGS, "max_new_tokens": 128}, "max_new_tokens was 64; it is 128 now"),
        ({**SETTINGS, "seed": 1}, "seed was null; it is 1 now"),
        ({"max_new_tokens": 64}, 'target was "t"; it is null now'),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, others: dict[str, Any], told: str
) -> None:
    sweep_of(two_arms(FakeBackend())).run(SweepLog(tmp_path, SETTINGS))
    with pytest.raises(UserError, match=f"{told}.*another --output"):
        SweepLog(tmp_path, others)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello\n", "line 1: no line of a sweep"),
        ('{"format_version": 2, "settings": {}}\n', "has format_version 2"),
        (json.dumps({"format_version": 1, "settings": SETTINGS}) + "\n[]\n", "line 2: no line"),
    ],
)
def test_files_that_are_no_log(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=told):
        SweepLog(tmp_path, SETTINGS)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: .*another --output"):
        SweepLog(tmp_path / "file" / "below", SETTINGS)


# ---- what it amounts to ---------------------------------------------------------------------


def measured(speeds: dict[tuple[str, int, int], list[float]]) -> dict[Cell, list[dict[str, Any]]]:
    """Repeats of cells by (method, K, concurrency) at these tokens/s."""
    found: dict[Cell, list[dict[str, Any]]] = {}
    for (method, k, concurrency), every in speeds.items():
        answers = [Answer(num_tokens=10, chunks=[(0.1 * concurrency, 10)], seconds=1.0)]
        cell = Cell(method, "", "peagle", k, concurrency, "a")
        found[cell] = [figures_of(Run(answers, 10 / speed)) for speed in every]
    return found


def test_medians_speed_ups_best_k_and_linearity() -> None:
    result = summarize(
        measured(
            {
                ("plain", 0, 1): [90, 100, 500],
                ("plain", 0, 4): [300, 200, 250],
                ("eagle3", 3, 1): [150, 160, 140],
                ("eagle3", 5, 1): [120, 120, 120],
                ("peagle", 3, 1): [200, 210, 190],
                ("peagle", 7, 1): [300, 290, 310],
                ("peagle", 7, 4): [200, 200, 200],
            }
        ),
        None,
    )
    by_key = {(c["method"], c["k"], c["concurrency"]): c for c in result["cells"]}
    best = by_key["peagle", 7, 1]
    assert best["median"]["output_tokens_per_s"] == pytest.approx(300)
    assert best["spread"]["output_tokens_per_s"] == pytest.approx([290, 310])
    assert best["speed_up_over_plain"] == pytest.approx(3)
    assert best["speed_up_over_eagle3"] == pytest.approx(2)  # over its best K
    assert by_key["peagle", 7, 4]["speed_up_over_eagle3"] is None
    assert by_key["peagle", 7, 4]["speed_up_over_plain"] == pytest.approx(0.8)
    assert by_key["peagle", 7, 4]["linearity"] == pytest.approx(200 / 1200)
    assert by_key["plain", 0, 4]["linearity"] == pytest.approx(250 / 400)
    found = {(one["method"], one["concurrency"]): one["k"] for one in result["best_k"]}
    assert found == {("eagle3", 1): 3, ("peagle", 1): 7, ("peagle", 4): 7}
    assert best["meets_objective"] is None and result["goodput"] == []


def test_goodput_is_the_most_that_keeps_the_objective() -> None:
    speeds = {("peagle", 3, c): [10.0 * c] for c in (1, 2, 4, 8)}
    result = summarize(measured(speeds), Objective(450, None, 90))
    assert [cell["meets_objective"] for cell in result["cells"]] == [True, True, True, False]
    (one,) = result["goodput"]
    assert (one["method"], one["k"], one["concurrency"]) == ("peagle", 3, 4)
    assert one["requests_per_s"] == pytest.approx(4)
    assert summarize(measured(speeds), Objective(1, None, 90))["goodput"] == []


# ---- the GPU --------------------------------------------------------------------------------


def test_busy_is_the_mean_of_what_was_seen() -> None:
    values = iter([0.9, *[0.2, 0.4] * 500])
    with GpuBusy(None, lambda: next(values)) as busy:
        time.sleep(0.35)
    assert busy.share is not None and 0.2 <= busy.share <= 0.4
    with GpuBusy(torch.device("cpu")) as busy:
        time.sleep(0.15)
    assert busy.share is None


@pytest.mark.parametrize("status", [0, 1])
def test_nvml_is_asked_for_the_device(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    asked: list[bytes] = []

    class Library:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
            asked.append(uuid)
            return status

        def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:
            found._obj.gpu, found._obj.memory = 42, 7
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    facts = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    with GpuBusy(torch.device("cuda")) as busy:
        time.sleep(0.25)
    assert asked == [b"GPU-1234"] and busy.share == (None if status else pytest.approx(0.42))
