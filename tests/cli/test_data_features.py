"""`peagle data features`: a store for train, whole or gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.cli import data, progress
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_store import FeatureStore
from peagle.models.target_ends import TargetEnds
from tests.cli.conftest import Pair, Peagle, kill_when
from tests.conftest import VOCAB_SIZE, byte_tokenizer

SMALL = ["--shard-gib", 30_000 / 2**30]


def write(path: Path, count: int, length: int) -> Path:
    """Responses of random tokens, all of unlike lengths."""
    generator = torch.Generator().manual_seed(count)
    with path.open("w") as lines:
        for index in range(count):
            ids = torch.randint(2, 300, (length + index % 40,), generator=generator).tolist()
            row = {"prompt_token_ids": ids[:5], "response_token_ids": ids[5:]}
            lines.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", count=30, length=20)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_store_is_written_that_training_opens(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path
) -> None:
    output = tmp_path / "deep" / "features"
    command = ["data", "features", train, "--target", pair.target, "-o", output, *SMALL]
    result = peagle(*command)
    assert result.status == 0, result.err
    size = sum(map(len, files_of(output).values()))
    assert f"{size / 2**10:,.1f} KiB ({size:,} bytes) in " in result.err
    assert "layers 1,2,3 in bf16; " in result.err and "iB are free" in result.err
    shards = len(files_of(output)) - 1
    assert shards > 3
    assert result.out.startswith(f"{output}: whole, 30 sequences in {shards} shards, ")

    ends = TargetEnds.load(pair.target)
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 2048)
    store = FeatureStore.open(output, dataset, ends, (1, 2, 3))
    assert store.features_of(29).shape == (int(dataset.start_loc[-1] - dataset.start_loc[-2]), 96)

    again = peagle(*command, "--verify", "--format", "json")
    assert again.status == 0 and f"{shards} shards are there, 0 B to write" in again.err
    told = json.loads(again.out)
    assert (told["computed_tokens"], told["verified"], told["bytes"]) == (0, True, size)
    assert (told["num_shards"], told["num_sequences"], told["dtype"]) == (shards, 30, "bf16")
    assert told["target_dtype"] == "float32" and told["aux_layer_ids"] == [1, 2, 3]

    path = output / "features-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert peagle(*command).status == 0
    result = peagle(*command, "--verify")
    assert (result.status, result.out) == (2, "")
    assert "features-00001.safetensors' of stored features was altered" in result.err
    refused = peagle(*command, "--dtype", "fp8")
    assert refused.status == 2 and "holds features of other things: dtype" in refused.err


def test_options_are_heard(peagle: Peagle, pair: Pair, train: Path, tmp_path: Path) -> None:
    command = ["data", "features", train, "--target", pair.target, "-o", tmp_path / "f"]
    command += ["--aux-layer-ids", "0, 2", "--dtype", "fp8", "--target-dtype", "float64"]
    command += ["--max-length", 24, "--batch-tokens", 50, "--max-disk-gib", 1, "--format", "json"]
    result = peagle(*command)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert told["aux_layer_ids"] == [0, 2] and told["dtype"] == "fp8" and told["longest"] == 24
    assert told["target_dtype"] == "float64" and told["computed_tokens"] == told["num_tokens"]
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 24)
    store = FeatureStore.open(tmp_path / "f", dataset, TargetEnds.load(pair.target), (0, 2))
    assert store.features_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-disk-gib", "0.000001"], " KiB and --max-disk-gib allows 1.0 KiB. Store less"),
        (["--max-disk-gib", "-1"], "--max-disk-gib is -1.0; expected a size of 0 or more"),
        (["--shard-gib", "0"], "--shard-gib is 0.0; expected a size above 0"),
        (["--aux-layer-ids", "1,x"], "--aux-layer-ids is '1,x'; expected layer numbers"),
        (["--aux-layer-ids", "1,9"], "aux layer ids are [1, 9]; expected distinct ascending"),
        (["--dtype", "int4"], "'int4' is not one of"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--max-length", "8"], "longer one"),
        (["--target", "./none"], "'none' is not there"),
    ],
)
def test_mistakes_exit_with_2_before_anything_is_written(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    output = tmp_path / "features"
    if message == "longer one":
        train.write_text(json.dumps({"prompt_token_ids": [2] * 8, "response_token_ids": [3, 4]}))
        message = "no sequence with at least two response tokens within max_length 8"
    result = peagle("data", "features", train, "--target", pair.target, "-o", output, *arguments)
    assert (result.status, result.out) == (2, "")
    assert "peagle: error: " in result.err and message in result.err
    assert not output.exists()


def test_an_interrupt_leaves_whole_shards(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["data", "features", train, "--target", pair.target, *SMALL, "--batch-tokens", 1]
    calls: list[Any] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 17:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "_show_features", interrupted)
        result = peagle(*command, "-o", tmp_path / "halved")
    assert (result.status, result.out) == (130, "")
    whole = len(list((tmp_path / "halved").glob("features-*.safetensors")))
    assert whole >= 1 and f"peagle: {whole} of " in result.err
    assert "shards are whole; the same command goes on after them" in result.err
    for name in ("halved", "whole"):
        assert peagle(*command, "-o", tmp_path / name).status == 0
    assert files_of(tmp_path / "halved") == files_of(tmp_path / "whole")


def test_progress_is_told(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    command = ["data", "features", train, "--target", pair.target, *SMALL, "--batch-tokens", 1]
    told = [
        line for line in peagle(*command, "-o", tmp_path / "f").err.splitlines() if "/s" in line
    ]
    assert len(told) == 30 and "tokens/s; 0:00 left" in told[-1]
    assert "peagle: 0 of " in told[0] and "tokens, " in told[0]


def test_kill_and_go_on(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """kill -9 in the middle: the same command completes it as an uninterrupted run would have."""
    train = write(tmp_path / "train.jsonl", count=150, length=40)

    def command(output: str) -> list[str]:
        given = ["--target", pair.target, "-o", tmp_path / output, *SMALL, "--batch-tokens", 1]
        return ["data", "features", *map(str, [train, *given])]

    def shards() -> list[Path]:
        return sorted((tmp_path / "killed").glob("features-*.safetensors"))

    kill_when(lambda: len(shards()) >= 5, command("killed"))
    before = {path: path.stat().st_mtime_ns for path in shards()}
    assert len(before) >= 5
    for output in ("killed", "whole"):
        assert peagle(*command(output)).status == 0
    assert len(before) < len(shards()), "it was killed in the middle"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
