"""The two-pass partition: gradients of a long sequence in pieces, exact, nothing computed twice.

Depth-0 elements never attend to deeper ones. So they run once, and each layer's keys and values
become leaves of autograd; the deeper elements run in S segments against these, and the backward
pass of each segment adds to the gradients of the leaves; at last the depth-0 pass goes backward
with what the leaves collected. What a segment keeps in memory is dropped before the next one runs,
so that the peak is the depth-0 pass and 1/S of the rest. (The paper's Algorithm 1 computes the
depth-0 context anew in every segment; reference/peagle.md, "Sequence partition".)

Segments are split by anchor, so that every chain lies in one of them. A correction that is trained
with the head reads what chains begin with (`Roots`): the segments borrow that too.

Shapes: B rows, N positions, R deeper elements of a row, E of a segment, D drafter width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter
from peagle.models.elements import PADDING_ROW, Elements
from peagle.training.chains import ChainPlan
from peagle.training.element_attention import BlockTable, causal_attention
from peagle.training.training_methods import (
    Graded,
    Roots,
    Selected,
    TrainingMethod,
    concatenate,
    tokens_after,
)


def split_by_anchor(
    elements: Elements, length: int, segments: int, num_depths: int, multiple: int = 1
) -> list[Elements]:
    """Split the supervised elements below depth 0 into S segments of about equal size, [B, E] each.

    A segment holds a range of each row's anchors with all of their depths, in the order of (anchor,
    depth). Elements that are not supervised are left out: no supervised element attends to them.
    There are fewer segments where there are too few elements.

    Args:
        elements: depth 0 of all N positions (`length`) first, chains whole, as `sample_elements`
            makes them.
        multiple: pad segments to a multiple of this. Above 1 their size depends on the shape of
            `elements` only, not on the rows, since every size is compiled once.
    """
    deeper = _mapped(elements, lambda x: x[:, length:])
    num_rest = deeper.anchors.shape[1]
    if not num_rest:
        return []
    key_BR = deeper.anchors * num_depths + deeper.depths
    last = torch.iinfo(torch.int64).max
    order_BR = torch.where(deeper.supervised, key_BR, last).argsort(dim=1)
    ordered = _mapped(deeper, lambda x: x.gather(1, order_BR))
    count_B1 = ordered.supervised.sum(1, keepdim=True)
    # Depths 1, 2, ... of an anchor stand side by side: all belong where the first one does.
    first_BR = torch.arange(num_rest, device=count_B1.device) - (ordered.depths - 1)
    segment_BR = first_BR * segments // count_B1.clamp_min(1)
    segment_BR = torch.where(ordered.supervised, segment_BR, segments)
    borders = torch.arange(segments + 1, device=count_B1.device)
    start_BS = torch.searchsorted(segment_BR, borders.expand(len(count_B1), -1).contiguous())
    if multiple == 1:
        size = int(start_BS.diff(dim=1).max())
    else:
        size = min(num_rest, -(-num_rest // segments) + num_depths - 2)
        size += -size % multiple
    parts = (_slice(ordered, start_BS[:, i : i + 2], size) for i in range(segments))
    return list(parts) if size else []


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """The elements that the passes over a batch compute, decided before the first pass.

    Attributes:
        context: the elements of depth 0, [B, N].
        parts: the deeper ones in segments, [B, E] each.
        graded: which of the context and of each part count.
        blocks: mask blocks of the context and of each part, where FlexAttention needs them.
        is_causal: rows of the context have one document each, and padding at most at their end.
        plans: how a correction sees each part; () without one.
    """

    context: Elements
    parts: tuple[Elements, ...]
    graded: tuple[Selected, ...]
    blocks: tuple[BlockTable | None, ...]
    is_causal: bool
    plans: tuple[ChainPlan, ...] = ()

    @classmethod
    def of(
        cls,
        elements: Elements,
        length: int,
        segments: int,
        method: TrainingMethod,
        plan: Callable[[Selected], ChainPlan] | None = None,
    ) -> Self:
        """Split elements, as `sample_elements` makes them, of rows of `length` positions.

        `plan` says how a correction sees a part below depth 0; None: there is no correction.
        """
        context = _mapped(elements, lambda x: x[:, :length])
        depths = method.section.depth
        parts = split_by_anchor(elements, length, segments, depths, method.multiple)
        graded = tuple(Selected.of(part, length) for part in (context, *parts))
        is_causal = bool((context.documents <= 0).all())
        keys = (concatenate([context, part]) for part in parts)
        pairs = [(context, context), *zip(parts, keys, strict=True)]
        tables = [
            BlockTable.of(*pair) if method.flex and not (is_causal and pair[0] is context) else None
            for pair in pairs
        ]
        plans = () if plan is None else tuple(map(plan, graded[1:]))
        return cls(context, tuple(parts), graded, tuple(tables), is_causal, plans)

    def graded_at(self, index: int, hidden_BED: Tensor, roots: Sequence[Tensor]) -> Graded:
        """Return the graded elements of a part below depth 0, from the head's outputs at it."""
        selected = self.graded[index + 1]
        if not self.plans:
            return Graded.at(selected, hidden_BED)
        return Graded.at(selected, hidden_BED, Roots(*roots), self.plans[index])


def two_pass_backward(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    layout: PartitionLayout,
    loss_of: Callable[[Graded], Tensor],
    *,
    method: TrainingMethod,
) -> Tensor:
    """Add the gradients of a batch to the head's parameters; returns the loss, without a graph.

    The sum of the parts' losses, which `loss_of` gives with one denominator for the whole batch,
    and their gradients are what one pass over all elements would give.
    """
    # What the first pass keeps stays through all segments: where these are to save memory, it
    # keeps no inner states of its MLPs.
    first = _ContextPass(drafter, batch, states, layout, method, light=len(layout.parts) > 1)
    borrowed = _Borrowed(first.lent())
    loss = torch.zeros((), device=layout.context.anchors.device)
    for index in range(len(layout.parts)):
        leaves = borrowed.leaves()
        hidden_BED = _segment(drafter, layout, index, leaves, method)
        part_loss = loss_of(layout.graded_at(index, hidden_BED, leaves[-2:]))
        part_loss.backward()
        borrowed.collect(leaves)
        loss = loss + part_loss.detach()
    first_loss = loss_of(Graded.at(layout.graded[0], first.hidden_BND))
    borrowed.backward(first_loss)
    return loss + first_loss.detach()


def frozen_backward(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    layout: PartitionLayout,
    loss_of: Callable[[Graded], Tensor],
    *,
    method: TrainingMethod,
) -> Tensor:
    """`two_pass_backward` where nothing of the head is trained: gradients end at its outputs.

    Depth 0, which no correction changes, has none.
    """
    with torch.no_grad():
        parts = list(partitioned_graded(drafter, batch, states, layout, method))
    total = torch.zeros((), device=layout.context.anchors.device)
    for graded in parts:
        loss = loss_of(graded)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    return total


def partitioned_graded(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    layout: PartitionLayout,
    method: TrainingMethod,
) -> Iterator[Graded]:
    """Yield graded elements of depth 0, then of each segment; for validation, keeping nothing."""
    first = _ContextPass(drafter, batch, states, layout, method, light=False)
    yield Graded.at(layout.graded[0], first.hidden_BND)
    for index in range(len(layout.parts)):
        lent = first.lent()
        hidden_BED = _segment(drafter, layout, index, lent, method)
        yield layout.graded_at(index, hidden_BED, lent[-2:])


class _ContextPass:
    """The depth-0 pass, and the tensors that the segments borrow from it.

    Attributes:
        hidden_BND: the head's output at depth 0.
    """

    def __init__(
        self,
        drafter: Drafter,
        batch: Batch,
        states: TargetStates,
        layout: PartitionLayout,
        method: TrainingMethod,
        *,
        light: bool,
    ) -> None:
        rows, length = batch.tokens_BN.shape
        next_tokens = tokens_after(batch.tokens_BN)
        # The mask token's embedding beside the others: one gradient of the whole table, not S.
        mask_token = next_tokens.new_tensor([drafter.config.mask_token_id])
        embedding = drafter.embed_tokens(torch.cat((next_tokens.flatten(), mask_token)))
        self._mask_embedding = embedding[-1:]
        self._lends_roots = bool(layout.plans)
        self._shared = drafter.shared_hidden()
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        context, attention = layout.context, causal_attention
        if not layout.is_causal:
            attention = method.make_attention(context, context, layout.blocks[0])

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Copies: a view would keep the whole projection in memory.
            value = value.contiguous()
            key = key.contiguous() if method.recompute else key
            # A layer that is computed again comes here again; the graph hangs on the first.
            self._keys_values.setdefault(layer, (key, value))
            return attention(query, key, value)

        self._embedding_BND = embedding[:-1].unflatten(0, (rows, length))
        self.hidden_BND = method.run_layers(
            drafter,
            self._embedding_BND,
            drafter.combine_features(states.features_BNA.to(embedding.dtype)),
            context.positions,
            attend,
            light=light,
        )

    def lent(self) -> list[Tensor]:
        """Return mask embedding [1, D], h_shared [D], keys and values of layer 0, 1, ... and, if
        there is a correction, the tensors of `Roots`.
        """
        pairs = (self._keys_values[layer] for layer in sorted(self._keys_values))
        roots = [self._embedding_BND, self.hidden_BND.detach()] if self._lends_roots else []
        return [self._mask_embedding, self._shared, *(x for pair in pairs for x in pair), *roots]


class _Borrowed:
    """Tensors of the first pass that the segments use as leaves, with sums of their gradients.

    The sums are at least float32, whatever the type of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._sums: list[Tensor | None] = [None] * len(tensors)

    def leaves(self) -> list[Tensor]:
        """Return the tensors without their past, for one segment."""
        return [x.detach().requires_grad_(x.requires_grad) for x in self._tensors]

    def collect(self, leaves: list[Tensor]) -> None:
        """Add the gradients that a segment left at its leaves."""
        for i, leaf in enumerate(leaves):
            if leaf.grad is None:
                continue
            total = self._sums[i]
            if total is None:
                self._sums[i] = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32))
            else:
                total.add_(leaf.grad)
            leaf.grad = None

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the first pass: its own loss, and the gradients that the segments left."""
        # Without a segment the sums are zeros, as one pass would have left them.
        pairs = [
            (x, torch.zeros_like(x) if total is None else total.to(x.dtype))
            for x, total in zip(self._tensors, self._sums, strict=True)
            if x.requires_grad
        ]
        self._sums = []
        torch.autograd.backward(
            [loss, *(x for x, _ in pairs)], [None, *(total for _, total in pairs)]
        )


def _segment(
    drafter: Drafter,
    layout: PartitionLayout,
    index: int,
    leaves: list[Tensor],
    method: TrainingMethod,
) -> Tensor:
    """Return the head's output at a segment's elements, [B, E, D]."""
    mask_embedding, shared, *keys_values = leaves
    part = layout.parts[index]
    both = concatenate([layout.context, part])
    attention = method.make_attention(part, both, layout.blocks[index + 1])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Layer 0 has one value for all mask slots.
        value = value.expand_as(key)
        keys = torch.cat((keys_values[2 * layer], key), dim=1)
        values = torch.cat((keys_values[2 * layer + 1], value), dim=1)
        return attention(query, keys, values)

    return method.run_layers(
        drafter, mask_embedding.unsqueeze(0), shared.view(1, 1, -1), part.positions, attend
    )


def _mapped(elements: Elements, function: Callable[[Tensor], Tensor]) -> Elements:
    fields = (elements.anchors, elements.depths, elements.documents, elements.supervised)
    return Elements(*(function(field) for field in fields))


def _slice(ordered: Elements, border_B2: Tensor, size: int) -> Elements:
    """Return the columns from the first border to before the second, padded to `size`."""
    column_BE = border_B2[:, :1] + torch.arange(size, device=border_B2.device)
    inside_BE = column_BE < border_B2[:, 1:]
    column_BE = column_BE.clamp_max(ordered.anchors.shape[1] - 1)
    part = _mapped(ordered, lambda x: x.gather(1, column_BE))
    return Elements(
        anchors=part.anchors.where(inside_BE, 0),
        depths=part.depths.where(inside_BE, 0),
        documents=part.documents.where(inside_BE, PADDING_ROW),
        supervised=part.supervised & inside_BE,
    )
