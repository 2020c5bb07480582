"""When a plan of many epochs, and a validation that gets worse, are warned of."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from peagle.training.overfitting import epochs_warning, rising_validation
from peagle.training.trainer import Trainer
from peagle.training.training_plan import make_plan
from tests.training.runs import make_config


@pytest.mark.parametrize(
    ("steps", "steps_per_epoch", "num_tokens", "warns"),
    [
        (930, 100, 12_300_000, True),  # the trial whose heads overfitted
        (700, 100, 12_300_000, True),
        (301, 100, 49_999_999, True),
        (300, 100, 12_300_000, False),
        (190, 100, 60_900_000, False),  # the trial in which validation still improved
        (900, 100, 60_900_000, False),
    ],
)
def test_many_epochs_of_few_tokens(
    steps: int, steps_per_epoch: int, num_tokens: int, warns: bool
) -> None:
    assert bool(epochs_warning(steps, steps_per_epoch, num_tokens)) == warns


def test_the_warning_says_how_many_and_what_to_do() -> None:
    text = epochs_warning(930, 100, 12_300_000)
    for expected in ("9.3 epochs of 12,300,000 tokens", "`peagle data regenerate`", "steps = 300."):
        assert expected in text
    assert not epochs_warning(300, 100, 12_300_000), "it advises what it does not warn of"


def reports(training: list[float], validation: list[float]) -> list[dict[str, Any]]:
    """A report of training and then one of validation at each of some steps."""
    found = []
    for step, (one, other) in enumerate(zip(training, validation, strict=True), start=1):
        found.append({"kind": "train", "step": step, "loss": one})
        found.append({"kind": "validation", "step": step, "loss": other})
    return found


@pytest.mark.parametrize(
    ("training", "validation", "warns"),
    [
        ([3.0, 2.5, 2.0, 1.5], [3.2, 3.0, 3.1, 3.2], True),
        ([3.0, 2.5, 2.0], [3.0, 3.1, 3.2], True),
        ([3.0, 2.5, 2.0, 1.5], [3.2, 3.0, 3.1, 3.05], False),  # it came down again
        ([3.0, 2.5, 2.0, 1.5], [3.2, 3.1, 3.0, 3.1], False),  # once
        ([3.0, 2.5, 2.6, 2.7], [3.2, 3.0, 3.1, 3.2], False),  # both get worse: no overfitting
        ([3.0, 2.5], [3.0, 3.1], False),
        ([3.0, 2.5, 2.0], [3.0, 3.0, 3.0], False),
    ],
)
def test_a_rising_validation(training: list[float], validation: list[float], warns: bool) -> None:
    assert bool(rising_validation(reports(training, validation))) == warns


def test_a_rising_validation_is_told_with_its_figures() -> None:
    text = rising_validation(reports([3.0, 2.5, 2.0, 1.5], [3.2, 3.0, 3.1, 3.2]))
    for expected in ("from step 2 to 4 (3.000, 3.100, 3.200)", "(2.500, 1.500)", "run.patience"):
        assert expected in text
    without_training = [one for one in reports([3, 2, 1], [1, 2, 3]) if one["kind"] != "train"]
    assert rising_validation(without_training) == ""


def told(trainer: Trainer, **options: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run(**options)
    return [str(one.message) for one in caught]


@pytest.mark.slow
def test_a_run_warns_before_it_starts_and_so_does_its_plan(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    def config(steps: int) -> Any:
        return make_config(target_folder, responses, tmp_path, optimizer={"steps": steps})

    trainer = Trainer(config(1))
    epoch = trainer.stream.steps_per_epoch
    many, few = 4 * epoch, 3 * epoch
    plan = make_plan(config(many))
    assert f"4.0 epochs of {48 * 30:,} tokens" in plan.warning
    assert plan.to_json()["warning"] == plan.warning and f"warning: {plan.warning}" in str(plan)
    assert "warning" not in str(make_plan(config(few)))
    assert make_plan(config(few)).to_json()["warning"] == ""
    steps: list[int] = []
    trainer = Trainer(config(many), stepped=steps.append)
    trainer._warn_of_epochs = lambda: steps.append(0)  # type: ignore[method-assign]
    trainer.run()
    assert steps[0] == 0, "before the first step"
    other = config(many).model_copy(update={"output": tmp_path / "b"})
    assert told(Trainer(other)) == [plan.warning]
    assert told(Trainer(other), resume=True) == []


@pytest.mark.slow
def test_a_run_warns_once_of_a_validation_that_gets_worse(
    target_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations whose losses rise by 1 each; training is a real run, and learns."""
    every = {"log_every": 1, "validate_every": 2}
    config = make_config(target_folder, responses, tmp_path, optimizer={"steps": 12}, run=every)
    trainer = Trainer(config)
    real, rises = trainer.validate, iter(range(1, 99))

    def worse() -> Any:
        report = real()
        assert report is not None
        object.__setattr__(report, "loss", report.loss + next(rises))
        return report

    monkeypatch.setattr(trainer, "validate", worse)
    found = told(trainer)
    assert len(found) == 1 and "rose from step 2 to 6" in found[0]
