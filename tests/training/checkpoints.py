"""Checkpoints of training, read without the code that writes them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a run's checkpoint, as "file/name", as they lie there."""
    files = sorted((folder / "checkpoint").iterdir())
    assert {file.suffix for file in files} == {".safetensors", ".json"}, "nothing is pickled"
    return {
        f"{file.name}/{name}": tensor
        for file in files
        if file.suffix == ".safetensors"
        for name, tensor in load_file(file).items()
    }
