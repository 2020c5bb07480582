"""One batch: its gradients in training, its acceptance in validation.

Shapes: M graded elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.models.drafter import Drafter
from peagle.training.batches import Batch
from peagle.training.eagle3 import eagle3_graded
from peagle.training.features import TargetStates
from peagle.training.methods import Graded, Method
from peagle.training.objective import Grade, Objective
from peagle.training.partition import partitioned_graded, two_pass_backward

# Pairs of elements that a mask may hold.
_VALIDATION_PAIRS = 1 << 27


@dataclass(frozen=True, slots=True)
class Outcome:
    """Graded elements of a batch, all [M], without their hidden states.

    Attributes:
        row, anchor, depth: which.
        match: the greedy draft is the target's token.
        loss: mean of the element losses, by their weights; a scalar.
    """

    row: Tensor
    anchor: Tensor
    depth: Tensor
    match: Tensor
    loss: Tensor


class Step:
    """Computes gradients and grades of a head.

    Args:
        drafter: the head.
        method: how its elements are chosen and computed.
        training, validation: how they are graded.
        segments: of the two-pass partition.
    """

    def __init__(
        self,
        drafter: Drafter,
        method: Method,
        training: Objective,
        validation: Objective,
        segments: int,
    ) -> None:
        self.drafter = drafter
        self.method = method
        self.training = training
        self.validation = validation
        self.segments = segments

    def backward(self, batch: Batch, states: TargetStates, generator: torch.Generator) -> Outcome:
        """Add the gradients of the mean loss of a batch to the head's."""
        parts: list[tuple[Graded, Grade]] = []
        if self.method.section.name == "eagle3":
            weight = self._weight(batch.deepest_BN)
            graded = eagle3_graded(self.drafter, batch, states, self.method)
            loss = self._graded_loss(graded, states, weight, parts)
            loss.backward()
        else:
            elements = self.method.elements(batch, generator)
            # One denominator for all segments, known before the first.
            weight = self.training.weights(elements.depths)[elements.supervised].sum()
            loss = two_pass_backward(
                self.drafter,
                batch,
                states,
                elements,
                self.segments,
                lambda graded: self._graded_loss(graded, states, weight.clamp_min(1), parts),
                method=self.method,
            )
        return _joined(parts, loss.detach())

    @torch.no_grad()
    def evaluate(self, batch: Batch, states: TargetStates) -> Outcome:
        """Grade every element of a batch, over the target's whole vocabulary."""
        parts = [
            (graded, self.validation.grade(graded, states))
            for graded in self._everything(batch, states)
        ]
        loss = torch.stack([grade.loss for _, grade in parts]).sum()
        weight = torch.stack([grade.weight for _, grade in parts]).sum().clamp_min(1)
        return _joined(parts, loss / weight)

    def _everything(self, batch: Batch, states: TargetStates) -> Iterator[Graded]:
        # Validation's shapes are too many to compile each.
        method = Method(self.method.section)
        if method.section.name == "eagle3":
            yield eagle3_graded(self.drafter, batch, states, method)
            return
        elements = method.elements(batch, None, everything=True)
        pairs = elements.anchors.numel() * batch.tokens_BN.shape[1]
        segments = -(-pairs // _VALIDATION_PAIRS)
        yield from partitioned_graded(self.drafter, batch, states, elements, segments, method)

    def _weight(self, deepest_BN: Tensor) -> Tensor:
        """Sum of the weights of all elements down to the deepest of each anchor."""
        depths_K = torch.arange(self.method.section.depth, device=deepest_BN.device)
        counts_K = (deepest_BN.unsqueeze(-1) >= depths_K).sum((0, 1))
        return (self.training.weights(depths_K) * counts_K).sum().clamp_min(1)

    def _graded_loss(
        self,
        graded: Graded,
        states: TargetStates,
        weight: Tensor,
        parts: list[tuple[Graded, Grade]],
    ) -> Tensor:
        grade = self.training.grade(graded, states)
        parts.append((_described(graded), grade))
        return grade.loss / weight


def _described(graded: Graded) -> Graded:
    """Which elements they are; their hidden states are not kept alive."""
    return Graded(graded.row, graded.anchor, graded.depth, graded.hidden_MD.new_empty(0))


def _joined(parts: list[tuple[Graded, Grade]], loss: Tensor) -> Outcome:
    """All parts as one, since a chain is spread over them."""
    return Outcome(
        row=torch.cat([graded.row for graded, _ in parts]),
        anchor=torch.cat([graded.anchor for graded, _ in parts]),
        depth=torch.cat([graded.depth for graded, _ in parts]),
        match=torch.cat([grade.match_M for _, grade in parts]),
        loss=loss,
    )
