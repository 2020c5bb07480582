"""Candidate trees of an EAGLE-3 head against its chains, run along every path by themselves."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.models.target import TargetModel
from peagle.speculation import ProposerInput
from peagle.speculation.proposers import TREE_TEMPERATURE, AutoregressiveProposer
from tests.kernels.tree_reference import paths_of
from tests.speculation.test_proposers import make_proposer, prompt_step

PROMPTS = [[5, 9, 200], [17], [31, 31, 8, 2, 90, 41]]
VOCAB = 20  # draft vocabulary


class OnePath:
    """A constraint that leaves the sequence of a step one token for each column."""

    def __init__(self, path: Sequence[int], vocab_size: int) -> None:
        self.lens = [len(path) + 1]
        self._path, self._vocab_size, self._column = path, vocab_size, 0

    def mask(self, device: torch.device) -> Tensor | None:
        if self._column == len(self._path):
            return None
        mask_1V = torch.zeros(1, self._vocab_size, dtype=torch.bool)
        mask_1V[0, self._path[self._column]] = True
        return mask_1V

    def advance(self, tokens: Sequence[int]) -> None:
        self._column += 1


class Chains:
    """log softmax(logits / temperature) behind any path, from a chain that is led along it."""

    def __init__(self, target: TargetModel, prompt: Sequence[int], **options: Any) -> None:
        self._step = roomy(prompt_step(target, [prompt]))
        self._proposer = make_proposer(target, False, self._step, **options)
        self._vocab_size = target.vocab_size
        self.target_ids = self._proposer.target_ids.tolist()

    def logprobs(self, path: Sequence[int]) -> list[float]:
        """By draft id, behind target ids."""
        own, seen = self._proposer, list[Tensor]()
        compute = own.drafter.compute_logits

        def watched(hidden: Tensor) -> Tensor:
            seen.append(compute(hidden))
            return seen[-1]

        own.drafter.compute_logits = watched  # type: ignore[method-assign]
        constraint = OnePath(path, self._vocab_size)
        with torch.inference_mode():
            own.propose(
                replace(self._step, num_draft_tokens=[len(path) + 1], constraint=constraint)
            )
        own.drafter.compute_logits = compute  # type: ignore[method-assign]
        return torch.log_softmax(seen[-1].flatten() / TREE_TEMPERATURE, -1).tolist()


def roomy(step: ProposerInput) -> ProposerInput:
    """The step with blocks for all nodes of beams."""
    batch = len(step.num_rows)
    return replace(step, block_tables_BM=torch.arange(batch * 20).view(batch, 20).flip(0))


def expected_tree(
    chains: Chains, depth: int, beam: int, nodes: int
) -> dict[tuple[int, ...], float]:
    """The best paths of beams, and their scores."""
    every, last = dict[tuple[int, ...], float](), {(): 0.0}
    for _ in range(depth):
        found = dict[tuple[int, ...], float]()
        for path, score in last.items():
            values = chains.logprobs(path)
            best = sorted(range(len(values)), key=lambda i: -values[i])[:beam]
            found |= {(*path, chains.target_ids[i]): score + values[i] for i in best}
        every |= found
        last = dict(sorted(found.items(), key=lambda item: -item[1])[:beam])
    return dict(sorted(every.items(), key=lambda item: -item[1])[:nodes])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 4, 4), {}),
        ((2, 4, 9), {}),
        ((3, 3, 9), {"norm_output": True}),
        ((4, 4, 30), {"num_layers": 2, "windows": (3, None)}),
        ((8, 2, 60), {}),
        ((8, 1, 8), {}),
    ],
    ids=str,
)
def test_nodes_have_the_scores_of_chains_along_their_paths(
    target: TargetModel, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """Sequences of several lengths and depths, among them one that does not draft."""
    beam, depth, nodes = shape
    options = {"num_layers": 1, "draft_vocab_size": VOCAB, **options}
    prompts, depths = [*PROMPTS, [3, 4]], [depth, max(depth - 1, 1), depth, 0]
    step = roomy(prompt_step(target, prompts, k=depths))
    trees = CandidateTrees(beam, depth, nodes)
    proposer = make_proposer(target, False, step, trees=trees, **options)
    assert isinstance(proposer, AutoregressiveProposer)
    with torch.inference_mode():
        drafts = proposer.propose(step)
    assert drafts.parents_BK is not None and drafts.scores_BK is not None
    for b, (prompt, d) in enumerate(zip(prompts, depths, strict=True)):
        count = drafts.lens[b]
        found = (x[b, :count].tolist() for x in (drafts.tokens_BK, drafts.parents_BK))
        expected = expected_tree(Chains(target, prompt, **options), d, beam, nodes)
        assert count == len(expected)
        paths = paths_of(*found)
        assert set(paths) == set(expected)
        scores = drafts.scores_BK[b, :count].tolist()
        assert scores == pytest.approx([expected[path] for path in paths], abs=1e-9)


def test_a_beam_of_one_is_the_chain(target: TargetModel) -> None:
    depths = [4, 2, 3]
    step = roomy(prompt_step(target, PROMPTS, k=depths))
    found = []
    for trees in (None, CandidateTrees(1, 4, 6)):
        proposer = make_proposer(target, False, step, trees=trees)
        with torch.inference_mode():
            drafts = proposer.propose(step)
        assert drafts.lens == depths
        found.append([drafts.tokens_BK[b, :k].tolist() for b, k in enumerate(depths)])
        if drafts.parents_BK is not None:
            assert all(
                drafts.parents_BK[b, :k].tolist() == [*range(k)] for b, k in enumerate(depths)
            )
    assert found[0] == found[1]


class Rising:
    """A constraint that allows multiples of three behind the root, and behind a node more."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def masks(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        behind: Sequence[Sequence[int]],
    ) -> Tensor:
        ids_V = torch.arange(self._vocab_size)
        return torch.stack(
            [torch.stack([self.allowed(ids_V, token) for token in own or (-1,)]) for own in tokens]
        )

    @staticmethod
    def allowed(ids_V: Tensor, token: int) -> Tensor:
        return (ids_V % 3 == 0) if token < 0 else ids_V > token


@pytest.mark.slow
def test_a_constraint_restricts_the_nodes(target: TargetModel) -> None:
    """Scores are probabilities among the tokens that are allowed; paths end where none is."""
    beam, depth, nodes = 3, 3, 20
    options: dict[str, Any] = {"num_layers": 1, "draft_vocab_size": VOCAB}
    step = roomy(prompt_step(target, PROMPTS[:2], k=depth))
    step = replace(step, beam_constraint=Rising(target.vocab_size))
    trees = CandidateTrees(beam, depth, nodes)
    proposer = make_proposer(target, False, step, trees=trees, **options)
    with torch.inference_mode():
        drafts = proposer.propose(step)
    assert drafts.parents_BK is not None and drafts.scores_BK is not None
    for b, prompt in enumerate(PROMPTS[:2]):
        chains = Chains(target, prompt, **options)
        ids_V = torch.tensor(chains.target_ids)
        logprobs = chains.logprobs

        def allowed(path: Sequence[int], logprobs: Any = logprobs, ids_V: Tensor = ids_V) -> Any:
            kept_V = Rising.allowed(ids_V, path[-1] if path else -1)
            logits_V = torch.tensor(logprobs(path), dtype=torch.float64)
            masked_V = logits_V.masked_fill(~kept_V, -torch.inf)
            return masked_V.log_softmax(-1).nan_to_num(-torch.inf).tolist()

        chains.logprobs = allowed  # type: ignore[method-assign]
        expected = expected_tree(chains, depth, beam, nodes)
        kept = {path: score for path, score in expected.items() if score > -1e4}
        scores = drafts.scores_BK[b].tolist()
        count = sum(score > -1e4 for score in scores)
        found = (x[b, :count].tolist() for x in (drafts.tokens_BK, drafts.parents_BK))
        paths = paths_of(*found)
        assert set(paths) == set(kept) and count > 0
        assert scores[:count] == pytest.approx([kept[path] for path in paths])
