"""`peagle train --plan`: from a folder without weights, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peagle.training import training_plan as plans
from tests.cli.conftest import Peagle
from tests.conftest import VOCAB_SIZE, make_target_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training configuration; of its target there is no weight."""
    root = tmp_path_factory.mktemp("plan")
    target = make_target_folder(root / "target")
    (target / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(0)
    with (root / "data.jsonl").open("w") as lines:
        for _ in range(30):
            ids = torch.randint(2, VOCAB_SIZE, (40,), generator=generator).tolist()
            row = {"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]}
            lines.write(json.dumps(row) + "\n")
    path = root / "head.toml"
    path.write_text(
        """
target = "target"
output = "run"
[head]
num_layers = 1
[data]
train = "data.jsonl"
batch_tokens = 256
length_multiple = 8
[method]
depth = 3
[optimizer]
steps = 20
"""
    )
    return path


CPU = ("--set", "run.device=cpu")


def test_a_plan_for_people(peagle: Peagle, config: Path) -> None:
    result = peagle("train", config, "--plan", *CPU, "--tokens-per-s", 100)
    assert (result.status, result.err) == (0, "")
    data, memory = "30 sequences, 1,200 tokens", "at the peak, estimated"
    for line in (data, memory, "1 segment, layers kept", "S=8 "):
        assert line in result.out
    assert "100 tokens/s, as given" in result.out
    assert not (config.parent / "run").exists()


def test_a_plan_for_programs(peagle: Peagle, config: Path) -> None:
    result = peagle("train", config, "--plan", *CPU, "--format", "json")
    assert (result.status, result.err) == (0, "")
    plan = json.loads(result.out)
    assert plan["problem"] == "" and plan["pace"] is None
    assert plan["memory"]["peak"] == sum(plan["memory"]["parts"].values())
    assert [way["segments"] for way in plan["memory"]["by_segments"]] == [1, 2, 4, 8]
    assert plan["steps"] == 20 and plan["epochs"] == 20 / plan["data"]["steps_per_epoch"]


def test_for_a_gpu_that_is_not_here(
    peagle: Peagle, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "LEAST_STEP_SECONDS", 0.0)
    call = ("train", config, "--plan", "--format", "json", "--gpu-memory-gib", 80)
    plan = json.loads(peagle(*call).out)
    assert plan["device"] == "cuda" and plan["head"]["dtype"] == "bfloat16"
    assert plan["memory"]["budget"] == 72 * 2**30
    assert plan["pace"]["hours"] > 0 and "H100" in plan["pace"]["basis"]
    plan = json.loads(peagle(*call, "--gpus", 2).out)
    assert plan["processes"] == 2


def test_no_hours_are_told_where_arithmetic_does_not_decide(peagle: Peagle, config: Path) -> None:
    """20,000 steps of a tiny head would be "0.1 minutes" by their arithmetic."""
    many = ("train", config, "--plan", "--set", "optimizer.steps=20000")
    for where in (("--gpu-memory-gib", 80), CPU):
        assert json.loads(peagle(*many, *where, "--format", "json").out)["pace"] is None
        told = peagle(*many, *where).out
        assert "give --tokens-per-s" in told and "minutes" not in told
    assert "all steps  " in peagle(*many, *CPU, "--tokens-per-s", 100).out


def test_what_does_not_fit_exits_with_2(peagle: Peagle, config: Path) -> None:
    result = peagle("train", config, "--plan", *CPU, "--set", "run.memory_gib=0.0001")
    assert result.status == 2
    assert "takes least" in result.out and "may take" in result.out
    assert "error: A step may take 104.9 KiB (run.memory_gib is 0.0001)" in result.err
    again = peagle(
        "train", config, "--plan", *CPU, "--set", "run.memory_gib=0.0001", "--format", "json"
    )
    assert again.status == 2 and json.loads(again.out)["problem"] in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plan", "--set", "data.train=none.jsonl"), "none.jsonl"),
        (("--plan", "--set", "target=none"), "is not there"),
        (("--plan", *CPU, "--gpu-memory-gib", "80"), "run.device is 'cpu'"),
        (("--plan", "--gpu-memory-gib", "0"), "expected a number above 0"),
        (("--plan", "--tokens-per-s", "nan"), "expected a number above 0"),
        (("--gpu-memory-gib", "80"), "it goes with --plan"),
        (("--gpus", "2"), "it goes with --plan"),
        (("--tokens-per-s", "5"), "it goes with --plan"),
        (("--plan", "--set", "run.segments=0"), "run.segments is 0"),
        (("--plan", "--set", "run.recompute_layers=often"), "run.recompute_layers is 'often'"),
        (("--plan", "--set", "head.init=nothing"), "head.init"),
    ],
)
def test_mistakes(peagle: Peagle, config: Path, arguments: tuple[str, ...], message: str) -> None:
    result = peagle("train", config, *arguments)
    assert result.status == 2 and result.out == ""
    assert message in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_needs_its_size(peagle: Peagle, config: Path) -> None:
    result = peagle("train", config, "--plan", "--set", "run.device=cuda")
    assert result.status == 2 and "--gpu-memory-gib 80" in result.err
