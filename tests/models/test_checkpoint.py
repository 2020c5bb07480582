"""Draft heads on disk: what is written, read back and converted, and what is refused by name."""

import errno
import json
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import (
    FORMATS,
    HeadFormat,
    convert_head,
    load_drafter,
    read_head,
    save_drafter,
    split_tensors,
    write_json,
)
from peagle.models.checkpoint.files import replace_file, save_tensors
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint, tokens_digest
from peagle.models.target import TargetModel
from tests.conftest import make_drafter, make_target_folder
from tests.crashes import kills
from tests.models.any_head import FACTS, configs
from tests.models.editing import bits_of_head, edit_config, edit_tensors, rename_a_token

Heads = Callable[..., Path]
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WRITTEN = ["config.json", "model.safetensors"]
FORMAT = pytest.mark.parametrize("format", FORMATS)
KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(folder: Path, target: TargetModel) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target)
    return str(caught.value)


@FORMAT
@KINDS
def test_the_length_of_training_is_written_as_the_window(
    target: TargetModel, tmp_path: Path, parallel: bool, format: HeadFormat
) -> None:
    """Of P-EAGLE heads, whose mask slots fail beyond it; an earlier window does not stay."""
    drafter = make_drafter(target, parallel=parallel, windows=(9, None))
    save_drafter(tmp_path / "kept", drafter, format=format)
    assert read_head(tmp_path / "kept").config.windows == (9, None)
    for length, windows in ((40, (40, 40)), (50, (50, 50))):
        extra = {"max_sequence_length_trained": length}
        save_drafter(tmp_path / "head", drafter, extra=extra, format=format)
        data = json.loads((tmp_path / "head/config.json").read_text())
        layers = data.get("transformer_layer_config", data)
        assert read_head(tmp_path / "head").config.windows == (windows if parallel else ())
        assert layers.get("sliding_window") == (length if parallel else None)


# ---- what is written ----

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 1, "norm_before_residual": True, "trained_depth": 8},
    {"norm_before_fc": True, "draft_vocab_size": 100},
    {"fc_norm": True, "attention_bias": True, "rms_norm_eps": 1e-6},
    {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "head_dim": 16,
        "aux_layer_ids": (0, 3),
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
]


@KINDS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_round_trip(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], parallel: bool
) -> None:
    drafter = make_drafter(target, parallel=parallel, **options)
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, target, dtype=torch.float32)
    assert loaded.config == drafter.config == read_head(tmp_path).config
    own, again = drafter.state_dict(), loaded.state_dict()
    assert list(again) == list(own)
    assert all(torch.equal(again[name], own[name]) for name in own)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not loaded.training
    assert names_in(tmp_path) == WRITTEN


@FORMAT
@KINDS
@pytest.mark.parametrize("qwen3", [False, True], ids=["llama", "qwen3"])
def test_names_and_shapes_are_those_that_vllm_loads(
    target: TargetModel, tmp_path: Path, format: HeadFormat, parallel: bool, qwen3: bool
) -> None:
    size = 16 if qwen3 else 8
    more = {"attention_bias": not qwen3, "qk_norm": qwen3, "norm_before_fc": qwen3}
    head = {"hidden_size": 48, "head_dim": size, "draft_vocab_size": 100, **more}
    save_drafter(tmp_path, make_drafter(target, parallel=parallel, **head), format=format)
    expected = {
        "embed_tokens.weight": [320, 48],
        "fc.weight": [48, 96],
        "norm.weight": [48],
        "lm_head.weight": [100, 48],
        "d2t": [100],
        "t2d": [320],
        "layers.0.hidden_norm.weight": [48],
    }
    if parallel:
        expected["mask_hidden"] = [1, 1, 96]
    if qwen3:
        expected["input_norm.weight"] = [96]
    heads = {"q": 4 * size, "k": 2 * size, "v": 2 * size}
    for layer, width in (("layers.0", 96), ("layers.1", 48)):
        expected |= {
            f"{layer}.input_layernorm.weight": [48],
            f"{layer}.post_attention_layernorm.weight": [48],
            **{f"{layer}.self_attn.{x}_proj.weight": [n, width] for x, n in heads.items()},
            f"{layer}.self_attn.o_proj.weight": [48, heads["q"]],
            f"{layer}.mlp.gate_proj.weight": [40, 48],
            f"{layer}.mlp.up_proj.weight": [40, 48],
            f"{layer}.mlp.down_proj.weight": [48, 40],
        }
        if qwen3:
            expected |= {f"{layer}.self_attn.{x}_norm.weight": [size] for x in "qk"}
        else:
            expected |= {f"{layer}.self_attn.{x}_proj.bias": [n] for x, n in heads.items()}
            expected[f"{layer}.self_attn.o_proj.bias"] = [48]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == expected
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    ids = torch.arange(100) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())


def test_stored_type_can_be_chosen(target: TargetModel, tmp_path: Path) -> None:
    drafter = make_drafter(target, draft_vocab_size=100)
    save_drafter(tmp_path, drafter, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {n: v.dtype for n, v in tensors.items() if v.dtype != torch.bfloat16} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = dict(split_tensors(load_drafter(tmp_path, target)))
    assert loaded["fc.weight"].dtype == target.dtype
    assert torch.equal(loaded["fc.weight"].bfloat16(), drafter.fc.weight.bfloat16())


def test_an_interrupted_write_leaves_the_old_files(
    head: Path, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(tensors: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = {p.name: p.read_bytes() for p in head.iterdir()}
    monkeypatch.setattr("peagle.models.checkpoint.files.save_file", full_disk)
    for write in (
        lambda: save_drafter(head, make_drafter(target, num_layers=1)),
        lambda: convert_head(head, tmp_path / "out", "vllm"),
    ):
        with pytest.raises(UserError, match=r"could not be written: .*No space left on device"):
            write()
    assert {p.name: p.read_bytes() for p in head.iterdir()} == before
    assert names_in(tmp_path / "out") == []
    load_drafter(head, target)


@pytest.mark.slow
@pytest.mark.parametrize("is_alike", [True, False])
def test_a_crash_at_any_step_leaves_no_mixture_of_two_heads(
    target: TargetModel, tmp_path: Path, is_alike: bool
) -> None:
    """Two heads of the same shapes; where one key of config.json differs, files must not mix."""
    convention = {} if is_alike else {"norm_before_residual": True}
    heads = [make_drafter(target, seed=1), make_drafter(target, seed=2, **convention)]
    for name, drafter in zip(("old", "new"), heads, strict=True):
        save_drafter(tmp_path / name, drafter)
    folder = tmp_path / "head"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)

    found = []
    for _ in kills(prepare, lambda: save_drafter(folder, heads[1])):
        try:
            loaded = load_drafter(folder, target)
        except CheckpointError as error:
            assert "has no model.safetensors" in str(error)
            found.append("none")
            continue
        (which,) = (
            name
            for name in ("old", "new")
            if all(
                torch.equal(value, loaded.state_dict()[key])
                for key, value in load_drafter(tmp_path / name, target).state_dict().items()
            )
        )
        assert loaded.config == load_drafter(tmp_path / which, target).config
        found.append(which)
    order = ["old", "new"] if is_alike else ["old", "none", "new"]
    assert list(dict.fromkeys(found)) == order


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert names_in(tmp_path) == ["state.json"]


# ---- what else is read ----


def use_alias(folder: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    edit_tensors(folder, rename)


def shard(folder: Path) -> None:
    """Spread the weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def spread(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()


def flatten_mask(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update(mask_hidden=t["mask_hidden"].flatten()))


def drop_t2d(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("t2d"))


@FORMAT
@pytest.mark.parametrize("rearrange", [use_alias, shard, spread, flatten_mask, drop_t2d])
def test_layout_is_straightened(
    head_folders: Heads,
    target: TargetModel,
    tmp_path: Path,
    format: HeadFormat,
    rearrange: Callable[[Path], None],
) -> None:
    source = head_folders(draft_vocab_size=100)
    loaded, bits = load_drafter(source, target).state_dict(), bits_of_head(source)
    rearrange(source)
    result = convert_head(source, tmp_path / "out", format)
    assert names_in(tmp_path / "out") == WRITTEN
    if rearrange is drop_t2d:
        del bits["t2d"]
    assert bits_of_head(tmp_path / "out") == bits
    assert load_file(tmp_path / "out" / "model.safetensors")["mask_hidden"].shape == (1, 1, 96)
    assert result.num_tensors == len(bits)
    assert result.num_bytes == sum(len(raw) for _, raw in bits.values())
    for folder in (source, tmp_path / "out"):
        found = load_drafter(folder, target).state_dict()
        assert all(torch.equal(found[name], loaded[name]) for name in loaded)


def test_absent_embeddings_are_the_targets(head: Path, target: TargetModel, tmp_path: Path) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        edit_tensors(head, lambda tensors, name=name: tensors.pop(name))
    convert_head(head, tmp_path / "out", "speculators")
    for folder in (head, tmp_path / "out"):
        drafter = load_drafter(folder, target)
        assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
        assert torch.equal(drafter.lm_head.weight, target.lm_head_weight())
        assert drafter.lm_head.weight.data_ptr() != target.lm_head_weight().data_ptr()


def test_maps_that_keep_every_token_are_left_out(
    head: Path, target: TargetModel, tmp_path: Path
) -> None:
    assert {"d2t", "t2d"}.isdisjoint(load_file(head / "model.safetensors"))
    maps = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
    edit_tensors(head, lambda tensors: tensors.update(maps))
    load_drafter(head, target)
    convert_head(head, tmp_path / "out", "speculators")
    assert {"d2t", "t2d"}.isdisjoint(load_file(tmp_path / "out" / "model.safetensors"))
    maps["d2t"][3] = 1
    edit_tensors(head, lambda tensors: tensors.update(maps))
    assert "d2t and t2d select tokens" in refusal(head, target)


# ---- conversion ----


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


@pytest.mark.slow
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
        first, third = read_head(a), read_head(c)
        assert (first.config, first.facts) == (third.config, third.facts)
        assert read_head(b).config == config


def test_the_targets_name_moves_and_can_be_given(
    head: Path, target_folder: Path, tmp_path: Path
) -> None:
    def verifier(name: str) -> Any:
        data = json.loads((tmp_path / name / "config.json").read_text())
        return data["speculators_config"]["verifier"]["name_or_path"]

    result = convert_head(head, tmp_path / "a", "speculators")
    assert verifier("a") == result.target == target_folder.name
    convert_head(head, tmp_path / "b", "speculators", target="Qwen/Qwen3-8B")
    assert verifier("b") == "Qwen/Qwen3-8B"
    convert_head(tmp_path / "b", tmp_path / "c", "vllm")
    convert_head(tmp_path / "c", tmp_path / "d", "speculators")
    assert verifier("d") == "Qwen/Qwen3-8B"


@pytest.mark.slow
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


def test_destinations_are_not_overwritten_unasked(head: Path, tmp_path: Path) -> None:
    source = head.rename(tmp_path / "source")
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


def test_force_replaces_the_head_and_nothing_else(head_folders: Heads, target: TargetModel) -> None:
    source, old = head_folders(num_layers=1), head_folders(num_layers=3)
    shard(old)
    (old / "README.md").write_text("mine")
    convert_head(source, old, "speculators", force=True)
    assert names_in(old) == ["README.md", *WRITTEN]
    assert load_drafter(old, target).config.num_layers == 1


# ---- tensors that are refused ----


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def shaped(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def typed(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def hold_nan(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][3, 4] = torch.nan


def hold_twice(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"].clone()


BROKEN: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    *(
        (without(name), f"tensor {name!r} is missing.")
        for name in (
            *("fc.weight", "norm.weight", "layers.0.hidden_norm.weight", "d2t", "lm_head.weight"),
            *("layers.0.self_attn.k_proj.weight", "layers.1.mlp.up_proj.weight"),
        )
    ),
    (without("mask_hidden"), "'mask_hidden' is missing. It has a mask token, so it is a P-EAGLE"),
    (
        without("layers.1.self_attn.q_norm.weight"),
        "'layers.1.self_attn.q_norm.weight' is missing. Its config.json says",
    ),
    (
        lambda t: t.update({"z": torch.zeros(1), "layers.2.mlp.up_proj.weight": torch.zeros(40)}),
        "tensor 'layers.2.mlp.up_proj.weight' is unknown to this head (2 in all)",
    ),
    (shaped("fc.weight", 32, 64), "'fc.weight' has shape [32, 64]; expected [32, 96]"),
    (shaped("layers.0.self_attn.q_proj.weight", 32, 32), "[32, 32]; expected [32, 64]"),
    (shaped("layers.1.self_attn.v_proj.weight", 32, 32), "[32, 32]; expected [16, 32]"),
    (shaped("norm.weight", 1, 32), "'norm.weight' has shape [1, 32]; expected [32]"),
    (shaped("mask_hidden", 1, 1, 64), "[1, 1, 64]; expected [1, 1, 96]"),
    (shaped("mask_hidden", 95), "'mask_hidden' has shape [95]"),
    (shaped("embed_tokens.weight", 319, 32), "[319, 32]; expected [320, 32]"),
    (
        typed("d2t", torch.float32),
        "'d2t' has type torch.float32; expected torch.int64, torch.int32",
    ),
    (
        typed("fc.weight", torch.int8),
        "'fc.weight' has type torch.int8; expected torch.float32, torch.bfloat16",
    ),
    (typed("fc.weight", torch.float8_e4m3fn), "float8"),
    (hold_nan, "tensor 'lm_head.weight' holds NaN or infinite values"),
    (hold_twice, "holds tensor 'layers.0.hidden_norm.weight' a second time"),
    (lambda t: t["d2t"].add_(300), "expected distinct ids from 0 to 319"),
    (lambda t: t["d2t"].sub_(300), "expected distinct ids from 0 to 319"),
    (lambda t: t.update(d2t=-torch.arange(100)), "maps draft ids to target ids 0 to 0"),
    (lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d disagree"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_weights_are_refused_by_name(
    head_folders: Heads,
    target: TargetModel,
    tmp_path: Path,
    change: Callable[..., Any],
    message: str,
) -> None:
    source = head_folders(qk_norm=True, draft_vocab_size=100)
    edit_tensors(source, change)
    with pytest.raises(CheckpointError) as caught:
        convert_head(source, tmp_path / "out", "vllm")
    assert message in str(caught.value)
    assert str(source / "model.safetensors") in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert refusal(source, target) == str(caught.value)


def test_what_config_and_weights_disagree_about(
    head: Path, head_folders: Heads, target: TargetModel
) -> None:
    edit_config(head, mask_token_id=None, pard_token=None, ptd_token_id=None)
    assert "tensor 'mask_hidden' is unknown" in refusal(head, target)
    wide = head_folders(hidden_size=48)  # wider than its target: it needs embeddings of its own
    edit_tensors(wide, without("embed_tokens.weight"))
    assert "'embed_tokens.weight' is missing" in refusal(wide, target)


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        change(data)
        (folder / INDEX).write_text(json.dumps(data))

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
    head: Path, target: TargetModel, damage: Callable[[Path], Any], message: str
) -> None:
    shard(head)
    load_drafter(head, target)
    damage(head)
    found = refusal(head, target)
    assert message in found
    assert str(head) in found


# ---- folders that are refused ----


def test_folders_that_are_no_heads_are_refused(
    head: Path, target_folder: Path, target: TargetModel, tmp_path: Path
) -> None:
    for source, message in (
        (tmp_path / "nothing", r"draft head .*nothing' is not there"),
        (target_folder, "is a whole model"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(UserError, match=message):
            convert_head(source, tmp_path / "out", "vllm")
        with pytest.raises(UserError, match=message):
            load_drafter(source, target)
    file = head / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-8], b"", b"x" * 64):
        file.write_bytes(broken)
        assert f"{str(file)!r} is not readable as safetensors" in refusal(head, target)
    file.unlink()
    assert refusal(head, target) == f"The draft head {str(head)!r} has no model.safetensors."
    (head / "config.json").unlink()
    assert refusal(head, target) == f"The draft head {str(head)!r} has no config.json."


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt", "model.ckpt"])
def test_pickled_weights_are_refused_unread(head: Path, target: TargetModel, name: str) -> None:
    (head / "model.safetensors").rename(head / name)
    message = refusal(head, target)
    assert f"{str(head / name)!r} is a pickle" in message
    assert "expected model.safetensors" in message


# ---- another target ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "has vocab_size 320, the target"),
        ({"hidden_size": 48}, "has target_hidden_size 32, the target"),
        ({"num_hidden_layers": 3}, "reads target layers [1, 2, 3], but"),
    ],
    ids=str,
)
def test_a_head_of_a_target_of_other_sizes_is_refused(
    head: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    other = TargetModel.load(make_target_folder(tmp_path / "other", **change))
    found = refusal(head, other)
    assert message in found
    assert "it is a head of another target" in found
    assert str(tmp_path / "other") in found


def test_a_head_of_another_target_of_the_same_sizes_is_refused(
    head: Path, target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    other = TargetModel.load(make_target_folder(tmp_path / "other", seed=1))
    message = refusal(head, other)
    assert f"was trained for target {target_folder.name!r}" in message
    assert f"not for {str(tmp_path / 'other')!r}: lm_head_sha256 is" in message
    assert '"check_target": false' in message
    load_drafter(head, other, check_target=False)
    save_drafter(head, make_drafter(target))  # without a fingerprint
    load_drafter(head, other)


def test_other_depth_and_other_tokenizer_are_refused(
    head: Path, target_folder: Path, tmp_path: Path
) -> None:
    deeper = TargetModel.load(make_target_folder(tmp_path / "deeper", num_hidden_layers=6))
    assert "num_layers is 6, the head expects 4" in refusal(head, deeper)
    other = Path(shutil.copytree(target_folder, tmp_path / "other"))
    rename_a_token(other / "tokenizer.json")
    assert "tokenizer_sha256 is" in refusal(head, TargetModel.load(other))
    (other / "tokenizer.json").unlink()
    load_drafter(head, TargetModel.load(other))  # nothing to compare with


def test_a_tokenizer_that_was_saved_anew_is_the_same(
    head: Path, target_folder: Path, tmp_path: Path
) -> None:
    """Libraries write the same tokens in other words: other versions, spaces, forms of merges."""
    other = Path(shutil.copytree(target_folder, tmp_path / "other"))
    data = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    text = json.dumps({**data, "normalizer": {"type": "Sequence", "normalizers": []}}, indent=1)
    (other / "tokenizer.json").write_text(text, encoding="utf-8")
    load_drafter(head, TargetModel.load(other))
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    del config["peagle"]["target"]["tokens_sha256"]  # a head that was trained before this field
    (head / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "tokenizer_sha256 is" in refusal(head, TargetModel.load(other))


@pytest.mark.parametrize(
    ("model", "same"),
    [
        ({"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}, True),
        ({"vocab": {"ab": 2, "b": 1, "a": 0}, "merges": ["a b"], "fuse_unk": True}, True),
        ({"vocab": [["a", -1.0], ["b", -2.0], ["ab", -3.0]], "merges": ["a b"]}, True),
        ({"vocab": {"a": 0, "b": 1, "ba": 2}, "merges": ["a b"]}, False),
        ({"vocab": {"a": 1, "b": 0, "ab": 2}, "merges": ["a b"]}, False),
        ({"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []}, False),
    ],
)
def test_the_digest_is_that_of_tokens_and_merges(
    tmp_path: Path, model: dict[str, Any], same: bool
) -> None:
    def digest(model: dict[str, Any], added: list[tuple[int, str]]) -> str | None:
        tokens = [{"id": index, "content": token} for index, token in added]
        text = json.dumps({"model": model, "added_tokens": tokens})
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        return tokens_digest(tmp_path)

    first = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    assert (digest(model, [(3, "<s>")]) == digest(first, [(3, "<s>")])) is same
    assert digest(model, [(3, "<s>")]) != digest(model, [(3, "</s>")])


@pytest.mark.parametrize("fingerprint", [{"name": "x"}, {"unknown": 1}, [], "x"], ids=str)
def test_an_unreadable_fingerprint_is_refused(
    head: Path, target: TargetModel, fingerprint: Any
) -> None:
    edit_config(head, peagle={"format_version": 1, "target": fingerprint})
    assert "fingerprint is not readable" in refusal(head, target)


def test_the_fingerprint_is_the_same_in_every_type(target_folder: Path, tmp_path: Path) -> None:
    """Heads are trained in one type and served in another; bfloat16 is the common ground."""
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16)
    folder = tmp_path / target_folder.name
    shutil.copytree(target_folder, folder)
    model.save_pretrained(folder)
    types = (torch.float32, torch.float64, torch.bfloat16, None)
    found = [TargetFingerprint.of(TargetModel.load(folder, dtype=dtype)) for dtype in types]
    assert len(set(found)) == 1
    # A float32 checkpoint rounds to the same rows as its bfloat16 copy.
    stored_wide = TargetFingerprint.of(TargetModel.load(target_folder, dtype=torch.float64))
    assert stored_wide == found[0]
    # float16 loses small values: the rows are then not compared, the rest is.
    narrow = TargetModel.load(folder, dtype=torch.float16)
    found[0].check(narrow, "head")
    with pytest.raises(CheckpointError, match="num_layers"):
        replace(found[0], num_layers=5).check(narrow, "head")
    assert TargetFingerprint.from_json(json.loads(json.dumps(found[0].to_json()))) == found[0]


@pytest.mark.parametrize("row", [0, -1])
def test_the_fingerprint_sees_a_changed_output_embedding(target: TargetModel, row: int) -> None:
    before = TargetFingerprint.of(target)
    target.lm_head_weight()[row] *= 1.5
    with pytest.raises(CheckpointError, match="lm_head_sha256"):
        before.check(target, "head")


def test_what_the_disk_does_not_take_is_an_error_of_the_system(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as tensors:
            save_tensors(tmp_path / "tensors", {"a": torch.zeros(5000)}, {})
        with pytest.raises(OSError) as text:
            replace_file(tmp_path / "text", b"0" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tensors.value.errno, text.value.errno) == (errno.EFBIG, errno.EFBIG)
    assert tensors.value.filename == str(tmp_path / "tensors")
    assert not list(tmp_path.glob("text*"))
