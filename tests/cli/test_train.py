"""`peagle train` as a process: progress, mistakes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import VOCAB_SIZE


@pytest.fixture
def config(target_folder: Path, tmp_path: Path) -> Path:
    """A training configuration on random sequences."""
    generator = torch.Generator().manual_seed(0)
    with (tmp_path / "data.jsonl").open("w") as lines:
        for _ in range(40):
            ids = torch.randint(2, VOCAB_SIZE, (20,), generator=generator).tolist()
            row = {"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]}
            lines.write(json.dumps(row) + "\n")
    path = tmp_path / "head.toml"
    path.write_text(
        f"""
target = "{target_folder}"
output = "run"
[head]
num_layers = 1
[data]
train = "data.jsonl"
validation = "data.jsonl"
batch_tokens = 256
length_multiple = 8
[method]
depth = 3
[optimizer]
steps = 6
[run]
device = "cpu"
log_every = 2
"""
    )
    return path


def peagle_train(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peagle", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_json_progress_and_the_head(config: Path) -> None:
    done = peagle_train(config, "--format", "json")
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["kind"] for r in reports] == ["train"] * 3 + ["validation", "result"]
    assert len(reports[0]["accuracy"]) == len(reports[3]["acceptance_lengths"]) == 3
    assert (Path(reports[-1]["head"]) / "model.safetensors").is_file()
    assert (config.parent / "run" / "train.json").is_file()


def test_text_progress_names_everything(config: Path) -> None:
    pruned = ["--set", "head.draft_vocab_size=100"]
    done = peagle_train(config, "--output", config.parent / "other", *pruned)
    assert done.returncode == 0, done.stderr
    assert "draft vocabulary: 100 of 320 tokens cover" in done.stderr
    for expected in ("loss", "AL", "(K=3)", "accuracy by depth", "tokens/s", "left", "validation"):
        assert expected in done.stdout
    for expected in ("conditional, greedy", "conditional, T=1", "head of step 6 (acceptance"):
        assert expected in done.stdout
    assert (config.parent / "other" / "head" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "is not there"),
        (["CONFIG", "--set", "optimizer.steps=-1"], "optimizer.steps is -1"),
        (["CONFIG", "--set", "data.train=none.jsonl"], "none.jsonl"),
        (["CONFIG", "--set", "target=none"], "is not there"),
        (["CONFIG", "--resume"], "no checkpoint to resume from"),
        (["CONFIG", "--set", "run.device=tpu9"], "tpu9"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_exit_with_2(config: Path, arguments: list[str], message: str) -> None:
    done = peagle_train(*(config if a == "CONFIG" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_interrupt_saves_and_resumes(config: Path) -> None:
    command = [sys.executable, "-m", "peagle", "train", str(config), "--format", "json"]
    command += ["--set", "optimizer.steps=100000", "--set", "run.log_every=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "go on with --resume" in errors and "Traceback" not in errors
    record = json.loads((config.parent / "run" / "checkpoint" / "state.json").read_text())
    assert record["step"] >= 1
