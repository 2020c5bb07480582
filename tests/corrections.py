"""Corrections with random weights, which change most drafts."""

from pathlib import Path

import torch
from torch import Tensor

from peagle.models.checkpoint import (
    CORRECTION_NAME,
    head_identity,
    read_head,
    save_correction,
)
from peagle.models.checkpoint.correction import _read, _write
from peagle.models.correction import Correction


def random_correction(
    hidden_size: int,
    *,
    rank: int = 4,
    width: int = 8,
    num_slots: int = 3,
    seed: int = 0,
) -> Correction:
    """A correction whose term is about as large as the normed states."""
    correction = Correction(hidden_size, rank=rank, width=width, num_slots=num_slots)
    correction.reset(seed)
    with torch.no_grad():
        correction.slots.normal_()
        correction.down.weight.normal_()
    return correction.requires_grad_(False)


def add_correction(head: Path) -> Path:
    """Put a random correction beside a head; returns its file."""
    config = read_head(head).config
    correction = random_correction(config.hidden_size)
    save_correction(head, correction, head_identity(head, config), dtype=torch.float32)
    return head / CORRECTION_NAME


def perturbed_correction(head: Path, path: Path, seed: int) -> Path:
    """Write the correction of a head with noise in its weights; returns its file."""
    tensors, facts = _read(head / CORRECTION_NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        tensors[name] = (tensor + noise).to(tensor.dtype)
    _write(path, tensors, facts)
    return path


def term_of(correction: Correction, normed: Tensor, e: Tensor, slot: int) -> Tensor:
    """P Wo silu(B n + t + p) of one slot by plain products, [D].

    Args:
        normed: n of the slot, [D].
        e: the embedding of the token drafted before it, [D].
    """
    own = dict(correction.named_parameters())
    t = own["tokens.weight"] @ (e / e.square().mean().sqrt())
    p = own["slots"][min(slot, len(own["slots"])) - 1]
    inner = own["states.weight"] @ normed + t + p
    return own["up.weight"] @ (own["down.weight"] @ (inner * inner.sigmoid()))
