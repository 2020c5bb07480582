"""A second head for the bundled target: the bundled one with noise in its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from peagle.models.checkpoint import CORRECTION_NAME, head_identity, read_head
from peagle.models.checkpoint.correction import _read, _write


def make_second_head(source: Path, folder: Path, *, noise: float = 0.3) -> Path:
    """Copy a head with its correction; the noise is relative to the deviation of each weight."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(0)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)

    def noisy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: value
            if not value.is_floating_point() or "norm" in name
            else value + noise * value.float().std() * torch.randn(value.shape, generator=generator)
            for name, value in tensors.items()
        }

    save_file({n: t.to(tensors[n].dtype) for n, t in noisy(tensors).items()}, weights)
    if (path := folder / CORRECTION_NAME).is_file():
        tensors, facts = _read(path)
        identity = head_identity(folder, read_head(folder).config)
        _write(path, noisy(tensors), {**facts, "head": identity})
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a head's config.json; None drops one. `peagle` changes within its object."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["peagle"] |= changes.pop("peagle", {})
    data |= changes
    data["peagle"] = {name: value for name, value in data["peagle"].items() if value is not None}
    path.write_text(json.dumps({n: value for n, value in data.items() if value is not None}))
