"""Changing a saved head or model in place, for tests of what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def bits_of_head(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Type and bytes of every tensor of a head, by canonical name; their order of rows counts."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {
        name.replace("midlayer.", "layers.0."): (
            value.dtype,
            value.flatten().view(torch.uint8).numpy().tobytes(),
        )
        for name, value in tensors.items()
    }


def rename_a_token(file: Path) -> None:
    """Give a tokenizer one other token."""
    data = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    token = next(reversed(vocabulary))
    vocabulary[f"{token}x"] = vocabulary.pop(token)
    file.write_text(json.dumps(data), encoding="utf-8")
