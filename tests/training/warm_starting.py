"""What the tests of warm starts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.data.dataset import ResponseDataset
from peagle.models.checkpoint import save_drafter, split_tensors
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel, load_tokenizer
from peagle.training.build import Built, build
from peagle.training.config import TrainConfig
from tests.training.runs import write_rows


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
    return build(config, target, tokenizer, dataset)


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in split_tensors(drafter)}
