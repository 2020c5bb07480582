"""config.json in both styles: what is written, what is read, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from transformers import Qwen3Config

from peagle.errors import CheckpointError
from peagle.models.checkpoint import (
    FORMATS,
    HeadFormat,
    config_from_json,
    config_to_json,
    format_of,
    load_drafter,
    read_head,
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
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")


def through_json(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(data))


def published(format: HeadFormat, config: DrafterConfig = BASE) -> dict[str, Any]:
    """A config.json without peagle's own keys."""
    data = through_json(config_to_json(config, format=format))
    del data["peagle"]
    return data


# ---- round trips ----


@pytest.mark.slow
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


# ---- what is written ----


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


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_keys_of_the_vllm_style(parallel: bool) -> None:
    config = replace(
        BASE,
        hidden_size=48,
        head_dim=16,
        mask_token_id=1 if parallel else None,
        trained_depth=8,
    )
    data = config_to_json(config, {"note": "x"})
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]
    assert data["model_type"] == "llama"
    assert data["eagle_config"] == {AUX: [1, 2, 3], "use_aux_hidden_state": True}
    wanted = {"hidden_size": 48, "target_hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    wanted |= {"vocab_size": 320, "draft_vocab_size": 100, "norm_before_residual": False}
    assert {key: data[key] for key in wanted} == wanted
    mask = {key: data.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")}
    assert set(mask.values()) == {1 if parallel else None}
    assert data["peagle"] == {
        "format_version": 1,
        "num_speculative_tokens_trained": 8,
        "note": "x",
    }


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


# ---- what is read ----


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
            read_head(tmp_path / "head", num_target_layers=layers)


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


# ---- what is refused ----

LAYERS = "transformer_layer_config"
Change = dict[str, Any]
# By style: the keys that change ("a.b" is b in a; None removes one), and what is said.
BAD_SPECULATORS: list[tuple[Change, str]] = [
    ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; expected one of"),
    ({"speculators_model_type": None}, "speculators_model_type is None; expected one of peagle"),
    ({LAYERS: None}, f"{LAYERS}.model_type is None; expected llama or qwen3"),
    ({LAYERS: [1]}, f"{LAYERS} is [1]; expected an object"),
    ({LAYERS: {"model_type": "gemma"}}, f"{LAYERS}.model_type is 'gemma'"),
    ({LAYERS: {"model_type": "llama"}}, f"the key '{LAYERS}.num_attention_heads' is missing"),
    ({f"{LAYERS}.vocab_size": None}, f"the key '{LAYERS}.vocab_size' is missing"),
    ({f"{LAYERS}.hidden_act": "gelu"}, f"{LAYERS}.hidden_act is 'gelu'; expected 'silu'"),
    ({f"{LAYERS}.mlp_bias": True}, f"{LAYERS}.mlp_bias is True; expected False"),
    ({f"{LAYERS}.attention_bias": "no"}, "attention_bias is 'no'; expected true or false"),
    ({f"{LAYERS}.rope_parameters": {"rope_type": "linear"}}, "rope_parameters is {'rope_type'"),
    ({f"{LAYERS}.rope_parameters": {"full": {"rope_theta": 1.0}}}, "rope_parameters.full is"),
    (
        {f"{LAYERS}.layer_types": ["full_attention", "sliding_attention"]},
        f"{LAYERS}.layer_types names sliding_attention, and {LAYERS}.sliding_window is None",
    ),
    ({f"{LAYERS}.layer_types": ["chunked"]}, f"{LAYERS}.layer_types names 'chunked'; expected"),
    ({f"{LAYERS}.layer_types": 3}, f"{LAYERS}.layer_types is 3; expected a list with sliding"),
    ({"mask_token_id": None}, "mask_token_id is missing; a P-EAGLE head needs its mask token"),
    ({"mask_token_id": "1"}, "mask token id is '1'"),
    ({AUX: None}, f"{AUX} is missing; expected the target layers that the head reads"),
    ({AUX: [2, 2, 3]}, "expected distinct ascending layers"),
    ({AUX: ["1", "2"]}, "expected distinct ascending layers"),
    ({AUX: 3}, "a value is of the wrong type"),
    ({"norm_before_residual": "false"}, "norm_before_residual is 'false'; expected true or false"),
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
BAD_VLLM: list[tuple[Change, str]] = [
    ({"architectures": ["PEagleForCausalLM"]}, "expected one of LlamaForCausalLMEagle3"),
    ({"architectures": None}, "architectures is []"),
    ({"eagle_config.use_aux_hidden_state": False}, "use_aux_hidden_state is false"),
    ({AUX: None, "eagle_config": {}}, f"eagle_config.{AUX} is missing"),
    ({"eagle_config": [1]}, "eagle_config is [1]; expected an object"),
    (
        {"layer_types": ["sliding_attention"], "sliding_window": 8},
        "layer_types names 1 layers; expected 2 (num_hidden_layers)",
    ),
    (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0},
        "sliding_window is 0; expected the positions that such a layer attends to",
    ),
    (
        {"architectures": ["PEagleDraftModel"], **dict.fromkeys(MASKS)},
        'Add "mask_token_id" to config.json: the token id that its training was given as',
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5; expected 1.0"),
    ({"norm_output": 1}, "norm_output is 1; expected true or false"),
    ({"hidden_size": None}, "the key 'hidden_size' is missing"),
    ({"num_hidden_layers": "2"}, "num_layers is '2'; expected a whole number"),
    ({"num_attention_heads": [4]}, "num_attention_heads is [4]"),
    ({"num_attention_heads": "4", "head_dim": None}, "a value is of the wrong type"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta is 'big'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type is 'longrope'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, "RoPE type is 'ntk'"),
    ({"rope_parameters": 3}, "rope_parameters is 3; expected an object"),
    ({"peagle": "x"}, "peagle is 'x'; expected an object"),
    ({"peagle": {"format_version": "2"}}, "format_version is '2'; expected a whole number"),
    ({"peagle": {"num_speculative_tokens_trained": "8"}}, "trained_depth is '8'"),
]


@pytest.mark.parametrize("layer_types", [{}, {"layer_types": ["sliding_attention"] * 2}], ids=str)
@pytest.mark.parametrize("size", [{}, {"sliding_window": 6}, {"sliding_window": None}], ids=str)
@pytest.mark.parametrize("first", [{}, {"max_window_layers": 1}, {"max_window_layers": 0}], ids=str)
@pytest.mark.parametrize("used", [{}, {"use_sliding_window": True}], ids=str)
def test_qwen3_windows_are_those_of_transformers(
    layer_types: Change, size: Change, first: Change, used: Change
) -> None:
    keys = {**layer_types, **size, **first, **used}
    theirs = Qwen3Config(num_hidden_layers=2, **keys)
    sizes = [
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types or ()
    ]
    expected = tuple(sizes) if any(sizes) else ()
    data = config_of(architectures=["Eagle3Qwen3ForCausalLM"], num_hidden_layers=2) | keys
    if layer_types and used and size.get("sliding_window", 1) is None:
        with pytest.raises(CheckpointError, match="names sliding_attention, and sliding_window is"):
            config_from_json(data, "head", num_target_layers=8)
    else:
        assert config_from_json(data, "head", num_target_layers=8).windows == expected


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [("speculators", *case) for case in BAD_SPECULATORS] + [("vllm", *case) for case in BAD_VLLM],
    ids=str,
)
def test_bad_values_are_named(
    tmp_path: Path, format: HeadFormat, change: Change, message: str
) -> None:
    data = published(format)
    for key, value in change.items():
        outer, _, inner = key.partition(".")
        (data[outer] if inner else data)[inner or outer] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        read_head(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize("text", [b"{", b"", b"[]", b'"x"', b"\xff\xfe\x00"])
def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(
        CheckpointError, match=r"config.json' (is not JSON|holds .*expected an obj)"
    ):
        read_head(tmp_path)


def test_an_unknown_format_is_refused(target: TargetModel, tmp_path: Path) -> None:
    wrong: Any = "gguf"
    with pytest.raises(CheckpointError, match="format is 'gguf'; expected one of vllm, spec"):
        save_drafter(tmp_path, make_drafter(target), format=wrong)
    assert list(tmp_path.iterdir()) == []
