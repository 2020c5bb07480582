"""`peagle train`: progress, mistakes, and Ctrl-C; the latter in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Peagle
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


@pytest.fixture(autouse=True)
def _keep_handlers() -> Iterator[None]:
    """The command takes the signals of its process, which is the tests' own here."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_json_progress_and_the_head(peagle: Peagle, config: Path) -> None:
    done = peagle("train", config, "--format", "json")
    assert done.status == 0, done.err
    reports = [json.loads(line) for line in done.out.splitlines()]
    assert [r["kind"] for r in reports] == ["train"] * 3 + ["validation", "result"]
    assert len(reports[0]["accuracy"]) == len(reports[3]["acceptance_lengths"]) == 3
    assert (Path(reports[-1]["head"]) / "model.safetensors").is_file()
    assert (config.parent / "run" / "train.json").is_file()
    assert done.err == ""
    # As any file: 0666 less the umask.
    (other := config.parent / "other").touch()
    for file in (config.parent / "run").rglob("*.*"):
        if file.is_file():
            assert file.stat().st_mode == other.stat().st_mode, file


def test_text_progress_names_everything(
    peagle: Peagle, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    pruned = ["--set", "head.draft_vocab_size=100"]
    done = peagle("train", config, "--output", "run/../other", *pruned)
    assert done.status == 0, done.err
    assert "draft vocabulary: 100 of 320 tokens cover" in done.err
    phases = ("loading the target", "making the head", "step 1 of 6", "validating", "saving")
    places = [done.err.index(f"peagle: {phase}") for phase in phases]
    assert places == sorted(places)
    for expected in ("loss", "AL", "(K=3)", "accuracy by depth", "tokens/s", "left", "validation"):
        assert expected in done.out
    for expected in (
        "conditional, greedy",
        "conditional, T=1",
        "head of step 6 (acceptance",
        " to other/head ",
    ):
        assert expected in done.out
    assert (config.parent / "other" / "head" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "is not there"),
        (["CONFIG", "--set", "optimizer.steps=-1"], "optimizer.steps is -1"),
        (["CONFIG", "--set", "data.train=none.jsonl"], "none.jsonl"),
        (["CONFIG", "--set", "target=none"], "is not there"),
        (["CONFIG", "--set", "data.validation=none.jsonl"], "--validation-share alone"),
        (["CONFIG", "--output", "CONFIG"], "cannot be written: Not a directory"),
        (["CONFIG", "--output", "/proc/none"], "cannot be written: "),
        (["CONFIG", "--resume"], "no checkpoint to resume from"),
        (["CONFIG", "--set", "run.device=tpu9"], "tpu9"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_exit_with_2(
    peagle: Peagle, config: Path, arguments: list[str], message: str
) -> None:
    done = peagle("train", *(config if a == "CONFIG" else a for a in arguments))
    assert (done.status, done.out) == (2, "")
    told = done.err.splitlines()[-1 if arguments else 0]
    assert told.startswith("peagle: error: ") and message in told


@pytest.mark.parametrize("wrong", ["data.validation=none.jsonl", "target=none"])
def test_a_wrong_path_is_refused_before_torch_is_imported(config: Path, wrong: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from peagle.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "train", str(config), "--set", wrong]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "is not there" in result.stderr, result.stderr


def test_interrupt_saves_and_resumes(config: Path) -> None:
    command = [sys.executable, "-m", "peagle", "train", str(config), "--format", "json"]
    command += ["--set", "optimizer.steps=100000", "--set", "run.log_every=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "continue with --resume" in errors and "Traceback" not in errors
    record = json.loads((config.parent / "run" / "checkpoint" / "state.json").read_text())
    assert record["step"] >= 1
