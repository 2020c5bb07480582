"""The two training methods: P-EAGLE's elements in one pass, EAGLE-3's training-time test.

Both grade (anchor, depth) elements of a batch; they differ in how a deep element is computed.
Shapes: B rows, N positions, E elements, M graded elements, D drafter width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peagle.models.drafter import Attend, Drafter
from peagle.models.elements import Elements, sample_elements, supervised_depth
from peagle.training.config import MethodSection
from peagle.training.data import Batch
from peagle.training.element_attention import ElementAttention, dense_attention
from peagle.training.features import TargetStates

MakeAttention = Callable[[Elements, Elements], ElementAttention]
_FLEX_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Graded:
    """Elements that count, with the head's hidden states.

    Within a row they are in the order of the token that they predict, so that those which are
    graded by the same target row stand side by side.

    Attributes:
        row, anchor, depth: int64 [M], which elements.
        hidden_MD: the head's output at them, before the final norm.
    """

    row: Tensor
    anchor: Tensor
    depth: Tensor
    hidden_MD: Tensor


def peagle_forward(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    elements: Elements,
    make_attention: MakeAttention = dense_attention,
    *,
    recompute: bool = False,
) -> Tensor:
    """The head's output at every element, [B, E, D], in one pass.

    Depth 0: token x[a+1], hidden fc(g[a]). Deeper: mask token, h_shared. `recompute` as in
    `run_layers`.
    """
    tokens_BN = batch.tokens_BN
    is_ntp = elements.depths == 0
    next_tokens = tokens_after(tokens_BN, elements.anchors)
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None
    tokens = torch.where(is_ntp, next_tokens, mask_token_id)

    length = tokens_BN.shape[1]
    combined_BND = full_precision(drafter, drafter.combine_features(states.features_BNA))
    shared_D = full_precision(drafter, drafter.shared_hidden())
    # Elements start with depth 0 of every position (models.elements).
    num_rest = elements.anchors.shape[1] - length
    hidden = torch.cat((combined_BND, shared_D.expand(len(tokens_BN), num_rest, -1)), dim=1)
    attention = make_attention(elements, elements)
    return run_layers(
        drafter,
        drafter.embed_tokens(tokens),
        hidden,
        elements.positions,
        lambda _, q, k, v: attention(q, k, v),
        recompute=recompute,
    )


def run_layers(
    drafter: Drafter,
    embedding: Tensor,
    hidden: Tensor,
    positions: Tensor,
    attend: Attend,
    *,
    recompute: bool = False,
) -> Tensor:
    """What `Drafter.forward` computes, from embeddings in place of tokens.

    Args:
        drafter: the head.
        embedding, hidden: [..., D]; dimensions of 1 stand for equal rows until attention tells
            them apart by position, so that layer 0 projects one row for all mask slots.
        positions: int64 [...], which decides the shape of the result.
        attend: as in `Drafter.forward`; with `recompute` it may be called again going backward.
        recompute: activation checkpointing: keep the input of each layer only, and run the layer
            again for its gradients.
    """
    rope = drafter._rope_at(positions, hidden.dtype)
    for layer in drafter.layers:
        if recompute and torch.is_grad_enabled():
            hidden = checkpoint(  # type: ignore[assignment]
                layer,
                hidden,
                embedding,
                rope,
                attend,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            hidden = layer(hidden, embedding, rope, attend)
    return drafter.norm(hidden) if drafter.config.norm_output else hidden


def tokens_after(tokens_BN: Tensor, anchors_BE: Tensor) -> Tensor:
    """x[a+1] of each anchor a (of the last one: itself; nobody learns from it)."""
    return tokens_BN.gather(1, (anchors_BE + 1).clamp_max(tokens_BN.shape[1] - 1))


def eagle3_forward(
    drafter: Drafter,
    batch: Batch,
    states: TargetStates,
    num_depths: int,
    make_attention: MakeAttention = dense_attention,
) -> Iterator[tuple[Elements, Tensor]]:
    """Training-time test: depth after depth, each fed with the head's own previous output.

    Depth j of anchor a stands at position a + j, with token x[a+j+1] and the head's output for
    (a, j-1); it attends as a P-EAGLE element does. (EAGLE-3, Li et al., 2025.)

    Yields:
        the elements of one depth (every anchor) and the head's output at them, [B, N, D].
    """
    tokens_BN = batch.tokens_BN
    rows, length = tokens_BN.shape
    device = tokens_BN.device
    anchors = torch.arange(length, device=device).unsqueeze(0)
    deepest_BN = supervised_depth(batch.lengths_B, batch.prompt_lens_B, length)
    hidden = full_precision(drafter, drafter.combine_features(states.features_BNA))
    caches: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    seen: list[Elements] = []
    for depth in range(num_depths):
        depths, documents = torch.full_like(anchors, depth), torch.zeros_like(anchors)
        # Every row attends alike, so one row stands for all in the mask.
        seen.append(Elements(anchors, depths, documents, documents.bool()))
        attention = make_attention(seen[-1], concatenate(seen))

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

        next_tokens = tokens_BN[:, (anchors[0] + depth + 1).clamp_max(length - 1)]
        hidden = drafter(next_tokens, hidden, anchors + depth, attend)
        per_row = (x.expand(rows, length) for x in (anchors, depths, documents))
        yield Elements(*per_row, supervised=deepest_BN >= depth), hidden


class Method:
    """Computes the graded elements of a batch, for either method.

    Args:
        section: the method's configuration.
        make_attention: how elements attend.
        flex: pad for FlexAttention's blocks.
        recompute: activation checkpointing (P-EAGLE only).
    """

    def __init__(
        self,
        section: MethodSection,
        make_attention: MakeAttention = dense_attention,
        *,
        flex: bool = False,
        recompute: bool = False,
    ) -> None:
        self.section = section
        self.recompute = recompute
        self.make_attention = make_attention
        self.multiple = _FLEX_BLOCK if flex else 1

    def graded(
        self,
        drafter: Drafter,
        batch: Batch,
        states: TargetStates,
        generator: torch.Generator | None,
        *,
        everything: bool = False,
    ) -> Graded:
        """All graded elements of a batch.

        Args:
            drafter: the head.
            batch, states: what it reads.
            generator: of the element sampling.
            everything: no conditional drop, as validation wants it.
        """
        section = self.section
        if section.name == "eagle3":
            parts = eagle3_forward(drafter, batch, states, section.depth, self.make_attention)
            by_depth, hidden_by_depth = zip(*parts, strict=True)
            return select(concatenate(by_depth), torch.cat(hidden_by_depth, dim=1))
        # Every shape is compiled once; validation's would be too many.
        make_attention = dense_attention if everything else self.make_attention
        elements = self.elements(batch, generator, everything=everything)
        hidden = peagle_forward(
            drafter, batch, states, elements, make_attention, recompute=self.recompute
        )
        return select(elements, hidden)

    def elements(
        self, batch: Batch, generator: torch.Generator | None, *, everything: bool = False
    ) -> Elements:
        """P-EAGLE's elements of a batch; arguments as in `graded`."""
        section = self.section
        deepest_BN = supervised_depth(
            batch.lengths_B, batch.prompt_lens_B, batch.tokens_BN.shape[1]
        )
        return sample_elements(
            deepest_BN,
            section.depth,
            ratio=1.0 if everything else section.cod_ratio,
            floor=section.cod_floor,
            generator=generator,
            multiple=self.multiple,
            max_anchors=batch.max_response_len,
        )


def select(elements: Elements, hidden_BED: Tensor) -> Graded:
    """The supervised elements with their outputs, in the order that `Graded` wants."""
    row, column = elements.supervised.nonzero(as_tuple=True)
    width, span = elements.anchors.shape[1], elements.positions.max() + 1
    order = (row * span + elements.positions[row, column]).argsort(stable=True)
    row, column = row[order], column[order]
    # No row twice, so index_select's backward adds in no particular order and is still exact.
    hidden_MD = hidden_BED.flatten(0, 1).index_select(0, row * width + column)
    return Graded(row, elements.anchors[row, column], elements.depths[row, column], hidden_MD)


def concatenate(parts: Sequence[Elements]) -> Elements:
    """The elements of all parts, one part's after the other's."""
    return Elements(
        *(
            torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in ("anchors", "depths", "documents", "supervised")
        )
    )


def full_precision(drafter: Drafter, hidden: Tensor) -> Tensor:
    """The hidden states in the type of the weights.

    Under autocast fc gives bfloat16; the residual stream keeps the weights' precision.
    """
    return hidden.to(drafter.fc.weight.dtype)
