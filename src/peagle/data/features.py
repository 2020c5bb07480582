"""What the frozen target says about a batch: features to read, hidden states to imitate.

Shapes: B rows, N positions, A * H feature width, H target width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention.torch_backend import DocumentAttention
from peagle.data.batches import Batch
from peagle.models.target import TargetModel


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's view of a batch.

    Attributes:
        features_BNA: aux features g of every position.
        hidden_BNH: final hidden states; lm_head of position p gives the distribution of x[p+1].
    """

    features_BNA: Tensor
    hidden_BNH: Tensor


@torch.no_grad()
def target_states(target: TargetModel, batch: Batch) -> TargetStates:
    """Run the target over packed rows; each document begins at position 0."""
    rows, length = batch.tokens_BN.shape
    positions = torch.arange(length).repeat(rows, 1)
    for place in batch.places:
        positions[place.row, place.start : place.start + place.length] -= place.start
    spans = [(place.row, place.start, place.length) for place in batch.places]
    hidden, features = target.forward(
        batch.tokens_BN.flatten(),
        positions.flatten().to(batch.tokens_BN.device),
        DocumentAttention(batch.documents_BN, spans),
    )
    return TargetStates(features.unflatten(0, (rows, length)), hidden.unflatten(0, (rows, length)))
