"""Proposers: how many drafts, in how many passes, drawn from which distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from peagle.attention import LayerKVCache, TorchAttention
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation import Drafts, SamplingTensors, TargetStep
from peagle.speculation.proposers import (
    AutoregressiveProposer,
    HeadProposer,
    ParallelProposer,
    PromptLookupProposer,
)
from tests.conftest import make_drafter

K = 4
BLOCK_SIZE = 4
KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])


def make_proposer(
    target: TargetModel, parallel: bool, num_blocks: int, k: int = K, **options: Any
) -> HeadProposer:
    draft_sampling = options.pop("draft_sampling", "argmax")
    drafter = make_drafter(target, parallel=parallel, seed=2, **options).double()
    drafter.requires_grad_(False)
    kind = ParallelProposer if parallel else AutoregressiveProposer
    config = drafter.config
    caches = [
        LayerKVCache(
            num_blocks,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            torch.float64,
            target.device,
        )
        for _ in range(config.num_layers)
    ]
    return kind(
        drafter,
        TorchAttention(),
        caches,
        num_speculative_tokens=k,
        max_model_len=256,
        draft_sampling=draft_sampling,
    )


def prompt_step(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    temperature: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
) -> TargetStep:
    """The step after a prefill of `prompts`; features are a function of token and position."""
    batch = len(prompts)
    lens = [len(prompt) for prompt in prompts]
    blocks = -(-(max(lens) + 2 * K) // BLOCK_SIZE)
    table = torch.randn(500, 3 * target.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.tensor([p for length in lens for p in range(length)])
    temperatures = torch.tensor(temperature or [0.0] * batch)
    sampling = SamplingTensors(
        temperature_B=temperatures,
        top_k_B=torch.zeros(batch, dtype=torch.int64),
        top_p_B=torch.ones(batch),
        seeds_B=torch.tensor(seeds or list(range(batch))),
        num_outputs_B=torch.ones(batch, dtype=torch.int64),
        all_greedy=not bool(temperatures.any()),
    )
    return TargetStep(
        tokens_T=tokens,
        positions_T=positions,
        start_loc=torch.tensor(list(accumulate(lens, initial=0))),
        features_TA=(table[tokens] + table[positions + 320]).double(),
        num_accepted_B=torch.tensor(lens) - 1,
        next_tokens_B=torch.tensor([prompt[0] for prompt in prompts]),
        block_tables_BM=torch.arange(batch * blocks).view(batch, blocks),
        sampling=sampling,
        histories=[[*prompt, prompt[0]] for prompt in prompts],
    )


def num_blocks(step: TargetStep) -> int:
    return step.block_tables_BM.numel()


def propose(target: TargetModel, step: TargetStep, parallel: bool, **options: Any) -> Drafts:
    with torch.inference_mode():
        return make_proposer(target, parallel, num_blocks(step), **options).propose(step)


PROMPTS = [[5, 9, 200], [17], [31, 31, 8, 2, 90, 41]]


@KINDS
@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_drafts_in_one_pass_or_in_k(
    target: TargetModel, parallel: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[int] = []
    forward = Drafter.forward

    def counting(self: Drafter, tokens: Tensor, *rest: Any) -> Tensor:
        slots.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(Drafter, "forward", counting)
    drafts = propose(target, prompt_step(target, PROMPTS), parallel, k=k)
    assert drafts.tokens_BK.shape == (3, k)
    assert drafts.lens == [k, k, k]
    assert drafts.probs_BKV is None
    # 10 prompt tokens in all; mask slots ride along, later passes run one slot a sequence.
    assert slots == ([10 + 3 * (k - 1)] if parallel else [10] + [3] * (k - 1))


@KINDS
def test_the_first_drafts_are_the_same_for_every_k(target: TargetModel, parallel: bool) -> None:
    """Later mask slots are invisible to earlier ones, later passes to earlier passes."""
    step = prompt_step(target, PROMPTS)
    longest = propose(target, step, parallel, k=4).tokens_BK
    for k in (1, 2, 3):
        assert torch.equal(propose(target, step, parallel, k=k).tokens_BK, longest[:, :k])


@KINDS
def test_batch_mates_do_not_change_drafts(target: TargetModel, parallel: bool) -> None:
    options: dict[str, Any] = {"draft_sampling": "probabilistic", "draft_vocab_size": 100}
    temperature, seeds = [0.9, 0.0, 1.4], [3, 4, 5]
    step = prompt_step(target, PROMPTS, temperature, seeds)
    together = propose(target, step, parallel, **options)
    assert together.probs_BKV is not None
    for b in (0, 2):
        alone = prompt_step(target, PROMPTS[b : b + 1], temperature[b : b + 1], seeds[b : b + 1])
        drafts = propose(target, alone, parallel, **options)
        assert torch.equal(drafts.tokens_BK[0], together.tokens_BK[b])
        assert drafts.probs_BKV is not None
        torch.testing.assert_close(drafts.probs_BKV[0], together.probs_BKV[b])
    # The greedy one has a one-hot q at its argmax draft.
    greedy = propose(target, prompt_step(target, PROMPTS[1:2]), parallel, **options)
    assert torch.equal(greedy.tokens_BK[0], together.tokens_BK[1])
    one_hot = torch.nn.functional.one_hot(together.tokens_BK[1], target.vocab_size)
    assert torch.equal(together.probs_BKV[1], one_hot.double())


@KINDS
def test_pruned_heads_draft_inside_their_vocabulary(target: TargetModel, parallel: bool) -> None:
    step = prompt_step(target, [[5, 9, 200]] * 300, [1.5] * 300)
    for draft_sampling in ("argmax", "probabilistic"):
        proposer = make_proposer(
            target, parallel, num_blocks(step), draft_vocab_size=20, draft_sampling=draft_sampling
        )
        kept = proposer.drafter.t2d
        assert kept is not None
        with torch.inference_mode():
            drafts = proposer.propose(step)
        assert bool(kept[drafts.tokens_BK].all())
        if drafts.probs_BKV is not None:
            assert bool((drafts.probs_BKV[..., ~kept] == 0).all())
            assert len(drafts.tokens_BK.unique()) > 10


@KINDS
def test_drafts_are_distributed_as_their_q(target: TargetModel, parallel: bool) -> None:
    """The first draft over many seeds; the second too, whose q an autoregressive head takes from
    the first.
    """
    count = 4000
    options: dict[str, Any] = {"draft_vocab_size": 12, "draft_sampling": "probabilistic"}
    step = prompt_step(target, [[5, 9, 200]] * count, [1.5] * count, list(range(count)))
    drafts = propose(target, step, parallel, k=2, **options)
    q_BKV = drafts.probs_BKV
    assert q_BKV is not None
    torch.testing.assert_close(q_BKV.sum(-1), torch.ones(count, 2, dtype=torch.float64))
    for column in range(2):
        counts = np.bincount(drafts.tokens_BK[:, column].numpy(), minlength=target.vocab_size)
        expected = q_BKV[:, column].sum(0).numpy()
        common = expected > 5
        assert common.sum() > 3
        rest = [counts[~common].sum()], [expected[~common].sum() + 1e-9]
        statistic = stats.chisquare(
            np.append(counts[common], rest[0]), np.append(expected[common], rest[1])
        )
        assert statistic.pvalue > 1e-3, column
    same_first = drafts.tokens_BK[:, 0] == drafts.tokens_BK[0, 0]
    second_q = q_BKV[:, 1]
    assert torch.allclose(second_q[same_first], second_q[0])
    assert torch.allclose(second_q, second_q[0].expand_as(second_q)) == parallel


@KINDS
def test_positions_past_the_context_are_drafted_without_writing(
    target: TargetModel, parallel: bool
) -> None:
    step = prompt_step(target, PROMPTS)
    proposer = make_proposer(target, parallel, num_blocks(step))
    proposer.max_model_len = 3
    with torch.inference_mode():
        drafts = proposer.propose(step)
    assert drafts.lens == [K, K, K]
    written = proposer.caches[0].keys[:-1].abs().sum((-1, -2)).flatten() > 0
    first = step.block_tables_BM[:, 0] * BLOCK_SIZE
    expected = {int(first[b]) + p for b in range(3) for p in range(3)}
    assert set(written.nonzero().flatten().tolist()) == expected


# ---- prompt lookup --------------------------------------------------------------------------


def naive_lookup(history: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """What stands at the place before which the text agrees longest with its own end."""

    def agreement(place: int) -> int:
        n = 0
        while n < min(place, longest) and history[place - 1 - n] == history[-1 - n]:
            n += 1
        return n

    places = [(agreement(place), place) for place in range(1, len(history))]
    places = [found for found in places if found[0] >= shortest]
    if not places:
        return []
    best = max(places)[1]
    return history[best : best + k]


@settings(deadline=None, max_examples=400)
@given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    k=st.integers(1, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_lookup_equals_the_naive_search(
    history: list[int], k: int, shortest: int, more: int
) -> None:
    proposer = PromptLookupProposer(k, shortest + more, shortest)
    assert proposer.lookup(history) == naive_lookup(history, k, shortest + more, shortest)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([7, 1, 5, 8, 1, 6, 8, 1], [6, 8, 1]),  # the longer match wins over the later one
        ([1, 5, 1, 6, 1], [6, 1]),  # among equals the later one
        ([4, 4], [4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
    ids=str,
)
def test_lookup_examples(history: list[int], expected: list[int]) -> None:
    assert PromptLookupProposer(3, 4, 1).lookup(history) == expected


def test_lookup_drafts_are_padded_and_counted(target: TargetModel) -> None:
    step = replace(
        prompt_step(target, PROMPTS), histories=[[1, 2, 3, 1], [1, 2], [5, 6, 7, 8, 9, 5]]
    )
    drafts = PromptLookupProposer(4, 3, 1).propose(step)
    assert drafts.lens == [3, 0, 4]
    assert drafts.tokens_BK.tolist() == [[2, 3, 1, 0], [0, 0, 0, 0], [6, 7, 8, 9]]
    assert drafts.probs_BKV is None
