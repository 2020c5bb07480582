"""EAGLE-3's training-time test: depth after depth, fed with the head's own output.

Shapes: B rows, N positions, D drafter width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter
from peagle.models.elements import Elements
from peagle.training.element_attention import ElementAttention
from peagle.training.training_methods import Graded, Selected, TrainingMethod, concatenate


def eagle3_graded(
    drafter: Drafter, batch: Batch, states: TargetStates, method: TrainingMethod
) -> Graded:
    """All graded elements of a batch: every anchor, every depth."""
    by_depth, hidden_by_depth = zip(*eagle3_forward(drafter, batch, states, method), strict=True)
    selected = Selected.of(concatenate(by_depth), batch.tokens_BN.shape[1])
    return Graded.at(selected, torch.cat(hidden_by_depth, dim=1))


def eagle3_forward(
    drafter: Drafter, batch: Batch, states: TargetStates, method: TrainingMethod
) -> Iterator[tuple[Elements, Tensor]]:
    """Training-time test: depth after depth, each fed with the head's own previous output.

    Depth j of anchor a has position a + j, token x[a+j+1] and the head's output for
    (a, j-1); it attends as a P-EAGLE element does. (EAGLE-3, Li et al., 2025.)

    Yields:
        the elements of one depth (every anchor) and the head's output at them, [B, N, D].
    """
    tokens_BN, documents_BN = batch.tokens_BN, batch.documents_BN
    length, device = tokens_BN.shape[1], tokens_BN.device
    anchors_BN = torch.arange(length, device=device).expand_as(tokens_BN)
    hidden = drafter.combine_features(states.features_BNA.to(drafter.fc.weight.dtype))
    caches: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    seen: list[Elements] = []
    for depth in range(method.section.depth):
        depths_BN = torch.full_like(anchors_BN, depth)
        supervised_BN = batch.deepest_BN >= depth
        seen.append(Elements(anchors_BN, depths_BN, documents_BN, supervised_BN))
        attention = method.make_attention(seen[-1], concatenate(seen), None)

        def attend(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention: ElementAttention = attention,
        ) -> Tensor:
            keys, values = caches.setdefault(layer, ([], []))
            keys.append(key)
            values.append(value)
            return attention(query, torch.cat(keys, dim=1), torch.cat(values, dim=1))

        next_tokens = tokens_BN[:, (anchors_BN[0] + depth + 1).clamp_max(length - 1)]
        hidden = drafter(next_tokens, hidden, anchors_BN + depth, attend)
        yield seen[-1], hidden
