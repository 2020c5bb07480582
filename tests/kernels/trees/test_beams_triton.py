"""Beams and trees that kernels grow against those of torch."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.trees.beams import BeamTrees, count_beam_nodes
from tests.kernels.devices import DEVICES, compile_for_card
from tests.kernels.tree_reference import paths_of

pytest.importorskip("triton")

from peagle.kernels.trees.beams_triton import BeamBuffers, extend_beams, rank_candidates
from peagle.kernels.trees.growth_triton import GrowthScratch, find_candidates

# Beam, depth, nodes, vocabulary; in the fourth there are more rows than candidates.
CASES = [
    (4, 4, 15, 2100),
    (8, 3, 63, 40),
    (1, 5, 5, 300),
    (3, 2, 60, 3),
    (5, 7, 31, 500),
    (2, 1, 2, 9),
]


class Kernels:
    """`BeamTrees` by kernels."""

    def __init__(self, num_seqs: int, beam: int, depth: int, nodes: int, like: Tensor) -> None:
        size = num_seqs * beam
        self._scratch = GrowthScratch.allocate(size, 1, 1, like.shape[-1], like.device)
        self._buffers = BeamBuffers.allocate(num_seqs, beam, depth, nodes, like.device)
        for buffer in (self._buffers.scores_BX, self._buffers.node_scores_BN):
            buffer.fill_(torch.nan)  # of a step before
        self._depth = -1

    def extend(self, logits_RV: Tensor):
        self._depth += 1
        found = self._scratch.first(len(logits_RV))
        find_candidates(logits_RV.unsqueeze(1), found, 0.7)
        return extend_beams(found, self._buffers, self._depth)

    def best(self, depths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rank_candidates(self._buffers, depths_B)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trees_are_those_of_torch(device: str, case: tuple[int, int, int, int]) -> None:
    beam, depth, nodes, vocab = case
    generator = torch.Generator().manual_seed(vocab)
    depths = torch.tensor([depth, max(depth - 1, 1), 0, depth], device=device)
    first, *others = (
        (3 * torch.randn(4, rows, vocab, generator=generator)).to(device)
        for rows in (1, *[beam] * (depth - 1))
    )
    by_kernels = Kernels(4, beam, depth, nodes, first)
    by_torch = BeamTrees(beam, nodes, 0.7)
    found, expected = by_kernels.extend(first[:, 0]), by_torch.start(first[:, 0])
    for logits in [None, *others]:
        if logits is not None:
            found = by_kernels.extend(logits.flatten(0, 1))
            expected = by_torch.extend(logits)
        for name in ("tokens_BW", "behind_BW", "paths_BW", "visible_BW"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        torch.testing.assert_close(found.scores_BW, expected.scores_BW, rtol=1e-4, atol=1e-4)
    trees = by_kernels.best(depths), by_torch.best(depths)
    for b, d in enumerate(depths.tolist()):
        count = count_beam_nodes(d, beam, nodes)
        paths = [paths_of(*(x[b, :count].tolist() for x in tree[:2])) for tree in trees]
        assert paths[0] == paths[1] and len(set(paths[0])) == count
        torch.testing.assert_close(
            trees[0][2][b, :count], trees[1][2][b, :count], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("device", DEVICES)
def test_siblings_differ_where_logits_tie_or_are_broken(device: str) -> None:
    """Or a target's token would be accepted twice."""
    logits = torch.zeros(3, 3, 40, device=device)
    logits[1] = torch.nan
    logits[2, :, 2:] = -torch.inf
    kernels = Kernels(3, 3, 3, 12, logits)
    kernels.extend(logits[:, 0])
    for _ in range(2):
        kernels.extend(logits.flatten(0, 1))
    tokens, parents, scores = kernels.best(torch.full((3,), 3, device=device))
    for b in range(3):
        pairs = list(zip(parents[b].tolist(), tokens[b].tolist(), strict=True))
        assert len(set(pairs)) == 12
        assert all(parent < row for row, (parent, _) in enumerate(pairs, start=1))
    assert not scores.isnan().any() and bool((scores[1] == -torch.inf).all())


@pytest.mark.slow
def test_kernels_of_beams_compile_for_a_card() -> None:
    found = compile_for_card("beams")
    assert len(found) == 2 * 2 + 2
    assert not {name for name, kernel in found.items() if kernel["stack"]}
