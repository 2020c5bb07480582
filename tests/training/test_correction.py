"""Fitting a correction on a frozen head: the trainer of heads, with something else to train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from peagle import LLM, SamplingParams
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME
from peagle.training.config import TrainConfig
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer
from tests.training.runs import make_config, read_checkpoint, run_until_step

FEW = {"rank": 16, "width": 32, "steps": 12, "learning_rate": 1e-2}
OFTEN = {"log_every": 4, "validate_every": 4, "save_every": 4}


@pytest.fixture(scope="module")
def head(target_folder: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of few steps: what its drafts do not know of each other shows."""
    folder = tmp_path_factory.mktemp("run")
    changes: dict[str, Any] = {"optimizer": {"steps": 60, "learning_rate": 6e-3}}
    Trainer(make_config(target_folder, responses, folder, **changes)).run()
    return folder / "head"


def fitting(target: Path, responses: Path, output: Path, head: Path, **changes: Any) -> TrainConfig:
    given = make_config(target, responses, output, run={**OFTEN, **changes.pop("run", {})})
    data = given.model_dump(mode="json", exclude_none=True)
    return TrainConfig.model_validate({**data, "correction": {"on": head, **FEW, **changes}})


@pytest.mark.slow
def test_it_drafts_better_than_the_head_alone(
    target_folder: Path, responses: Path, head: Path, tmp_path: Path
) -> None:
    files = {path: path.read_bytes() for path in head.iterdir()}
    reports: list[TrainingReport] = []
    config = fitting(target_folder, responses, tmp_path, head, steps=80)
    record = Trainer(config, reports.append).run()
    first, *_, last = [report for report in reports if report.kind == "validation"]
    assert first.step == 0 and last.step == 80
    assert last.loss < 0.8 * first.loss
    assert last.acceptance_lengths[-1] > first.acceptance_lengths[-1] + 0.02
    assert last.accuracy[0] == first.accuracy[0], "the first draft is left alone"
    assert {path: path.read_bytes() for path in files} == files, "the head stays as it is"
    assert record == json.loads((tmp_path / "train.json").read_text())
    assert record["correction"]["rank"] == 16
    with safe_open(head / CORRECTION_NAME, framework="pt") as reader:
        facts = json.loads(reader.metadata()["peagle_correction"])
    assert facts["head"] == record["correction"]["head"]
    assert facts["record"]["data_sha256"] == record["data_sha256"]

    # What validation promises is what serving gives.
    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    best = max(report.acceptance_lengths[-1] for report in reports if report.kind == "validation")
    for correction, promised in ((True, best), (False, first.acceptance_lengths[-1])):
        speculative = {"model": str(head), "num_speculative_tokens": 4, "correction": correction}
        llm = LLM(target_folder, speculative_config=speculative, max_num_seqs=48)
        outputs = llm.generate(
            [row["prompt_token_ids"] for row in rows],
            SamplingParams(max_tokens=24, ignore_eos=True),
        )
        assert [o.token_ids for o in outputs] == [row["response_token_ids"] for row in rows]
        served = llm.engine.stats.speculation.acceptance_length
        assert abs(served - promised) < 0.15, correction


@pytest.mark.slow
def test_a_resumed_fit_equals_an_uninterrupted_one(
    target_folder: Path, responses: Path, head: Path, tmp_path: Path
) -> None:
    Trainer(fitting(target_folder, responses, tmp_path / "whole", head)).run()
    halved = Trainer(fitting(target_folder, responses, tmp_path / "halved", head))
    run_until_step(halved, 8)
    again = Trainer(fitting(target_folder, responses, tmp_path / "halved", head))
    again.run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    assert not any("layers" in name for name in first), "nothing of the head is in it"
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.slow
def test_a_correction_that_does_not_help_is_not_written(
    target_folder: Path, responses: Path, head: Path, tmp_path: Path
) -> None:
    (head / CORRECTION_NAME).unlink(missing_ok=True)
    config = fitting(target_folder, responses, tmp_path, head, learning_rate=1e-12)
    assert Trainer(config).run()["best"]["step"] == 0
    assert not (head / CORRECTION_NAME).exists()


def test_the_heads_own_options_do_not_count(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = fitting(target_folder, responses, tmp_path, tmp_path, survival=0.5)
    assert (config.optimizer.steps, config.optimizer.learning_rate) == (12, 1e-2)
    assert (config.method.loss, config.method.weights()) == ("kl", [0.0, 1.0, 0.5, 0.25])


def test_an_eagle3_head_is_refused(
    target_folder: Path, responses: Path, tmp_path: Path, head_folders: Any
) -> None:
    head = head_folders(parallel=False)
    with pytest.raises(UserError, match="an EAGLE-3 head, whose drafts see each other; expected"):
        Trainer(fitting(target_folder, responses, tmp_path, head))


@pytest.mark.slow
def test_it_goes_on_with_the_present_correction(
    target_folder: Path, responses: Path, head: Path, tmp_path: Path
) -> None:
    """Its first validation is the last one of the fit before, not that of the bare head."""

    def validations(output: str, start: str, **changes: Any) -> list[TrainingReport]:
        reports: list[TrainingReport] = []
        run = fitting(target_folder, responses, tmp_path / output, head, start=start, **changes)
        Trainer(run, reports.append).run()
        return [report for report in reports if report.kind == "validation"]

    before = validations("a", "fresh", steps=40)
    again = validations("b", "present")
    best = next(one for one in reversed(before) if one.is_best)
    assert again[0].loss == pytest.approx(best.loss, rel=0.02), "but for the stored bfloat16"
    assert again[0].loss < 0.95 * before[0].loss
    with pytest.raises(UserError, match=r"correction\.rank is 8, and the correction of the head"):
        validations("c", "present", rank=8)
