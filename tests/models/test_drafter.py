"""The drafter and its drafts against the method written out: one slot after another, no cache.

The reference reads the saved checkpoint (config.json and tensors by name), takes the features from
transformers' own hidden states, and recomputes everything at each step.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.errors import CheckpointError
from peagle.kernels.drafts.batches import DraftBatch
from peagle.models.checkpoint import load_drafter
from peagle.models.drafter import Drafter, DrafterConfig, RMSNorm
from peagle.models.target import TargetModel
from peagle.speculation import Drafts, ProposerInput, proposers
from tests.conftest import HEAD_SIZES
from tests.models.reference_head import ReferenceHead, Slot

K = 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, norm before residual": {"num_layers": 1, "norm_before_residual": True},
    "norm before residual": {"num_layers": 3, "norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm per aux state": {"fc_norm": True, "rms_norm_eps": 1e-3},
    "pruned vocabulary": {"draft_vocab_size": 100},
    "bias": {"attention_bias": True},
    "wider than the target": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
    },
    "Qwen3-style, heads wider than the model": {"qk_norm": True, "head_dim": 16},
    "output after the final norm": {"norm_output": True, "num_layers": 1},
    "windows in two of three layers": {"num_layers": 3, "windows": (6, None, 6)},
    "a window in every layer": {"num_layers": 3, "windows": (4, 4, 4)},
    "a window, Qwen3-style": {"num_layers": 1, "windows": (7,), "qk_norm": True},
    "two aux states, llama3 rope": {"aux_layer_ids": (0, 3), "rope_parameters": LLAMA3},
}


@cache
@torch.no_grad()
def hidden_states(folder: Path, tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    """What enters every layer, as transformers computes it; the same for all heads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states


def aux_features(folder: Path, tokens: list[int], head: ReferenceHead) -> Tensor:
    """Features of every position: the states entering the aux layers, side by side."""
    states = hidden_states(folder, tuple(tokens))
    ids = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return torch.cat([states[i][0] for i in ids], dim=-1)


@pytest.fixture(scope="module", params=[True, False], ids=["peagle", "eagle3"])
def parallel(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=HEADS)
def head_folder(
    request: pytest.FixtureRequest, parallel: bool, head_folders: Callable[..., Path]
) -> Path:
    return head_folders(parallel=parallel, seed=5, **HEADS[request.param])


# ---- the module by itself ----


@torch.no_grad()
def test_forward_equals_the_reference(
    target: TargetModel, target_folder: Path, head_folder: Path, parallel: bool
) -> None:
    tokens = torch.randint(2, 300, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    head = ReferenceHead(head_folder)
    features = aux_features(target_folder, tokens, head)[:-1]
    drafter = load_drafter(head_folder, target)
    scaling = drafter.config.head_dim**-0.5

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        window = drafter.windows[layer]
        dense = DenseCausalAttention(1)
        return dense(query, key, value, None, scaling=scaling, sliding_window=window)

    ids, positions = tokens[1:], list(range(len(tokens) - 1))
    hidden = drafter.combine_features(features)
    slots = head.context(tokens, features)
    if parallel:
        ids = ids + [1] * (K - 1)
        positions = list(range(len(ids)))
        hidden = torch.cat((hidden, drafter.shared_hidden().expand(K - 1, -1)))
        shared = head.combine(head.w["mask_hidden"].flatten())
        slots += [Slot(len(slots) + j, 1, shared) for j in range(K - 1)]
    out = drafter(torch.tensor(ids), hidden, torch.tensor(positions), attend)
    expected = head.run(slots)
    returned = head.norm(expected, "norm") if head.config.get("norm_output") else expected
    torch.testing.assert_close(out, returned, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        drafter.compute_logits(out), head.logits(expected), atol=1e-10, rtol=0
    )
    assert float(expected.std(0).min()) > 1e-3, "outputs must vary"


def test_low_precision_norms_compute_in_float32() -> None:
    norm = RMSNorm(64, 1e-5).bfloat16()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), expected.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 320}, r"mask token id is 320; expected .* 0 to 319"),
        ({"mask_token_id": -1}, r"mask token id is -1"),
        ({"draft_vocab_size": 321}, r"draft_vocab_size is 321; expected 1 to vocab_size \(320\)"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size is 0; expected a whole number of at least 1"),
        ({"num_kv_heads": 3}, r"num_attention_heads is 4; expected a multiple of .* \(3\)"),
        ({"norm_before_fc": True, "fc_norm": True}, r"norm_before_fc and fc_norm"),
        ({"num_layers": 0}, r"num_layers is 0; expected a whole number of at least 1"),
        ({"hidden_size": "32"}, r"hidden_size is '32'; expected a whole number"),
        ({"head_dim": -8}, r"head_dim is -8"),
        ({"aux_layer_ids": (2, 1)}, r"aux_layer_ids is \(2, 1\); expected distinct ascending"),
        ({"aux_layer_ids": (1, 1)}, r"aux_layer_ids is \(1, 1\)"),
        ({"aux_layer_ids": ("a",)}, r"aux_layer_ids is \('a',\)"),
        ({"aux_layer_ids": ()}, r"aux_layer_ids is \(\)"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"RoPE type is 'dynamic'; supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, r"rope_parameters is \{"),
        ({"rope_parameters": {"rope_theta": math.inf}}, r"rope_parameters.rope_theta is inf"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0.5"),
        ({"head_dim": 7}, r"head_dim is 7; expected an even number"),
        ({"mask_token_id": True}, r"mask token id is True"),
        ({"trained_depth": 0}, r"trained_depth is 0; expected a whole number of at least 1"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0; expected a number above 0"),
        ({"qk_norm": None}, r"qk_norm is None; expected true or false"),
        ({"windows": (4,)}, r"windows of the layers are \[4\]; expected one for each of 2 layers"),
        ({"windows": (4, 0)}, r"windows of the layers are \[4, 0\]; .* of at least 1 or none"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        **HEAD_SIZES,
        "vocab_size": 320,
        "draft_vocab_size": 320,
        "target_hidden_size": 32,
        "aux_layer_ids": (1, 2, 3),
        "mask_token_id": 1,
    }
    DrafterConfig(**good)
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig(**{**good, **change})


# ---- the engine's drafts, step by step ----

PROMPTS = [[4, 99, 31, 31, 200, 7], [17], [250, 3, 3, 8, 120, 9, 9, 41, 12, 77]]
PARAMS = SamplingParams(max_tokens=28, ignore_eos=True)
ORDER = (3, 0, 5, 1, 4, 2)  # of accepted drafts: each number once in as few tokens as can be


@dataclass(frozen=True)
class Recorded:
    """One sequence at one call of the proposer."""

    history: list[int]
    num_accepted: int
    drafts: list[int]
    logits_KV: Tensor


def generate_and_record(
    llm: LLM, truth: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[Recorded]:
    """Generate PROMPTS, recording the drafts; some are then replaced by the true continuation, so
    that verification accepts every number of them from 0 to K.
    """
    drafting: Any = llm.engine.drafting
    proposer = drafting.proposer
    propose, compute_logits = proposer.propose, proposer.drafter.compute_logits
    columns: list[Tensor] = []
    recorded: list[Recorded] = []
    turns: Counter[int] = Counter()

    def recording_logits(hidden: Tensor) -> Tensor:
        columns.append(compute_logits(hidden))
        return columns[-1]

    def recording_propose(step: ProposerInput) -> Drafts:
        columns.clear()
        drafts = propose(step)
        logits_BKV = torch.cat(columns, dim=1)
        tokens_BK = drafts.tokens_BK.clone()
        for b, history in enumerate(step.histories):
            assert step.num_draft_tokens[b] == K, "drafts are cut at the end of the context only"
            whole = truth[history[0]]
            recorded.append(
                Recorded(
                    list(history),
                    step.num_rows[b] - 1,
                    drafts.tokens_BK[b].tolist(),
                    logits_BKV[b],
                )
            )
            num_right = ORDER[(history[0] + turns[history[0]]) % len(ORDER)]
            turns[history[0]] += 1
            right = whole[len(history) : len(history) + num_right]
            tokens_BK[b, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return replace(drafts, tokens_BK=tokens_BK)

    monkeypatch.setattr(proposer.drafter, "compute_logits", recording_logits)
    monkeypatch.setattr(proposer, "propose", recording_propose)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [p + o.token_ids for p, o in zip(PROMPTS, outputs)] == list(truth.values())
    return recorded


@pytest.fixture(scope="module")
def truth(target_folder: Path) -> dict[int, list[int]]:
    """Prompt and greedy continuation by first token."""
    outputs = LLM(target_folder, dtype="float64").generate(PROMPTS, PARAMS)
    return {p[0]: p + o.token_ids for p, o in zip(PROMPTS, outputs)}


def make_llm(target_folder: Path, head_folder: Path, **speculative: Any) -> LLM:
    # Small blocks and two sequences at a time: the third prompt joins a running batch.
    config = {"model": str(head_folder), "num_speculative_tokens": K, **speculative}
    sizes: dict[str, Any] = {"block_size": 3, "max_num_seqs": 2}
    return LLM(target_folder, dtype="float64", speculative_config=config, **sizes)


def largest_difference(
    recorded: list[Recorded], target_folder: Path, head_folder: Path, truth: dict[int, list[int]]
) -> float:
    """Of the recorded draft logits from the reference's; asserts nothing."""
    head = ReferenceHead(head_folder)
    features = {first: aux_features(target_folder, t, head) for first, t in truth.items()}
    worst = 0.0
    for one in recorded:
        _, logits = head.draft(one.history, features[one.history[0]][: len(one.history) - 1], K)
        worst = max(worst, float((logits - one.logits_KV).abs().max()))
    return worst


@pytest.mark.slow
@torch.no_grad()
def test_drafts_equal_the_reference_at_every_step(
    target_folder: Path,
    head_folder: Path,
    truth: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = generate_and_record(make_llm(target_folder, head_folder), truth, monkeypatch)
    decoded = {one.num_accepted for one in recorded if len(one.history) > 12}
    assert decoded == set(range(K + 1)), "every number of accepted drafts must occur"
    head = ReferenceHead(head_folder)
    features = {first: aux_features(target_folder, t, head) for first, t in truth.items()}
    for one in recorded:
        known = features[one.history[0]][: len(one.history) - 1]
        drafts, logits = head.draft(one.history, known, K)
        torch.testing.assert_close(one.logits_KV, logits, atol=1e-9, rtol=0)
        assert one.drafts == drafts


@pytest.mark.slow
@torch.no_grad()
def test_positions_beyond_the_heads_own_limit_keep_their_angles(
    target_folder: Path,
    head_folders: Callable[..., Path],
    truth: dict[int, list[int]],
    parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = head_folders(parallel=parallel, seed=5, max_position_embeddings=16)
    llm = make_llm(target_folder, folder, max_model_len=256)
    recorded = generate_and_record(llm, truth, monkeypatch)
    assert max(len(one.history) for one in recorded) > 30
    assert largest_difference(recorded, target_folder, folder, truth) < 1e-9


def keep_stale_slots(expand: Callable[..., DraftBatch]) -> Callable[..., DraftBatch]:
    """A planted fault: what mask slots and rejected drafts left in the cache is not overwritten."""

    def faulty(*args: Any, **kwargs: Any) -> DraftBatch:
        batch = expand(*args, **kwargs)
        first = batch.query_start_loc[:-1]
        index = torch.arange(len(batch.slots_R))
        after_first = ~torch.isin(index, first)
        is_ntp = batch.feature_rows_R < len(args[0])
        decoding = batch.positions_R >= 12
        stale = after_first & is_ntp & decoding
        return replace(batch, slots_R=torch.where(stale, -1, batch.slots_R))

    return faulty


def count_stale_slots(expand: Callable[..., DraftBatch]) -> Callable[..., DraftBatch]:
    """A planted fault: the context is one slot too long, so queries stand one position off."""

    def faulty(*args: Any, **kwargs: Any) -> DraftBatch:
        batch = expand(*args, **kwargs)
        return replace(batch, seq_lens_B=batch.seq_lens_B + 1)

    return faulty


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("fault", [keep_stale_slots, count_stale_slots])
def test_leaked_slots_are_noticed(
    target_folder: Path,
    head_folders: Callable[..., Path],
    truth: dict[int, list[int]],
    parallel: bool,
    fault: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = head_folders(parallel=parallel, seed=5)
    monkeypatch.setattr(proposers, "expand_draft_batch", fault(proposers.expand_draft_batch))
    recorded = generate_and_record(make_llm(target_folder, folder), truth, monkeypatch)
    assert largest_difference(recorded, target_folder, folder, truth) > 1e-3


# ---- vocabulary maps ----


def test_draft_ids_map_to_target_ids(head_folders: Callable[..., Path]) -> None:
    config = DrafterConfig(32, 40, 1, 4, 2, 8, 320, 4, 32, (1, 2, 3), 1)
    drafter = Drafter(config)
    drafter.set_draft_vocabulary(torch.tensor([3, 10, 11, 319]))
    assert drafter.target_ids().tolist() == [3, 10, 11, 319]
    assert drafter.to_target_ids(torch.tensor([[2, 0], [3, 3]])).tolist() == [[11, 3], [319, 319]]
    assert drafter.d2t is not None
    assert drafter.d2t.tolist() == [3, 9, 9, 316]
    assert drafter.t2d is not None
    assert drafter.t2d.nonzero().flatten().tolist() == [3, 10, 11, 319]
    assert F.one_hot(torch.tensor([3, 10, 11, 319]), 320).sum(0).bool().equal(drafter.t2d)
