"""Chains of drawn drafts in an engine whose other requests have trees.

Eager steps have the exact distribution of the target, and captured steps are eager ones. On a CPU
the latter are not captured and their kernels run under Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.config import SpeculativeConfig
from peagle.errors import UserError
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from peagle.speculation import verification
from tests.conftest import make_drafter
from tests.engine.feature_reference import Reference, fit, make_folder

TREES = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 6}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"
)


def make(
    target: Path, head: Path, *, eager: bool, first: float | None = 1.0, **options: Any
) -> LLM:
    """An engine with trees; requests of a temperature of at least `first` draw chains."""
    speculative = {"model": str(head), "parallel_drafting_spec": TREES, "drawn_chains_from": first}
    sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 2, "seed": 1}
    sizes["device"] = "cpu"
    if "schedule" in options:
        speculative["num_speculative_tokens_per_batch_size"] = options.pop("schedule")
    return LLM(
        target,
        speculative_config=speculative,
        dtype="float32",
        enforce_eager=eager,
        **{**sizes, **options},
    )


# ---- the distribution ------------------------------------------------------------------------

PROMPT = (1, 1, 3, 1, 3, 3, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Reference]:
    """A target of few tokens, a head and the reference."""
    folder, head = make_folder(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("head")
    target = TargetModel.load(folder, dtype=torch.float32)
    save_drafter(head, make_drafter(target, num_layers=1, draft_vocab_size=7, seed=5))
    return folder, head, Reference(folder)


def fit_of(world: tuple[Path, Path, Reference], schedule: list[list[int]] | None) -> float:
    """P-value of three tokens each, of requests that share steps with others that have trees."""
    folder, head, reference = world
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    llm = make(folder, head, eager=True, max_num_seqs=64, schedule=schedule)
    others = [replace(params, temperature=0.7), replace(params, seed=3)]
    num_outputs = 1500
    asked = [*[params] * num_outputs, *others * 40]
    found = llm.generate([PROMPT] * len(asked), asked)[:num_outputs]
    assert sum(one.stats.num_accepted_tokens for one in found) > num_outputs / 5
    assert all(max(one.stats.num_draft_tokens, 0) <= 3 * 3 for one in found), "chains of 3"
    outputs = [tuple(output.token_ids) for output in found]
    return fit(outputs, reference.joint(params, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, [[1, 32, 2], [33, 64, 1]]], ids=["whole", "cut"])
def test_outputs_have_the_references_distribution(
    world: tuple[Path, Path, Reference], schedule: list[list[int]] | None
) -> None:
    assert fit_of(world, schedule) > 1e-3


def as_trees(verify_drawn: Any) -> Any:
    """A drawn draft passes where it equals the target's own token, and no draw replaces it."""

    def changed(probs_RV: Any, q_BKV: Any, rows: Any, sampling: Any, tokens_BJ: Any) -> Any:
        found = verify_drawn(probs_RV, q_BKV, rows, sampling, tokens_BJ)
        own_B = tokens_BJ.gather(1, found.num_accepted_B.unsqueeze(1)).squeeze(1)
        return replace(found, next_tokens_B=own_B)

    return changed


@pytest.mark.slow
def test_a_wrong_rule_is_noticed(
    world: tuple[Path, Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_verify_drawn", as_trees(verification._verify_drawn))
    assert fit_of(world, None) < 1e-4


# ---- captured steps --------------------------------------------------------------------------

HOT = SamplingParams(max_tokens=6, temperature=1.5, ignore_eos=True)
PARAMS = [
    HOT,
    replace(HOT, seed=7, max_tokens=5),
    replace(HOT, temperature=0.8, top_k=40, max_tokens=4),
    replace(HOT, top_p=0.9, num_speculative_tokens=2, frequency_penalty=0.5, logprobs=1),
    replace(HOT, temperature=0.0, max_tokens=4),
]
PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 35)), [8, 8, 1]]


def outputs(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS, PARAMS)
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    logprobs = [[(one.token_id, one.rank) for one in o.logprobs or []] for o in found]
    return [(o.token_ids, o.stats, tops) for o, tops in zip(found, logprobs, strict=True)]


@pytest.fixture(scope="module")
def head(head_folders: Callable[..., Path]) -> Path:
    return head_folders(parallel=True)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_captured_steps_are_eager_ones(target_folder: Path, head: Path, device: str) -> None:
    """Requests with chains and with trees join and leave."""
    pytest.importorskip("triton")
    eager, llm = (make(target_folder, head, eager=eager, device=device) for eager in (True, False))
    expected, found = outputs(eager), outputs(llm)
    assert found == expected
    assert llm.stats.eager_steps == {}
    assert sum(one[1].num_accepted_tokens for one in found) > 1


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("graphs_everywhere")
def test_the_load_cuts_chains(target_folder: Path, head: Path) -> None:
    """No step verifies more of them than its share; trees beside them take what is left."""
    pytest.importorskip("triton")
    llm = make(target_folder, head, eager=False, schedule=[[1, 2, 2]])
    engine, counts = llm.engine, dict[bool, set[int]]()
    for prompt, params in zip(PROMPTS[:2], PARAMS, strict=False):
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            seen = counts.setdefault(output.sequence.draws_chain, set())
            seen.add(output.num_drafted)
    assert llm.stats.eager_steps == {}
    assert max(counts[True]) == 2 and counts[True] <= {0, 2}
    assert max(counts[False]) >= 2


# ---- the configuration -----------------------------------------------------------------------


def test_who_gets_chains(target_folder: Path, head: Path) -> None:
    """Requests with a seed or a structured output keep trees."""
    llm = make(target_folder, head, eager=True, first=0.9)
    engine = llm.engine
    for params, is_chain in (
        (HOT, True),
        (replace(HOT, temperature=0.9), True),
        (replace(HOT, temperature=0.89), False),
        (replace(HOT, seed=1), False),
        (replace(HOT, temperature=0.0), False),
    ):
        assert engine.add_request([1, 2], params).draws_chain is is_chain


@pytest.mark.parametrize("value", [0, -1.0, "hot", float("nan")])
def test_temperatures_that_are_none(value: Any) -> None:
    trees = {"model": "head", "parallel_drafting_spec": TREES}
    with pytest.raises(UserError, match=r"drawn_chains_from .* expected a temperature above 0"):
        SpeculativeConfig(**trees, drawn_chains_from=value)
    with pytest.raises(UserError, match=r"drawn_chains_from is 1\.0; expected none without"):
        SpeculativeConfig(model="head", drawn_chains_from=1.0)
