"""Runs that start from another head: they learn, resume exactly, and begin better than others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.errors import UserError
from peagle.models.checkpoint import load_drafter
from peagle.models.target import TargetModel
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.warm_start import InitHead
from tests.conftest import make_drafter
from tests.training.checkpoints import read_checkpoint
from tests.training.runs import write_responses
from tests.training.warm_starting import configure, save, write_data


@pytest.fixture
def eagle3_head(target: TargetModel, tmp_path: Path) -> Path:
    drafter = make_drafter(target, parallel=False, num_layers=1)
    return save(tmp_path / "e", target, drafter)


def test_every_parameter_of_a_grown_head_learns(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    """Projections of zero must not hold their layer back for more than a step."""
    data = write_data(tmp_path / "data.jsonl", [[*range(10 + i, 40 + i)] for i in range(20)])
    config = configure(
        target_folder,
        tmp_path / "out",
        eagle3_head,
        data,
        head={"num_layers": 2},
        optimizer={"steps": 3, "learning_rate": 1e-3},
    )
    trainer = Trainer(config)
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    trainer.run()
    for name, parameter in trainer.drafter.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_a_warm_started_run_resumes_exactly(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data.jsonl", [[*range(10 + i, 40 + i)] for i in range(20)])

    def trainer(name: str, *, stop: bool = False) -> Trainer:
        changes = {"optimizer": {"steps": 6}, "run": {"log_every": 1}}
        config = configure(target_folder, tmp_path / name, eagle3_head, data, **changes)
        run = Trainer(config, lambda report: setattr(run, "stop_requested", stop))
        return run

    trainer("whole").run()
    with pytest.raises(TrainingStopped):
        trainer("halved", stop=True).run()
    trainer("halved").run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# ---- a fine-tuned target --------------------------------------------------------------------


def fine_tuned(folder: Path, source: Path) -> Path:
    """The target with every weight a little different."""
    shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * parameter.std().nan_to_num(0) * noise)
    model.save_pretrained(folder)
    return folder


def train(
    target: Path, data: Path, output: Path, init: Path | None, **optimizer: Any
) -> TrainingReport:
    """The last validation of a run."""
    reports: list[TrainingReport] = []
    config = configure(
        target,
        output,
        init,
        data,
        head={} if init else {"num_layers": 1},
        data={"validation": data},
        optimizer=optimizer,
        run={"save_dtype": "float32"},
    )
    Trainer(config, reports.append).run()
    return [report for report in reports if report.kind == "validation"][-1]


def test_a_head_goes_on_for_a_fine_tuned_target(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    train(target_folder, responses, tmp_path / "old", None, steps=150, learning_rate=3e-3)
    tuned = fine_tuned(tmp_path / "tuned", target_folder)
    data = write_responses(tuned, tmp_path / "new.jsonl")
    head = tmp_path / "old/head"
    with pytest.raises(UserError, match="was trained for target"):
        load_drafter(head, TargetModel.load(tuned))

    # One step so small that it changes nothing shows what each begins with.
    begin = {"steps": 1, "learning_rate": 1e-9}
    fresh = train(tuned, data, tmp_path / "fresh", None, **begin)
    first = train(tuned, data, tmp_path / "first", head, **begin)
    assert first.loss < 0.7 * fresh.loss
    assert first.acceptance_lengths[-1] > fresh.acceptance_lengths[-1] + 0.2
    last = train(tuned, data, tmp_path / "last", head, steps=40, learning_rate=3e-3)
    assert last.loss < 0.9 * first.loss
    assert last.acceptance_lengths[-1] >= first.acceptance_lengths[-1]
    load_drafter(tmp_path / "last/head", TargetModel.load(tuned))

    differences = InitHead.read(head, TargetModel.load(tuned)).differences
    assert differences == (
        f"it was {target_folder.name!r} and is 'tuned'",
        "the weights of lm_head are others",
    )
