"""What the frozen target says about a batch: features to read, hidden states to imitate.

Shapes: B rows, N positions, A * H feature width, H target width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.models.target import TargetModel
from peagle.training.data import Batch


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
    """Run the target over right-padded rows (causality hides the padding)."""
    rows, length = batch.tokens_BN.shape
    positions = torch.arange(length, device=batch.tokens_BN.device).repeat(rows)
    hidden, features = target.forward(
        batch.tokens_BN.flatten(), positions, DenseCausalAttention(rows)
    )
    return TargetStates(features.unflatten(0, (rows, length)), hidden.unflatten(0, (rows, length)))
