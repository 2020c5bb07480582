"""Captured steps with drawn drafts: outputs have the distribution of the target.

Of plain decoding by the transformers model and textbook formulas, as in `test_feature_matrix`. On a
CPU the step is not captured and its kernels run under Triton's interpreter, which is slow.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.engine.feature_reference import REGEX, Reference, fit, make_folder

pytest.importorskip("triton")

from peagle.engine.step import decode_step
from peagle.kernels.sampling.rejection_triton import reject_drafts

ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
PROMPT = (1, 1, 3, 1, 3, 3, 3)
COUNTS = {"cpu": 96, "cuda": 4000}
ASKED: dict[str, dict[str, Any]] = {
    "cuts": {"top_k": 4, "top_p": 0.9, "min_p": 0.02},
    "rules": {"repetition_penalty": 1.7, "frequency_penalty": 0.9, "logit_bias": {1: 1.0}},
    "grammar": {"structured_output": REGEX, "ignore_eos": False},
}


# On a CPU the slowest alone: it goes through all that the others do but for cuts and masks.
CASES = [
    pytest.param(
        "rules", "cpu", marks=pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
    ),
    *(pytest.param(asked, "cuda", marks=pytest.mark.gpu) for asked in ASKED),
]


@dataclass(frozen=True)
class World:
    """A target of few tokens, its reference and its head."""

    folder: Path
    reference: Reference
    head: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder, head = make_folder(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("head")
    target = TargetModel.load(folder, dtype=torch.float32)
    save_drafter(head, make_drafter(target, num_layers=1, draft_vocab_size=7, seed=5))
    return World(folder, Reference(folder), head)


def fit_of(world: World, asked: dict[str, Any], device: str) -> float:
    """P-value of two tokens each: the second is verified, or replaces a draft."""
    params = SamplingParams(**{"ignore_eos": True, **asked}, temperature=1.0, max_tokens=2)
    llm = LLM(
        world.folder,
        speculative_config={
            "model": str(world.head),
            "num_speculative_tokens": 1,
            "draft_sampling": "probabilistic",
        },
        dtype="float32",
        device=device,
        max_model_len=64,
        block_size=4,
        max_num_seqs=64,
        seed=1,
    )
    found = llm.generate([PROMPT] * COUNTS[device], params)
    passed = llm.stats.speculation
    assert llm.stats.eager_steps == {}
    assert passed.num_accepted_tokens > 0.1 * passed.num_draft_tokens
    outputs = [tuple(output.token_ids) for output in found]
    return fit(outputs, world.reference.joint(params, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "device"), CASES)
def test_outputs_have_the_references_distribution(world: World, asked: str, device: str) -> None:
    assert fit_of(world, ASKED[asked], device) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "device"), CASES)
def test_a_wrong_rule_is_noticed(
    world: World, asked: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft passes. A subtler fault is for the test of the kernels, which is faster."""

    def wrong(*given: Any, **named: Any) -> None:
        reject_drafts(*given, **named)
        _, _, _, active_B, state, _, num_accepted_B = given
        num_accepted_B.copy_(torch.where(active_B != 0, state.num_draft_tokens_B, num_accepted_B))

    monkeypatch.setattr(decode_step, "reject_drafts", wrong)
    assert fit_of(world, ASKED[asked], device) < 1e-4
