"""Models of known shapes with random weights: what speed needs, without their weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from peagle.kernels.linear.experts import ExpertWeights, Gate
from peagle.kernels.linear.packed_weights import STEP, TILE, Format, PackedWeight, make_fp8
from peagle.models.checkpoint import save_drafter
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.packed_layers import (
    PackedLinear,
    experts_of,
    find_gate,
    hold_experts,
    use_experts,
)
from peagle.models.packed_loading import model_without_weights
from peagle.models.target import TargetModel, default_aux_layer_ids


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and the geometry of its heads.

    Attributes:
        model_type: of transformers; config: its settings.
        draft_vocab_size: of the heads.
        peagle_layers: layers of a P-EAGLE head; an EAGLE-3 head has one.
        head_intermediate_size: MLP width of the heads; None: that of the target.
        format: format of the experts' weights as published, and with "fp8" (blocks of 128 x 128)
            of all linear layers inside.
    """

    model_type: str
    config: dict[str, Any]
    draft_vocab_size: int
    peagle_layers: int = 4
    head_intermediate_size: int | None = None
    format: Format = "plain"


# A grammar of JSON can be spelled by these.
JSON_CHARACTERS = [chr(code) for code in range(32, 127)]
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
    "qwen3-coder-30b-a3b": Shape(
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5472,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        },
        draft_vocab_size=32_000,
        head_intermediate_size=6144,
        format="fp8",
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131_072,
        },
        draft_vocab_size=32_000,
        head_intermediate_size=8640,
        format="mxfp4",
    ),
    "gemma-4-31b": Shape(
        "gemma4_text",
        {
            "vocab_size": 262_144,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "num_global_key_value_heads": 4,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": True,
        },
        draft_vocab_size=32_000,
        format="fp8",
    ),
    "tiny-experts": Shape(
        "qwen3_moe",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 96,
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
        },
        draft_vocab_size=256,
        peagle_layers=2,
        format="fp8",
    ),
    # The weights of its experts are what a CPU waits for at up to about 16 tokens.
    "small-experts": Shape(
        "qwen3_moe",
        {
            "vocab_size": 512,
            "hidden_size": 384,
            "intermediate_size": 384,
            "moe_intermediate_size": 768,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        draft_vocab_size=512,
        peagle_layers=2,
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

SHAPES["qwen3-8b-fp8"] = replace(SHAPES["qwen3-8b"], format="fp8")

_OSS_20B = SHAPES["gpt-oss-20b"]
SHAPES["gpt-oss-120b"] = replace(
    _OSS_20B,
    config=_OSS_20B.config
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
)


def make_config(shape: Shape) -> Any:
    """The configuration of transformers."""
    settings = {"tie_word_embeddings": False, "eos_token_id": 0} | shape.config
    return AutoConfig.for_model(shape.model_type, **settings)


def make_target(
    shape: Shape, folder: Path, dtype: torch.dtype, device: torch.device
) -> TargetModel:
    """A target with random weights; `folder` gets a tokenizer of as many words.

    The weights are made where they are used: nothing of them is written.
    """
    if not (folder / "tokenizer.json").is_file():
        make_tokenizer(shape.config["vocab_size"]).save_pretrained(folder)
    config = make_config(shape)
    torch.manual_seed(0)
    if shape.format != "plain":
        return TargetModel(_packed_model(shape, config, dtype, device), name=str(folder))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return TargetModel(model, name=str(folder))


def _packed_model(shape: Shape, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model whose experts, and in FP8 linear layers, hold random packed weights."""
    model = model_without_weights(shape.model_type, config, dtype)
    for module in experts_of(model):
        gate = find_gate(module)
        assert gate is not None
        hold_experts(module, _random_experts(module, gate, shape.format, dtype, device))
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "layers." in name and shape.format == "fp8":
            weight = random_weight("fp8", (module.out_features, module.in_features), device)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear(weight))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                values = values.fill_(1.0) if values.ndim == 1 else values.normal_(std=0.02)
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    model.tie_weights()
    use_experts(model)
    return model.eval()


def _random_experts(
    module: Any, gate: Gate, format: Format, dtype: torch.dtype, device: torch.device
) -> ExpertWeights:
    count = module.num_experts
    gate_up, down = module.gate_up_proj.shape[1:], module.down_proj.shape[1:]
    if module.is_transposed:
        gate_up, down = gate_up[::-1], down[::-1]
    bias = [None, None]
    if module.has_bias:
        bias = [torch.zeros(count, n, dtype=dtype, device=device) for n in (gate_up[0], down[0])]
    weights = [random_weight(format, (count, *size), device) for size in (gate_up, down)]
    return ExpertWeights(weights[0], weights[1], gate, bias[0], bias[1])


def random_weight(format: Format, size: tuple[int, ...], device: torch.device) -> PackedWeight:
    """Random numbers of a format, [..., N, K]; their standard deviation is about 0.02."""
    *_, n, k = size
    lead = size[:-2]
    if format == "mxfp4":  # all bits are numbers
        tiles = (*lead, -(-n // TILE[0]), -(-k // STEP), *TILE)
        data = torch.randint(256, tiles, dtype=torch.uint8, device=device)
        scales = torch.randint(119, 122, (*lead, -(-k // 128), n, 4), device=device)
        words = scales.to(torch.uint8).view(torch.int32).squeeze(-1).mT
        return PackedWeight(data, "mxfp4", words, None, (1, 32), (-n % TILE[0], -k % STEP))
    if format == "int4":
        data = torch.randint(256, (*lead, n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(*lead, -(-k // 128), n, device=device).mT * 0.008
        return PackedWeight(data, "int4", scale, block=(1, 128))
    if format == "fp8":
        return make_fp8(*random_fp8(size, device), (128, 128))
    data = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
    if format == "plain":
        return PackedWeight(data.mul_(0.02))
    scale = torch.rand(*lead, n, 1, device=device) * 0.001
    return PackedWeight(data.mul_(40).to(torch.int8), "int8", scale, block=(1, k))


def random_fp8(size: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Random e4m3 numbers, [..., N, K], and scales of blocks of 128 x 128, as published."""
    *lead, n, k = size
    q = torch.empty(size, dtype=torch.bfloat16, device=device).normal_().to(torch.float8_e4m3fn)
    return q, torch.rand(*lead, -(-n // 128), -(-k // 128), device=device) * 0.04


def make_head_config(shape: Shape, method: str) -> DrafterConfig:
    """The configuration of a head."""
    config = make_config(shape)
    parallel = method == "peagle"
    return DrafterConfig(
        hidden_size=config.hidden_size,
        intermediate_size=shape.head_intermediate_size or config.intermediate_size,
        num_layers=shape.peagle_layers if parallel else 1,
        num_attention_heads=shape.config["num_attention_heads"],
        num_kv_heads=shape.config["num_key_value_heads"],
        head_dim=shape.config["head_dim"],
        vocab_size=config.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        aux_layer_ids=default_aux_layer_ids(config.num_hidden_layers),
        mask_token_id=1 if parallel else None,
        max_position_embeddings=config.max_position_embeddings,
    )


def make_head(
    shape: Shape, method: str, folder: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Write a head with random weights, once; the weights are made on a device."""
    written = folder / "config.json"
    if written.is_file() and json.loads(written.read_text())["dtype"] == _name(dtype):
        return
    torch.manual_seed(1)
    with device:
        drafter = Drafter(make_head_config(shape, method))
    save_drafter(folder, drafter.to(dtype))


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words w0, w1, ...: text of the usual length costs the usual time to put together.

    Characters of JSON stand at the end, in the place of words, where the vocabulary has room.
    """
    words = [f"w{i}" for i in range(vocab_size)]
    if vocab_size > 3 * len(JSON_CHARACTERS):
        words[-len(JSON_CHARACTERS) :] = JSON_CHARACTERS
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
