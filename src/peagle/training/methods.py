"""The two training methods: P-EAGLE's elements in one pass, EAGLE-3's training-time test.

Both grade (anchor, depth) elements of a batch; they differ in how a deep element is computed.
Shapes: B rows, N positions, E elements, M graded elements, D drafter width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.models.drafter import Drafter
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
) -> Tensor:
    """The head's output at every element, [B, E, D], in one pass.

    Depth 0: token x[a+1], hidden fc(g[a]). Deeper: mask token, h_shared.
    """
    tokens_BN = batch.tokens_BN
    is_ntp = elements.depths == 0
    next_tokens = tokens_BN.gather(1, (elements.anchors + 1).clamp_max(tokens_BN.shape[1] - 1))
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None
    tokens = torch.where(is_ntp, next_tokens, mask_token_id)

    length = tokens_BN.shape[1]
    combined_BND = _full_precision(drafter, drafter.combine_features(states.features_BNA))
    shared_D = _full_precision(drafter, drafter.shared_hidden())
    # Elements start with depth 0 of every position (models.elements).
    num_rest = elements.anchors.shape[1] - length
    hidden = torch.cat((combined_BND, shared_D.expand(len(tokens_BN), num_rest, -1)), dim=1)
    attention = make_attention(elements, elements)
    return drafter(tokens, hidden, elements.positions, lambda _, q, k, v: attention(q, k, v))


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
    hidden = _full_precision(drafter, drafter.combine_features(states.features_BNA))
    caches: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    seen: list[Elements] = []
    for depth in range(num_depths):
        depths, documents = torch.full_like(anchors, depth), torch.zeros_like(anchors)
        # Every row attends alike, so one row stands for all in the mask.
        seen.append(Elements(anchors, depths, documents, documents.bool()))
        attention = make_attention(seen[-1], _concatenate(seen))

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
    """

    def __init__(
        self,
        section: MethodSection,
        make_attention: MakeAttention = dense_attention,
        *,
        flex: bool = False,
    ) -> None:
        self.section = section
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
    ) -> Iterator[Graded]:
        """Graded elements, in parts whose order is by depth for EAGLE-3 and one for P-EAGLE.

        Args:
            drafter: the head.
            batch, states: what it reads.
            generator: of the element sampling.
            everything: no conditional drop, as validation wants it.
        """
        section = self.section
        if section.name == "eagle3":
            for elements, hidden in eagle3_forward(
                drafter, batch, states, section.depth, self.make_attention
            ):
                yield _select(elements, hidden)
            return
        deepest_BN = supervised_depth(
            batch.lengths_B, batch.prompt_lens_B, batch.tokens_BN.shape[1]
        )
        # Every shape is compiled once; validation's would be too many.
        make_attention = dense_attention if everything else self.make_attention
        elements = sample_elements(
            deepest_BN,
            section.depth,
            ratio=1.0 if everything else section.cod_ratio,
            floor=section.cod_floor,
            generator=generator,
            multiple=self.multiple,
            max_anchors=batch.max_response_len,
        )
        hidden = peagle_forward(drafter, batch, states, elements, make_attention)
        yield _select(elements, hidden)


def _select(elements: Elements, hidden_BED: Tensor) -> Graded:
    row, column = elements.supervised.nonzero(as_tuple=True)
    return Graded(
        row=row,
        anchor=elements.anchors[row, column],
        depth=elements.depths[row, column],
        hidden_MD=hidden_BED[row, column],
    )


def _concatenate(parts: list[Elements]) -> Elements:
    return Elements(
        *(
            torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in ("anchors", "depths", "documents", "supervised")
        )
    )


def _full_precision(drafter: Drafter, hidden: Tensor) -> Tensor:
    """Under autocast fc gives bfloat16; the residual stream keeps the weights' precision."""
    return hidden.to(drafter.fc.weight.dtype)
