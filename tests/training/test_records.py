"""What a run leaves beside its head, and that it stops at a loss without a value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.training.reporting import Window
from peagle.training.step import GradedElements
from peagle.training.trainer import Trainer
from tests.conftest import VOCAB_SIZE
from tests.training.runs import make_config, write_rows


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
        "tokens": 48 * 30,
        "response_tokens": 48 * 24,
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
