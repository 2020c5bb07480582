"""Greedy output equals transformers' own generation.

Every architecture, way to draft, shape of head and schedule of requests is tested. In float64 there
is no difference at all. In float32 the shape of a batch moves logits by 1e-6, so a
first difference must be a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from peagle import LLM, SamplingParams
from peagle.attention.torch_backend import TorchPreparedAttention
from peagle.engine import model_runner
from peagle.kernels.drafts.batches import slot_mapping
from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logits_rules import TreeRows
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import CONFIGS, make_drafter, make_target_folder
from tests.corrections import add_correction
from tests.engine.engines import TREES, assert_idle, config_of, know_the_answer

PROMPTS = [[5, 9, 200, 31], [17] * 40, [3], list(range(20, 95)), [8, 8, 9, 9, 8, 8, 9, 9, 8, 8]]
NEW_TOKENS = 32
NEAR_TIE = 1e-4


@cache
def reference_outputs(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    make_cache: type[DynamicCache] = DynamicCache,
) -> list[list[int]]:
    """What transformers' own `generate` gives for PROMPTS, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=make_cache(),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@cache
def load_target(folder: Path, dtype: torch.dtype = torch.float64) -> TargetModel:
    """The target, loaded once; engines may share it."""
    return TargetModel.load(folder, dtype=dtype)


def engine_outputs(
    folder: Path,
    speculative: dict[str, Any] | None,
    *,
    dtype: torch.dtype = torch.float64,
    right_share: float = 0.0,
    **options: Any,
) -> list[list[int]]:
    """What the engine gives for PROMPTS; with right_share > 0 some drafts are made right."""
    llm = LLM(model=load_target(folder, dtype), speculative_config=speculative, **options)
    if right_share:
        outputs = reference_outputs(folder, dtype)
        answers = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
        know_the_answer(llm, answers, NEW_TOKENS, right_share)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert_idle(llm)
    assert not right_share or llm.stats.speculation.acceptance_length > 1.5
    return [output.token_ids for output in found]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target_folder(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def own_heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """A P-EAGLE head (True), with a correction, and an EAGLE-3 head (False) of the target."""
    found = {}
    for parallel in (True, False):
        found[parallel] = str(tmp_path_factory.mktemp("head"))
        save_drafter(found[parallel], make_drafter(load_target(folder), parallel=parallel))
    add_correction(Path(found[True]))
    return found


@pytest.mark.slow
def test_plain_output_equals_transformers(folder: Path) -> None:
    expected = reference_outputs(folder)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "outputs must differ"
    assert engine_outputs(folder, None) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "k"), [(True, 7), (False, 5)], ids=["peagle", "eagle3"])
def test_drafted_output_equals_transformers(
    folder: Path, own_heads: dict[bool, str], parallel: bool, k: int
) -> None:
    """The P-EAGLE head drafts with its correction."""
    config = {"model": own_heads[parallel], "num_speculative_tokens": k}
    # As drafted (nearly all wrong), and with drafts accepted and rejected at every position.
    for right_share in (0.0, 0.8):
        outputs = engine_outputs(folder, config, right_share=right_share)
        assert outputs == reference_outputs(folder), right_share


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "k"), [(True, 1), (True, 2), (True, 7), (False, 1)])
def test_every_k_is_lossless(
    target_folder: Path, heads: dict[bool, Path], parallel: bool, k: int
) -> None:
    config = {"model": str(heads[parallel]), "num_speculative_tokens": k}
    outputs = engine_outputs(target_folder, config, right_share=0.8)
    assert outputs == reference_outputs(target_folder)


@pytest.mark.slow
def test_trees_equal_transformers(folder: Path, own_heads: dict[bool, str]) -> None:
    config = {"model": own_heads[True], "parallel_drafting_spec": TREES}
    for right_share in (0.0, 0.8):
        outputs = engine_outputs(folder, config, right_share=right_share)
        assert outputs == reference_outputs(folder), right_share


def test_prompt_lookup_equals_transformers(folder: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    assert engine_outputs(folder, config) == reference_outputs(folder)


@torch.no_grad()
def gap_of_first_difference(folder: Path, prompt: list[int], a: list[int], b: list[int]) -> float:
    """Difference of the two logits where two outputs part; 0 where they do not."""
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if length is None:
        return 0.0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt + a[:length]])).logits[0, -1]
    return float((logits[a[length]] - logits[b[length]]).abs())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_float32_differs_at_near_ties_only(
    folder: Path, own_heads: dict[bool, str], parallel: bool
) -> None:
    expected = reference_outputs(folder, torch.float32)
    config: dict[str, Any] = {"model": own_heads[parallel], "num_speculative_tokens": 7}
    for speculative in (None, config):
        outputs = engine_outputs(folder, speculative, dtype=torch.float32)
        pairs = zip(PROMPTS, outputs, expected, strict=True)
        gaps = [gap_of_first_difference(folder, p, o, e) for p, o, e in pairs]
        assert max(gaps) < NEAR_TIE, f"{sum(gap > 0 for gap in gaps)} outputs differ: {gaps}"


HEADS: dict[str, dict[str, Any]] = {
    "pruned vocabulary": {"draft_vocab_size": 100},
    "wider than the target": {
        "hidden_size": 48,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    },
    "one layer": {"num_layers": 1, "norm_before_residual": True},
    "four layers": {"num_layers": 4, "norm_before_fc": True},
    "norms and biases": {"fc_norm": True, "attention_bias": True},
    "one aux state": {"aux_layer_ids": (2,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_is_lossless(
    target_folder: Path, head_folders: Callable[..., Path], name: str, parallel: bool
) -> None:
    head = head_folders(parallel=parallel, **HEADS[name])
    config = {"model": str(head), "num_speculative_tokens": 5}
    outputs = engine_outputs(target_folder, config, right_share=0.5)
    assert outputs == reference_outputs(target_folder)


# Few blocks and prompts in several passes are in the feature matrix, for every way but ngram.
SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "two at a time, small blocks": {"max_num_seqs": 2, "block_size": 3},
    "one slot a block": {"block_size": 1},
    "one block a sequence": {"block_size": 256},
    "context just long enough": {"max_model_len": max(map(len, PROMPTS)) + NEW_TOKENS},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "peagle", "trees", "eagle3", "ngram"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduling_does_not_change_output(
    target_folder: Path, heads: dict[bool, Path], way: str, name: str
) -> None:
    speculative = config_of(way, heads)
    share = 0.6 if speculative and "model" in speculative else 0.0
    outputs = engine_outputs(target_folder, speculative, right_share=share, **SCHEDULES[name])
    assert outputs == reference_outputs(target_folder)


def test_a_wrong_slot_is_noticed(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when keys and values are written one slot too low."""

    def off_by_one(*args: Any) -> Tensor:
        return (slot_mapping(*args) - 1).clamp_min(0)

    monkeypatch.setattr("peagle.engine.model_runner.slot_mapping", off_by_one)
    assert engine_outputs(target_folder, None) != reference_outputs(target_folder)


def paths_by_row(*trees: Any) -> TreePaths:
    paths = OF_LISTS(*trees)
    return replace(
        paths, depths_BJ=torch.arange(paths.depths_BJ.shape[1]).expand_as(paths.depths_BJ)
    )


def see_all_rows_before(self: Any, tree: Any, key_rows_BS: Tensor, window: int | None) -> Tensor:
    rows_Q = torch.arange(self.metadata.max_query_len)
    return key_rows_BS.unsqueeze(1) <= rows_Q.unsqueeze(1)


def accept_the_first_node(self: TreeRows, tokens_BJ: Tensor) -> Tensor:
    reached_BJ = REACHED(self, tokens_BJ)
    reached_BJ[:, 1] |= self.drafted_BK[:, 0] & (reached_BJ.sum(-1) == 1)
    return reached_BJ


REACHED, OF_LISTS = TreeRows.reached, TreePaths.of_lists
TREE_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a position is the row": (TreePaths, "of_lists", staticmethod(paths_by_row)),
    "siblings are seen": (TorchPreparedAttention, "_see_path", see_all_rows_before),
    "the path is not moved": (model_runner, "move_path", lambda *_: None),
    "a node passes unseen": (TreeRows, "reached", accept_the_first_node),
}


@pytest.mark.parametrize("name", TREE_FAULTS)
def test_a_wrong_rule_for_trees_is_noticed(
    target_folder: Path, heads: dict[bool, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, fault = TREE_FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    try:
        outputs = engine_outputs(target_folder, config_of("trees", heads), right_share=0.8)
    except (AssertionError, ValueError, IndexError):
        return  # what is said is so wrong that no answer begins so
    assert outputs != reference_outputs(target_folder)
