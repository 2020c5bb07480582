"""Drafts with a correction, against a loop over sequences and slots by the formula."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.engine.drafting import HeadDrafting
from peagle.kernels.trees.growth import best_first_trees
from peagle.models.correction import DraftCorrection
from peagle.models.target import TargetModel
from peagle.speculation.proposers import TREE_TEMPERATURE, EagerDraft, HeadProposer
from tests.corrections import random_correction, term_of
from tests.kernels.tree_reference import Path, exact_tree, paths_of
from tests.speculation.test_proposers import K, make_proposer, prompt_step

PROMPTS = [[5, 9, 200], [17], [31, 31, 8, 2, 90, 41]]


class Corrected:
    """A proposer with a random correction, and what its slots see."""

    def __init__(self, target: TargetModel, step: Any, **more: Any) -> None:
        self.proposer: HeadProposer = make_proposer(target, True, step, **more)
        self.drafter = self.proposer.drafter
        self.correction = random_correction(self.drafter.config.hidden_size).double()
        weights = self.drafter.embed_tokens.weight, self.drafter.lm_head.weight
        self.drafter.correction = DraftCorrection(self.correction, *weights)

    def logits(self, normed_KD: Tensor, path: Sequence[int]) -> Tensor:
        """Of the slot behind a path, [V], -inf outside of the draft vocabulary."""
        normed_D = normed_KD[len(path)]
        if path:
            embedding = self.drafter.embed_tokens.weight[path[-1]]
            normed_D = normed_D + term_of(self.correction, normed_D, embedding, len(path))
        return self.own_logits(normed_D)

    def own_logits(self, normed_D: Tensor) -> Tensor:
        """Of the head itself, [V]."""
        head = self.drafter
        full = torch.full((head.config.vocab_size,), -torch.inf, dtype=torch.float64)
        full[head.target_ids()] = head.lm_head.weight @ normed_D
        return full

    def logprobs(self, normed_KD: Tensor, path: Sequence[int]) -> Tensor:
        """Of what follows in a tree, [V]: the 64 likeliest tokens by the head are corrected."""
        mixed = self.own_logits(normed_KD[len(path)])
        some = mixed.topk(64).indices if path else torch.arange(len(mixed))
        if path:
            mixed[some] = self.logits(normed_KD, path)[some]
        logprobs_V = (mixed / TREE_TEMPERATURE).log_softmax(-1)
        return torch.full_like(mixed, -torch.inf).scatter(0, some, logprobs_V[some])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The normed states of the slots of each choice."""
    found: list[Tensor] = []
    choose = EagerDraft.choose

    def watching(self: EagerDraft, hidden_NJD: Tensor, first: int) -> None:
        found.append(self._proposer.drafter.normed(hidden_NJD))
        choose(self, hidden_NJD, first)

    monkeypatch.setattr(EagerDraft, "choose", watching)
    return found


@pytest.mark.parametrize(
    ("draft_vocab_size", "draft_sampling"),
    [(320, "argmax"), (100, "argmax"), (320, "probabilistic"), (100, "probabilistic")],
)
def test_every_draft_knows_the_one_before(
    target: TargetModel, seen: list[Tensor], draft_vocab_size: int, draft_sampling: str
) -> None:
    lens = [K, 2, K]
    step = prompt_step(target, PROMPTS, [0.9, 0.0, 1.4], [3, 4, 5], k=lens)
    options = {"draft_vocab_size": draft_vocab_size, "draft_sampling": draft_sampling}
    made = Corrected(target, step, **options)
    with torch.inference_mode():
        drafts = made.proposer.propose(step)
    order = [0, 2, 1]  # those with the most drafts come first
    differs = 0
    for row, b in enumerate(order):
        for slot in range(lens[b]):
            logits_V = made.logits(seen[0][row], drafts.tokens_BK[b, :slot].tolist())
            token, greedy = int(drafts.tokens_BK[b, slot]), int(logits_V.argmax())
            differs += greedy != int(made.own_logits(seen[0][row, slot]).argmax())
            temperature = [0.9, 0.0, 1.4][b]
            if draft_sampling == "argmax" or not temperature:
                assert token == greedy
            else:
                assert drafts.probs_BKV is not None
                expected_V = (logits_V / temperature).softmax(-1)
                torch.testing.assert_close(drafts.probs_BKV[b, slot], expected_V)
                assert expected_V[token] > 0
    assert differs > 3, "the correction changes drafts"


class OnlyAfter:
    """Allows the token after the last one, and those far from it."""

    def __init__(self, count: int, vocab_size: int) -> None:
        self.lens = [K] * count
        self.allowed = torch.ones(count, vocab_size, dtype=torch.bool)
        self.masks: list[Tensor] = []

    def mask(self, device: torch.device) -> Tensor:
        self.masks.append(self.allowed.clone())
        return self.masks[-1]

    def advance(self, tokens: Sequence[int]) -> None:
        for row, token in enumerate(tokens):
            self.allowed[row, token % 7 :: 7] = False


def test_a_grammar_masks_corrected_logits(target: TargetModel, seen: list[Tensor]) -> None:
    grammar = OnlyAfter(len(PROMPTS), target.vocab_size)
    step = replace(prompt_step(target, PROMPTS), constraint=grammar)
    made = Corrected(target, step, draft_vocab_size=100)
    with torch.inference_mode():
        drafts = made.proposer.propose(step).tokens_BK
    for b in range(len(PROMPTS)):
        for slot in range(K):
            logits_V = made.logits(seen[0][b], drafts[b, :slot].tolist())
            logits_V[~grammar.masks[slot][b]] = -torch.inf
            assert int(drafts[b, slot]) == int(logits_V.argmax())


@pytest.mark.parametrize("draft_vocab_size", [320, 70])
@pytest.mark.parametrize("device_way", [False, True])
def test_the_children_of_a_tree_know_their_parents(
    target: TargetModel,
    seen: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    draft_vocab_size: int,
    device_way: bool,
) -> None:
    lens, shape = [K, 2, K], CandidateTrees(3, K, 20)
    step = prompt_step(target, PROMPTS, k=lens)
    made = Corrected(target, step, draft_vocab_size=draft_vocab_size, trees=shape)
    if device_way:
        monkeypatch.setattr(made.proposer, "grow", partial(grown_as_on_a_card, made.proposer))
    with torch.inference_mode():
        drafts = made.proposer.propose(step)
    assert drafts.parents_BK is not None and drafts.lens == [20] * 3
    alone = 0
    for row, b in enumerate([0, 2, 1]):  # those with the most drafts come first
        normed_KD = seen[0][row]
        found = paths_of(drafts.tokens_BK[b].tolist(), drafts.parents_BK[b].tolist())
        scores: dict[Path, float] = {(): 0.0}
        for path in found:
            own = made.logprobs(normed_KD, path[:-1])[path[-1]]
            scores[path] = scores[path[:-1]] + float(own)
        ordered = [scores[path] for path in found]
        assert all(before >= after - 1e-12 for before, after in pairwise(ordered))
        expected = exact_tree(lambda path, of=normed_KD: made.logprobs(of, path), lens[b], 3, 20)
        assert set(found) == set(expected)
        uncorrected = exact_tree(
            lambda path, of=normed_KD: marginal(made, of, path), lens[b], 3, 20
        )
        alone += len(set(uncorrected) - set(found))
    assert alone > 20, "the correction changes trees"


def grown_as_on_a_card(
    proposer: HeadProposer,
    logits_NKV: Tensor,
    states_NKW: Tensor,
    depths_N: Tensor,
    which_N: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Depth after depth, not node by node."""
    correction, shape = proposer.drafter.correction, proposer.trees
    assert correction is not None and shape is not None
    ids, heat = proposer.target_ids, TREE_TEMPERATURE
    tokens, parents, scores = best_first_trees(
        logits_NKV,
        depths_N,
        num_parallel_trees=shape.num_parallel_trees,
        max_nodes=shape.max_nodes,
        temperature=heat,
        children=correction.tree_children(logits_NKV, states_NKW, ids, heat, which_N),
    )
    return proposer.drafter.to_target_ids(tokens), parents, scores


def marginal(made: Corrected, normed_KD: Tensor, path: Sequence[int]) -> Tensor:
    return (made.own_logits(normed_KD[len(path)]) / TREE_TEMPERATURE).log_softmax(-1)


def test_trees_under_a_grammar_know_the_parents_too(
    target: TargetModel, seen: list[Tensor]
) -> None:
    """`grow_trees` asks for logits behind a path; the whole vocabulary is corrected."""
    step = prompt_step(target, PROMPTS)
    made = Corrected(target, step, draft_vocab_size=70, trees=CandidateTrees(3, K, 7))
    with torch.inference_mode():
        drafts = made.proposer.propose(step)
    unused: Any = None
    drafting = HeadDrafting(made.proposer, unused, target.vocab_size, 256, 256, unused)
    ids = made.drafter.target_ids()
    for b in range(len(PROMPTS)):
        logits_after = drafting._logits_after(drafts.slots[b])
        for path in ([], [9], [9, 200], [9, 200, 31]):
            expected_V = made.logits(seen[0][b], path)[ids]
            torch.testing.assert_close(logits_after(path), expected_V)


def test_a_head_without_one_drafts_as_before(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One choice of all columns, from the head's own logits."""
    columns: list[int] = []
    put = EagerDraft._put

    def watching(self: EagerDraft, logits_NJV: Tensor, *rest: Any) -> None:
        columns.append(logits_NJV.shape[1])
        put(self, logits_NJV, *rest)

    monkeypatch.setattr(EagerDraft, "_put", watching)
    step = prompt_step(target, PROMPTS)
    with torch.inference_mode():
        make_proposer(target, True, step).propose(step)
    assert columns == [K]
