"""Corrections with random weights, which change most drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from peagle.models.checkpoint import (
    CORRECTION_NAME,
    head_identity,
    read_head,
    save_correction,
)
from peagle.models.correction import Correction
from peagle.models.correction_form import CorrectionForm


def random_correction(
    hidden_size: int,
    *,
    rank: int = 4,
    width: int = 8,
    num_slots: int = 3,
    seed: int = 0,
    form: CorrectionForm = "gated",
) -> Correction:
    """A correction whose term is about as large as the normed states."""
    correction = Correction(hidden_size, rank=rank, width=width, num_slots=num_slots, form=form)
    correction.reset(seed)
    with torch.no_grad():
        if form == "markov":
            correction.tokens.weight.normal_(0, hidden_size**-0.5)
        else:
            correction.slots.normal_()
            correction.down.weight.normal_()
        if form == "diagonal":
            correction.decay.normal_()
        if form == "recurrent":
            correction.gru.bias_ih.normal_()
            correction.gru.bias_hh.normal_()
    return correction.requires_grad_(False)


def add_correction(head: Path, form: CorrectionForm = "gated") -> Path:
    """Put a random correction beside a head; returns its file."""
    config = read_head(head).config
    correction = random_correction(config.hidden_size, form=form)
    save_correction(head, correction, head_identity(head, config), dtype=torch.float32)
    return head / CORRECTION_NAME


def term_of(
    correction: Correction, normed: Tensor, tokens_e: Sequence[Tensor], root: Tensor
) -> Tensor:
    """P r of one slot by plain products, [D].

    Args:
        normed, root: n of the slot and of slot 0, [D].
        tokens_e: the embeddings of all tokens drafted before it, [D] each.
    """
    own = dict(correction.named_parameters())
    scaled = [e / e.square().mean().sqrt() for e in tokens_e]
    t = own["tokens.weight"] @ scaled[-1]
    if correction.form == "markov":
        return own["up.weight"] @ t
    slot = min(len(tokens_e), len(own["slots"]))
    inner = own["states.weight"] @ normed + t + own["slots"][slot - 1]
    if correction.form == "diagonal":
        for distance, e in enumerate(reversed(scaled[:-1]), start=1):
            inner = inner + own["decay"] ** distance * (own["tokens.weight"] @ e)
    if correction.form == "recurrent":
        path = torch.tanh(own["begin.weight"] @ root)
        for e in scaled:
            x = own["gru.weight_ih"] @ (own["tokens.weight"] @ e) + own["gru.bias_ih"]
            h = own["gru.weight_hh"] @ path + own["gru.bias_hh"]
            (xr, xz, xn), (hr, hz, hn) = x.chunk(3), h.chunk(3)
            new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
            z = torch.sigmoid(xz + hz)
            path = (1 - z) * new + z * path
        inner = inner + own["path.weight"] @ path
    return own["up.weight"] @ (own["down.weight"] @ (inner * inner.sigmoid()))
