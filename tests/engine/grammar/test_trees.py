"""Trees under a grammar against all paths that it allows, with their probabilities."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar import (
    BeamGrammar,
    GrammarState,
    LogitsAfter,
    grow_masked_trees,
    verification_masks,
)
from tests.engine.grammar.conftest import allowed, encode

pytest.importorskip("xgrammar")

Path = tuple[int, ...]
TEMPERATURE = 0.7
CASES = [
    ("(a|b)*1", ""),
    ("(ab|a)(1|b1)", "a"),
    ("a?a?a?a{2}", "a"),
    ("ab1", ""),
    ("[ab1]{3}a*", "b"),
]


def every_path(
    state: GrammarState, logits_after: LogitsAfter, depth: int, w: int, ids: list[int]
) -> dict[Path, float]:
    """The score of each path that may be drafted, by walking all of them."""
    found: dict[Path, float] = {}

    def walk(path: Path, score: float) -> None:
        some = [] if state.is_finished or len(path) == depth else sorted(allowed(state) & set(ids))
        if not some:
            return
        columns = torch.tensor([ids.index(token) for token in some])
        scores = torch.log_softmax(logits_after(path)[columns] / TEMPERATURE, -1).tolist()
        ranked = sorted(zip(scores, some, strict=True), reverse=True)
        for own, token in ranked if path else ranked[:w]:
            assert state.try_advance(token)
            found[*path, token] = score + own
            walk((*path, token), score + own)
            state.rollback(1)

    walk((), 0.0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pruned", [False, True], ids=["whole vocabulary", "pruned"])
@pytest.mark.parametrize(("pattern", "text"), CASES)
def test_trees_are_the_most_probable_allowed_paths(
    compiler: Any, pattern: str, text: str, pruned: bool
) -> None:
    rng = random.Random(pattern)
    generator = torch.Generator().manual_seed(0)
    ids = sorted(rng.sample(range(compiler.vocab_size), 200)) if pruned else None
    ids = sorted({*ids, *encode("a1")}) if ids else None
    for _ in range(5):
        state = compiler.start(StructuredOutput.regex(pattern))
        state.accept(encode(text))
        depth, n = rng.randint(1, 4), rng.choice([1, 4, 9, 30])
        w = rng.randint(1, n)
        columns = ids or list(range(compiler.vocab_size))
        logits = torch.randn(depth, len(columns), generator=generator, dtype=torch.float64)

        def after(path: Sequence[int], logits: Tensor = logits) -> Tensor:
            return logits[len(path)].roll(path[-1] if path else 0)

        scores = every_path(state, after, depth, w, columns)
        shape = CandidateTrees(w, 1, n)
        token_ids = None if ids is None else torch.tensor(ids)
        grow_masked_trees([state], [after], [depth], shape, TEMPERATURE, token_ids)
        tokens, parents, told = state.prepared_tree()
        paths: list[Path] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        found = [scores[path] for path in paths[1:]]
        assert found == sorted(found, reverse=True) and len(set(paths)) == len(paths)
        best = sorted(scores.values(), reverse=True)[:n]
        assert len(found) == len(best)
        assert all(map(math.isclose, found, best)) and told == pytest.approx(found)
        # Each row has the mask of a state behind its path.
        masks = verification_masks([state], [tokens], compiler.vocab_size)
        assert masks is not None
        for path, mask in zip(paths, masks, strict=True):
            fresh = compiler.start(StructuredOutput.regex(pattern))
            fresh.accept([*encode(text), *path])
            wanted = torch.full_like(mask, -1).unsqueeze(0)
            fresh.mask_into(wanted, 0)
            assert torch.equal(mask, wanted[0])


@pytest.mark.slow
def test_masks_of_beams_are_those_behind_their_paths(compiler: Any) -> None:
    """Behind a forbidden token, and behind a stop id, nothing is allowed."""
    structures = [StructuredOutput.regex("(ab|a)(1|b1)"), None, StructuredOutput.regex("b[1a]{2}")]
    states = [None if s is None else compiler.start(s) for s in structures]
    (a,), (b,), (one,) = (encode(text) for text in "ab1")
    stop = min(allowed(finished(compiler, "(ab|a)(1|b1)", [a, one])))
    beams = [
        ([0, 1, 2], [[], [], []], [[], [], []]),
        ([0, 1, 2], [[a, b], [a, b], [b, a]], [[0, 0]] * 3),
        ([0, 2], [[one, b], [one, one]], [[0, 0], [0, 1]]),
        ([0, 2], [[stop, one], [a, a]], [[0, 1], [0, 1]]),
    ]
    grammar = BeamGrammar(states, compiler.vocab_size)
    before: dict[int, list[list[int]]] = {n: [[]] for n in range(3)}
    for sequences, tokens, behind in beams:
        masks = grammar.masks(sequences, tokens, behind)
        for n, own, parents, mask_WV in zip(sequences, tokens, behind, masks, strict=True):
            nodes = zip(own, parents, strict=True)
            before[n] = [[*before[n][parent], token] for token, parent in nodes] or [[]]
            for path, mask_V in zip(before[n], mask_WV, strict=True):
                found = set(mask_V.nonzero().flatten().tolist())
                structure = structures[n]
                if structure is None:
                    assert len(found) == compiler.vocab_size
                    continue
                fresh = compiler.start(structure)
                moved = [fresh.try_advance(token) for token in path]
                ends = fresh.is_finished or not all(moved)
                assert found == (set() if ends else allowed(fresh))


def finished(compiler: Any, pattern: str, path: Sequence[int]) -> GrammarState:
    """The state of a pattern behind a path."""
    state = compiler.start(StructuredOutput.regex(pattern))
    assert all(state.try_advance(token) for token in path)
    return state
