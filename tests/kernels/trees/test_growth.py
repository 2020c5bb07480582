"""Candidate trees against an exact best-first search, and the paths of their rows."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.attention.kv_moves import SlotMoves, move_slots
from peagle.kernels.paths import TreePaths, path_rows
from peagle.kernels.trees.growth import (
    Children,
    after_slots,
    best_first_trees,
    count_nodes,
    searched_trees,
)
from tests.kernels.devices import DEVICES
from tests.kernels.tree_reference import exact_tree, paths_of

Grow = Callable[..., tuple[Tensor, Tensor, Tensor]]


def search(
    logits: Tensor, depths: Tensor, *, temperature: float, max_nodes: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    after = after_slots(logits, max_nodes, temperature)
    return searched_trees(after, depths.tolist(), max_nodes=max_nodes, **options)


EITHER = pytest.mark.parametrize("grow", [best_first_trees, search])


@EITHER
@pytest.mark.parametrize("seed", range(25))
def test_trees_are_those_of_an_exact_best_first_search(seed: int, grow: Grow) -> None:
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
    found = grow(logits, torch.tensor(depths), **shape)
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


@EITHER
def test_ties_and_broken_logits_keep_parents_before_children(grow: Grow) -> None:
    certain = torch.full((3, 4, 9), -1e4)
    certain[0, :, 2] = 0  # every child is as probable as its parent
    certain[1] = 0
    certain[2, 1] = torch.nan
    shape = {"num_parallel_trees": 3, "max_nodes": 12, "temperature": 0.7}
    _, parents, _ = grow(certain, torch.full((3,), 4), **shape)
    rows = torch.arange(1, 13)
    assert (parents < rows).all()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_search_gives_the_trees_of_all_depths_at_once(data: st.DataObject) -> None:
    """Odd shapes, and logits of few values: where paths tie, equal scores will do."""
    draw = data.draw
    num_seqs, depth, vocab = (draw(st.integers(1, most)) for most in (3, 6, 9))
    n = draw(st.sampled_from([1, 2, 5, 16, 63]))
    w, values = draw(st.integers(1, n)), draw(st.integers(2, 1000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randint(values, (num_seqs, depth, vocab), generator=generator) * (9.0 / values)
    after_VV = torch.randint(values, (vocab, vocab), generator=generator) * (4.0 / values)
    depths = [draw(st.integers(1, depth)) for _ in range(num_seqs)]
    shape = {"num_parallel_trees": w, "max_nodes": n}
    logits = logits.double()
    after = after_slots(logits, n, 0.7)
    hook: Children | None = None
    if draw(st.booleans()):  # what follows depends on which of two equal ones is taken: none are
        logits += 1e-3 * torch.rand(logits.shape, generator=generator, dtype=torch.float64)

        def logprobs(column: int, tokens: Tensor) -> Tensor:
            own = logits[:, column, None] + (after_VV[tokens] if column else 0)
            return torch.log_softmax(own / 0.7, -1)

        def children(column: int, tokens_BW: Tensor) -> tuple[Tensor, Tensor]:
            found = logprobs(column, tokens_BW)
            return found, torch.arange(vocab).expand_as(found)

        def ranked(b: int, column: int, token: int) -> tuple[list[float], list[int]]:
            tokens = torch.full((num_seqs, 1), token)
            best = logprobs(column, tokens)[b, 0].sort(descending=True)
            return best.values.tolist(), best.indices.tolist()

        after, hook = ranked, children

    expected = best_first_trees(
        logits, torch.tensor(depths), temperature=0.7, children=hook, **shape
    )
    found = searched_trees(after, depths, **shape)
    for b, most in enumerate(depths):
        count = count_nodes(most, w, n, vocab)
        tree, other = (tuple(x[b, :count].tolist() for x in of) for of in (found, expected))
        assert tree[2] == pytest.approx(other[2], abs=1e-9)
        pairs = list(zip(tree[0], tree[1], strict=True))
        assert len(set(pairs)) == count and all(row < i for i, (_, row) in enumerate(pairs, 1))
        if all(before > next_ + 1e-9 for before, next_ in pairwise(tree[2])):
            assert pairs[:-1] == list(zip(*other[:2], strict=True))[:-1]


def test_children_may_depend_on_their_parent() -> None:
    """The hook: after an odd token only 0 may follow, after an even one only 1."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    asked: list[int] = []

    def children(column: int, tokens_BW: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(column)
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


@EITHER
@pytest.mark.parametrize("broken", [[0, 1, 2], [1, 2], [2]])
def test_siblings_differ_where_logits_are_broken(broken: list[int], grow: Grow) -> None:
    """Or a target's token would be accepted more than once."""
    logits = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    logits[:, broken] = torch.nan
    tokens, parents, _ = grow(
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
        listed = TreePaths.of_lists(parents)
        assert torch.equal(listed.visible_BJ, paths.visible_BJ)
        assert torch.equal(listed.depths_BJ, paths.depths_BJ) and listed.depth == n
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
    # Slot 39 is scrap, a path stops early, and rows that follow each other move up. Slot -1, which
    # is scrap too, is no memory in front of the cache.
    from_BD = torch.tensor([[5, 7, 8], [20, 18, 18], [30, -1, -1]])
    to_BD = torch.tensor([[4, 5, 6], [19, 18, 18], [-1, -1, -1]])
    behind = [torch.cat((torch.zeros_like(x[:1]), x)).to(device) for x in caches]
    SlotMoves([x[1:] for x in behind])(from_BD.to(device), to_BD.to(device))
    move_slots(caches, from_BD, to_BD)
    for expected, found in zip(caches, behind, strict=True):
        assert not found[0].any()
        assert torch.equal(expected[:39], found[1:40].cpu())
