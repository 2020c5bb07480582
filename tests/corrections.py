"""Corrections with random weights, which change most drafts."""

from __future__ import annotations

from pathlib import Path

import torch

from peagle.models.checkpoint import (
    CORRECTION_NAME,
    head_identity,
    read_head,
    save_correction,
)
from peagle.models.correction import Correction


def random_correction(
    hidden_size: int, *, rank: int = 4, width: int = 8, num_slots: int = 3, seed: int = 0
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
