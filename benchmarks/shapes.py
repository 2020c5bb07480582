"""Models of known shapes with random weights: what speed needs, without their weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from peagle.models.checkpoint import save_drafter
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target import TargetModel, default_aux_layer_ids


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and the geometry of its heads.

    Attributes:
        model_type: of transformers; config: its settings.
        draft_vocab_size: of the heads.
        peagle_layers: of a P-EAGLE head; an EAGLE-3 head has one.
    """

    model_type: str
    config: dict[str, Any]
    draft_vocab_size: int
    peagle_layers: int = 4


SHAPES = {
    "qwen3-8b": Shape(
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        draft_vocab_size=32_000,
    ),
    "tiny": Shape(
        "qwen3",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
        },
        draft_vocab_size=256,
        peagle_layers=2,
    ),
}


def make_target(
    shape: Shape, folder: Path, dtype: torch.dtype, device: torch.device
) -> TargetModel:
    """A target with random weights; `folder` gets a tokenizer of as many words.

    The weights are made where they are used: nothing of them is written.
    """
    if not (folder / "tokenizer.json").is_file():
        make_tokenizer(shape.config["vocab_size"]).save_pretrained(folder)
    config = AutoConfig.for_model(
        shape.model_type, **shape.config, tie_word_embeddings=False, eos_token_id=0
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return TargetModel(model, name=str(folder))


def make_head(target: TargetModel, shape: Shape, method: str, folder: Path) -> None:
    """Write a head with random weights, once."""
    config = target.model.config
    parallel = method == "peagle"
    drafter_config = DrafterConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=shape.peagle_layers if parallel else 1,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        aux_layer_ids=default_aux_layer_ids(target.num_layers),
        mask_token_id=1 if parallel else None,
        max_position_embeddings=config.max_position_embeddings,
    )
    written = folder / "config.json"
    if written.is_file() and json.loads(written.read_text())["dtype"] == _name(target.dtype):
        return
    torch.manual_seed(1)
    with target.device:
        drafter = Drafter(drafter_config)
    save_drafter(folder, drafter.to(target.dtype))


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words w0, w1, ...: text of the usual length costs the usual time to put together."""
    core = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
