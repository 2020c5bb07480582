"""Small training runs, and what they wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.data.dataset import ResponseDataset
from peagle.models.checkpoint import save_drafter, split_tensors
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel, load_tokenizer
from peagle.training.build import Built, build_drafter
from peagle.training.config import TrainConfig
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer


def make_config(target: Path, responses: Path, output: Path, **changes: Any) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "head": {"num_layers": 1},
        "data": {
            "train": responses,
            "validation": responses,
            "batch_tokens": 256,
            "length_multiple": 8,
        },
        "method": {"name": "peagle", "depth": 4},
        "optimizer": {"steps": 40, "learning_rate": 3e-3},
        "run": {"log_every": 10, "validate_every": 20, "save_every": 10, "device": "cpu"},
    }
    for name, section in changes.items():
        sections[name] = {**sections.get(name, {}), **section}
    return TrainConfig.model_validate({"target": target, "output": output, **sections})


def write_rows(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    """A data file, one row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_responses(target: Path, path: Path) -> Path:
    """Greedy responses of a target to random prompts, as JSONL."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 300, (6,), generator=generator).tolist() for _ in range(48)]
    llm = LLM(target, max_num_seqs=48)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    return write_rows(
        path,
        [
            {"prompt_token_ids": prompt, "response_token_ids": output.token_ids}
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
    )


def twelve_steps(**run: Any) -> dict[str, dict[str, Any]]:
    """Changes for `make_config`: every step is logged, every other one validated and saved."""
    every = {"log_every": 1, "validate_every": 2, "save_every": 2, "save_dtype": "float32"}
    return {"optimizer": {"steps": 12}, "run": {**every, **run}}


class Stop(Exception):
    """The end of a run before its last step."""


def run_until_step(trainer: Trainer, last: int) -> None:
    """Run until the report of a step, which comes before its checkpoint is saved."""

    def stop(report: TrainingReport) -> None:
        if report.step >= last:
            raise Stop

    trainer.report = stop
    with pytest.raises(Stop):
        trainer.run()


def steps_of(folder: Path, kind: str) -> list[int]:
    """Steps of the lines of a kind in metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == kind]


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a run's checkpoint, as "file/name", as they lie there."""
    files = sorted((folder / "checkpoint").iterdir())
    assert {file.suffix for file in files} == {".safetensors", ".json"}, "nothing is pickled"
    return {
        f"{file.name}/{name}": tensor
        for file in files
        if file.suffix == ".safetensors"
        for name, tensor in load_file(file).items()
    }


def save(folder: Path, target: TargetModel, drafter: Drafter, **options: Any) -> Path:
    save_drafter(folder, drafter, fingerprint=TargetFingerprint.of(target), **options)
    return folder


def write_data(path: Path, responses: list[list[int]]) -> Path:
    return write_rows(
        path, [{"prompt_token_ids": [3, 4], "response_token_ids": r} for r in responses]
    )


def configure(
    target: Path, output: Path, init: Path | None, train: Path, **changes: dict[str, Any]
) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "head": {"init": init},
        "data": {"train": train, "batch_tokens": 256, "length_multiple": 8},
        "method": {"depth": 4},
        "optimizer": {"steps": 1},
        "run": {"device": "cpu"},
    }
    merged = {name: {**section, **changes.get(name, {})} for name, section in sections.items()}
    return TrainConfig.model_validate({"target": target, "output": output, **merged})


def warm(
    target_folder: Path,
    init: Path,
    tmp_path: Path,
    responses: list[list[int]] | None = None,
    **changes: Any,
) -> Built:
    """What a run with `head.init` starts with."""
    data = write_data(tmp_path / "data.jsonl", responses or [list(range(10, 60))] * 3)
    config = configure(target_folder, tmp_path / "out", init, data, **changes)
    target, tokenizer = TargetModel.load(target_folder), load_tokenizer(target_folder)
    dataset = ResponseDataset.load(data, tokenizer, target.vocab_size, 2048)
    return build_drafter(config, target, tokenizer, dataset)


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in split_tensors(drafter)}
