"""From one style to the other: no bit changes, and what is broken is refused by name."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import (
    FORMATS,
    HeadFormat,
    convert_head,
    load_drafter,
    read_head_config,
    save_drafter,
)
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.models.any_head import FACTS, configs
from tests.models.editing import bits_of_head, edit_config, edit_tensors

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FORMAT = pytest.mark.parametrize("format", FORMATS)


def random_head(config: DrafterConfig, seed: int) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_()
    if config.is_pruned:
        kept = torch.randperm(config.vocab_size)[: config.draft_vocab_size]
        drafter.set_draft_vocabulary(kept.sort().values)
    return drafter


def shard(folder: Path) -> None:
    """Spread the weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ---- what is kept ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    facts=FACTS,
    first=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_there_and_back_changes_no_bit(
    config: DrafterConfig, facts: dict[str, Any], first: HeadFormat, dtype: torch.dtype, seed: int
) -> None:
    other: HeadFormat = "speculators" if first == "vllm" else "vllm"
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = (Path(folder) / name for name in "abc")
        save_drafter(a, random_head(config, seed), extra=facts, dtype=dtype, format=first)
        convert_head(a, b, other)
        convert_head(b, c, first)
        assert bits_of_head(a) == bits_of_head(b) == bits_of_head(c)
        before, after = (json.loads((f / "config.json").read_text()) for f in (a, c))
        assert before == after
        assert read_head_config(a) == read_head_config(c)
        assert read_head_config(b)[0] == config


@FORMAT
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_the_head_computes_the_same_from_either_style(
    head_folders: Callable[..., Path],
    target: TargetModel,
    tmp_path: Path,
    format: HeadFormat,
    parallel: bool,
) -> None:
    source = head_folders(parallel=parallel, qk_norm=True, draft_vocab_size=50, trained_depth=4)
    convert_head(source, tmp_path, format)
    before, after = (load_drafter(folder, target) for folder in (source, tmp_path))
    assert after.config == before.config
    for name, value in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], value)


@FORMAT
def test_layout_is_straightened(
    head_folders: Callable[..., Path], tmp_path: Path, format: HeadFormat
) -> None:
    """Aliases, shards, a flat mask state, absent embeddings, absent t2d, maps that select all."""
    source = Path(shutil.copytree(head_folders(draft_vocab_size=100), tmp_path / "source"))
    expected = bits_of_head(source)

    def rearrange(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
        del tensors["embed_tokens.weight"], tensors["t2d"]

    edit_tensors(source, rearrange)
    shard(source)
    result = convert_head(source, tmp_path / "out", format)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    for name in ("embed_tokens.weight", "t2d"):
        del expected[name]
    assert bits_of_head(tmp_path / "out") == expected
    assert load_file(tmp_path / "out" / "model.safetensors")["mask_hidden"].shape == (1, 1, 96)
    assert result.num_tensors == len(expected)
    assert result.num_bytes == sum(len(raw) for _, raw in expected.values())


def test_maps_that_keep_every_token_are_left_out(
    head_folders: Callable[..., Path], target: TargetModel, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(head_folders(), tmp_path / "source"))
    maps = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
    edit_tensors(source, lambda tensors: tensors.update(maps))
    load_drafter(source, target)
    convert_head(source, tmp_path / "out", "speculators")
    assert {"d2t", "t2d"}.isdisjoint(load_file(tmp_path / "out" / "model.safetensors"))
    maps["d2t"][3] = 1
    edit_tensors(source, lambda tensors: tensors.update(maps))
    with pytest.raises(CheckpointError, match="d2t and t2d select tokens"):
        load_drafter(source, target)


def test_t2d_follows_from_d2t(
    head_folders: Callable[..., Path], target: TargetModel, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(head_folders(draft_vocab_size=100), tmp_path / "source"))
    expected = load_drafter(source, target).t2d
    edit_tensors(source, lambda tensors: tensors.pop("t2d"))
    found = load_drafter(source, target).t2d
    assert expected is not None and found is not None
    assert torch.equal(found, expected)


def test_the_targets_name_moves_and_can_be_given(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    def verifier(name: str) -> Any:
        data = json.loads((tmp_path / name / "config.json").read_text())
        return data["speculators_config"]["verifier"]["name_or_path"]

    source = head_folders()
    result = convert_head(source, tmp_path / "a", "speculators")
    assert verifier("a") == result.target == target_folder.name
    convert_head(source, tmp_path / "b", "speculators", target="Qwen/Qwen3-8B")
    assert verifier("b") == "Qwen/Qwen3-8B"
    convert_head(tmp_path / "b", tmp_path / "c", "vllm")
    convert_head(tmp_path / "c", tmp_path / "d", "speculators")
    assert verifier("d") == "Qwen/Qwen3-8B"


def test_notes_say_what_the_new_style_cannot(target: TargetModel, tmp_path: Path) -> None:
    save_drafter(tmp_path / "wide", make_drafter(target, hidden_size=48))
    notes = convert_head(tmp_path / "wide", tmp_path / "out", "speculators").notes
    assert [note.split(":")[0] for note in notes] == [
        "the target's name is unknown",
        "the trained depth is unknown",
        "the head is 48 wide and its target 32",
    ]
    save_drafter(tmp_path / "known", make_drafter(target, trained_depth=4))
    assert convert_head(tmp_path / "known", tmp_path / "o", "speculators", target="x").notes == ()
    assert convert_head(tmp_path / "wide", tmp_path / "p", "vllm").notes == ()


# ---- where it goes --------------------------------------------------------------------------


def test_destinations_are_not_overwritten_unasked(
    head_folders: Callable[..., Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(head_folders(), tmp_path / "source"))
    before = bits_of_head(source)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("source", "is the source; expected another folder"),
        ("link", "is the source; expected another folder"),
        ("source/../source", "is the source"),
        ("file", "is a file; expected a folder"),
        ("full", "is not empty. Name another folder, or replace the head in it with --force"),
    ):
        with pytest.raises(UserError) as caught:
            convert_head(source, tmp_path / name, "vllm")
        assert message in str(caught.value)
        assert repr(str(tmp_path / name)) in str(caught.value)
    with pytest.raises(UserError, match="is the source"):
        convert_head(source, source, "speculators", force=True)
    assert bits_of_head(source) == before
    convert_head(source, tmp_path / "empty", "vllm")
    convert_head(source, tmp_path / "deep" / "new", "vllm")


def test_force_replaces_the_head_and_nothing_else(
    head_folders: Callable[..., Path], target: TargetModel, tmp_path: Path
) -> None:
    source, old = head_folders(num_layers=1), tmp_path / "old"
    shutil.copytree(head_folders(num_layers=3), old)
    shard(old)
    (old / "README.md").write_text("mine")
    convert_head(source, old, "speculators", force=True)
    names = sorted(p.name for p in old.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    assert load_drafter(old, target).config.num_layers == 1


def test_a_folder_that_cannot_be_written_is_a_users_mistake(
    head_folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    source = head_folders()
    monkeypatch.setattr("peagle.models.checkpoint.files.save_file", full_disk)
    with pytest.raises(UserError, match=r"could not be written: .*No space left on device"):
        convert_head(source, tmp_path / "out", "vllm")
    assert list((tmp_path / "out").iterdir()) == []


# ---- broken heads ---------------------------------------------------------------------------


def twice(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"].clone()


def nan(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][3, 4] = torch.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "tensor 'fc.weight' is missing"),
        (
            lambda t: t.pop("layers.1.self_attn.q_norm.weight"),
            "tensor 'layers.1.self_attn.q_norm.weight' is missing. Its config.json says",
        ),
        (lambda t: t.pop("d2t"), "tensor 'd2t' is missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor 'lm_head.weight' is missing"),
        (lambda t: t.update(x=torch.ones(1)), "tensor 'x' is unknown to this head"),
        (lambda t: t.update(mask_hidden=torch.ones(95)), "'mask_hidden' has shape [95]"),
        (
            lambda t: t.update(d2t=t["d2t"].float()),
            "'d2t' has type torch.float32; expected torch.int64, torch.int32",
        ),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
            "'fc.weight' has type torch.int8; expected torch.float32, torch.bfloat16",
        ),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "float8"),
        (nan, "tensor 'lm_head.weight' holds NaN or infinite values"),
        (twice, "holds tensor 'layers.0.hidden_norm.weight' a second time"),
    ],
)
def test_broken_weights_are_refused_by_name(
    head_folders: Callable[..., Path],
    target: TargetModel,
    tmp_path: Path,
    change: Callable[..., Any],
    message: str,
) -> None:
    source = Path(
        shutil.copytree(head_folders(qk_norm=True, draft_vocab_size=100), tmp_path / "source")
    )
    edit_tensors(source, change)
    for attempt in (
        lambda: convert_head(source, tmp_path / "out", "vllm"),
        lambda: load_drafter(source, target),
    ):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert message in str(caught.value)
        assert str(source / "model.safetensors") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_head_wider_than_its_target_needs_its_own_embeddings(
    target: TargetModel, tmp_path: Path
) -> None:
    save_drafter(tmp_path, make_drafter(target, hidden_size=48))
    edit_tensors(tmp_path, lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"'embed_tokens.weight' is missing"):
        load_drafter(tmp_path, target)


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / INDEX
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SHARDS[1]).unlink(), f"names '{SHARDS[1]}', which is not there"),
        (lambda f: (f / SHARDS[0]).write_bytes(b"x" * 99), "is not readable as safetensors"),
        (
            lambda f: (f / SHARDS[0]).write_bytes((f / SHARDS[0]).read_bytes()[:-9]),
            f"{SHARDS[0]}' is not readable as safetensors",
        ),
        (lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1]), "a second time"),
        (lambda f: (f / INDEX).write_text("{"), f"{INDEX}' is not JSON"),
        (lambda f: (f / INDEX).write_text("[]"), "is not an index of shards; expected an object"),
        (lambda f: (f / INDEX).write_text("{}"), "expected an object with weight_map"),
        (edit_index(lambda d: d.update(weight_map=3)), f"{INDEX}' is not an index of shards"),
        (
            edit_index(lambda d: d["weight_map"].update({"fc.weight": "../fc.safetensors"})),
            "puts tensor 'fc.weight' into '../fc.safetensors'",
        ),
        (edit_index(lambda d: d["weight_map"].update({"fc.weight": 3})), "into 3; expected"),
        (
            edit_index(lambda d: d["weight_map"].update({"gone.weight": SHARDS[0]})),
            f"lists tensor 'gone.weight', not in '{SHARDS[0]}'",
        ),
    ],
)
def test_broken_shards_are_refused_by_name(
    head_folders: Callable[..., Path],
    tmp_path: Path,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    source = Path(shutil.copytree(head_folders(), tmp_path / "source"))
    shard(source)
    convert_head(source, tmp_path / "fine", "vllm")
    damage(source)
    with pytest.raises(CheckpointError) as caught:
        convert_head(source, tmp_path / "out", "vllm")
    assert message in str(caught.value)
    assert str(source) in str(caught.value)


def test_heads_that_are_none_are_refused(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    for source, message in (
        (tmp_path / "nothing", "is not there"),
        (target_folder, "is a whole model"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(UserError, match=message):
            convert_head(source, tmp_path / "out", "vllm")
    source = Path(shutil.copytree(head_folders(), tmp_path / "source"))
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        convert_head(source, tmp_path / "out", "vllm")
    edit_config(source, peagle={"format_version": 7})
    with pytest.raises(CheckpointError, match="format_version is 7, newer"):
        convert_head(source, tmp_path / "out", "vllm")
