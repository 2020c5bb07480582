"""Writing features: whole shards of a known size, however the run ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.data import feature_writer
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_writer import FeatureProgress, locked
from peagle.data.features import INDEX_NAME, FeatureStore, StoredDtype
from peagle.errors import UserError
from peagle.models.target import TargetModel
from tests.data.stores import AUX, RARE, SMALL, files_of, writer_of, written

# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("shard_bytes", [1, SMALL, 2**30])
def test_shards_are_of_the_announced_size(
    tmp_path: Path,
    dataset: ResponseDataset,
    model: TargetModel,
    dtype: StoredDtype,
    shard_bytes: int,
) -> None:
    writer = writer_of(tmp_path / "store", dataset, model, dtype, shard_bytes=shard_bytes)
    need = writer.check_disk()
    assert need.missing < need.total, "the index counts"
    writer.write(model, batch_tokens=1)
    files = files_of(tmp_path / "store")
    assert need.total == sum(map(len, files.values()))
    shards = sorted(name for name in files if name != INDEX_NAME)
    assert len(shards) == {1: len(dataset), 2**30: 1}.get(shard_bytes, len(shards))
    seen: list[int] = []
    for name in shards:
        tensors = load_file(tmp_path / "store" / name)
        seen += tensors["sequences"].tolist()
        assert files[name][0] % 8 == 0, "the header keeps tensors aligned"
        data = sum(t.numel() * t.itemsize for k, t in tensors.items() if k != "sequences")
        assert data <= shard_bytes or len(tensors["sequences"]) == 1
    assert sorted(seen) == list(range(len(dataset)))
    after = writer_of(tmp_path / "store", dataset, model, dtype, shard_bytes=shard_bytes).need()
    assert (after.total, after.missing) == (need.total, 0)


class Stop(Exception):
    pass


def stop_after(batches: int) -> Callable[[FeatureProgress], None]:
    left = [batches]

    def watch(progress: FeatureProgress) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stop

    return watch


@pytest.mark.parametrize("batches", [1, 4, 6])
def test_an_interrupted_store_goes_on_where_it_was(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, batches: int
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    writer_of(whole, dataset, model).write(model, 60)
    with pytest.raises(Stop):
        writer_of(halved, dataset, model).write(model, 60, stop_after(batches))
    before = {path: path.stat().st_mtime_ns for path in halved.glob("*.safetensors")}
    assert not list(halved.glob("*.part")) and len(before) < len(list(whole.iterdir())) - 1
    with pytest.raises(UserError, match=f"incomplete: {len(before)} of "):
        FeatureStore.open(halved, dataset, model, AUX)
    writer = writer_of(halved, dataset, model)
    left = sum(plan.num_positions for plan in writer.missing)
    progress = writer.write(model, 60)
    assert progress.tokens == progress.num_tokens == left
    assert progress.shards == progress.num_shards == len(writer.plans)
    assert files_of(halved) == files_of(whole)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_a_shard_that_the_index_does_not_list_yet_is_kept(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    """The run was killed between the shard and the index; what it had begun is in the way."""
    written(tmp_path, dataset, model)
    before = files_of(tmp_path)
    index = json.loads(before[INDEX_NAME])
    name = index["shards"].pop()["file"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    (tmp_path / (index["shards"][0]["file"] + ".part")).write_bytes(b"half of it")
    (tmp_path / index["shards"].pop(0)["file"]).unlink()
    writer = writer_of(tmp_path, dataset, model)
    assert [plan.number for plan in writer.missing] == [0]
    assert writer.need().free - shutil.disk_usage(tmp_path).free <= 10 + 2**20
    writer.write(model, 1)
    assert files_of(tmp_path) == before
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    shutil.copy(tmp_path / index["shards"][0]["file"], tmp_path / name)
    (tmp_path / name).write_bytes(b"other things")
    with pytest.raises(UserError, match=f"{name}' does not belong to the store"):
        writer_of(tmp_path, dataset, model)


def test_a_full_disk_leaves_whole_shards(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = feature_writer.ShardFile.put

    def fails(self: feature_writer.ShardFile, tensors: Any) -> None:
        if self.path.name.startswith("features-00002") and "features" in tensors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(feature_writer.ShardFile, "put", fails)
        with pytest.raises(UserError, match=r"No space left on device.*Whole shards stay"):
            writer_of(tmp_path, dataset, model).write(model, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        INDEX_NAME,
        "features-00000.safetensors",
        "features-00001.safetensors",
    }
    writer_of(tmp_path, dataset, model).write(model, 1)
    FeatureStore.open(tmp_path, dataset, model, AUX, verify=True)


@pytest.mark.parametrize("shard", [0, -1])
def test_a_shard_that_cannot_be_finished_is_told(
    tmp_path: Path,
    dataset: ResponseDataset,
    model: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
    shard: int,
) -> None:
    """Also the last one, after which nothing else is written."""
    writer = writer_of(tmp_path, dataset, model)
    name, digest = writer.plans[shard].file, feature_writer.sha256_of

    def fails(path: Path) -> str:
        if path.name.startswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(path)

    monkeypatch.setattr(feature_writer, "sha256_of", fails)
    with pytest.raises(UserError, match="Input/output error"):
        writer.write(model, 1)
    assert not list(tmp_path.glob("*.part")) and not (tmp_path / name).exists()


def test_one_process_writes_at_a_time(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    writer = writer_of(tmp_path / "store", dataset, model)
    with locked(tmp_path / "store"), pytest.raises(UserError, match="Another process is writing"):
        writer.write(model, 1)
    writer.write(model, 1)


# ---- disk -----------------------------------------------------------------------------------


def test_too_small_a_cap_is_refused_before_anything_is_written(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    writer = writer_of(tmp_path / "store", dataset, model)
    total = writer.need().total
    with pytest.raises(UserError) as caught:
        writer.check_disk(total - 1)
    size = f"{total / 2**10:.1f} KiB"
    assert f"The features take {size} and --max-disk-gib allows" in str(caught.value)
    assert not (tmp_path / "store").exists()
    assert writer.check_disk(total).total == total


def test_too_full_a_disk_is_refused_before_anything_is_written(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(tmp_path / "new" / "store", dataset, model)
    missing, usage = writer.need().missing, namedtuple("usage", "total used free")
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return usage(10**9, 0, missing - 1)

    monkeypatch.setattr(feature_writer.shutil, "disk_usage", disk_usage)
    with pytest.raises(UserError, match=r"still take .* KiB in '.*', and the disk has .* KiB left"):
        writer.check_disk()
    assert asked == [tmp_path] and not (tmp_path / "new").exists()


# ---- broken targets -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("broken", "sequence", "position"),
    [("model.embed_tokens.weight", 5, 6), ("model.norm.weight", 9, 7)],
)
def test_nan_of_the_target_names_sequence_and_position(
    tmp_path: Path,
    dataset: ResponseDataset,
    target_folder: Path,
    dtype: StoredDtype,
    broken: str,
    sequence: int,
    position: int,
) -> None:
    """In a row of the embedding: one token of one sequence. In the last norm: hidden states only,
    of which the first that is stored is the first of the response.
    """
    model = TargetModel.load(target_folder, dtype=torch.float32)
    parameter = model.model.get_parameter(broken)
    parameter.data[RARE if parameter.dim() == 2 else 0] = float("nan")
    with pytest.raises(UserError) as caught:
        writer_of(tmp_path, dataset, model, dtype, aux=(0,)).write(model, 100)
    assert f"of sequence {sequence} (from 0) hold NaN" in str(caught.value)
    assert f"at position {position}. Its weights" in str(caught.value)
    assert not list(tmp_path.glob("*.part"))


def test_one_broken_hidden_state_is_enough(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward

    def broken(tokens: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        hidden, features = forward(tokens, *arguments)
        hidden[tokens == RARE, 3] = float("inf")
        return hidden, features

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(UserError, match=r"of sequence 5 \(from 0\) hold NaN .* at position 6\."):
        writer_of(tmp_path, dataset, model).write(model, 100)
