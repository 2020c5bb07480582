"""Copies joined to trees: against a search written anew, and the kernels against the reference."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.paths import row_depths
from peagle.kernels.trees.copies import (
    MAX_COPIED,
    MAX_MATCH,
    NO_COPY,
    PRIOR_RATES,
    TextIndex,
    Tree,
    copied_tokens,
    find_matches,
    join_copies,
)
from peagle.kernels.trees.survival import SCORE_UNIT, Survival
from tests.kernels.devices import DEVICES, compile_for_card


def longest_match(
    text: list[int], end: list[int], longest: int, shortest: int, first: int = 0
) -> tuple[int, int] | None:
    """Every place compared with a path's end: longest first, then latest (or `first`)."""
    best: tuple[int, int] | None = None
    for at in range(len(text) - 1):
        length = 0
        while length < min(longest, at + 1, len(end)) and text[at - length] == end[-1 - length]:
            length += 1
        if length >= shortest and (best is None or length >= best[0] + first):
            best = length, at + 1
    return best


def indices_of(texts: list[list[int]]) -> list[TextIndex]:
    """Of a text and its prediction."""
    indices = [TextIndex(text, MAX_MATCH, 2, is_prediction=i > 0) for i, text in enumerate(texts)]
    for index in indices:
        index.extend()
    return indices


def random_tree(rng: random.Random, count: int, vocab: int, most_depth: int = 4) -> Tree:
    """A tree whose siblings differ and whose scores fall."""
    parents: list[int] = []
    tokens: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        for _ in range(20):
            row, token = rng.randrange(len(tokens) + 1), rng.randrange(vocab)
            taken = {(p, t) for p, t in zip(parents, tokens, strict=True)}
            if (row, token) not in taken and row_depths(parents)[row] < most_depth:
                above = scores[row - 1] if row else 0.0
                parents.append(row)
                tokens.append(token)
                scores.append(above - rng.uniform(0.05, 1.5))
                break
    order = sorted(range(len(tokens)), key=lambda node: -scores[node])
    rows = {0: 0} | {node + 1: place for place, node in enumerate(order, 1)}
    tokens, scores = [tokens[node] for node in order], [scores[node] for node in order]
    parents = [rows[parents[node]] for node in order]
    depths = row_depths(parents)[1:]
    survival = Survival.uncalibrated(most_depth, "cpu")
    worths = survival(torch.tensor([scores]), torch.tensor([depths]))[0].tolist() if tokens else []
    return Tree(tokens, parents, scores, worths, [NO_COPY] * len(tokens))


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    path=st.lists(st.integers(0, 3), max_size=3),
    shortest=st.integers(1, 3),
)
def test_the_longest_and_latest_match(text: list[int], path: list[int], shortest: int) -> None:
    grown: list[int] = []
    index = TextIndex(grown, MAX_MATCH, shortest)
    for token in text:
        grown.append(token)
        index.extend()
    assert index.find([*text, *path]) == longest_match(text, [*text, *path], MAX_MATCH, shortest)


def test_a_copy_goes_on_with_its_own_tokens() -> None:
    assert copied_tokens([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), max_nodes=st.integers(1, 12))
def test_the_best_nodes_of_tree_and_copies(seed: int, max_nodes: int) -> None:
    """Every path of every copy is written out, and the best are chosen by their worth."""
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(30)]
    tree = random_tree(rng, rng.randrange(8), 5)
    # A prediction, as long as the text or none, has the last word.
    texts = [text, [rng.randrange(4) for _ in range(rng.choice((0, 30)))]]
    matches = find_matches(indices_of(texts), tree.tokens, tree.parents, 4)
    joined = join_copies(tree, matches, PRIOR_RATES, max_nodes=max_nodes)

    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    worth = dict(zip(paths[1:], tree.worths, strict=True))
    every = dict(worth)
    for row in range(min(4, len(paths))):
        found = [
            (*match, i)
            for i in (1, 0)
            if (match := longest_match(texts[i], [*text, *paths[row]], MAX_MATCH, 2, first=i))
        ]
        assert bool(found) == any(match.row == row for match in matches)
        if not found:
            continue
        length, start, i = max(found, key=lambda one: one[0])
        path, w = paths[row], worth.get(paths[row], 1.0)
        for step, token in enumerate(copied_tokens(texts[i], start, MAX_COPIED)):
            siblings = [p for p in paths[1:] if p[:-1] == path]
            path = (*path, token)
            drafted = 0 if path not in worth else 2 if siblings[0] == path else 1
            least = (2, 3, 4, 6, 9, 16)
            column = sum(length + step >= one for one in least) - 1
            w = max(w * PRIOR_RATES[6 * drafted + column], worth.get(path, 0.0))
            every[path] = max(every.get(path, 0.0), w)
    best = sorted(every.values(), reverse=True)[:max_nodes]
    assert joined.worths == pytest.approx(best)
    rows: list[tuple[int, ...]] = [()]
    for token, parent in zip(joined.tokens, joined.parents, strict=True):
        assert parent < len(rows)
        rows.append((*rows[parent], token))
    assert len(set(rows)) == len(rows)
    for path, w in zip(rows[1:], joined.worths, strict=True):
        assert every[path] == pytest.approx(w)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_equal_the_reference(device: str) -> None:
    pytest.importorskip("triton")
    from peagle.kernels.trees.copies_triton import (
        CopyScratch,
        HeadTrees,
        JoinedTrees,
        Texts,
        join_found_copies,
    )

    rng, rows, nodes, batch, max_len = random.Random(5), 4, 12, 6, 70
    rates = [rng.uniform(0.1, 0.98) for _ in PRIOR_RATES]
    weights_D2 = torch.tensor([[1.0, 0.0], [0.9, 0.1], [1.1, -0.2], [0.8, 0.0]])
    scratch = CopyScratch.allocate(batch, nodes, rows, device)
    outs = torch.full((5, batch, nodes + 1), 7, dtype=torch.int64, device=device)
    out = JoinedTrees(*(rows_BX[:, 1:] for rows_BX in outs))
    for _ in range(3):
        texts = [[rng.randrange(5) for _ in range(rng.randrange(1, 71))] for _ in range(batch)]
        trees = [random_tree(rng, rng.randrange(1, nodes + 1), 6) for _ in range(batch)]
        has_copies = [b != 2 for b in range(batch)]
        text_BL = torch.randint(5, (batch, 80), dtype=torch.int32)  # an earlier text is left
        # Some stand before texts of any length, which may have overwritten their beginnings.
        predictions = [[rng.randrange(5) for _ in range(rng.choice((0, 1, 9, 60)))] for _ in texts]
        tokens_BN, parents_BN = torch.zeros(2, batch, nodes, dtype=torch.int64)
        scores_BN = torch.zeros(batch, nodes)
        for b, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            if given := predictions[b]:
                text_BL[b, -len(given) :] = torch.tensor(given)
            text_BL[b, : len(text)] = torch.tensor(text)
            count = len(tree.tokens)
            tokens_BN[b, :count] = torch.tensor(tree.tokens, dtype=torch.int64)
            parents_BN[b, :count] = torch.tensor(tree.parents, dtype=torch.int64)
            scores_BN[b, :count] = torch.tensor(tree.scores)
        # A "depth" of this test is the number of nodes, and the last tree is none.
        sizes_K = torch.arange(nodes + 1, device=device)
        depths_B = torch.tensor([len(tree.tokens) for tree in trees[:-1]] + [0], device=device)
        lasts_B = torch.tensor([len(text) - 1 for text in texts], device=device)
        head = [x.to(device) for x in (tokens_BN, parents_BN, scores_BN)]
        has_copies_B = torch.tensor(has_copies, device=device).long()
        num_predicted_B = torch.tensor([*map(len, predictions)], device=device)
        join_found_copies(
            Texts(text_BL.to(device), lasts_B, has_copies_B, num_predicted_B),
            HeadTrees(*head, depths_B, sizes_K),
            weights_D2.to(device),
            torch.tensor(rates, device=device),
            scratch,
            out,
            lengths=(MAX_MATCH, 2),
            max_model_len=max_len,
        )
        assert (outs[:, :, 0] == 7).all(), "nothing is written beside the rows"
        assert int(depths_B[-1]) == 0 and not out.tokens_BN[-1].any()
        for b, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            depths = row_depths(tree.parents)[1:]
            worths = list[float]()
            if depths:
                survival = Survival(weights_D2)
                found = survival(torch.tensor([tree.scores]), torch.tensor([depths]))[0].tolist()
                for parent, worth in zip(tree.parents, found, strict=True):
                    worths.append(min(worth, worths[parent - 1] if parent else 1.0))
            tree = tree._replace(worths=worths)
            given = predictions[b][-(80 - len(text)) :]
            matches = find_matches(indices_of([text, given]), tree.tokens, tree.parents, rows)
            room = min(nodes, max_len - len(text)) if b < batch - 1 else 0
            matches = matches if has_copies[b] else []
            wanted = join_copies(tree, matches, rates, max_nodes=room)
            count = int(depths_B[b])
            assert count == len(wanted.tokens)
            assert out.tokens_BN[b, :count].tolist() == wanted.tokens
            assert out.parents_BN[b, :count].tolist() == wanted.parents
            assert out.cells_BN[b, :count].tolist() == wanted.cells
            worths = [unit * SCORE_UNIT for unit in out.worths_BN[b, :count].tolist()]
            scores = [unit * SCORE_UNIT for unit in out.scores_BN[b, :count].tolist()]
            assert worths == pytest.approx(wanted.worths, abs=2e-5)
            assert scores == pytest.approx(wanted.scores, abs=1e-4)
            assert not any(x[b, count:].any() for x in (out.tokens_BN, out.worths_BN))
            assert all(math.isfinite(x) for x in wanted.scores)


@pytest.mark.slow
def test_kernels_compile_for_a_card() -> None:
    found = compile_for_card("copies")
    assert len(found) == 6
    assert not any(kernel["stack"] for kernel in found.values()), "nothing spills"
