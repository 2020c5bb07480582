"""config.json in both styles: what is written, what is read, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from safetensors.torch import load_file

from peagle.errors import CheckpointError
from peagle.models.checkpoint import (
    FORMATS,
    HeadFormat,
    config_from_json,
    config_to_json,
    format_of,
    load_drafter,
    read_head_config,
    save_drafter,
)
from peagle.models.checkpoint.formats import facts_from_json
from peagle.models.drafter import DrafterConfig
from peagle.models.target import TargetModel
from tests.conftest import make_drafter, make_target_folder
from tests.models.any_head import FACTS, FINGERPRINT, configs

BASE = DrafterConfig(32, 40, 2, 4, 2, 8, 320, 100, 32, (1, 2, 3), 1)
FORMAT = pytest.mark.parametrize("format", FORMATS)
AUX = "eagle_aux_hidden_state_layer_ids"


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(data))


def published(format: HeadFormat, config: DrafterConfig = BASE) -> dict[str, Any]:
    """A config.json without peagle's own keys."""
    data = through_json(config_to_json(config, format=format))
    del data["peagle"]
    return data


# ---- round trips ----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(config=configs(), facts=FACTS)
def test_both_styles_say_the_same(config: DrafterConfig, facts: dict[str, Any]) -> None:
    for first in FORMATS:
        data = through_json(config_to_json(config, facts, format=first))
        assert format_of(data) == first
        assert config_from_json(data, "here") == config
        for second in FORMATS:
            again = config_to_json(config, facts_from_json(data), format=second)
            assert again == config_to_json(config, facts, format=second)


@settings(max_examples=50, deadline=None)
@given(config=configs())
def test_nothing_but_our_own_facts_needs_our_own_key(config: DrafterConfig) -> None:
    for format in FORMATS:
        found = config_from_json(published(format, config), "here")
        assert replace(found, trained_depth=config.trained_depth) == config


# ---- what is written ------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_keys_of_the_speculators_style(parallel: bool, qk_norm: bool) -> None:
    kind = "peagle" if parallel else "eagle3"
    config = replace(BASE, mask_token_id=1 if parallel else None, trained_depth=8, qk_norm=qk_norm)
    data = config_to_json(config, {"target": FINGERPRINT}, format="speculators")
    assert data["speculators_model_type"] == kind
    assert data["speculators_config"]["algorithm"] == kind
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    assert data["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": []}
    assert data["peagle"]["target"] == FINGERPRINT
    assert data["peagle"]["num_speculative_tokens_trained"] == 8
    assert data.get("mask_token_id") == config.mask_token_id
    assert data["draft_vocab_size"] == 100
    assert data[AUX] == [1, 2, 3]
    assert data["norm_before_residual"] is False
    assert data["target_hidden_size"] is None
    layers = data["transformer_layer_config"]
    assert layers["model_type"] == ("qwen3" if qk_norm else "llama")
    assert {k: layers[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")} == {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
    }


@FORMAT
@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual_is_always_written(format: HeadFormat, value: bool) -> None:
    for mask in (1, None):
        config = replace(BASE, norm_before_residual=value, mask_token_id=mask)
        assert config_to_json(config, format=format)["norm_before_residual"] is value


def test_vllm_finds_in_the_nested_keys_what_it_does_not_forward() -> None:
    """Its configuration is `transformer_layer_config` and a few keys beside it."""
    config = replace(BASE, aux_layer_ids=(1, 3), fc_norm=True, norm_output=True)
    layers = config_to_json(config, format="speculators")["transformer_layer_config"]
    assert layers["num_aux_hidden_states"] == 2
    assert layers["fc_norm"] is layers["norm_output"] is True
    assert "num_aux_hidden_states" not in config_to_json(BASE, format="speculators")


def test_qwen3_heads_have_an_architecture_of_their_own() -> None:
    data = config_to_json(replace(BASE, qk_norm=True, head_dim=16))
    assert data["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert (data["model_type"], data["head_dim"]) == ("qwen3", 16)
    assert data[AUX] == data["eagle_config"][AUX] == [1, 2, 3]


def test_an_unknown_depth_stays_unknown() -> None:
    data = config_to_json(BASE, format="speculators")
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config_from_json(data, "here").trained_depth is None
    del data["peagle"]
    assert config_from_json(data, "here").trained_depth == 5


@FORMAT
def test_tensors_of_qwen3_heads_are_those_that_vllm_loads(
    target: TargetModel, tmp_path: Path, format: HeadFormat
) -> None:
    head = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 16, "qk_norm": True}
    drafter = make_drafter(target, draft_vocab_size=100, norm_before_fc=True, **head)
    save_drafter(tmp_path, drafter, format=format)
    expected = {
        "embed_tokens.weight": [320, 48],
        "fc.weight": [48, 96],
        "input_norm.weight": [96],
        "mask_hidden": [1, 1, 96],
        "norm.weight": [48],
        "lm_head.weight": [100, 48],
        "d2t": [100],
        "t2d": [320],
        "layers.0.hidden_norm.weight": [48],
    }
    for layer, width in (("layers.0", 96), ("layers.1", 48)):
        expected |= {
            f"{layer}.input_layernorm.weight": [48],
            f"{layer}.post_attention_layernorm.weight": [48],
            f"{layer}.self_attn.q_proj.weight": [96, width],
            f"{layer}.self_attn.k_proj.weight": [32, width],
            f"{layer}.self_attn.v_proj.weight": [32, width],
            f"{layer}.self_attn.o_proj.weight": [48, 96],
            f"{layer}.self_attn.q_norm.weight": [16],
            f"{layer}.self_attn.k_norm.weight": [16],
            f"{layer}.mlp.gate_proj.weight": [40, 48],
            f"{layer}.mlp.up_proj.weight": [40, 48],
            f"{layer}.mlp.down_proj.weight": [48, 40],
        }
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == expected


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "expected"), [("peagle", False), ("eagle3", True)])
def test_norm_before_residual_of_a_file_that_does_not_say(kind: str, expected: bool) -> None:
    """vLLM's assumptions: heads without the key have been served by it."""
    data = published("speculators", replace(BASE, mask_token_id=1 if kind == "peagle" else None))
    del data["norm_before_residual"]
    assert config_from_json(data, "here").norm_before_residual is expected


@pytest.mark.parametrize(
    ("model_type", "head_dim", "positions"), [("llama", 8, 2048), ("qwen3", 128, 32768)]
)
def test_absent_keys_have_the_defaults_of_the_model_type(
    model_type: str, head_dim: int, positions: int
) -> None:
    data = published("speculators")
    layers = data["transformer_layer_config"]
    layers["model_type"] = model_type
    for key in ("head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters"):
        del layers[key]
    for key in ("num_key_value_heads", "attention_bias", "rope_theta"):
        layers[key] = None
    config = config_from_json(data, "here")
    assert (config.head_dim, config.max_position_embeddings) == (head_dim, positions)
    assert (config.num_kv_heads, config.rms_norm_eps, config.attention_bias) == (4, 1e-6, False)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.qk_norm == (model_type == "qwen3")


def test_vllm_style_layers_follow_the_architecture() -> None:
    for name, qwen3 in (
        ("LlamaForCausalLM", False),
        ("Eagle3LlamaForCausalLM", False),
        ("Qwen3ForCausalLM", True),
        ("Eagle3Qwen3ForCausalLM", True),
    ):
        data = published("vllm") | {"architectures": [name], "model_type": "anything"}
        assert config_from_json(data, "here").qk_norm is qwen3


def test_the_aux_layers_at_the_top_come_first() -> None:
    data = published("vllm")
    data[AUX] = [0, 2, 4]
    assert config_from_json(data, "here").aux_layer_ids == (0, 2, 4)
    del data[AUX]
    assert config_from_json(data, "here").aux_layer_ids == (1, 2, 3)


def test_norm_before_fc_may_stand_in_eagle_config() -> None:
    data = published("vllm")
    data["eagle_config"]["norm_before_fc"] = True
    assert config_from_json(data, "here").norm_before_fc is True


@FORMAT
def test_absent_aux_layers_are_vllms_default(tmp_path: Path, format: HeadFormat) -> None:
    target = TargetModel.load(make_target_folder(tmp_path / "target", num_hidden_layers=8))
    drafter = make_drafter(target, aux_layer_ids=(2, 4, 5))
    save_drafter(tmp_path / "head", drafter, format=format)
    path = tmp_path / "head" / "config.json"
    data = json.loads(path.read_text())
    data[AUX] = None
    data.pop("eagle_config", None)
    path.write_text(json.dumps(data))
    assert load_drafter(tmp_path / "head", target).config.aux_layer_ids == (2, 4, 5)
    for layers in (None, 6):
        with pytest.raises(CheckpointError, match=r"is missing; .*\[2, L // 2, L - 3\]"):
            read_head_config(tmp_path / "head", num_target_layers=layers)


# ---- what is refused ------------------------------------------------------------------------

LAYERS = "transformer_layer_config"
BAD_SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; expected one of"),
    ({"speculators_model_type": None}, "speculators_model_type is None; expected one of peagle"),
    ({LAYERS: None}, f"{LAYERS}.model_type is None; expected llama or qwen3"),
    ({LAYERS: [1]}, f"{LAYERS} is [1]; expected an object"),
    ({LAYERS: {"model_type": "gemma"}}, f"{LAYERS}.model_type is 'gemma'"),
    ({LAYERS: {"model_type": "llama"}}, f"the key '{LAYERS}.num_attention_heads' is missing"),
    ({f"{LAYERS}.vocab_size": None}, f"the key '{LAYERS}.vocab_size' is missing"),
    ({f"{LAYERS}.hidden_act": "gelu"}, f"{LAYERS}.hidden_act is 'gelu'; expected 'silu'"),
    ({f"{LAYERS}.mlp_bias": True}, f"{LAYERS}.mlp_bias is True; expected False"),
    ({f"{LAYERS}.head_dim": 7}, "head_dim is 7; expected an even number"),
    ({f"{LAYERS}.head_dim": 0}, "head_dim is 0; expected a whole number"),
    ({f"{LAYERS}.rms_norm_eps": "x"}, "rms_norm_eps is 'x'; expected a number above 0"),
    ({f"{LAYERS}.attention_bias": "no"}, "attention_bias is 'no'; expected true or false"),
    ({f"{LAYERS}.rope_parameters": {"rope_type": "linear"}}, "rope_parameters is {'rope_type'"),
    ({f"{LAYERS}.rope_parameters": {"full": {"rope_theta": 1.0}}}, "rope_parameters.full is"),
    (
        {f"{LAYERS}.layer_types": ["full_attention", "sliding_attention"]},
        f"{LAYERS}.layer_types names sliding_attention",
    ),
    ({f"{LAYERS}.layer_types": 3}, "a value is of the wrong type"),
    ({f"{LAYERS}.quantization_config": {"bits": 4}}, f"{LAYERS}.quantization_config is set"),
    ({"mask_token_id": None}, "mask_token_id is missing; a P-EAGLE head needs its mask token"),
    ({"mask_token_id": "1"}, "mask token id is '1'"),
    ({"mask_token_id": 320}, "mask token id is 320"),
    ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ({AUX: None}, f"{AUX} is missing; expected the target layers that the head reads"),
    ({AUX: [2, 2, 3]}, "expected distinct ascending layers"),
    ({AUX: ["1", "2"]}, "expected distinct ascending layers"),
    ({AUX: 3}, "a value is of the wrong type"),
    ({"norm_before_residual": "false"}, "norm_before_residual is 'false'; expected true or false"),
    ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both set"),
    ({"speculators_config": 3}, "speculators_config is 3; expected an object"),
    ({"speculators_config": {"proposal_methods": 3}}, "proposal_methods is 3; expected a list"),
    (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
        "trained_depth is 0; expected a whole number of at least 1",
    ),
    ({"speculators_config": {"verifier": {"name_or_path": 5}}}, "name_or_path is 5; expected"),
    ({"peagle": {"format_version": 9}}, "format_version is 9, newer than this peagle reads (1)"),
    ({"peagle": 3}, "peagle is 3; expected an object"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SPECULATORS, ids=str)
def test_bad_values_of_the_speculators_style_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = published("speculators")
    for key, value in change.items():
        outer, _, inner = key.partition(".")
        (data[outer] if inner else data)[inner or outer] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        read_head_config(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


BAD_VLLM: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["PeagleLlamaForCausalLM2"]}, "expected one of LlamaForCausalLMEagle3"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5; expected 1.0"),
    ({"norm_output": 1}, "norm_output is 1; expected true or false"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta is 'big'"),
    ({"peagle": {"num_speculative_tokens_trained": "8"}}, "trained_depth is '8'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VLLM, ids=str)
def test_bad_values_of_the_vllm_style_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_from_json(published("vllm") | change, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)


def test_an_unknown_format_is_refused(target: TargetModel, tmp_path: Path) -> None:
    wrong: Any = "gguf"
    with pytest.raises(CheckpointError, match="format is 'gguf'; expected one of vllm, spec"):
        save_drafter(tmp_path, make_drafter(target), format=wrong)
    assert list(tmp_path.iterdir()) == []
