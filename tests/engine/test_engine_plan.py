"""The plan of an engine: sizes by the way to draft, and refusals before anything is allocated."""

from pathlib import Path
from typing import Any

import pytest

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine import LLMEngine
from peagle.engine.engine_plan import EnginePlan, plan_engine
from peagle.errors import UserError
from peagle.models.target import TargetModel
from tests.engine.engines import TREES, K, config_of

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=2048)
NODES, DEPTH = TREES["max_nodes"], TREES["prediction_depth"]


def plan_of(target: TargetModel, name: str, heads: dict[bool, Path]) -> EnginePlan:
    config = config_of(name, heads)
    return plan_engine(target, CONFIG, config and SpeculativeConfig.parse(config))


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "num_nodes", "slots"),
    [
        ("plain", 0, None, 2),
        ("ngram", K, None, 2 * (K + 1)),
        ("peagle", K, None, 2 * (K + 1)),
        ("eagle3", K, None, 2 * (K + 1)),
        ("trees", DEPTH, NODES, max(2 * (DEPTH + 1), NODES + 1)),
    ],
)
def test_sizes_follow_from_the_way_to_draft(
    target: TargetModel,
    heads: dict[bool, Path],
    name: str,
    num_draft_tokens: int,
    num_nodes: int | None,
    slots: int,
) -> None:
    plan = plan_of(target, name, heads)
    has_head = name in ("peagle", "eagle3", "trees")
    assert (plan.num_speculative_tokens, plan.num_nodes) == (num_draft_tokens, num_nodes)
    assert plan.num_lookahead_slots == slots
    assert (plan.max_model_len, plan.max_draft_len) == (64, 64 if has_head else 0)
    assert (plan.drafter is not None, bool(plan.aux_layer_ids)) == (has_head, has_head)
    assert (plan.tree_record is not None) == (name == "trees")
    # On a CPU no graphs run, which alone keep memory.
    assert not plan.is_pipelined and not plan.kept_bytes and not plan.num_resuming


@pytest.mark.parametrize("name", ["plain", "ngram", "peagle", "peagle probabilistic"])
def test_graphs_hold_a_step_in_flight_and_keep_memory(
    target: TargetModel, heads: dict[bool, Path], graphs_everywhere: None, name: str
) -> None:
    plan = plan_of(target, name, heads)
    num_draft_tokens = 0 if name == "plain" else K
    assert plan.is_pipelined and plan.num_lookahead_slots == 3 * (num_draft_tokens + 1)
    # Of passes over a step and prompts, of the prompts of a pass, and q or texts of 3 sequences.
    has_head = name not in ("plain", "ngram")
    rows = 128 + 256 + 384 + 512 + 640 + (2048 if has_head else 0)
    width = target.hidden_size * (4 if has_head else 1)
    q = 3 * K * target.vocab_size * 4 if name == "peagle probabilistic" else 0
    texts = 3 * 64 * 4 if name == "ngram" else 0
    assert plan.kept_bytes == rows * width * 8 + q + texts


@pytest.mark.parametrize(
    ("config", "speculative", "message"),
    [
        ({"max_model_len": 10**6}, None, "max_model_len is 1000000; the target's positions end"),
        ({}, {"parallel_drafting": False}, "parallel_drafting is False, but .* a P-EAGLE head"),
    ],
)
def test_a_refused_engine_allocates_nothing(
    target: TargetModel,
    heads: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    speculative: dict[str, Any] | None,
    message: str,
) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was begun")

    monkeypatch.setattr("peagle.engine.engine.Sampler", allocate)
    monkeypatch.setattr("peagle.engine.engine.FeatureRings", allocate)
    drafts = speculative and SpeculativeConfig.parse({"model": str(heads[True]), **speculative})
    with pytest.raises(UserError, match=message):
        LLMEngine(target, EngineConfig(**config), drafts)
    assert not target.kv_caches
