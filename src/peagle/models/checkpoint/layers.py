"""The keys of config.json that both styles share, flat in one and nested in the other.

They are those of a transformers configuration of type llama or qwen3; a qwen3 drafter has a norm
on every query and key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.errors import CheckpointError
from peagle.models.checkpoint.files import object_at
from peagle.models.drafter import DrafterConfig
from peagle.models.target import default_aux_layer_ids

LLAMA, QWEN3 = "llama", "qwen3"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
_USUAL_NUM_AUX = 3  # what vLLM assumes where it finds no list
# What the transformers configuration of a type assumes for absent keys.
_QWEN3_HEAD_DIM = 128
_MAX_POSITIONS = {LLAMA: 2048, QWEN3: 32768}
_DEFAULT_THETA = 10000.0
# Values that peagle's drafter does not implement, and the ones that it does.
_FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "logit_scale": 1.0,
}


def write_layers(config: DrafterConfig) -> dict[str, Any]:
    """Keys for the layers of `config`.

    From the speculators style vLLM builds its configuration out of these keys and a few others, so
    what it would not find otherwise stands here: a number of aux states other than three, and
    `fc_norm` of a P-EAGLE head.
    """
    data: dict[str, Any] = {
        "model_type": QWEN3 if config.qk_norm else LLAMA,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta", _DEFAULT_THETA),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if len(config.aux_layer_ids) != _USUAL_NUM_AUX:
        data["num_aux_hidden_states"] = len(config.aux_layer_ids)
    return data | {name: True for name in OPTIONS if getattr(config, name)}


def read_layers(data: Mapping[str, Any], model_type: str, path: str = "") -> dict[str, Any]:
    """Arguments of `DrafterConfig` that the keys of the layers give.

    Args:
        data: the keys.
        model_type: llama or qwen3.
        path: where `data` stands in the file, for messages.

    Raises:
        CheckpointError: a key is missing, or asks for what peagle lacks.
    """
    _refuse_unsupported(data, path)

    def need(key: str) -> Any:
        if data.get(key) is None:
            raise CheckpointError(f"the key {path + key!r} is missing.")
        return data[key]

    heads, size, vocab_size = need("num_attention_heads"), need("hidden_size"), need("vocab_size")
    head_dim = value_at(data, "head_dim", None)
    if head_dim is None:
        head_dim = _QWEN3_HEAD_DIM if model_type == QWEN3 else size // heads
    return {
        "hidden_size": size,
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": value_at(data, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "attention_bias": value_at(data, "attention_bias", False),
        "rms_norm_eps": value_at(data, "rms_norm_eps", 1e-6),
        "max_position_embeddings": value_at(
            data, "max_position_embeddings", _MAX_POSITIONS[model_type]
        ),
        "rope_parameters": _rope_parameters(data),
        "qk_norm": model_type == QWEN3,
    }


def read_head(data: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """What both styles write beside the layers, at the top level: widths and options of the head.

    Args:
        data: config.json.
        layers: from `read_layers`; absent widths are the layers' own.
    """
    return {
        "draft_vocab_size": value_at(data, "draft_vocab_size", layers["vocab_size"]),
        "target_hidden_size": value_at(data, "target_hidden_size", layers["hidden_size"]),
        **{name: value_at(data, name, False) for name in OPTIONS},
    }


def read_aux_layers(given: Any, key: str, num_target_layers: int | None) -> tuple[int, ...]:
    """The layers whose entering states are the feature.

    A file without them means vLLM's default, (2, L // 2, L - 3) of a target of L layers.

    Args:
        given: what the file says.
        key: where it says it.
        num_target_layers: L, None if unknown.

    Raises:
        CheckpointError: they are missing and there is no default.
    """
    if given:
        # vLLM concatenates in ascending layer order, whatever the list says.
        return tuple(sorted(given))
    if num_target_layers is not None and num_target_layers > 2 * _USUAL_NUM_AUX:
        return default_aux_layer_ids(num_target_layers)
    raise CheckpointError(
        f"{key} is missing; expected the target layers that the head reads. Write them into the "
        "file: vLLM takes [2, L // 2, L - 3] of a target with L layers, L of at least 7."
    )


def value_at(data: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key`; `default` where it is absent or null."""
    value = data.get(key)
    return default if value is None else value


def _refuse_unsupported(data: Mapping[str, Any], path: str) -> None:
    for key, supported in _FIXED.items():
        if value_at(data, key, supported) != supported:
            raise CheckpointError(f"{path}{key} is {data[key]!r}; expected {supported!r}.")
    if "sliding_attention" in value_at(data, "layer_types", ()):
        raise CheckpointError(
            f"{path}layer_types names sliding_attention, which peagle's drafter does not "
            "implement; expected full_attention in every layer."
        )
    if data.get("quantization_config"):
        raise CheckpointError(
            f"{path}quantization_config is set: peagle reads heads in float types only. Use the "
            "head before quantization."
        )


def _rope_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it, or as `rope_scaling` (type under "type") of older files."""
    rope = object_at(data, "rope_parameters")
    if not rope:
        rope = object_at(data, "rope_scaling")
        rope = {"rope_type": rope.pop("type", "default"), **rope}
    rope.setdefault("rope_theta", value_at(data, "rope_theta", _DEFAULT_THETA))
    return rope
