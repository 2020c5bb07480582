"""`run.minutes`: steps that are planned by the time of a few, with a clock that the test winds."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.training_plan import make_plan
from tests.training.runs import make_config, read_checkpoint


def ticking(seconds: float) -> Callable[[], float]:
    """A clock by which as much time has passed at each look."""
    times = count(100.0, seconds)
    return lambda: next(times)


def timed(target: Path, responses: Path, output: Path, **changes: Any) -> TrainConfig:
    """18 seconds of a run with the default optimizer."""
    optimizer = {"steps": None, "name": "muon", **changes.pop("optimizer", {})}
    run = {"minutes": 0.3, "log_every": 2, "save_every": 4, **changes.pop("run", {})}
    return make_config(target, responses, output, optimizer=optimizer, run=run, **changes)


def same_weights(one: Path, other: Path) -> bool:
    left, right = read_checkpoint(one), read_checkpoint(other)
    return left.keys() == right.keys() and all(torch.equal(x, right[n]) for n, x in left.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_run_by_time_is_the_run_of_that_many_steps(
    target_folder: Path, responses: Path, tmp_path: Path, method: str
) -> None:
    """Weights, moments, reports: measuring leaves nothing behind."""
    own = {"method": {"name": method}}
    config = timed(target_folder, responses, tmp_path / "timed", **own)
    trainer = Trainer(config, clock=ticking(1.5))
    record = trainer.run()
    assert (record["steps"], record["planned_steps"], record["stop_reason"]) == (12, 12, "steps")
    assert record["config"]["run"]["minutes"] == 0.3
    assert record["config"]["optimizer"]["steps"] == 12
    counted = Trainer(
        timed(
            target_folder,
            responses,
            tmp_path / "counted",
            optimizer={"steps": 12},
            run={"minutes": None},
            **own,
        )
    )
    counted.run()
    assert same_weights(tmp_path / "timed", tmp_path / "counted")
    for name in ("step", "steps", "loss", "learning_rate"):
        ours, theirs = (t.history.every("train") for t in (trainer, counted))
        assert [one[name] for one in ours] == [one[name] for one in theirs]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_planned_steps(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """On a machine that is much slower, or not as busy."""
    Trainer(timed(target_folder, responses, tmp_path / "whole"), clock=ticking(1.5)).run()
    config = timed(target_folder, responses, tmp_path / "parts")
    first = Trainer(config, clock=ticking(1.5))
    first._stepped = lambda step: setattr(first, "stop_requested", step == 5)
    with pytest.raises(TrainingStopped, match="step 5 of 12"):
        first.run()
    assert Trainer(config, clock=ticking(60.0)).run(resume=True)["planned_steps"] == 12
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    other = timed(target_folder, responses, tmp_path / "parts", run={"minutes": 0.6})
    with pytest.raises(UserError, match=r"was made with run.minutes 0.3 \(now 0.6\)"):
        Trainer(other).run(resume=True)
    steps = {"optimizer": {"steps": 14}, "run": {"minutes": None}}
    longer = timed(target_folder, responses, tmp_path / "parts", **steps)
    assert Trainer(longer).run(resume=True)["steps"] == 14


@pytest.mark.slow
def test_long_steps_are_measured_once_and_short_ones_more_often(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    trainer = Trainer(timed(target_folder, responses, tmp_path), clock=ticking(2.0))
    taken: list[int] = []
    real = trainer._train_step
    trainer._train_step = lambda *words, **named: (taken.append(0), real(*words, **named))[1]  # type: ignore[method-assign]
    assert trainer.measure_step(most_seconds=1.0) == 2.0
    assert len(taken) == 2, "one that may compile, one that counts"
    taken.clear()
    assert trainer.measure_step() == 2.0
    assert len(taken) == 9


def test_a_plan_shows_the_steps_if_it_knows_the_speed(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = timed(target_folder, responses, tmp_path)
    unknown = make_plan(config)
    assert unknown.steps is None and unknown.hours is None and unknown.to_json()["steps"] is None
    assert "as a step's time tells when the run begins, by run.minutes = 0.3" in str(unknown)
    speed = unknown.stream.tokens_per_step / 1.5
    plan = make_plan(config, tokens_per_s=speed)
    assert plan.steps == 12 and plan.hours == pytest.approx(0.3 / 60)
    assert "12, by run.minutes = 0.3, " in str(plan)
    assert (plan.to_json()["steps"], plan.to_json()["minutes"]) == (12, 0.3)
