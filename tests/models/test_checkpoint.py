"""Draft heads on disk: what is written and what is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.errors import UserError
from peagle.models.checkpoint import (
    config_from_json,
    config_to_json,
    load_drafter,
    read_head_config,
    save_drafter,
    split_tensors,
    write_json,
)
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.models.editing import edit_tensors

KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])


# ---- what is written ------------------------------------------------------------------------

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
    assert loaded.config == drafter.config
    assert read_head_config(tmp_path)[0] == drafter.config
    own, again = drafter.state_dict(), loaded.state_dict()
    assert list(again) == list(own)
    assert all(torch.equal(again[name], own[name]) for name in own)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not loaded.training
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@KINDS
def test_names_and_shapes_are_those_that_vllm_loads(
    target: TargetModel, tmp_path: Path, parallel: bool
) -> None:
    options = {"hidden_size": 48, "head_dim": 8, "draft_vocab_size": 100}
    save_drafter(tmp_path, make_drafter(target, parallel=parallel, num_layers=2, **options))
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
    for layer, width in (("layers.0", 96), ("layers.1", 48)):
        expected |= {
            f"{layer}.input_layernorm.weight": [48],
            f"{layer}.post_attention_layernorm.weight": [48],
            f"{layer}.self_attn.q_proj.weight": [32, width],
            f"{layer}.self_attn.k_proj.weight": [16, width],
            f"{layer}.self_attn.v_proj.weight": [16, width],
            f"{layer}.self_attn.o_proj.weight": [48, 32],
            f"{layer}.mlp.gate_proj.weight": [40, 48],
            f"{layer}.mlp.up_proj.weight": [40, 48],
            f"{layer}.mlp.down_proj.weight": [48, 40],
        }
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    ids = torch.arange(100) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())


def test_bias_of_the_output_projection_is_written(target: TargetModel, tmp_path: Path) -> None:
    save_drafter(tmp_path, make_drafter(target, attention_bias=True))
    names = set(load_file(tmp_path / "model.safetensors"))
    for layer in ("layers.0", "layers.1"):
        assert {f"{layer}.self_attn.{p}_proj.bias" for p in "qkvo"} <= names


def test_vocabulary_maps_are_left_out_of_a_full_vocabulary(head: Path) -> None:
    assert {"d2t", "t2d"}.isdisjoint(load_file(head / "model.safetensors"))


@KINDS
def test_config_has_the_keys_that_vllm_reads(
    target: TargetModel, tmp_path: Path, parallel: bool
) -> None:
    options = {"hidden_size": 48, "head_dim": 16, "draft_vocab_size": 100, "trained_depth": 8}
    save_drafter(tmp_path, make_drafter(target, parallel=parallel, **options))
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]
    assert data["model_type"] == "llama"
    assert data["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "use_aux_hidden_state": True,
    }
    wanted = {"hidden_size": 48, "target_hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    wanted |= {"vocab_size": 320, "draft_vocab_size": 100, "norm_before_residual": False}
    assert {key: data[key] for key in wanted} == wanted
    mask = {key: data.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")}
    assert set(mask.values()) == {1 if parallel else None}
    assert data["peagle"] == {"format_version": 1, "num_speculative_tokens_trained": 8}
    assert data["dtype"] == "float32"


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


def test_an_interrupted_write_leaves_the_old_file(
    head: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in head.iterdir()}

    def full_disk(tensors: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.models.checkpoint.files.save_file", full_disk)
    with pytest.raises(UserError, match=r"could not be written: .*No space left"):
        save_drafter(head, make_drafter(target, num_layers=1))
    assert {p.name: p.read_bytes() for p in head.iterdir()} == before
    load_drafter(head, target)


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


# ---- what else is read ----------------------------------------------------------------------


def test_midlayer_is_an_alias_of_the_first_layer(head: Path, target: TargetModel) -> None:
    expected = load_drafter(head, target).state_dict()

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    edit_tensors(head, rename)
    found = load_drafter(head, target).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tensors_may_be_spread_over_files(head: Path, target: TargetModel) -> None:
    expected = load_drafter(head, target).state_dict()
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in range(2):
        part = {n: tensors[n] for n in names[i::2]}
        save_file(part, head / f"model-0000{i + 1}-of-00002.safetensors")
    found = load_drafter(head, target).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_absent_embeddings_are_the_targets(head: Path, target: TargetModel) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        edit_tensors(head, lambda tensors, name=name: tensors.pop(name))
    drafter = load_drafter(head, target)
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.lm_head_weight())
    assert drafter.lm_head.weight.data_ptr() != target.lm_head_weight().data_ptr()


def test_mask_hidden_may_be_flat(head: Path, target: TargetModel) -> None:
    expected = load_drafter(head, target).mask_hidden
    assert expected is not None
    edit_tensors(head, lambda t: t.update(mask_hidden=t["mask_hidden"].flatten()))
    found = load_drafter(head, target).mask_hidden
    assert found is not None
    assert torch.equal(found, expected)


def config_of(**changes: Any) -> dict[str, Any]:
    """A published style of config.json, without keys of our own."""
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]},
        **changes,
    }
    return {key: value for key, value in data.items() if value is not None}


def test_defaults_of_absent_keys() -> None:
    config = config_from_json(config_of(), "here")
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.draft_vocab_size == 320
    assert config.target_hidden_size == 32
    assert config.aux_layer_ids == (1, 2, 3), "ascending, whatever the list says"
    assert config.mask_token_id is None
    assert config.norm_before_residual is False
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.trained_depth is None


def test_mask_id_keys_are_read_in_vllms_order() -> None:
    every = {"ptd_token_id": 7, "pard_token": 8, "mask_token_id": 9}
    for remaining, expected in ((3, 9), (2, 8), (1, 7)):
        given = dict(list(every.items())[:remaining])
        assert config_from_json(config_of(**given), "here").mask_token_id == expected
    assert config_from_json(config_of(mask_token_id=0, ptd_token_id=7), "here").mask_token_id == 0


def test_other_places_of_keys() -> None:
    data = config_of(
        eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 5], speculative_tokens=6
    )
    config = config_from_json(data, "here")
    assert config.aux_layer_ids == (0, 5)
    assert config.trained_depth == 6


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_old_rope_scaling_is_understood(key: str) -> None:
    scaling = {key: "linear", "factor": 4.0}
    config = config_from_json(config_of(rope_scaling=scaling, rope_theta=5e5), "here")
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


def test_config_round_trip_keeps_extra_facts(target: TargetModel) -> None:
    config = make_drafter(target, trained_depth=8).config
    data = config_to_json(config, {"note": "x"})
    assert data["peagle"]["note"] == "x"
    assert config_from_json(json.loads(json.dumps(data)), "here") == config
