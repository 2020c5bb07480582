"""Checkpoints of the named shapes with random weights in the format in which they are published.

Two engines that load one of them route the same tokens to the same experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import Shape, make_config, make_tokenizer, random_fp8
from torch import Tensor, nn

from peagle.models.packed_layers import experts_of
from peagle.models.packed_loading import model_without_weights

SHARD_BYTES = 4 * 2**30
_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def write_checkpoint(shape: Shape, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Write config.json, a tokenizer and shards of weights, which are made on a device."""
    config = make_config(shape)
    torch.manual_seed(0)
    model = model_without_weights(shape.model_type, config, dtype)
    make_tokenizer(shape.config["vocab_size"]).save_pretrained(folder)
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = 0
    for name, tensor in _tensors(shape, model, dtype, device):
        held[name] = tensor.cpu()
        held_bytes += tensor.numel() * tensor.itemsize
        if held_bytes >= SHARD_BYTES:
            _save(folder, held, shards)
            held_bytes = 0
    if held:
        _save(folder, held, shards)
    files = {name: _file(i) for i, names in enumerate(shards) for name in names}
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written = config.to_dict() | {"architectures": [type(model).__name__]}
    name = str(dtype).removeprefix("torch.")
    written |= {"dtype": name, "torch_dtype": name}
    if method := _METHODS[shape.format]:
        written["quantization_config"] = method | _not_converted(shape, model)
    (folder / "config.json").write_text(json.dumps(written, indent=1))


def _not_converted(shape: Shape, model: Any) -> dict[str, list[str]]:
    """Name the layers of an FP8 model that stay as they are: other engines quantise all others.

    A router whose weights an engine takes for FP8 gives every token the same experts.
    """
    if shape.format != "fp8":
        return {}
    routers = [name for name, _ in model.named_modules() if name.endswith(".mlp.gate")]
    return {"modules_to_not_convert": ["lm_head", *routers]}


def _file(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, held: dict[str, Tensor], shards: list[list[str]]) -> None:
    save_file(held, folder / _file(len(shards)), metadata={"format": "pt"})
    shards.append(list(held))
    held.clear()


def _tensors(
    shape: Shape, model: Any, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint by name."""
    experts = {id(module) for module in experts_of(model)}
    for name, module in model.named_modules():
        if id(module) in experts:
            yield from _experts(shape, name, module, dtype, device)
        elif type(module) is nn.Linear and "layers." in name and shape.format == "fp8":
            yield from _linear(name, (module.out_features, module.in_features), device)
        else:
            for last, parameter in module.named_parameters(recurse=False):
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                is_weight = parameter.ndim > 1
                values = values.normal_(std=0.02) if is_weight else values.fill_(1.0)
                yield f"{name}.{last}", values * (0 if "bias" in last or last == "sinks" else 1)


def _linear(name: str, size: tuple[int, int], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    q, scale = random_fp8(size, device)
    yield f"{name}.weight", q
    yield f"{name}.weight_scale_inv", scale


def _experts(
    shape: Shape, name: str, module: Any, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Experts of gpt-oss together, those of others apart."""
    turned = -1 if module.is_transposed else 1
    sizes = {
        part: getattr(module, part).shape[1:][::turned] for part in ("gate_up_proj", "down_proj")
    }
    if shape.format == "mxfp4":
        for part, (n, k) in sizes.items():
            blocks = (module.num_experts, n, k // 32, 16)
            yield f"{name}.{part}_blocks", _integers(0, 256, blocks, device)
            yield f"{name}.{part}_scales", _integers(119, 122, blocks[:-1], device)
            bias = torch.zeros(module.num_experts, n, dtype=dtype, device=device)
            yield f"{name}.{part}_bias", bias
        return
    (both, width), (_, inner) = sizes["gate_up_proj"], sizes["down_proj"]
    parts = {"gate_proj": (both // 2, width), "up_proj": (both // 2, width)}
    for expert in range(module.num_experts):
        for part, size in {**parts, "down_proj": (width, inner)}.items():
            key = f"{name}.{expert}.{part}"
            if shape.format == "fp8":
                yield from _linear(key, size, device)
            else:
                weight = torch.empty(size, dtype=dtype, device=device).normal_(std=0.02)
                yield f"{key}.weight", weight


def _integers(low: int, high: int, size: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(low, high, size, dtype=torch.uint8, device=device)
