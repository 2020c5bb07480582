"""Proposers: how many drafts, in how many passes, drawn from which distribution."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from peagle.attention import LayerKVCache, TorchAttention
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation import Drafts, ProposerInput, SamplingTensors
from peagle.speculation.proposers import AutoregressiveProposer, ParallelProposer
from tests.conftest import make_drafter

K = 4
BLOCK_SIZE = 4
KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])


def make_proposer(
    target: TargetModel, parallel: bool, step: ProposerInput, **options: Any
) -> ParallelProposer | AutoregressiveProposer:
    draws, trees = options.pop("draft_sampling", "argmax") != "argmax", options.pop("trees", None)
    drafter = make_drafter(target, parallel=parallel, seed=2, **options).double()
    drafter.requires_grad_(False)
    kind = ParallelProposer if parallel else AutoregressiveProposer
    config = drafter.config
    sizes = step.block_tables_BM.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim
    caches = [LayerKVCache(*sizes, torch.float64, target.device) for _ in range(config.num_layers)]
    ways: dict[str, Any] = {"draws": draws, "trees": trees}
    return kind(drafter, TorchAttention(), caches, max_model_len=256, **ways)


def prompt_step(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    temperature: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    k: int | Sequence[int] = K,
) -> ProposerInput:
    """The step after a prefill of `prompts`; features are a function of token and position.

    Args:
        target: the target.
        prompts: token ids.
        temperature, seeds: of each sequence.
        k: drafts of all sequences, or of each.
    """
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
    return ProposerInput(
        tokens_T=tokens,
        positions_T=positions,
        start_loc=torch.tensor(list(accumulate(lens, initial=0))),
        features_TA=(table[tokens] + table[positions + 320]).double(),
        next_tokens_B=torch.tensor([prompt[0] for prompt in prompts]),
        block_tables_BM=torch.arange(batch * blocks).view(batch, blocks),
        num_rows=lens,
        seq_lens=lens,
        num_draft_tokens=[k] * batch if isinstance(k, int) else list(k),
        sampling=sampling,
        num_drawn=[0] * batch,
        histories=[[*prompt, prompt[0]] for prompt in prompts],
    )


def propose(target: TargetModel, step: ProposerInput, parallel: bool, **options: Any) -> Drafts:
    with torch.inference_mode():
        return make_proposer(target, parallel, step, **options).propose(step)


PROMPTS = [[5, 9, 200], [17], [31, 31, 8, 2, 90, 41]]


@KINDS
@pytest.mark.parametrize(
    ("lens", "mask_slots", "passes"),
    [
        ([1, 1, 1], 0, []),
        ([4, 4, 4], 3 + 3 + 3, [3, 3, 3]),
        ([0, 4, 2], 3 + 1, [2, 1, 1]),
        ([3, 1, 3], 2 + 2, [2, 2]),
        ([0, 0, 0], 0, []),
    ],
    ids=str,
)
def test_slots_and_passes_run_for_those_only_that_draft(
    target: TargetModel,
    parallel: bool,
    lens: list[int],
    mask_slots: int,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One pass with mask slots, or a pass for each further draft, after 10 prompt tokens."""
    slots: list[int] = []
    forward = Drafter.forward

    def counting(self: Drafter, tokens: Tensor, *rest: Any) -> Tensor:
        slots.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(Drafter, "forward", counting)
    drafts = propose(target, prompt_step(target, PROMPTS, k=lens), parallel)
    assert (drafts.lens, drafts.tokens_BK.shape) == (lens, (3, max(lens)))
    assert drafts.probs_BKV is None
    assert slots == ([10 + mask_slots] if parallel else [10, *passes])


@KINDS
def test_the_first_drafts_are_the_same_for_every_k(target: TargetModel, parallel: bool) -> None:
    """Later mask slots are invisible to earlier ones, later passes to earlier passes."""
    longest = propose(target, prompt_step(target, PROMPTS, k=4), parallel).tokens_BK
    for k in (1, 2, 3):
        shorter = propose(target, prompt_step(target, PROMPTS, k=k), parallel).tokens_BK
        assert torch.equal(shorter, longest[:, :k])


@KINDS
def test_a_greedy_draft_among_drawn_ones_has_a_one_hot_q(
    target: TargetModel, parallel: bool
) -> None:
    options: dict[str, Any] = {"draft_sampling": "probabilistic", "draft_vocab_size": 100}
    step = prompt_step(target, PROMPTS, [0.9, 0.0, 1.4], [3, 4, 5])
    together = propose(target, step, parallel, **options)
    greedy = propose(target, prompt_step(target, PROMPTS[1:2]), parallel, **options)
    assert torch.equal(greedy.tokens_BK[0], together.tokens_BK[1])
    one_hot = torch.nn.functional.one_hot(together.tokens_BK[1], target.vocab_size)
    assert together.probs_BKV is not None
    assert torch.equal(together.probs_BKV[1], one_hot.double())


@KINDS
def test_pruned_heads_draft_inside_their_vocabulary(target: TargetModel, parallel: bool) -> None:
    step = prompt_step(target, [[5, 9, 200]] * 300, [1.5] * 300)
    for draft_sampling in ("argmax", "probabilistic"):
        proposer = make_proposer(
            target, parallel, step, draft_vocab_size=20, draft_sampling=draft_sampling
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
    step = prompt_step(target, [[5, 9, 200]] * count, [1.5] * count, list(range(count)), k=2)
    drafts = propose(target, step, parallel, **options)
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
    proposer = make_proposer(target, parallel, step)
    proposer.max_model_len = 3
    with torch.inference_mode():
        drafts = proposer.propose(step)
    assert drafts.lens == [K, K, K]
    written = proposer.caches[0].keys[:-1].abs().sum((-1, -2)).flatten() > 0
    first = step.block_tables_BM[:, 0] * BLOCK_SIZE
    expected = {int(first[b]) + p for b in range(3) for p in range(3)}
    assert set(written.nonzero().flatten().tolist()) == expected


# ---- every sequence its own number of drafts ----


@KINDS
@pytest.mark.parametrize("lens", [[4, 4, 4], [0, 3, 1], [4, 0, 2], [0, 0, 1], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("draft_sampling", ["argmax", "probabilistic"])
def test_each_gets_the_drafts_that_it_gets_alone(
    target: TargetModel, parallel: bool, lens: list[int], draft_sampling: str
) -> None:
    options: dict[str, Any] = {"draft_sampling": draft_sampling, "draft_vocab_size": 100}
    temperature, seeds = [0.9, 1.1, 1.4], [3, 4, 5]
    step = prompt_step(target, PROMPTS, temperature, seeds, lens)
    together = propose(target, step, parallel, **options)
    assert together.lens == lens
    assert together.tokens_BK.shape == (3, max(lens))
    assert (together.probs_BKV is None) == (draft_sampling == "argmax" or not any(lens))
    for b, k in enumerate(lens):
        mine = slice(b, b + 1)
        one = prompt_step(target, PROMPTS[mine], temperature[mine], seeds[mine], lens[mine])
        alone = propose(target, one, parallel, **options)
        assert torch.equal(together.tokens_BK[b, :k], alone.tokens_BK[0])
        if alone.probs_BKV is not None:
            assert together.probs_BKV is not None
            torch.testing.assert_close(together.probs_BKV[b, :k], alone.probs_BKV[0])


def dense_drafts(
    proposer: ParallelProposer | AutoregressiveProposer, step: ProposerInput, window: int
) -> list[int]:
    """Drafts of one sequence by whole passes over all its slots, keys beyond the window masked."""
    drafter = proposer.drafter

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        at = torch.arange(len(query))
        distance = at.unsqueeze(1) - at
        hidden = (distance < 0) | (distance >= window)
        return torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value
        )

    def run(tokens: list[int], hidden: Tensor) -> Tensor:
        return drafter(torch.tensor(tokens), hidden, torch.arange(len(tokens)), attend)

    def choose(hidden: Tensor) -> list[int]:
        return drafter.to_target_ids(drafter.compute_logits(hidden).argmax(-1)).tolist()

    tokens = [*step.tokens_T[1:].tolist(), int(step.next_tokens_B[0])]
    hidden, (k,) = drafter.combine_features(step.features_TA), step.num_draft_tokens
    if isinstance(proposer, ParallelProposer):
        assert drafter.config.mask_token_id is not None
        masks = [drafter.config.mask_token_id] * (k - 1)
        shared = drafter.shared_hidden().expand(k - 1, -1)
        return choose(run(tokens + masks, torch.cat((hidden, shared)))[-k:])
    drafts: list[int] = []
    for _ in range(k):
        last = run(tokens + drafts, hidden)[-1:]
        drafts += choose(last)
        hidden = torch.cat((hidden, last))
    return drafts


@KINDS
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 40])
def test_nothing_beyond_the_window_is_looked_at(
    target: TargetModel, parallel: bool, window: int
) -> None:
    prompt = [5, 9, 200, 31, 31, 8, 2, 90, 41, 17, 64, 3]
    step = prompt_step(target, [prompt])
    proposer = make_proposer(target, parallel, step)
    with torch.inference_mode():
        proposer.drafter.windows = (window,) * len(proposer.drafter.windows)
        expected = dense_drafts(proposer, step, window)
        assert proposer.propose(step).tokens_BK[0].tolist() == expected
        proposer.drafter.windows = (None,) * len(proposer.drafter.windows)
        whole = dense_drafts(proposer, step, len(prompt) + K)
        assert proposer.propose(step).tokens_BK[0].tolist() == whole
    assert (whole != expected) == (window < 40), "a narrow one matters"


@KINDS
def test_nothing_before_the_context_start_is_looked_at(target: TargetModel, parallel: bool) -> None:
    """Drafts behind a hole are those of a sequence that never had the tokens in it."""
    k, starts = [4, 2, 3], torch.tensor([2, 0, 5])
    step = prompt_step(target, PROMPTS, k=k)
    found = propose(target, replace(step, context_starts_B=starts), parallel).tokens_BK
    for b in range(3):
        alone = prompt_step(target, PROMPTS[b : b + 1], k=k[b : b + 1])
        first = int(starts[b])
        behind = replace(
            alone,
            tokens_T=alone.tokens_T[first:],
            positions_T=alone.positions_T[first:],
            start_loc=alone.start_loc - torch.tensor([0, first]),
            features_TA=alone.features_TA[first:],
            num_rows=[alone.num_rows[0] - first],
            context_starts_B=starts[b : b + 1],
        )
        assert torch.equal(propose(target, behind, parallel).tokens_BK[0], found[b, : k[b]])
        if first:
            whole = propose(target, alone, parallel).tokens_BK[0]
            assert not torch.equal(whole, found[b, : k[b]]), "the hidden part matters"


# ---- positions that no draft needs ----

HEADS = pytest.mark.parametrize(
    "head",
    [
        {},
        {"num_layers": 3},
        {"num_layers": 2, "norm_before_residual": True, "fc_norm": True},
        {"qk_norm": True, "attention_bias": True, "norm_output": True},
    ],
    ids=str,
)


def rows_of(step: ProposerInput, first: Sequence[int], end: Sequence[int]) -> dict[str, Any]:
    """What a step over positions `first` to before `end` of each sequence has of its own."""
    starts, tokens = step.start_loc.tolist(), step.tokens_T.tolist()
    after = [[*tokens[starts[b] : starts[b + 1]], int(step.next_tokens_B[b])] for b in range(3)]
    lens = [e - f for f, e in zip(first, end, strict=True)]
    return {
        "start_loc": torch.tensor([starts[b] + f for b, f in enumerate(first)] + [len(tokens)]),
        "next_tokens_B": torch.tensor([after[b][e] for b, e in enumerate(end)]),
        "num_rows": lens,
        "seq_lens": list(end),
    }


@KINDS
@HEADS
def test_reading_apart_changes_nothing(
    target: TargetModel, parallel: bool, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts and every key and value, though the last layer runs for the last rows alone."""
    prompts = [[5, 9, 200, 3], [17, 2], [31, 31, 8, 2, 90, 41]]
    ends = [len(prompt) for prompt in prompts]
    step = prompt_step(target, prompts)
    whole, apart = (make_proposer(target, parallel, step, **head) for _ in range(2))
    before = rows_of(step, [0, 0, 0], [e - 1 for e in ends])
    last = rows_of(step, [e - 1 for e in ends], ends)
    layer: Any = apart.drafter.layers[-1]
    ran: list[int] = []
    layer.mlp.register_forward_hook(lambda _, args, __: ran.append(args[0].shape[0]))
    with torch.inference_mode():
        expected = whole.propose(step)
        apart.read(replace(step, num_draft_tokens=[0, 0, 0], sampling=None, **before))
        assert not ran
        found = apart.propose(replace(step, **last))
    assert ran == ([3 * K] if parallel else [3] * K)
    assert torch.equal(found.tokens_BK, expected.tokens_BK)
    for one, other in zip(apart.caches, whole.caches, strict=True):
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            assert torch.count_nonzero(x) > 0
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@HEADS
def test_keys_alone_are_those_of_the_whole_layer(target: TargetModel, head: dict[str, Any]) -> None:
    """Packed weights, from which no rows can be cut, have another class than nn.Linear."""

    class Packed(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    attention: Any = make_drafter(target, parallel=True, seed=2, **head).layers[-1].self_attn
    torch.manual_seed(0)
    x, angles = (
        torch.randn(5, attention.qkv_proj.in_features),
        torch.randn(5, 1, attention.head_dim),
    )
    rope = angles.cos(), angles.sin()
    _, key, value = attention.project(x, rope)
    for _ in range(2):
        found = attention.project_keys(x, rope)
        torch.testing.assert_close(found, (key, value), rtol=0, atol=1e-5)
        attention.qkv_proj = Packed(attention.qkv_proj)
