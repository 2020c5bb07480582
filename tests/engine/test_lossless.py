"""Greedy output equals transformers' own generation.

Every architecture meets plain decoding, trees and another way to draft, with the shapes of heads,
the schedules of requests and K in turn. In float64 there is no difference at all. In float32 the
shape of a batch moves logits by 1e-6, so a first difference must be a near-tie.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from peagle import LLM, SamplingParams
from peagle.attention.torch_backend import TorchPreparedAttention
from peagle.engine import model_runner
from peagle.kernels.drafts.batches import TargetBatch, pack_rows
from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logits_rules import TreeRows
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import CONFIGS, byte_tokenizer, make_drafter, make_target_folder
from tests.engine.engines import assert_idle, config_of, know_the_answer
from tests.models.test_architectures import ARCHITECTURES, reference
from tests.models.tiny import make_model

PROMPTS = [[5, 9, 200, 31], [17] * 40, [3], list(range(20, 95)), [8, 8, 9, 9, 8, 8, 9, 9, 8, 8]]
NEW_TOKENS = 10
NEAR_TIE = 1e-4


@cache
def reference_outputs(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    make_cache: type[DynamicCache] = DynamicCache,
) -> list[list[int]]:
    """What transformers' own `generate` gives for PROMPTS, one at a time."""
    model = reference(folder, dtype)
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


# Models of every type; the others of `ARCHITECTURES` have other positions or heads.
MODELS = [
    name for name, a in ARCHITECTURES.items() if name in CONFIGS or a.model_type not in CONFIGS
]
HEADS: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 100},
    {"hidden_size": 48, "num_attention_heads": 2, "num_kv_heads": 1, "head_dim": 16},
    {"num_layers": 1, "norm_before_residual": True},
    {"num_layers": 4, "norm_before_fc": True},
    {"fc_norm": True, "attention_bias": True},
    {"aux_layer_ids": (2,)},
]
# Few blocks and prompts in several passes are in the feature matrix.
SCHEDULES: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 2, "block_size": 3},
    {"block_size": 1},
    {"block_size": 256},
    {"block_size": 4, "max_model_len": max(map(len, PROMPTS)) + NEW_TOKENS},
]
DEPTHS = (7, 1, 5, 2)
# Besides plain decoding and trees; copies: trees with chains of prompt lookup.
OTHER_WAYS = ("peagle", "eagle3", "ngram", "copies", "eagle3 trees", "eagle3 copies")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, architecture = tmp_path_factory.mktemp("target"), ARCHITECTURES[model]
    make_model(architecture.model_type, **architecture.options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    assert len({tuple(tokens) for tokens in reference_outputs(folder)}) == len(PROMPTS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "trees", "another"])
def test_output_equals_transformers(folder: Path, model: str, way: str, tmp_path: Path) -> None:
    """The head drafts itself, or is made right, so that drafts pass and fail at every position."""
    index = MODELS.index(model)
    way = OTHER_WAYS[index % len(OTHER_WAYS)] if way == "another" else way
    k, schedule = DEPTHS[index % len(DEPTHS)], SCHEDULES[index % len(SCHEDULES)]
    config: dict[str, Any] | None = {"model": str(tmp_path), "num_speculative_tokens": k}
    if way == "plain":
        config = None
    elif way == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": k}
    else:
        shape = HEADS[index % len(HEADS)]
        head = make_drafter(load_target(folder), parallel="eagle3" not in way, **shape)
        save_drafter(tmp_path, head)
    if way.endswith(("trees", "copies")):
        tree = {"num_parallel_trees": 3, "prediction_depth": k, "max_nodes": 2 * k + 1}
        config = {"model": str(tmp_path), "parallel_drafting_spec": tree}
        config["prompt_lookup"] = way.endswith("copies")
    share = 0.0 if way in ("plain", "ngram") else 0.8
    outputs = engine_outputs(folder, config, right_share=share, **schedule)
    assert outputs == reference_outputs(folder)


@torch.no_grad()
def gap_of_first_difference(folder: Path, prompt: list[int], a: list[int], b: list[int]) -> float:
    """Difference of the two logits where two outputs part; 0 where they do not."""
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if length is None:
        return 0.0
    model = reference(folder, torch.float32)
    logits = model(torch.tensor([prompt + a[:length]])).logits[0, -1]
    return float((logits[a[length]] - logits[b[length]]).abs())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_float32_differs_at_near_ties_only(kind: str, tmp_path: Path) -> None:
    folder = make_target_folder(tmp_path / "target", kind)
    expected = reference_outputs(folder, torch.float32)
    configs: list[dict[str, Any] | None] = [None]
    for parallel in (True, False):
        head = tmp_path / str(parallel)
        save_drafter(head, make_drafter(load_target(folder), parallel=parallel))
        configs.append({"model": str(head), "num_speculative_tokens": 7})
    for config in configs:
        outputs = engine_outputs(folder, config, dtype=torch.float32)
        pairs = zip(PROMPTS, outputs, expected, strict=True)
        gaps = [gap_of_first_difference(folder, p, o, e) for p, o, e in pairs]
        assert max(gaps) < NEAR_TIE, f"{sum(gap > 0 for gap in gaps)} outputs differ: {gaps}"


def test_a_wrong_slot_is_noticed(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when keys and values are written one slot too low."""

    def off_by_one(*args: Any, **options: Any) -> TargetBatch:
        batch = pack_rows(*args, **options)
        return replace(batch, slots_R=(batch.slots_R - 1).clamp_min(0))

    monkeypatch.setattr("peagle.engine.model_runner.pack_rows", off_by_one)
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
