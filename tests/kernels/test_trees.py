"""Candidate trees against an exact best-first search, and the paths of their rows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from peagle.kernels.kv_moves import SlotMoves
from peagle.kernels.trees import (
    TreePaths,
    best_first_trees,
    count_nodes,
    move_slots,
    path_rows,
)
from tests.kernels.devices import DEVICES
from tests.kernels.tree_reference import exact_tree, paths_of


@pytest.mark.parametrize("seed", range(25))
def test_trees_are_those_of_an_exact_best_first_search(seed: int) -> None:
    """25 batches of 12 trees, of all shapes."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    depth, vocab = rng.randint(1, 8), rng.choice([3, 7, 40, 200])
    n = rng.choice([1, 2, 7, 16, 32, 63])
    w, temperature = rng.randint(1, n), rng.choice([0.3, 0.7, 1.0])
    sharpness = rng.choice([0.1, 1.0, 6.0])
    logits = sharpness * torch.randn(12, depth, vocab, generator=generator, dtype=torch.float64)
    depths = [rng.randint(1, depth) for _ in range(12)]
    shape = {"num_parallel_trees": w, "max_nodes": n, "temperature": temperature}
    found = best_first_trees(logits, torch.tensor(depths), **shape)  # type: ignore[arg-type]
    tokens, parents, scores = (x.tolist() for x in found)
    for b, d in enumerate(depths):
        logprobs_KV = torch.log_softmax(logits[b] / temperature, -1)
        expected = exact_tree(lambda path, of=logprobs_KV: of[len(path)], d, w, n)
        count = count_nodes(d, w, n, vocab)
        assert count == len(expected)
        assert set(paths_of(tokens[b][:count], parents[b][:count])) == set(expected)
        paths = paths_of(tokens[b][:count], parents[b][:count])
        sums = [sum(float(logprobs_KV[j, t]) for j, t in enumerate(path)) for path in paths]
        assert scores[b][:count] == pytest.approx(sums)
        few = count // 2 + 1  # the beginning of a tree is the smaller tree
        assert set(paths_of(tokens[b][:few], parents[b][:few])) == set(expected[:few])


def test_ties_and_broken_logits_keep_parents_before_children() -> None:
    certain = torch.full((3, 4, 9), -1e4)
    certain[0, :, 2] = 0  # every child is as probable as its parent
    certain[1] = 0
    certain[2, 1] = torch.nan
    shape = {"num_parallel_trees": 3, "max_nodes": 12, "temperature": 0.7}
    _, parents, _ = best_first_trees(certain, torch.full((3,), 4), **shape)  # type: ignore[arg-type]
    rows = torch.arange(1, 13)
    assert (parents < rows).all()


def test_children_may_depend_on_their_parent() -> None:
    """The hook: after an odd token only 0 may follow, after an even one only 1."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    asked: list[int] = []
    levels: list[Tensor] = []

    def children(column: int, tokens_BW: Tensor, parents_BW: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(column)
        if levels:
            assert (tokens_BW[:, :2] == (levels[-1].gather(1, parents_BW) + 1)[:, :2] % 2).all()
        levels.append(tokens_BW)
        tokens = ((tokens_BW + 1) % 2).unsqueeze(2).expand(-1, -1, 2)
        return torch.tensor([-0.1, -torch.inf]).expand_as(tokens), tokens

    tokens, parents, _ = best_first_trees(
        logits,
        torch.tensor([3, 3]),
        num_parallel_trees=2,
        max_nodes=6,
        temperature=1.0,
        children=children,
    )
    assert asked == [1, 2]
    for row in range(2):
        paths = paths_of(tokens[row].tolist(), parents[row].tolist())
        assert {len(path) for path in paths} == {1, 2, 3}
        assert all(y == (x + 1) % 2 for path in paths for x, y in pairwise(path))


@pytest.mark.parametrize("broken", [[0, 1, 2], [1, 2], [2]])
def test_siblings_differ_where_logits_are_broken(broken: list[int]) -> None:
    """Or a target's token would be accepted more than once."""
    logits = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    logits[:, broken] = torch.nan
    tokens, parents, _ = best_first_trees(
        logits, torch.tensor([3]), num_parallel_trees=2, max_nodes=9, temperature=0.7
    )
    pairs = list(zip(parents[0].tolist(), tokens[0].tolist(), strict=True))
    assert len(set(pairs)) == 9
    assert all(parent < row for row, (parent, _) in enumerate(pairs, start=1))


def random_parents(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(0, row) for row in range(n)]


def test_paths_are_those_of_the_parents() -> None:
    rng = random.Random(0)
    for n in (1, 5, 63):
        parents = [random_parents(rng, n), list(range(n))]
        paths = TreePaths.of(torch.tensor(parents), depth=n)
        for b, of in enumerate(parents):
            above: list[set[int]] = [{0}]
            for row, parent in enumerate(of, start=1):
                above.append(above[parent] | {row})
            visible = paths.visible_BJ[b].tolist()
            assert [{i for i in range(n + 1) if word >> i & 1} for word in visible] == above
            assert paths.depths_BJ[b].tolist() == [len(rows) - 1 for rows in above]


def test_the_rows_of_a_path_come_first() -> None:
    reached = torch.tensor([[1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    assert path_rows(reached).tolist() == [[0, 2, 5, 1, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_slots_move_as_if_all_were_read_first() -> None:
    caches = [torch.arange(8.0).view(8, 1, 1), torch.arange(8).view(8, 1, 1)]
    move_slots(caches, torch.tensor([[2, 3], [6, 0]]), torch.tensor([[1, 2], [5, 0]]))
    assert [cache.flatten().tolist() for cache in caches] == [[0, 2, 3, 3, 4, 6, 6, 7]] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_one_launch_moves_the_slots_of_all_caches(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = (64, 4096 + 256, 64, 7)  # bytes of a slot
    caches = [
        torch.randint(256, (40, width), generator=generator, dtype=torch.uint8) for width in widths
    ]
    # Slots 39 and -1 are scrap, a path stops early, and rows that follow each other move up.
    from_BD = torch.tensor([[5, 7, 8], [20, 18, 18], [-1, -1, -1]])
    to_BD = torch.tensor([[4, 5, 6], [19, 18, 18], [-1, -1, -1]])
    moved = [cache.to(device, copy=True) for cache in caches]
    SlotMoves(moved)(from_BD.to(device), to_BD.to(device))
    move_slots(caches, from_BD, to_BD)
    for expected, found in zip(caches, moved, strict=True):
        assert torch.equal(expected, found.cpu())
