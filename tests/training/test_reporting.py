"""What a run writes down, which head it keeps, and when it stops."""

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.training.config import RunSection
from peagle.training.reporting import Selection, TrainingReport, Window
from peagle.training.step import GradedElements
from peagle.training.trainer import Trainer, TrainingStopped
from tests.conftest import VOCAB_SIZE
from tests.training.runs import make_config, steps_of, twelve_steps, write_rows


@pytest.mark.parametrize("save_every", [1, 100])
def test_a_loss_without_a_value_stops_the_run(
    target_folder: Path, responses: Path, tmp_path: Path, save_every: int
) -> None:
    """Step 2 reads weights of 1e30; nothing after it is saved."""
    config = make_config(
        target_folder,
        responses,
        tmp_path,
        optimizer={"steps": 9, "learning_rate": 1e30},
        run={"save_every": save_every, "log_every": 4},
    )
    with pytest.raises(UserError, match=r"is (nan|inf) at step 2 of 9") as caught:
        Trainer(config).run()
    assert "optimizer.learning_rate (1e+30)" in str(caught.value)
    checkpoint = tmp_path / "checkpoint"
    if save_every == 1:
        assert "checkpoint' is from before" in str(caught.value)
        assert json.loads((checkpoint / "state.json").read_text())["step"] == 1
        assert all(x.isfinite().all() for x in load_head(tmp_path).values())
    else:
        assert not checkpoint.exists() and "is from before" not in str(caught.value)


def load_head(folder: Path) -> dict[str, torch.Tensor]:
    return {n: x.float() for n, x in load_file(folder / "head" / "model.safetensors").items()}


def test_a_validation_without_a_value_stops_the_run(
    target_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, optimizer={"steps": 2}, run={"save_every": 1}
    )
    trainer = Trainer(config)
    evaluate = trainer._step.evaluate

    def broken(*args: Any) -> Any:
        return replace(evaluate(*args), loss=torch.tensor(torch.inf))

    monkeypatch.setattr(trainer._step, "evaluate", broken)
    with pytest.raises(UserError, match="loss is inf at the validation after step 2"):
        trainer.run()
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 1


def test_a_gradient_without_a_value_is_found() -> None:
    """The loss is still finite; the weights no longer are."""
    batch = SimpleNamespace(tokens_BN=torch.zeros(1, 4), num_tokens=4)
    none = torch.zeros(0, dtype=torch.int64)
    outcome = GradedElements(none, none, none, none.bool(), torch.tensor(1.0))
    window = Window(2, torch.device("cpu"))
    for norm in (1.0, float("inf"), float("nan")):
        window.add(outcome, batch, torch.tensor(norm))  # type: ignore[arg-type]
    assert window.broken() == (1, "gradient norm", float("inf"))


def test_the_record_says_where_the_head_comes_from(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    few = write_rows(
        tmp_path / "few.jsonl", list(map(json.loads, responses.read_text().splitlines()))[:5]
    )
    config = make_config(
        target_folder,
        responses,
        tmp_path / "run",
        data={"validation": few},
        optimizer={"steps": 3},
        run={"seed": 8},
    )
    record = Trainer(config).run()
    assert record == json.loads((tmp_path / "run" / "train.json").read_text())
    for name in ("peagle", "torch", "transformers", "python", "device", "cpu", "threads"):
        assert record[name]
    assert "commit" in record and record["command"]
    assert record["data"]["train"] == {
        "file": "responses.jsonl",
        "sha256": sha256_of(responses),
        "sequences": 48,
        "responses": 48,
        "tokens": 48 * 30,
        "response_tokens": 48 * 24,
        "origins": [],
    }
    assert record["data_sha256"] == record["data"]["train"]["sha256"]
    validated = record["data"]["validation"]
    assert validated["sha256"] == sha256_of(few) and validated["sequences"] == 5
    assert record["target"]["vocab_size"] == VOCAB_SIZE and record["target"]["lm_head_sha256"]
    settings = record["config"]
    assert settings["run"]["seed"] == 8 and settings["method"]["depth"] == 4
    assert settings["data"]["batch_tokens"] == 256
    assert str(tmp_path) not in json.dumps({n: record[n] for n in record if n != "command"})
    assert record["tokens"] == pytest.approx(3 * 256, rel=0.2) and record["seconds"] > 0


# ---- which head is kept ----


def a_report(step: int, length: float, loss: float, **changes: Any) -> TrainingReport:
    values: dict[str, Any] = dict.fromkeys((f.name for f in fields(TrainingReport)), 0.0)
    lengths = {"acceptance_lengths": [1.0, length], "sampled_acceptance_lengths": [1.0, 9 - length]}
    values |= {"kind": "validation", "step": step, "loss": loss, "num_drafts": 9, **lengths}
    return TrainingReport(**{**values, **changes})


def test_the_best_is_the_longest_and_of_equals_the_one_with_the_lower_loss() -> None:
    selection = Selection(RunSection.model_validate({"patience": 2}), depth=2)
    found = [(1.5, 3.0), (1.5, 3.1), (1.4, 1.0), (1.5, 2.9), (1.6, 4.0), (1.6, 4.0), (1.5, 1.0)]
    better, exhausted = [], []
    for step, (length, loss) in enumerate(found, start=1):
        better.append(selection.consider(a_report(step, length, loss)))
        exhausted.append(selection.exhausted)
    assert better == [True, False, False, True, True, False, False]
    assert exhausted == [False, False, True, False, False, False, True]
    assert selection.best is not None and selection.best["step"] == 5
    sampled = Selection(RunSection.model_validate({"select": "sampled", "select_k": 2}), depth=8)
    assert [sampled.consider(a_report(i, *f)) for i, f in enumerate(found)][2]
    assert sampled.best is not None and sampled.best["acceptance_length"] == 9 - 1.4
    assert not sampled.exhausted


def test_where_nothing_can_be_walked_the_newest_head_is_the_best() -> None:
    selection = Selection(RunSection.model_validate({"patience": 1}), depth=2)
    for step in (1, 2, 3):
        assert selection.consider(a_report(step, 1.0, step, num_drafts=0))
    assert not selection.exhausted


class Scripted(Trainer):
    """A trainer whose validations find what a script says; it keeps the heads they saw."""

    script: dict[int, float]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[int, torch.Tensor] = {}

    def validate(self) -> TrainingReport | None:
        report = super().validate()
        assert report is not None
        self.seen[self.step] = self.drafter.fc.weight.detach().clone()
        return replace(report, acceptance_lengths=[1.0, self.script[self.step], 1.0, 1.0])


def scripted(script: dict[int, float]) -> type[Scripted]:
    return type("Run", (Scripted,), {"script": script})


def kept(folder: Path) -> torch.Tensor:
    return load_file(folder / "head" / "model.safetensors")["fc.weight"]


RISE_AND_FALL = {2: 1.5, 4: 1.9, 6: 1.7, 8: 1.9, 10: 1.6, 12: 1.2}


@pytest.mark.slow
def test_the_best_head_is_kept(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    """Of steps 4 and 8, equal in acceptance, the one with the lower loss."""
    trainer = scripted(RISE_AND_FALL)(
        make_config(target_folder, responses, tmp_path, **twelve_steps(select_k=2))
    )
    record = trainer.run()
    best = record["best"]
    losses = {e["step"]: e["loss"] for e in trainer.history.every("validation")}
    assert losses[8] < losses[4]
    assert (best["step"], best["k"], best["select"], best["temperature"]) == (8, 2, "greedy", 0)
    assert best["acceptance_length"] == 1.9 and best["validation"]["step"] == 8
    assert torch.equal(kept(tmp_path), trainer.seen[8])
    assert not torch.equal(kept(tmp_path), trainer.seen[12])
    assert record["stop_reason"] == "steps" and record["validation"]["step"] == 12
    assert [e["step"] for e in trainer.history.every("validation") if e["is_best"]] == [2, 4, 8]


@pytest.mark.slow
def test_without_validation_the_newest_head_is_kept(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, data={"validation": None}, **twelve_steps()
    )
    trainer = Trainer(config)
    assert trainer.run()["best"] is None
    assert torch.equal(kept(tmp_path), trainer.drafter.fc.weight)


@pytest.mark.slow
def test_patience_ends_the_run(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    script = {**RISE_AND_FALL, 8: 1.8}
    config = make_config(target_folder, responses, tmp_path, **twelve_steps(select_k=2, patience=2))
    trainer = scripted(script)(config)
    record = trainer.run()
    assert (record["steps"], record["stop_reason"], record["best"]["step"]) == (8, "patience", 4)
    assert torch.equal(kept(tmp_path), trainer.seen[4])
    assert json.loads((tmp_path / "train.json").read_text()) == record
    assert steps_of(tmp_path, "validation") == [2, 4, 6, 8]
    # Resumed, it is at its end; with more patience it goes on.
    again = scripted(script)(config)
    assert again.run(resume=True)["steps"] == 8 and again.seen == {}
    patient = make_config(
        target_folder, responses, tmp_path, **twelve_steps(select_k=2, patience=4)
    )
    record = scripted(script)(patient).run(resume=True)
    assert (record["steps"], record["stop_reason"], record["best"]["step"]) == (12, "steps", 4)
    assert steps_of(tmp_path, "train") == list(range(1, 13))


@pytest.mark.slow
def test_a_resumed_run_knows_the_best_head_and_repeats_no_line(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, **twelve_steps(select_k=2, save_every=3)
    )
    first = scripted(RISE_AND_FALL)(config, lambda r: None)
    first.report = lambda r: setattr(first, "stop_requested", r.step == 5)
    with pytest.raises(TrainingStopped):
        first.run()
    best = kept(tmp_path)
    state = json.loads((tmp_path / "checkpoint" / "state.json").read_text())
    with (tmp_path / "metrics.jsonl").open("a") as lines:  # a run that died at step 7
        lines.write('{"kind": "train", "step": 6, "loss": 1}\n{"kind": "validation", "step": 6}\n')
        lines.write('{"kind": "tra')
    script = {6: 1.7, 8: 1.8, 10: 1.6, 12: 1.2}
    record = scripted(script)(config).run(resume=True)
    assert record["best"]["step"] == 4 and torch.equal(kept(tmp_path), best)
    assert steps_of(tmp_path, "train") == list(range(1, 13))
    assert steps_of(tmp_path, "validation") == [2, 4, 6, 8, 10, 12]
    assert record["tokens"] > 2 * state["progress"]["tokens"] > 0
    # Chosen by another figure, the best one so far counts no more.
    other = make_config(target_folder, responses, tmp_path, **twelve_steps(select_k=1))
    assert scripted(script)(other).run(resume=True)["best"] is None


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"select_k": 5}, r"run.select_k is 5; expected at most method.depth, 4"),
        ({"select": "sampled", "validation_temperature": 0}, "run.validation_temperature is 0"),
        ({"validation_temperature": -1}, "greater than or equal to 0"),
        ({"patience": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, tmp_path, tmp_path, run=run)


def test_patience_needs_validation_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"patience is 3, but there is no data.validation"):
        make_config(*[tmp_path] * 3, data={"validation": None}, run={"patience": 3})
