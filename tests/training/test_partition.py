"""The two-pass partition against one pass over all elements, and the paper's Algorithm 1."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter
from peagle.models.elements import Elements, sample_elements
from peagle.training.config import MethodSection
from peagle.training.partition import (
    PartitionLayout,
    _Borrowed,
    split_by_anchor,
    two_pass_backward,
)
from peagle.training.training_methods import Graded, Selected, TrainingMethod
from tests.training.reference import HIDDEN as H
from tests.training.reference import VOCAB, make_head, make_plain_batch, peagle_forward

K, N = 5, 40
HEADS: list[dict[str, Any]] = [
    {},
    {"num_layers": 1, "norm_before_fc": True, "norm_before_residual": True},
    {"num_layers": 3, "fc_norm": True, "qk_norm": True, "norm_output": True},
    {"num_kv_heads": 4, "attention_bias": True},
]
# Documents of each row as (length, prompt); what is left of a row is padding.
PACKED = [
    [(9, 2), (17, 9), (14, 1)],
    [(31, 4), (4, 1)],
    [(5, 4), (3, 1), (3, 2)],  # two documents with nothing below depth 0
]


def make_batch(rows: int) -> tuple[Batch, TargetStates]:
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(2, VOCAB, (rows, N), generator=generator)
    features = torch.randn(rows, N, 3 * H, generator=generator, dtype=torch.float64)
    batch = make_plain_batch(tokens, torch.ones(rows, dtype=torch.int64))
    return batch, TargetStates(features, features[..., :H])


def make_elements(documents: list[list[tuple[int, int]]], multiple: int = 1) -> Elements:
    """Sampled elements of rows that hold several documents each."""
    document_of = torch.full((len(documents), N), len(documents[0]) + 9)
    deepest = torch.full((len(documents), N), -1)
    for row, lengths in enumerate(documents):
        start = 0
        for number, (length, prompt) in enumerate(lengths):
            document_of[row, start : start + length] = number
            for anchor in range(start + prompt - 1, start + length - 2):
                deepest[row, anchor] = start + length - 3 - anchor
            start += length
    generator = torch.Generator().manual_seed(1)
    sampled = sample_elements(
        deepest, K, ratio=0.8, floor=0.3, generator=generator, multiple=multiple
    )
    own = document_of.gather(1, sampled.anchors).where(sampled.documents >= 0, -1)
    return Elements(sampled.anchors, sampled.depths, own, sampled.supervised)


def make_loss(head: Drafter, batch: Batch, elements: Elements) -> Callable[[Graded], Tensor]:
    """Cross-entropy on the data's tokens, weighted by depth, over one global denominator."""
    count = elements.supervised.sum()

    def loss_of(graded: Graded) -> Tensor:
        labels = batch.tokens_BN[
            graded.selected.row, graded.selected.anchor + graded.selected.depth + 2
        ]
        losses = F.cross_entropy(head.compute_logits(graded.hidden_MD), labels, reduction="none")
        return (losses * 0.9**graded.selected.depth).sum() / count

    return loss_of


def gradients(head: Drafter) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}


def flat(head: Drafter, batch: Batch, states: TargetStates, elements: Elements) -> Tensor:
    head.zero_grad()
    hidden = peagle_forward(head, batch, states, elements)
    loss = make_loss(head, batch, elements)(Graded.at(Selected.of(elements, N), hidden))
    loss.backward()
    return loss.detach()


def two_pass(
    head: Drafter,
    batch: Batch,
    states: TargetStates,
    elements: Elements,
    segments: int,
    *,
    recompute: bool = False,
    multiple: int = 1,
) -> Tensor:
    head.zero_grad()
    method = TrainingMethod(MethodSection(depth=K), recompute=recompute)  # type: ignore[call-arg]
    method.multiple = multiple
    return two_pass_backward(
        head,
        batch,
        states,
        PartitionLayout.of(elements, N, segments, method),
        make_loss(head, batch, elements),
        method=method,
    )


def cumulative(
    head: Drafter, batch: Batch, states: TargetStates, elements: Elements, segments: int
) -> Tensor:
    """The paper's Algorithm 1: each segment with all the context before it, computed anew."""
    head.zero_grad()
    loss_of = make_loss(head, batch, elements)
    total = torch.zeros((), dtype=torch.float64)
    borders = [round(i * N / segments) for i in range(segments + 1)]
    for begin, end in itertools.pairwise(borders):
        length = min(end + 1, N)  # the token after the last anchor is an input too
        own = (elements.anchors >= begin) & (elements.anchors < end)
        is_context = (elements.depths == 0) & (elements.anchors < length)
        keep = (is_context | (own & elements.supervised))[0]
        part = Elements(
            elements.anchors[:, keep],
            elements.depths[:, keep],
            elements.documents[:, keep],
            (elements.supervised & own)[:, keep],
        )
        prefix = make_plain_batch(batch.tokens_BN[:, :length], torch.ones(1, dtype=torch.int64))
        seen = TargetStates(states.features_BNA[:, :length], states.hidden_BNH[:, :length])
        loss = loss_of(
            Graded.at(Selected.of(part, length), peagle_forward(head, prefix, seen, part))
        )
        loss.backward()
        total += loss.detach()
    return total


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("segments", [1, 2, 3, 8, 60])
def test_gradients_equal_those_of_one_pass(segments: int, recompute: bool) -> None:
    head, (batch, states), elements = make_head(), make_batch(3), make_elements(PACKED)
    loss = flat(head, batch, states, elements)
    expected = gradients(head)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected.values())
    value = two_pass(head, batch, states, elements, segments, recompute=recompute)
    torch.testing.assert_close(value, loss, atol=1e-12, rtol=1e-12)
    assert_same(gradients(head), expected)


@pytest.mark.parametrize("options", HEADS, ids=str)
def test_gradients_of_every_kind_of_head(options: dict[str, Any]) -> None:
    head, (batch, states), elements = make_head(**options), make_batch(3), make_elements(PACKED)
    flat(head, batch, states, elements)
    expected = gradients(head)
    two_pass(head, batch, states, elements, 4, multiple=8)
    assert_same(gradients(head), expected)


def test_frozen_embeddings_stay_without_gradient() -> None:
    head, (batch, states), elements = make_head(), make_batch(3), make_elements(PACKED)
    head.embed_tokens.requires_grad_(False)
    flat(head, batch, states, elements)
    expected = gradients(head)
    two_pass(head, batch, states, elements, 3)
    assert "embed_tokens.weight" not in expected
    assert_same(gradients(head), expected)


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_algorithm_1_gives_the_same_gradients(segments: int) -> None:
    head, (batch, states) = make_head(), make_batch(1)
    elements = make_elements([[(13, 3), (27, 6)]])
    loss = cumulative(head, batch, states, elements, segments)
    expected = gradients(head)
    value = two_pass(head, batch, states, elements, segments)
    torch.testing.assert_close(value, loss, atol=1e-12, rtol=1e-12)
    assert_same(gradients(head), expected)


def test_gradients_of_many_segments_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    borrowed = _Borrowed([weight * 1])
    for _ in range(300):
        leaves = borrowed.leaves()
        leaves[0].sum().backward()
        borrowed.collect(leaves)
    borrowed.backward(torch.zeros((), requires_grad=True))
    assert weight.grad is not None and weight.grad.tolist() == [300]


def listed(elements: Elements, row: int) -> list[tuple[int, int]]:
    chosen = elements.supervised[row]
    return list(
        zip(
            elements.anchors[row][chosen].tolist(),
            elements.depths[row][chosen].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("segments", [1, 3, 7, 60])
def test_every_chain_lies_in_one_segment(segments: int, multiple: int) -> None:
    elements = make_elements(PACKED, multiple)
    parts = split_by_anchor(elements, N, segments, K, multiple)
    assert len(parts) == segments
    for row in range(3):
        by_part = [listed(part, row) for part in parts]
        together = [pair for pairs in by_part for pair in pairs]
        assert sorted(together) == sorted(p for p in listed(elements, row) if p[1] > 0)
        assert together == sorted(together), "ascending anchors, chains side by side"
        owners = [{a for a, _ in pairs} for pairs in by_part]
        assert sum(map(len, owners)) == len(set().union(*owners))
        share = len(together) / segments
        assert all(len(pairs) <= share + K - 1 for pairs in by_part)
    for part in parts:
        assert (part.documents[~part.supervised] == -1).all(), "the rest is padding"
        assert part.anchors.shape[1] % multiple == 0


def test_padded_sizes_do_not_depend_on_the_rows() -> None:
    sizes = {
        part.anchors.shape[1]
        for documents in ([[(40, 1)]], [[(6, 3)]], [[(9, 2), (17, 9), (14, 1)]])
        for part in split_by_anchor(make_elements(documents, 8), N, 3, K, 8)
    }
    assert len(sizes) == 1


def test_nothing_below_depth_0_is_no_segment() -> None:
    only_context = make_elements([[(3, 1)]])
    assert split_by_anchor(only_context, N, 4, K) == []
    head, (batch, states) = make_head(), make_batch(1)
    flat(head, batch, states, only_context)
    expected = gradients(head)
    two_pass(head, batch, states, only_context, 4)
    assert_same(gradients(head), expected)
