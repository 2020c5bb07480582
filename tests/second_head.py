"""A second head for a target: another one with changed weights, and its correction."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.models.checkpoint import CORRECTION_NAME, head_identity, read_head
from peagle.models.checkpoint.correction import _read, _write

Tensors = dict[str, Tensor]


def noisy(tensors: Tensors) -> Tensors:
    torch.manual_seed(0)
    return {n: (t * (1 + torch.randn(t.shape) / 3)).to(t.dtype) for n, t in tensors.items()}


def permuted(tensors: Tensors) -> Tensors:
    torch.manual_seed(0)
    return {name: t[torch.randperm(len(t))] for name, t in tensors.items()}


def make_second_head(
    source: Path, folder: Path, change: Callable[[Tensors], Tensors] = noisy
) -> Path:
    shutil.copytree(source, folder)
    weights, correction = folder / "model.safetensors", folder / CORRECTION_NAME
    save_file(change(load_file(weights)), weights)
    if correction.is_file():
        tensors, facts = _read(correction)
        identity = head_identity(folder, read_head(folder).config)
        _write(correction, change(tensors), {**facts, "head": identity})
    return folder
