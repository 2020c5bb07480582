"""The vLLM style: one flat config.json, as the published `amazon/*-p-eagle` heads have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.errors import CheckpointError
from peagle.models.checkpoint.files import object_at
from peagle.models.checkpoint.layers import (
    AUX_KEY,
    LLAMA,
    QWEN3,
    read_aux_layers,
    read_head,
    read_layers,
    value_at,
    write_layers,
)
from peagle.models.drafter import DrafterConfig

# Model type of the layers behind each name; the first of a type is the one that is written.
ARCHITECTURES = {
    "LlamaForCausalLMEagle3": LLAMA,
    "Eagle3LlamaForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "Eagle3Qwen3ForCausalLM": QWEN3,
    "Qwen3ForCausalLM": QWEN3,
}
# Searched in vLLM's order; all are written, equal, because its versions read different ones.
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def write(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a head but for the "peagle" object.

    The aux layers stand twice because some readers look at the top level only.
    """
    layers = write_layers(config)
    aux_layer_ids = list(config.aux_layer_ids)
    architecture = next(n for n, kind in ARCHITECTURES.items() if kind == layers["model_type"])
    data: dict[str, Any] = {
        "architectures": [architecture],
        **layers,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        AUX_KEY: aux_layer_ids,
        "eagle_config": {AUX_KEY: aux_layer_ids, "use_aux_hidden_state": True},
    }
    if config.target_hidden_size != config.hidden_size:
        data["target_hidden_size"] = config.target_hidden_size
    if config.mask_token_id is not None:
        data.update(dict.fromkeys(_MASK_KEYS, config.mask_token_id))
    return data


def read(data: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """Arguments of `DrafterConfig`; defaults of absent keys are vLLM's.

    Raises:
        CheckpointError: not a head of a known architecture, or a key is missing.
    """
    named = data.get("architectures") or []
    model_type = next((ARCHITECTURES[n] for n in ARCHITECTURES if n in named), None)
    if model_type is None:
        raise CheckpointError(
            f"architectures is {named}; expected one of {', '.join(ARCHITECTURES)}."
        )
    eagle = object_at(data, "eagle_config")
    if eagle.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "eagle_config.use_aux_hidden_state is false; expected a head that reads hidden states "
            "of several target layers (EAGLE-3, P-EAGLE)."
        )
    layers = read_layers(data, model_type)
    return {
        **layers,
        **read_head(data, layers),
        "aux_layer_ids": read_aux_layers(
            data.get(AUX_KEY) or eagle.get(AUX_KEY), f"eagle_config.{AUX_KEY}", num_target_layers
        ),
        "mask_token_id": next((data[k] for k in _MASK_KEYS if data.get(k) is not None), None),
        "norm_before_residual": value_at(data, "norm_before_residual", False),
        "norm_before_fc": value_at(
            eagle, "norm_before_fc", value_at(data, "norm_before_fc", False)
        ),
    }
