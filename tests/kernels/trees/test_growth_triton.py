"""Trees that kernels grow against those of torch, and against an exact best-first search."""

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.trees.growth import best_first_trees, count_nodes, searched_trees
from peagle.models.correction import Correction, DraftCorrection
from tests.kernels.devices import DEVICES, compile_for_card
from tests.kernels.tree_reference import paths_of

pytest.importorskip("triton")

from peagle.kernels.trees.growth_triton import CorrectionTerm, GrowthScratch, grow_trees


def grow(
    logits: Tensor, depths: Tensor, n: int, w: int, term: CorrectionTerm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_seqs, num_slots, vocab = logits.shape
    scratch = GrowthScratch.allocate(num_seqs, num_slots, n, vocab, logits.device)
    tokens, parents = (
        torch.full((num_seqs, n), -7, dtype=torch.int64, device=logits.device) for _ in range(2)
    )
    shape = {"num_parallel_trees": w, "temperature": 0.7}
    scores = torch.zeros(num_seqs, n, device=logits.device)
    grow_trees(logits, depths, term, scratch, tokens, parents, scores, **shape)  # type: ignore[arg-type]
    return tokens, parents, scores


def correction_of(
    hidden: int, vocab: int, draft_vocab: int, device: str, count: int = 1
) -> DraftCorrection:
    generator, made = torch.Generator().manual_seed(5), list[Correction]()
    for seed in range(3, 3 + count):
        made.append(Correction(hidden, rank=12, width=24, num_slots=4))
        made[-1].reset(seed)
        with torch.no_grad():
            made[-1].down.weight.normal_(0, 2.0, generator=generator)
    embedding = torch.randn(vocab, hidden, generator=generator)
    lm_head = torch.randn(draft_vocab, hidden, generator=generator) / hidden**0.5
    return DraftCorrection(made, embedding, lm_head).to(device)


CASES = [(5, 2, 2, 2100), (16, 8, 5, 200), (63, 63, 4, 64), (1, 1, 1, 70), (7, 3, 3, 40)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(("n", "w", "num_slots", "vocab"), CASES)
def test_trees_are_those_of_torch(
    device: str, is_corrected: bool, n: int, w: int, num_slots: int, vocab: int
) -> None:
    generator = torch.Generator().manual_seed(n)
    wide = torch.randn(2, num_slots + 1, vocab, generator=generator) * 3
    logits = wide.to(device)[:, 1:]  # rows of a larger tensor
    depths = torch.tensor([num_slots, max(num_slots - 1, 1)], device=device)
    term, children = None, None
    if is_corrected:
        d2t = torch.arange(vocab, device=device) % 3
        correction = correction_of(8, vocab + 3, vocab, device)
        states = torch.randn(2, num_slots, 24, generator=generator).to(device)
        ids = torch.arange(vocab, device=device) + d2t
        children = correction.tree_children(logits, states, ids, 0.7)
        term = CorrectionTerm(states, *correction.weights, d2t)
    expected = best_first_trees(
        logits, depths, num_parallel_trees=w, max_nodes=n, temperature=0.7, children=children
    )
    found = grow(logits, depths, n, w, term)
    for b, depth in enumerate(depths.tolist()):
        count = count_nodes(depth, w, n, vocab)
        assert count == n or depth == 1
        trees = [[x[b, :count].tolist() for x in tree[:2]] for tree in (found, expected)]
        assert set(paths_of(*trees[0])) == set(paths_of(*trees[1]))
        for few in (1, count // 2 + 1):
            beginning = [paths_of(*(x[:few] for x in tree)) for tree in trees]
            assert beginning[0] == beginning[1]
        scores = [tree[2][b, :count].float() for tree in (found, expected)]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def weights_of(several: DraftCorrection, number: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, down, weight = several.weights
    return tokens[number], down[number], weight[number]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "w", "num_slots", "vocab"), CASES[:3])
def test_each_tree_has_its_own_of_several_corrections(
    device: str, n: int, w: int, num_slots: int, vocab: int
) -> None:
    """The kernel and torch against a sequence at a time with its correction's weights alone."""
    generator = torch.Generator().manual_seed(n)
    logits = (torch.randn(5, num_slots, vocab, generator=generator) * 3).to(device)
    states = torch.randn(5, num_slots, 24, generator=generator).to(device)
    depths = torch.full((5,), num_slots, device=device)
    ids = torch.arange(vocab, device=device)
    which = torch.tensor([1, 0, 3, 1, 2], device=device)
    several = correction_of(8, vocab, vocab, device, count=4)
    found = grow(logits, depths, n, w, CorrectionTerm(states, *several.weights, None, which))
    shape: dict[str, Any] = {"num_parallel_trees": w, "max_nodes": n}
    children = several.tree_children(logits, states, ids, 0.7, which)
    by_torch = best_first_trees(logits, depths, **shape, temperature=0.7, children=children)
    on_host = logits.cpu(), states.cpu(), ids.cpu(), 0.7, n, which.cpu()
    after = correction_of(8, vocab, vocab, "cpu", count=4).tree_search(*on_host)
    searched = searched_trees(after, depths.tolist(), **shape)
    differs = 0
    for b, number in enumerate(which.tolist()):
        own = slice(b, b + 1)
        alone, first = (
            grow(logits[own], depths[own], n, w, CorrectionTerm(states[own], *weights, None))
            for weights in (weights_of(several, number), weights_of(several, 0))
        )
        assert all(torch.equal(x[own], y) for x, y in zip(found, alone, strict=True))
        paths = [
            set(paths_of(*(x[at].tolist() for x in tree[:2])))
            for tree, at in ((alone, 0), (by_torch, b), (searched, b))
        ]
        assert paths[0] == paths[1] == paths[2]
        differs += not torch.equal(first[0], alone[0])
    assert differs, "the corrections grow the same trees, so that nothing would be seen"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [[], [0, 1, 2], [1, 2], [2]])
def test_siblings_differ_and_parents_come_first(device: str, broken: list[int]) -> None:
    """Also where logits tie or are broken: or a target's token would be accepted twice."""
    logits = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0))
    logits[1] = 0
    logits[:, broken] = torch.nan
    found = grow(logits.to(device), torch.tensor([3, 3], device=device), 20, 2)
    for tokens, parents in zip(*(x.tolist() for x in found[:2]), strict=True):
        assert len(set(zip(parents, tokens, strict=True))) == 20
        assert all(parent < row for row, parent in enumerate(parents, start=1))
        assert parents.count(0) <= 2
        assert max(map(len, paths_of(tokens, parents))) <= 3


@pytest.mark.slow
def test_kernels_of_trees_compile_for_a_card() -> None:
    found = compile_for_card("trees")
    assert len(found) == 1 + 2 + 3 + 1 + 1 + 1 + 1
    # The second one merges the parts of a vocabulary of 262,144 tokens.
    spills = {name: kernel["stack"] for name, kernel in found.items() if kernel["stack"]}
    assert not spills or spills.keys() == {"_best_of_slot_kernel 1"}
