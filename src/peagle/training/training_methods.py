"""Graded elements of both training methods, the head's layers run on them, and EAGLE-3's loop.

Shapes: B rows, N positions, E elements, M graded elements, D drafter width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.drafter import Attend, Drafter, DrafterLayer, Rope
from peagle.models.elements import Elements, sample_elements
from peagle.training.chains import ChainPlan
from peagle.training.chunked_loss import TargetOrder
from peagle.training.config import MethodSection
from peagle.training.element_attention import BLOCK, BlockTable, ElementAttention, dense_attention

# make_attention(queries, keys, blocks that were listed ahead)
MakeAttention = Callable[[Elements, Elements, BlockTable | None], ElementAttention]


@dataclass(frozen=True, slots=True)
class Selected:
    """Elements that count.

    Within a row they are in the order of the token that they predict, so that those which are
    graded by the same target row stand side by side.

    Attributes:
        row, anchor, depth: int64 [M], which elements.
        index: int64 [M], where they are among all B * E.
        order: the target rows that grade them, of B * N.
    """

    row: Tensor
    anchor: Tensor
    depth: Tensor
    index: Tensor
    order: TargetOrder

    @classmethod
    def of(cls, elements: Elements, length: int) -> Self:
        """Select the supervised elements; `length` is N."""
        row, column = elements.supervised.nonzero(as_tuple=True)
        position = elements.positions[row, column] + 1
        order = (row * (length + 1) + position).argsort(stable=True)
        row, column, position = row[order], column[order], position[order]
        return cls(
            row,
            elements.anchors[row, column],
            elements.depths[row, column],
            row * elements.anchors.shape[1] + column,
            TargetOrder.of(row * length + position),
        )


@dataclass(frozen=True, slots=True)
class Roots:
    """The states with which chains begin, at every position of a batch.

    Attributes:
        embedding_BND: of the token after each position.
        hidden_BND: the head's output at depth 0, before the final norm, without its past.
    """

    embedding_BND: Tensor
    hidden_BND: Tensor


@dataclass(frozen=True, slots=True)
class Graded:
    """Elements that count, with the head's output at them, before the final norm: [M, D].

    `roots` and `plan` are of elements below depth 0, for a correction; None where there is none.
    """

    selected: Selected
    hidden_MD: Tensor
    roots: Roots | None = None
    plan: ChainPlan | None = None

    @classmethod
    def at(
        cls,
        selected: Selected,
        hidden_BED: Tensor,
        roots: Roots | None = None,
        plan: ChainPlan | None = None,
    ) -> Self:
        """Take the selected elements' outputs out of the outputs of all elements."""
        # No row twice, so index_select's backward adds in no particular order and is still exact.
        hidden_MD = hidden_BED.flatten(0, 1).index_select(0, selected.index)
        return cls(selected, hidden_MD, roots, plan)


class TrainingMethod:
    """How the elements of a batch are chosen and computed.

    Args:
        flex: pad for FlexAttention's blocks.
        recompute: activation checkpointing (P-EAGLE only): keep the input of each layer and run
            the layer again for its gradients.
        compiled: run the parts of a layer around its attention through torch.compile, which fuses
            norms, RoPE and activations and keeps less for the backward pass.
    """

    def __init__(
        self,
        section: MethodSection,
        make_attention: MakeAttention = dense_attention,
        *,
        flex: bool = False,
        recompute: bool = False,
        compiled: bool = False,
    ) -> None:
        self.section = section
        self.recompute = recompute
        self.make_attention = make_attention
        self.flex = flex
        self.multiple = BLOCK if flex else 1
        self.compiled = compiled

    def elements(
        self, batch: Batch, generator: torch.Generator | None, *, everything: bool = False
    ) -> Elements:
        """P-EAGLE's elements of a batch, drawn by `uniform`.

        `everything`: no conditional drop, for validation.
        """
        section, deepest_BN = self.section, batch.deepest_BN
        return sample_elements(
            deepest_BN,
            section.depth,
            ratio=1.0 if everything else section.cod_ratio,
            floor=section.cod_floor,
            multiple=self.multiple,
            max_anchors=batch.max_anchors,
            documents_BN=batch.documents_BN,
            scores_BN=self.uniform(batch, generator),
        )

    def uniform(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """Return a uniform random number for each position, [B, N].

        The generator draws for the whole batch, so that what a row gets does not depend on how many
        processes share the rows.
        """
        device, (rows, length) = batch.deepest_BN.device, batch.deepest_BN.shape
        scores = torch.rand((batch.num_rows, length), generator=generator, device=device)
        return scores[batch.first_row : batch.first_row + rows]

    def run_layers(
        self,
        drafter: Drafter,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        light: bool = False,
    ) -> Tensor:
        """Compute `Drafter.forward` from embeddings in place of tokens.

        Args:
            drafter: the head.
            embedding, hidden: [..., D]; a dimension of 1 stands for equal rows, which attention
                distinguishes, so that layer 0 projects one row for all mask slots.
            positions: int64 [...], which decides the shape of the result.
            attend: see `Drafter.forward`; with `recompute` the backward pass calls it again.
            light: keep no inner states of the MLPs; they are computed again going backward.
        """
        rope = drafter._rope_at(positions, hidden.dtype)
        for layer in drafter.layers:
            assert isinstance(layer, DrafterLayer)
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(  # type: ignore[assignment]
                    self._run_layer,
                    layer,
                    hidden,
                    embedding,
                    rope,
                    attend,
                    False,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                hidden = self._run_layer(layer, hidden, embedding, rope, attend, light)
        return drafter.norm(hidden) if drafter.config.norm_output else hidden

    def _run_layer(
        self,
        layer: DrafterLayer,
        hidden: Tensor,
        embedding: Tensor,
        rope: Rope,
        attend: Attend,
        light: bool,
    ) -> Tensor:
        before, after = DrafterLayer.before_attention, DrafterLayer.after_attention
        if self.compiled:
            before, after = _compiled_layer()
        residual, query, key, value = before(layer, hidden, embedding, rope)
        attended = attend(layer.self_attn.layer_idx, query, key, value)
        return after(layer, residual, attended, light)


@cache
def _compiled_layer() -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]:
    """Return the layer's parts before and after attention, compiled for each shape.

    Going backward they compute again the values that cost no product. By itself the compiler keeps
    every input of a product, silu(gate) * up and the normed states among it: 40 of 124 KiB for an
    element and layer of a head of width 4,096.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        run = torch.compile(function, dynamic=False)

        def call(*arguments: Any) -> Any:
            with functorch_config.patch(ban_recompute_materialized_backward=False):
                return run(*arguments)

        return call

    return compiled(DrafterLayer.before_attention), compiled(DrafterLayer.after_attention)


def tokens_after(tokens_BN: Tensor) -> Tensor:
    """Return x[a+1] of each anchor a, [B, N]; the last, ungraded anchor repeats x[a]."""
    return torch.cat((tokens_BN[:, 1:], tokens_BN[:, -1:]), dim=1)


def concatenate(parts: Sequence[Elements]) -> Elements:
    """Return the elements of all parts, one part's after the other's."""
    return Elements(
        *(
            torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in ("anchors", "depths", "documents", "supervised")
        )
    )


# ---- EAGLE-3 ----


def eagle3_graded(
    drafter: Drafter, batch: Batch, states: TargetStates, method: TrainingMethod
) -> Graded:
    """Return all graded elements of a batch: every anchor, every depth."""
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
