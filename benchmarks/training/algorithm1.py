"""The paper's sequence partition (Algorithm 1), to compare with: the context is computed anew.

Segments are ranges of anchors; each runs depth 0 of all positions up to its end and its own deeper
elements in one pass, and goes backward at once. (P-EAGLE, arXiv 2602.01469.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.elements import Elements
from peagle.training.step import GradedElements, TrainingStep
from peagle.training.training_methods import Graded, Selected, concatenate


def cumulative_backward(
    step: TrainingStep, batch: Batch, states: TargetStates, generator: torch.Generator
) -> GradedElements:
    """Add the gradients of a batch, one cumulative segment after another.

    Args:
        step: head, method and loss.
        batch, states: as in `TrainingStep.backward`; rows of one document, laid out in S segments.
        generator: unused.
    """
    layout = batch.layout
    weight = torch.stack([step.training.weights(part.depth).sum() for part in layout.graded]).sum()
    length, multiple = batch.tokens_BN.shape[1], step.method.multiple
    total = torch.zeros((), device=batch.tokens_BN.device)
    done = 0
    for index, part in enumerate(layout.parts):
        last = index == len(layout.parts) - 1
        end = length if last else int(part.anchors[part.supervised].max()) + 1
        size = min(length, end + -end % multiple)
        context = _context(layout.context, size, done, end)
        both = concatenate([context, part])
        hidden = _one_pass(step, batch, states, both, size)
        loss = (
            step.training.grade(Graded.at(Selected.of(both, length), hidden), states).loss / weight
        )
        loss.backward()
        total, done = total + loss.detach(), end
    nothing = torch.empty(0, dtype=torch.int64, device=total.device)
    return GradedElements(nothing, nothing, nothing, nothing, total)


def _context(elements: Elements, size: int, done: int, end: int) -> Elements:
    """Depth 0 up to `size`; what an earlier segment graded is not graded again."""
    names = ("anchors", "depths", "documents", "supervised")
    anchors, depths, documents, supervised = (getattr(elements, name)[:, :size] for name in names)
    inside = (anchors >= done) & (anchors < end)
    return Elements(anchors, depths, documents, supervised & inside)


def _one_pass(
    step: TrainingStep, batch: Batch, states: TargetStates, elements: Elements, size: int
) -> Tensor:
    """The head's output at the elements: depth 0 of `size` positions first, then deeper ones."""
    drafter = step.drafter
    after = torch.cat((batch.tokens_BN[:, 1:], batch.tokens_BN[:, -1:]), dim=1)[:, :size]
    num_rest = elements.anchors.shape[1] - size
    mask_token = after.new_full((len(after), num_rest), drafter.config.mask_token_id or 0)
    embedding = drafter.embed_tokens(torch.cat((after, mask_token), dim=1))
    combined = drafter.combine_features(states.features_BNA[:, :size])
    shared = drafter.shared_hidden().expand(len(after), num_rest, -1)
    attention = step.method.make_attention(elements, elements, None)
    return step.method.run_layers(
        drafter,
        embedding,
        torch.cat((combined, shared), dim=1),
        elements.positions,
        lambda _, q, k, v: attention(q, k, v),
    )
