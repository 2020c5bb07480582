"""The style of the `speculators` package: the layers' configuration nested, the proposal named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.errors import CheckpointError
from peagle.models.checkpoint.files import object_at
from peagle.models.checkpoint.layers import (
    AUX_KEY,
    LLAMA,
    OPTIONS,
    QWEN3,
    read_aux_layers,
    read_head,
    read_layers,
    value_at,
    write_layers,
)
from peagle.models.drafter import DrafterConfig

# By kind of head, `norm_before_residual` of a file that does not say. It is vLLM's assumption: for
# "eagle3" the package's own class assumes false, but that class always writes the key, so a file
# without it comes from elsewhere and has been served by vLLM.
KINDS = {"peagle": False, "eagle3": True}
_CLASSES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
# Tokens to propose where the trained depth is unknown: the package's default.
_UNKNOWN_DEPTH = 5
_LAYERS = "transformer_layer_config"


def write(config: DrafterConfig, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a head but for the "peagle" object.

    Args:
        config: shape of the head.
        verifier: "name_or_path" (None if unknown) and "architectures" of the target.
    """
    kind = "peagle" if config.is_parallel else "eagle3"
    width = config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
    data: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": width,
        AUX_KEY: list(config.aux_layer_ids),
        "norm_before_residual": config.norm_before_residual,
        **{name: getattr(config, name) for name in OPTIONS},
        "embed_requires_grad": config.is_parallel,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.trained_depth or _UNKNOWN_DEPTH,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": dict(verifier),
        },
        _LAYERS: write_layers(config),
    }
    if config.is_parallel:
        data["mask_token_id"] = config.mask_token_id
    return data


def read(data: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """Arguments of `DrafterConfig`.

    Raises:
        CheckpointError: another kind of head, or a key is missing.
    """
    kind = data.get("speculators_model_type")
    if kind not in KINDS:
        raise CheckpointError(
            f"speculators_model_type is {kind!r}; expected one of {', '.join(KINDS)}."
        )
    nested = object_at(data, _LAYERS)
    model_type = nested.get("model_type")
    if model_type not in (LLAMA, QWEN3):
        raise CheckpointError(
            f"{_LAYERS}.model_type is {model_type!r}; expected {LLAMA} or {QWEN3}."
        )
    mask = data.get("mask_token_id") if kind == "peagle" else None
    if kind == "peagle" and mask is None:
        raise CheckpointError("mask_token_id is missing; a P-EAGLE head needs its mask token.")
    layers = read_layers(nested, model_type, f"{_LAYERS}.")
    return {
        **layers,
        **read_head(data, layers),
        "aux_layer_ids": read_aux_layers(data.get(AUX_KEY), AUX_KEY, num_target_layers),
        "mask_token_id": mask,
        "norm_before_residual": value_at(data, "norm_before_residual", KINDS[kind]),
    }


def read_verifier(data: Mapping[str, Any]) -> dict[str, Any]:
    """The target that the file names: "name_or_path" and "architectures".

    Raises:
        CheckpointError: it is named by something other than text.
    """
    verifier = object_at(object_at(data, "speculators_config"), "verifier")
    name, architectures = verifier.get("name_or_path"), verifier.get("architectures") or []
    if name is not None and not isinstance(name, str):
        raise CheckpointError(
            f"speculators_config.verifier.name_or_path is {name!r}; expected the target's name."
        )
    return {"name_or_path": name, "architectures": architectures}
