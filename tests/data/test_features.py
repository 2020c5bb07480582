"""Stores of features: what is written, what is read, and what is refused."""

import errno
import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.data import feature_writer
from peagle.data.batches import Batch, Place, make_batch
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_writer import FeatureProgress, FeatureWriter, locked, quantize_features
from peagle.data.features import (
    INDEX_NAME,
    FeatureStore,
    Index,
    StoredDtype,
    StoreFacts,
    dataset_sha256,
    target_states,
)
from peagle.errors import UserError
from peagle.models.target import TargetModel
from peagle.models.target_ends import TargetEnds
from tests.conftest import make_target_folder
from tests.data.files import AUX, RARE, SMALL, H, files_of, make_dataset, writer_of, written

# ---- reading ----


@pytest.fixture
def ends(target_folder: Path) -> TargetEnds:
    return TargetEnds.load(target_folder, dtype=torch.float32)


@torch.no_grad()
def reference(model: TargetModel, dataset: ResponseDataset, sequence: int) -> tuple[Tensor, Tensor]:
    """Features and hidden states of one sequence, run alone."""
    begin, end = dataset.start_loc[sequence : sequence + 2].tolist()
    model.tap_aux(AUX)
    hidden, features = model.forward(
        dataset.tokens[begin:end].long(), torch.arange(end - begin), DenseCausalAttention(1)
    )
    return features, hidden


def graded_positions(dataset: ResponseDataset, sequence: int, length: int) -> set[int]:
    """Positions whose logits grade an element, by the definition of elements."""
    begin = int(dataset.start_loc[sequence])
    is_answer = dataset.loss_mask[begin : begin + length].tolist()
    return {
        a + d + 1
        for a in range(length)
        for d in range(length - 2 - a)
        if all(is_answer[a + 1 : a + d + 3])
    }


def batch_of(places: list[Place], rows: int, length: int) -> Batch:
    """What the store looks at of a batch."""
    empty = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(empty, empty, empty, tuple(places), max_anchors=1, first_row=0, num_rows=rows)


PACKED = [
    Place(9, 0, 0, 41),
    Place(2, 0, 41, 4),
    Place(6, 0, 45, 3),
    Place(7, 2, 14, 25),
    Place(5, 2, 2, 12),
    Place(1, 3, 0, 30),
    Place(9, 3, 30, 20),  # cut, and there a second time
    Place(3, 1, 5, 14),  # cut at its prompt: nothing of it is graded
    Place(4, 1, 20, 2),
]


# ---- what is read is what was said ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_packed_rows_hold_what_the_target_said(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, dtype: StoredDtype
) -> None:
    store = written(tmp_path, dataset, model, dtype)
    rows, length = 4, 50
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote then holds NaN
    try:
        states = store.states(batch_of(PACKED, rows, length))
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert states.features_BNA.dtype == states.hidden_BNH.dtype == wanted
    features = torch.zeros(rows, length, 3 * H, dtype=wanted)
    hidden = torch.zeros(rows, length, H, dtype=wanted)
    for place in PACKED:
        its_features, its_hidden = reference(model, dataset, place.sequence)
        at = slice(place.start, place.start + place.length)
        if dtype == "fp8":
            its_features = decoded(*quantize_features(its_features, 3))
        features[place.row, at] = its_features[: place.length].to(wanted)
        stored = graded_positions(dataset, place.sequence, len(its_hidden))
        assert graded_positions(dataset, place.sequence, place.length) <= stored
        for position in stored & set(range(place.length)):
            hidden[place.row, place.start + position] = its_hidden[position].to(wanted)
    assert torch.equal(states.features_BNA, features)
    assert torch.equal(states.hidden_BNH, hidden)
    assert bool(hidden[3].any(-1)[:30].any()) and not bool(hidden[1, :20].any())


def test_batches_of_the_run_get_what_the_target_in_the_process_says(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, ends: TargetEnds
) -> None:
    """Computed in padded batches, read through the ends of the target only."""
    writer_of(tmp_path, dataset, model, "fp32").write(model, batch_tokens=100)
    store = FeatureStore.open(tmp_path, dataset, ends, AUX, verify=True)
    batch = make_batch(dataset, [[9, 2], [1, 0], [7, 5, 11]], 56)
    found, computed = store.states(batch), target_states(model, batch)
    real = batch.documents_BN >= 0
    assert torch.allclose(found.features_BNA[real], computed.features_BNA[real], atol=1e-4)
    assert not bool(found.features_BNA[~real].any())
    graded = 0
    for row in range(3):
        for anchor in range(56):
            for depth in range(int(batch.deepest_BN[row, anchor]) + 1):
                at = row, anchor + depth + 1
                logits = (ends.compute_logits(s.hidden_BNH[at]) for s in (found, computed))
                assert torch.allclose(next(logits), next(logits), atol=1e-3)
                graded += 1
    assert graded > 300


def test_sequences_can_be_read_alone_and_in_another_thread(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    store = written(tmp_path, dataset, model, "fp32")
    with ThreadPoolExecutor(1) as thread:
        for sequence in range(len(dataset)):
            found = thread.submit(store.features_of, sequence).result()
            assert torch.equal(found, reference(model, dataset, sequence)[0])


@pytest.mark.gpu
def test_pinned_states_are_the_same(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    plain = written(tmp_path, dataset, model)
    pinned = FeatureStore.open(tmp_path, dataset, model, AUX, pin_memory=True)
    batch = batch_of(PACKED, 4, 50)
    found, expected = pinned.states(batch), plain.states(batch)
    assert found.features_BNA.is_pinned() and found.hidden_BNH.is_pinned()
    assert torch.equal(found.features_BNA, expected.features_BNA)


# ---- float8 ----


def decoded(values_TA: Tensor, scales_TA: Tensor) -> Tensor:
    """In float64, by the definition of float8_e4m3fn: 4 bits of exponent, 3 of mantissa."""
    code = values_TA.view(torch.uint8).to(torch.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    assert not bool(((exponent == 15) & (mantissa == 7)).any()), "NaN"
    normal = (1 + mantissa / 8).double() * 2.0 ** (exponent - 7).double()
    value = torch.where(exponent == 0, mantissa.double() * 2.0**-9, normal)
    value = torch.where(code >= 128, -value, value)
    scaled = value.unflatten(-1, (scales_TA.shape[-1], -1)) * scales_TA.double().unsqueeze(-1)
    return scaled.flatten(-2).float()


def test_float8_is_within_the_bound_of_its_format() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3 * H, generator=generator) * torch.logspace(-20, 5, 50).unsqueeze(-1)
    x[:, 1] *= 1000  # an outlier in the first state costs the others of it their small values
    x[3, H : 2 * H] = 0.0
    x[4] = 0.0
    x[5] = 1e-42  # below the smallest normal number
    values, scales = quantize_features(x, 3)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (50, 3)
    assert scales.dtype == torch.float32 and bool((scales > 0).all())
    amax = x.unflatten(-1, (3, H)).abs().amax(-1)
    step = scales.repeat_interleave(H, dim=-1) * 2.0**-9  # between the smallest values
    error = (decoded(values, scales) - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, step / 2) * (1 + 1e-5)).all())
    top = decoded(values, scales).unflatten(-1, (3, H)).abs().amax(-1)
    assert torch.allclose(top[6:], amax[6:], rtol=1e-6), "the largest value is kept"
    for broken in (float("nan"), float("inf")):
        x[7, 5] = broken
        assert not bool(quantize_features(x, 3)[1].isfinite()[7, 0])


# ---- what does not belong together ----


def test_other_data_is_refused(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path, dataset, model)
    cut = dataset._cut(20)
    with pytest.raises(UserError, match="12 sequences of 201 tokens, the longest of 41; here are"):
        FeatureStore.open(tmp_path, cut, model, AUX)
    shorter = dataset.prompt_lens.clamp_max(9)
    moved = ResponseDataset.of_prompts(dataset.tokens, dataset.start_loc, shorter)
    one_answer = ResponseDataset.of_prompts(dataset.tokens, dataset.start_loc, dataset.prompt_lens)
    for other in (make_dataset(seed=1), moved, one_answer):
        with pytest.raises(UserError, match=r"are of other data.*data.max_length must be the same"):
            FeatureStore.open(tmp_path, other, model, AUX)
        with pytest.raises(UserError, match="holds features of other things: dataset_sha256"):
            writer_of(tmp_path, other, model)


def test_the_hash_of_prompts_with_one_response_stays(dataset: ResponseDataset) -> None:
    """Stores that older versions wrote are still those of their data."""
    parts = dataset.tokens, dataset.start_loc, dataset.prompt_lens
    assert parts[0].dtype == torch.int32 and {x.dtype for x in parts[1:]} == {torch.int64}
    by_hand = hashlib.sha256(b"".join(x.numpy().tobytes() for x in parts)).hexdigest()
    assert dataset_sha256(ResponseDataset.of_prompts(*parts)) == by_hand
    assert dataset_sha256(dataset) != by_hand


def test_another_target_is_refused_and_another_name_is_not(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, target_folder: Path
) -> None:
    written(tmp_path / "store", dataset, model)
    other = TargetEnds.load(make_target_folder(tmp_path / "other", seed=1))
    with pytest.raises(UserError, match=r"not of '.*other': lm_head_sha256 is \w+, the store exp"):
        FeatureStore.open(tmp_path / "store", dataset, other, AUX)
    with pytest.raises(UserError, match="of other things: target lm_head_sha256 '"):
        writer_of(tmp_path / "store", dataset, other)
    renamed = TargetEnds.load(Path(shutil.copytree(target_folder, tmp_path / "renamed")))
    FeatureStore.open(tmp_path / "store", dataset, renamed, AUX)
    assert not writer_of(tmp_path / "store", dataset, renamed).missing
    (tmp_path / "notes").write_text("mine")
    for place in (tmp_path, tmp_path / "notes"):
        with pytest.raises(UserError, match="is there already and holds no stored features"):
            writer_of(place, dataset, model)
    with pytest.raises(UserError, match=f"holds no stored features \\({INDEX_NAME} is not there"):
        FeatureStore.open(tmp_path, dataset, model, AUX)


def test_other_layers_types_and_sizes_are_refused(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path, dataset, model)
    with pytest.raises(UserError, match=r"of target layers \[1, 2, 3\], the head reads \[0, 1, 2"):
        FeatureStore.open(tmp_path, dataset, model, (0, 1, 2))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"aux": (0, 1, 2)}, r"aux_layer_ids \[1, 2, 3\], not \[0, 1, 2\]"),
        ({"dtype": "fp8"}, "dtype 'bf16', not 'fp8'"),
        ({"shard_bytes": 1}, f"shard_bytes {SMALL}, not 1"),
    )
    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            writer_of(tmp_path, dataset, model, **changes)
    facts = StoreFacts.of(dataset, model, AUX, "bf16", "float16", SMALL)
    with pytest.raises(UserError, match="target_dtype 'float32', not 'float16'"):
        FeatureWriter(tmp_path, dataset, facts)


def test_shards_of_another_store_are_refused(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path / "a", dataset, model)
    written(tmp_path / "b", make_dataset(seed=1), model)
    name = "features-00001.safetensors"
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(UserError, match=f"{name}' belongs to another store"):
        FeatureStore.open(tmp_path / "a", dataset, model, AUX)


# ---- damage ----


def test_a_truncated_shard_is_named(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path, dataset, model)
    before = files_of(tmp_path)
    path = tmp_path / "features-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for call in (
        lambda: FeatureStore.open(tmp_path, dataset, model, AUX),
        lambda: writer_of(tmp_path, dataset, model),
    ):
        with pytest.raises(UserError, match=r"features-00001.safetensors.*: it was cut off. Rem"):
            call()
    path.unlink()
    with pytest.raises(UserError, match=r"features-00001.safetensors' of stored features is miss"):
        FeatureStore.open(tmp_path, dataset, model, AUX)
    assert writer_of(tmp_path, dataset, model).write(model, 1).tokens < len(dataset.tokens)
    assert files_of(tmp_path) == before


def test_an_altered_shard_is_found_by_its_checksum(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path, dataset, model)
    path = tmp_path / "features-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)
    FeatureStore.open(tmp_path, dataset, model, AUX)
    for call in (
        lambda: FeatureStore.open(tmp_path, dataset, model, AUX, verify=True),
        writer_of(tmp_path, dataset, model).verify,
    ):
        with pytest.raises(UserError, match=r"features-00002.safetensors.* was altered: its SHA"):
            call()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("part", ["features", "hidden"])
def test_nan_that_was_not_written_is_found_when_it_is_read(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel, dtype: StoredDtype, part: str
) -> None:
    written(tmp_path, dataset, model, dtype, shard_bytes=2**30)
    [plan] = writer_of(tmp_path, dataset, model, dtype, shard_bytes=2**30).plans
    path = tmp_path / plan.file
    raw = bytearray(path.read_bytes())
    begin = plan.layout.begins[part]
    raw[begin : begin + 2] = b"\xff\xff"
    path.write_bytes(raw)
    store, first = FeatureStore.open(tmp_path, dataset, model, AUX), int(plan.sequences[0])
    store.states(make_batch(dataset, [[0, 1]], 56))
    with pytest.raises(UserError, match=f"of sequence {first} hold NaN or infinite"):
        store.states(make_batch(dataset, [[first]], 56))


def test_indices_that_cannot_be_read_are_named(
    tmp_path: Path, dataset: ResponseDataset, model: TargetModel
) -> None:
    written(tmp_path, dataset, model)
    good = json.loads((tmp_path / INDEX_NAME).read_text())
    for change, message in (
        ({"format_version": 2}, r"format_version 2, newer than this peagle reads \(1\)"),
        ({"kind": "shopping"}, "is not an index of stored features"),
        ({"shards": [{"file": "x"}]}, "is damaged"),
        ({"facts": {}}, "is damaged"),
    ):
        (tmp_path / INDEX_NAME).write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=message):
            FeatureStore.open(tmp_path, dataset, model, AUX)
        with pytest.raises(UserError, match=message):
            writer_of(tmp_path, dataset, model)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        Index.read(tmp_path)


# ---- writing ----


# ---- files ----


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


# ---- disk ----


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


# ---- broken targets ----


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
