"""Small training runs, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from peagle import LLM, SamplingParams
from peagle.training.config import TrainConfig


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
        sections[name] = {**sections[name], **section}
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


def steps_of(folder: Path, kind: str) -> list[int]:
    """Steps of the lines of a kind in metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == kind]
