"""Trials of a head: the verdict, and the heads that take turns until then."""

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peagle.bundled import BUNDLED_PEAGLE
from peagle.serving import head_swap
from peagle.serving.errors import ApiError
from peagle.serving.head_swap import HeadSwaps, resolve_folders
from peagle.serving.head_trial import HeadSlice, HeadTrial
from peagle.serving.metrics import ServedHead
from peagle.serving.protocol import TrialBody


def fill(part: HeadSlice, count: int, draw: np.random.Generator, length: float) -> None:
    """Count requests whose acceptance lengths vary about `length`."""
    for number in range(count):
        drafts = int(draw.geometric(1 / 20))
        rate = draw.gamma(4, (length - 1) / 4)
        part.counts[number] = [int(draw.poisson(rate * drafts)), drafts]
        part.ended.add(number)


def run_trial(seed: int, length: float, requests: int = 100, share: float = 0.5) -> HeadTrial:
    """Let a head of some acceptance length take turns with one of 3."""
    trial = HeadTrial(ServedHead("old"), ServedHead("new", 2), requests, share)
    draw, is_new = np.random.default_rng(seed), True
    while not (trial.is_worse or trial.has_all):
        fill(part := HeadSlice(), max(20, requests // 10), draw, length if is_new else 3.0)
        assert trial.is_full(part)
        trial.add(part, is_new=is_new)
        if trial.is_due:
            trial.look()
        is_new = trial.is_new_next
    return trial


@pytest.mark.slow
def test_equal_heads_are_seldom_rolled_back() -> None:
    worse = sum(run_trial(seed, 3.0).is_worse for seed in range(100))
    assert worse <= 6  # 2.5 are expected at most


@pytest.mark.slow
def test_worse_heads_are_rolled_back_early_and_better_ones_never() -> None:
    for seed in range(5):
        for share in (0.2, 0.5, 0.8):
            worse = run_trial(seed, 1.5, 500, share)
            assert worse.is_worse and len(worse.new.counts) < 300
        better = run_trial(seed, 4.0)
        assert better.interval is not None and better.interval[0] > 0 and better.has_all
    assert worse.to_json()["new"] == {
        **{"name": "new", "version": 2, "requests": len(worse.new.counts)},
        "acceptance_length": pytest.approx(1.5, abs=0.2),
    }


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_the_heads_share_the_requests(share: float) -> None:
    trial, is_new = HeadTrial(ServedHead("old"), ServedHead("new", 2), 500, share), True
    seen = {True: 0, False: 0}
    for number in range(100):
        part = HeadSlice()
        part.counts = {at: [1, 1] for at in range(20 + number % 3)}
        part.ended = {19, 100}  # the latter without drafts
        trial.add(part, is_new=is_new)
        seen[is_new] += len(part.counts) + 1
        is_new = trial.is_new_next
    assert seen[True] / sum(seen.values()) == pytest.approx(share, abs=0.03)


def test_few_requests_give_no_verdict() -> None:
    trial = HeadTrial(ServedHead("old"), ServedHead("new", 2), 500, 0.5)
    for is_new, count in ((True, 50), (False, 19)):
        fill(part := HeadSlice(), count, np.random.default_rng(0), 1.1 if is_new else 3.0)
        trial.add(part, is_new=is_new)
    trial.look()
    assert trial.interval is None and not trial.is_worse and "unknown" in trial.verdict()


def chunk(accepted: int, drafted: int, output: Any = None) -> Any:
    return SimpleNamespace(num_accepted=accepted, num_drafted=drafted, output=output)


def test_a_slice_counts_steps_with_drafts() -> None:
    part = HeadSlice()
    for step in (chunk(0, 0), chunk(2, 4), chunk(1, 4, "the end")):
        part.count(7, step)
    part.count(8, chunk(0, 0, "the end"))
    assert part.counts == {7: [3, 2]} and part.ended == {7, 8}


# ---- turns ----


class FakePool:
    """Engines that count made-up requests of whichever head serves."""

    head_folder = "/heads/old"

    def __init__(self, length: float) -> None:
        self.engines: list[Any] = [SimpleNamespace(number=i, end="", slice=None) for i in range(2)]
        self.turns: list[bool] = []
        self.done: list[str] = []
        self._length, self._draw = length, np.random.default_rng(0)

    async def try_head(self, folder: str) -> list[Any]:
        return self.engines

    async def turn_head(self, engines: list[Any], *, is_new: bool) -> None:
        assert all(engine.slice is None for engine in engines)
        self.turns.append(is_new)
        if self._length == 0:
            raise ApiError(500, "An engine could not take the head.")

    def restore_head(self, engines: list[Any]) -> None:
        self.done.append("restore")

    def keep_head(self, engines: list[Any], folder: str) -> None:
        self.done.append("keep")

    async def serve(self) -> None:
        """Fill one slice after the other, for as long as there are any."""
        is_new, before = True, None
        while True:
            part = self.engines[0].slice
            if part is not None and part is not before:
                is_new = self.turns[-1] if self.turns else True
                fill(part, 50, self._draw, self._length or 3.0 if is_new else 3.0)
            before = part
            await asyncio.sleep(0)


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(head_swap, "_LOOK_EVERY_S", 0.001)
    return shutil.copytree(BUNDLED_PEAGLE, tmp_path / "new")


async def try_new(new: Path, pool: FakePool, meanwhile: Callable[[FakePool], Any]) -> HeadSwaps:
    any_pool: Any = pool
    swaps = HeadSwaps(any_pool, resolve_folders([str(new.parent)]), ServedHead("old"))
    facts = await swaps.swap(str(new), TrialBody())
    assert facts["head"] == {"name": "new", "version": 2}
    assert facts["trial"]["state"] == "running" and facts["trial"]["requests"] == 500
    if (found := meanwhile(pool)) is not None:
        await found
    else:
        serving = asyncio.ensure_future(pool.serve())
    while swaps.facts()["trial"]["state"] == "running":
        await asyncio.sleep(0.001)
    if found is None:
        serving.cancel()
    assert all(engine.slice is None for engine in pool.engines)
    return swaps


@pytest.mark.slow
def test_a_head_that_is_not_worse_stays(new: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "peagle.serving")
    pool = FakePool(3.2)
    swaps = asyncio.run(try_new(new, pool, lambda _: None))
    assert swaps.facts()["trial"]["state"] == "kept" and pool.done == ["keep"]
    assert swaps.facts()["head"] == {"name": "new", "version": 2} and pool.turns[-1]
    assert swaps.facts()["trial"]["new"]["requests"] == 500
    assert len([line for line in caplog.messages if "ended, it is kept: acceptance" in line]) == 1


def end(pool: FakePool) -> None:
    pool.engines[1].end = "ended by a fault"


FAULTS: dict[str, tuple[float, Callable[[FakePool], Any]]] = {
    "It drafts worse: acceptance length": (1.5, lambda _: None),
    "Engine 1 ended by a fault during the trial.": (3.0, end),
    "An engine could not take the head.": (0, lambda _: None),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_the_old_head_serves_after_a_fault(new: Path, reason: str) -> None:
    pool = FakePool(FAULTS[reason][0])
    swaps = asyncio.run(try_new(new, pool, FAULTS[reason][1]))
    facts = swaps.facts()
    assert facts["trial"]["state"] == "rolled back" and reason in facts["trial"]["reason"]
    assert facts["head"] == {"name": "old", "version": 1} and pool.done == ["restore"]
    assert (swaps.head.num_swaps, swaps.head.num_rollbacks) == (1, 1)


def test_a_head_deleted_during_its_trial(new: Path) -> None:
    swaps = asyncio.run(try_new(new, FakePool(3.0), lambda _: shutil.rmtree(new)))
    assert "folder of the new head was deleted" in swaps.facts()["trial"]["reason"]


def test_the_path_of_the_old_head_ends_a_trial(new: Path) -> None:
    async def run() -> None:
        pool: Any = FakePool(3.0)
        swaps = HeadSwaps(pool, resolve_folders([str(new.parent)]), ServedHead("old"))
        swap = partial(swaps.swap, str(new))
        await swap(TrialBody())
        for path, body in ((str(new), None), ("/heads/old", TrialBody()), ("\0", None)):
            with pytest.raises(ApiError, match="The head 'new' is on trial; GET") as refused:
                await swaps.swap(path, body)
            assert refused.value.status == 409 and "'/heads/old'" in refused.value.message
        facts = await swaps.swap("/heads/old")
        assert facts["head"] == {"name": "old", "version": 1}
        assert facts["trial"]["reason"] == "It was ended by hand."
        assert (await swap())["head"] == {"name": "new", "version": 3}
        assert pool.done == ["restore", "keep"]

    asyncio.run(run())


def test_the_old_head_is_asked_for_while_the_last_turn_keeps_the_new_one(new: Path) -> None:
    async def run() -> None:
        pool: Any = FakePool(3.0)
        pool.head_folder = str(shutil.copytree(new, new.parent / "old"))
        swaps = HeadSwaps(pool, resolve_folders([str(new.parent)]), ServedHead("old"))
        stopping: list[asyncio.Future[Any]] = []
        turn = pool.turn_head

        async def turn_late(engines: list[Any], *, is_new: bool) -> None:
            await turn(engines, is_new=is_new)
            trial = swaps.facts()["trial"]
            if is_new and trial["new"]["requests"] >= 40:
                stopping.append(asyncio.ensure_future(swaps.swap(pool.head_folder)))
                await asyncio.sleep(0.01)

        pool.turn_head = turn_late
        await swaps.swap(str(new), TrialBody(requests=40))
        serving = asyncio.ensure_future(pool.serve())
        while not stopping:
            await asyncio.sleep(0.001)
        facts = await stopping[0]
        serving.cancel()
        assert pool.done == ["keep", "keep"]
        assert facts == {"head": {"name": "old", "version": 3}, "trial": None}

    asyncio.run(run())
