"""Drawn chains that lead trees: against paths written out, and the kernel against the reference."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.paths import row_depths
from peagle.kernels.trees.chains import count_drawn, merge_chain
from peagle.kernels.trees.copies import NO_COPY, Tree
from peagle.kernels.trees.survival import (
    DRAWN_SCORE,
    SCORE_UNIT,
    SURELY_VERIFIED,
    Survival,
)
from tests.kernels.devices import DEVICES


def random_tree(rng: random.Random, count: int, vocab: int) -> Tree:
    """A tree of up to `count` nodes whose siblings differ; each node has fields of its own."""
    found = dict[tuple[int, int], None]()
    for _ in range(count):
        found[rng.randrange(len(found) + 1), rng.randrange(vocab)] = None
    parents, tokens = ([node[i] for node in found] for i in (0, 1))
    size = len(found)
    units = [-i for i in range(size)], [1000 - i for i in range(size)]
    scores, worths = ([unit * SCORE_UNIT for unit in of] for of in units)
    return Tree(tokens, parents, scores, worths, [i % 5 for i in range(size)])


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens on the path to each node, its own the last."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def by_paths(tree: Tree, chain: list[int], most: int) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """The other fields of each node, by its path, in the order of the nodes."""
    drawn = (DRAWN_SCORE, SURELY_VERIFIED, NO_COPY)
    found: dict[tuple[int, ...], tuple[Any, ...]]
    found = {tuple(chain[: i + 1]): drawn for i in range(len(chain))}
    for path, *fields in zip(paths_of(tree), *tree[2:], strict=True):
        found.setdefault(path, tuple(fields))
    return dict(list(found.items())[:most])


CASES = {
    "seed": st.integers(0, 10**6),
    "count": st.integers(0, 12),
    "length": st.integers(0, 5),
    "most": st.integers(1, 12),
}


@given(**CASES)
@settings(max_examples=300, deadline=None)
def test_chains_come_first_and_share_their_path(
    seed: int, count: int, length: int, most: int
) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, min(count, most), 3)
    chain = [rng.randrange(3) for _ in range(length)]
    merged = merge_chain(tree, chain, most)
    fields = [*zip(*merged[2:], strict=True)]
    found = [*zip(paths_of(merged), fields, strict=True)]
    assert found == [*by_paths(tree, chain, most).items()]
    assert count_drawn(merged.scores) == min(length, most)


def test_an_example() -> None:
    """The tree has 4 behind the root, and 5 and 6 behind it; the chain is 4 6 7."""
    tree = Tree([4, 5, 8, 6], [0, 1, 0, 1], [-1.0, -2.0, -3.0, -4.0], [0.9] * 4, [NO_COPY] * 4)
    merged = merge_chain(tree, [4, 6, 7], 4)
    assert merged.tokens == [4, 6, 7, 5] and merged.parents == [0, 1, 2, 1]
    assert merged.scores == [DRAWN_SCORE] * 3 + [-2.0]
    assert row_depths(merged.parents)[1:] == [1, 2, 3, 2]
    survival = Survival.uncalibrated(3, "cpu")
    found = survival(torch.tensor([merged.scores]), torch.tensor([[1, 2, 3, 2]]))[0]
    assert found[:3].tolist() == [SURELY_VERIFIED] * 3 and 0 < found[3] < 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("most", "fields"), [(7, 4), (15, 4), (15, 2), (63, 4), (1, 2)])
def test_the_kernel_is_the_reference(device: str, most: int, fields: int) -> None:
    """Sequences that draw and that do not, with few slots and with little depth."""
    pytest.importorskip("triton")
    from peagle.kernels.trees.chains_triton import merge_chains

    rng, num_seqs, longest, max_model_len = random.Random(most), 12, 5, 100
    longest = min(longest, most)
    chains = [[rng.randrange(3) for _ in range(longest)] for _ in range(num_seqs)]
    rooms = [rng.choice([0, 1, 4, 90]) for _ in range(num_seqs)]
    trees = [random_tree(rng, min(room, rng.randrange(most + 1)), 3) for room in rooms]
    depths = [rng.randrange(longest + 3) for _ in range(num_seqs)]
    draws = [int(rng.random() < 0.8) for _ in range(num_seqs)]

    def written(tree: Tree) -> list[int]:
        """The nodes as the buffers have them: scores and worths in units."""
        units = [[round(value / SCORE_UNIT) for value in of] for of in tree[2:4]]
        rows = [tree.tokens, tree.parents, *units, tree.cells][: fields + 1]
        return [value for of in rows for value in [*of, *[0] * (most - len(of))]]

    rows = torch.tensor([written(tree) for tree in trees], device=device)
    tokens, nodes = rows[:, :most], rows[:, most:]
    num_nodes = torch.tensor([len(tree.tokens) for tree in trees], device=device)
    given = torch.tensor([depths, draws, [max_model_len - 1 - room for room in rooms]])
    depths_on, draws_on, first_on = given.to(device)
    of_rows = torch.tensor(chains, device=device), depths_on, draws_on, first_on
    merge_chains(*of_rows, num_nodes, tokens, nodes, max_model_len=max_model_len)
    for row, tree in enumerate(trees):
        if draws[row]:
            chain = chains[row][: min(depths[row], rooms[row])]
            tree = merge_chain(tree, chain, min(most, rooms[row]))
        assert rows[row].tolist() == written(tree)
        assert int(num_nodes[row]) == len(tree.tokens)
