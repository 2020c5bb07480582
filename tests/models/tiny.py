"""Tiny random models of any transformers class."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TEXT_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LOCAL: dict[str, Any] = {"head_dim": 8, "sliding_window": 6}
LOCAL_GLOBAL = {**LOCAL, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_model(
    model_type: str, auto: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A random model whose every parameter matters: none is left at 0 or 1, most are large."""
    torch.manual_seed(0)
    sizes = {} if "text_config" in options else TEXT_SIZES
    model = auto.from_config(AutoConfig.for_model(model_type, **{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
