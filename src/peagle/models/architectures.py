"""The architectures that may be a target, and the reasons why others may not.

A model type is on the list because its probe passes (`tests/models/test_architectures.py`): a tiny
random model of the real class, over the paged cache, equals transformers' own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import CheckpointError

# "gemma3" and "gemma4" are the image-and-text models, of which the text part is used.
SUPPORTED_MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "phi",
    "phi3",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
)
_STATEFUL = "some layers of which never call the attention function: they would run without state"
_RESCALED = "which rescales its logits after lm_head"
# What the same probe found out about others.
REFUSED_MODEL_TYPES = {
    "mamba": _STATEFUL,
    "mamba2": _STATEFUL,
    "jamba": _STATEFUL,
    "lfm2": _STATEFUL,
    "minimax": _STATEFUL,
    "qwen3_next": _STATEFUL,
    "recurrent_gemma": _STATEFUL,
    "falcon_h1": "whose layers keep a state beside attention: over the KV cache alone they differ",
    "t5": "an encoder-decoder",
    "gpt2": "whose decoder layers are not where peagle looks for them",
    "bloom": "whose decoder layers are not where peagle looks for them",
    "stablelm": "which does not pass keywords on to its attention",
    "deepseek_v3": "whose keys and values differ in size",
    "cohere": _RESCALED,
    "granite": _RESCALED,
}
# RoPE whose angles depend on the position alone; the draft head knows these too.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# "proportional" is Gemma 4's; "longrope" is fixed at start, see `fix_longrope`.
TARGET_ROPE_TYPES = (*SUPPORTED_ROPE_TYPES, "proportional", "longrope")
_FIXED_LONGROPE = "longrope fixed by peagle"


def check_architecture(config: Any) -> None:
    """Refuse a target that peagle would run wrongly.

    Raises:
        CheckpointError: its model type, its kind of RoPE or a combination of its settings is not
            supported.
    """
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        reason = REFUSED_MODEL_TYPES.get(config.model_type, "which nobody has probed")
        raise CheckpointError(
            f"The target is of model type {config.model_type!r}, {reason}; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    text = config.get_text_config()
    shared = getattr(text, "num_kv_shared_layers", 0)
    if shared and getattr(text, "hidden_size_per_layer_input", None) == 0:
        raise CheckpointError(
            f"The target has num_kv_shared_layers {shared} and hidden_size_per_layer_input 0; the "
            f"{config.model_type} of transformers runs such a model over single tokens only. "
            "Choose a model that has inputs per layer, or none of whose layers share keys."
        )
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    types = {r.get("rope_type", "default") for r in by_layer_type or [rope]}
    supported = set(TARGET_ROPE_TYPES) - ({"longrope"} if by_layer_type else set())
    for rope_type in sorted(types - supported):
        raise CheckpointError(
            f"The target uses RoPE type {rope_type!r}, whose angles depend on the batch; "
            f"supported: {', '.join(t for t in TARGET_ROPE_TYPES if t in supported)}."
        )


def final_softcap(config: Any) -> float | None:
    """Return c if the architecture bends its logits x to c * tanh(x / c), else None."""
    if config.model_type == "gemma3":  # it has the setting and ignores it
        return None
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap); without a cap the logits unchanged."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def fix_longrope(decoder: nn.Module, max_model_len: int) -> None:
    """Choose LongRoPE's short or long factors once, as the longest context asks.

    transformers chooses them in every pass, by the largest position in the pass: the keys of a
    sequence would change their meaning half-way, and with its batch-mates. Without effect on other
    kinds of RoPE.
    """
    for module in decoder.modules():
        rotary: Any = module
        if getattr(module, "rope_type", None) in ("longrope", _FIXED_LONGROPE):
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            compute = ROPE_INIT_FUNCTIONS["longrope"]
            inv_freq, scaling = compute(rotary.config, rotary.inv_freq.device, max_model_len)
            with torch.no_grad():
                rotary.inv_freq.copy_(inv_freq)
            rotary.attention_scaling = scaling
            rotary.rope_type = _FIXED_LONGROPE  # which transformers leaves alone
