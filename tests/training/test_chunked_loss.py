"""The chunked projection and loss against the plain form: all logits, autograd, no chunks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.chunked_loss import (
    DraftLoss,
    LossKind,
    Projection,
    TargetOrder,
    default_chunk_rows,
    judged_loss,
    projected_loss,
)

M, D, V = 23, 6, 17
KINDS: list[DraftLoss] = [
    DraftLoss("kl"),
    DraftLoss("ce"),
    DraftLoss("tv"),
    DraftLoss("kl_tv", tv_share=0.3),
]


class Case:
    """Random elements, target and head; `calls` holds the target rows that were asked for."""

    def __init__(self, *, pruned: bool, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.draft_ids = torch.tensor([0, 2, 3, 7, 8, 11, 16]) if pruned else None
        self.hidden = normal(M, D).requires_grad_()
        self.weight = normal(7 if pruned else V, D).requires_grad_()
        self.target_logits = 2 * normal(9, V)
        positions = torch.randint(9, (M,), generator=generator).sort().values
        self.positions = positions
        self.calls: list[int] = []
        self.projection = Projection(
            loss=DraftLoss(),
            order=TargetOrder.of(positions),
            weights_M=torch.rand(M, generator=generator).to(
                torch.promote_types(dtype, torch.float32)
            ),
            target_logits=self.rows,
            draft_ids=self.draft_ids,
            chunk_rows=M,
        )

    def rows(self, positions: Tensor) -> Tensor:
        self.calls += positions.tolist()
        return self.target_logits[positions]

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        return projected_loss(self.hidden, self.weight, replace(self.projection, **changes))

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.hidden, self.weight]))


def plain_loss(case: Case, loss: DraftLoss) -> Tensor:
    """The formulas over the full vocabulary, for autograd to differentiate."""
    draft_ids = torch.arange(V) if case.draft_ids is None else case.draft_ids
    reference = case.target_logits[case.positions]
    logits = case.hidden @ case.weight.T
    log_p = F.log_softmax(reference[:, draft_ids], -1)
    kl = (log_p.exp() * (log_p - F.log_softmax(logits, -1))).sum(-1)
    full_q = torch.zeros_like(reference).index_copy(1, draft_ids, logits.softmax(-1))
    tv = 1 - torch.minimum(full_q, reference.softmax(-1)).sum(-1)
    losses = {
        "kl": kl,
        "ce": F.cross_entropy(logits, reference[:, draft_ids].argmax(-1), reduction="none"),
        "tv": tv,
        "kl_tv": (1 - loss.tv_share) * kl + loss.tv_share * tv,
    }
    return (losses[loss.kind] * case.projection.weights_M).sum()


@pytest.mark.parametrize("chunk_rows", [1, 7, M, 1000])
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss.kind)
def test_loss_and_gradients_equal_the_plain_form(
    loss: DraftLoss, pruned: bool, chunk_rows: int
) -> None:
    case = Case(pruned=pruned)
    value, _ = case.run(loss=loss, chunk_rows=chunk_rows)
    expected = plain_loss(case, loss)
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
    pairs = zip(case.gradients(3 * value), case.gradients(3 * expected), strict=True)
    for gradient, wanted in pairs:
        assert wanted.abs().max() > 1e-2
        torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss.kind)
def test_gradients_against_finite_differences(loss: DraftLoss) -> None:
    case = Case(pruned=True)
    projection = replace(case.projection, loss=loss, chunk_rows=5)
    gradients = case.gradients(case.run(loss=loss, chunk_rows=5)[0])
    generator = torch.Generator().manual_seed(2)
    for which, tensor in enumerate((case.hidden, case.weight)):
        way = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        values = []
        for step in (1e-6, -1e-6):
            inputs = [case.hidden.detach(), case.weight.detach()]
            inputs[which] = inputs[which] + step * way
            values.append(projected_loss(inputs[0], inputs[1], projection)[0])
        slope = (values[0] - values[1]) / 2e-6
        assert abs(slope) > 1e-2
        torch.testing.assert_close(slope, (gradients[which] * way).sum(), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
def test_matches_are_argmax_over_the_targets_vocabulary(pruned: bool) -> None:
    case = Case(pruned=pruned)
    draft = (case.hidden @ case.weight.T).argmax(-1)
    draft = draft if case.draft_ids is None else case.draft_ids[draft]
    # Make the target agree with some elements.
    case.target_logits[case.positions[::6], draft[::6]] += 20
    _, match = case.run(chunk_rows=4)
    expected = draft == case.target_logits.argmax(-1)[case.positions]
    assert match.tolist() == expected.tolist() and 0 < match.sum() < M


@pytest.mark.parametrize("chunk_rows", [4, M])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
def test_chances_are_the_targets_over_its_whole_vocabulary(
    pruned: bool, temperature: float, chunk_rows: int
) -> None:
    case = Case(pruned=pruned)
    projection = replace(case.projection, chunk_rows=chunk_rows)
    judged, *drafts, chance_M = judged_loss(case.hidden, case.weight, projection, temperature)
    match_M, tokens_M = drafts
    draft = (case.hidden @ case.weight.T).argmax(-1)
    draft = draft if case.draft_ids is None else case.draft_ids[draft]
    assert tokens_M.tolist() == draft.tolist()
    chances = (case.target_logits / temperature).softmax(-1)[case.positions, draft]
    torch.testing.assert_close(chance_M, chances, atol=1e-12, rtol=1e-12)
    assert chances.max() > 4 * chances.min()
    loss, match = projected_loss(case.hidden, case.weight, projection)
    assert judged.item() == loss.item() and torch.equal(match_M, match)


def test_chances_of_narrow_logits_are_computed_wide() -> None:
    case = Case(pruned=False, dtype=torch.bfloat16)
    chances = judged_loss(case.hidden, case.weight, case.projection, 0.7)[-1]
    draft = (case.hidden @ case.weight.T).argmax(-1)
    exact = (case.target_logits.double() / 0.7).softmax(-1)[case.positions, draft]
    assert chances.dtype == torch.float32
    torch.testing.assert_close(chances.double(), exact, atol=1e-6, rtol=1e-5)


def test_a_target_row_is_projected_once_for_all_elements_of_a_chunk() -> None:
    case = Case(pruned=False)
    case.run(chunk_rows=M)
    assert case.calls == case.positions.unique().tolist()


def test_without_gradients_the_loss_is_the_same() -> None:
    case = Case(pruned=True)
    value, match = case.run(chunk_rows=5)
    with torch.no_grad():
        plain, same = case.run(chunk_rows=5)
    assert plain.item() == value.item() and not plain.requires_grad
    assert torch.equal(match, same)


def test_a_frozen_matrix_gets_no_gradient() -> None:
    case = Case(pruned=True)
    wanted = case.gradients(case.run()[0])[0]
    case.weight.requires_grad_(False)
    case.run()[0].backward()
    assert case.weight.grad is None and case.hidden.grad is not None
    torch.testing.assert_close(case.hidden.grad, wanted)


def test_no_elements_give_zero_loss_and_zero_gradients() -> None:
    case = Case(pruned=True)
    case.hidden = case.hidden[:0].detach().requires_grad_()
    nothing = torch.zeros(0, dtype=torch.int64)
    value, match = case.run(order=TargetOrder.of(nothing), weights_M=case.projection.weights_M[:0])
    gradients = case.gradients(value)
    assert value.item() == 0 and len(match) == 0 and not gradients[1].any()


def test_gradients_serve_one_backward_pass() -> None:
    case = Case(pruned=False)
    value, _ = case.run()
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        value.backward()


@pytest.mark.parametrize("kind", ["kl", "ce", "tv", "kl_tv"])
def test_narrow_products_and_wide_sums(kind: LossKind) -> None:
    exact, narrow = (Case(pruned=True, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    loss = DraftLoss(kind)
    expected = plain_loss(exact, loss)
    value, _ = narrow.run(loss=loss, chunk_rows=4)
    assert value.dtype == torch.float32
    assert abs(value - expected) < 2e-2 * expected and value != expected
    pairs = zip(narrow.gradients(value), exact.gradients(expected), strict=True)
    for gradient, wanted in pairs:
        assert gradient.dtype == torch.bfloat16
        assert (gradient - wanted).norm() < 3e-2 * wanted.norm()


def test_the_sum_of_a_wide_gradient_is_not_rounded() -> None:
    case = Case(pruned=True, dtype=torch.bfloat16)
    value, _ = case.run(chunk_rows=4)
    value.backward()
    rounded, case.weight.grad = case.weight.grad, None
    case.weight.grad_dtype = torch.float32
    value, _ = case.run(chunk_rows=4)
    value.backward()
    exact = case.weight.grad
    assert rounded is not None and exact is not None and exact.dtype == torch.float32
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(exact.bfloat16(), rounded)


def test_chunks_follow_the_vocabularies() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert default_chunk_rows(151_936, 32_000, gpu) == (1 << 27) // 183_936
    assert default_chunk_rows(2048, 2048, cpu) > default_chunk_rows(50_000, 50_000, cpu) == 64
