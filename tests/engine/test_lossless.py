"""Greedy output equals transformers' own generation: every architecture, every way to draft.

In float64 there is no difference at all. In float32 the shape of a batch moves logits by 1e-6, so a
first difference must be a near-tie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.models.checkpoint import save_drafter
from tests.conftest import CONFIGS, make_drafter, make_target_folder
from tests.engine.greedy import (
    PROMPTS,
    engine_outputs,
    load_target,
    reference_outputs,
)

NEAR_TIE = 1e-4


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target_folder(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """A P-EAGLE head (True) and an EAGLE-3 head (False) of the target."""
    found = {}
    for parallel in (True, False):
        found[parallel] = str(tmp_path_factory.mktemp("head"))
        save_drafter(found[parallel], make_drafter(load_target(folder), parallel=parallel))
    return found


def test_plain_output_equals_transformers(folder: Path) -> None:
    expected = reference_outputs(folder)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "outputs must differ"
    assert engine_outputs(folder, None) == expected


@pytest.mark.parametrize(
    ("parallel", "k"), [(True, 1), (True, 2), (True, 7), (False, 1), (False, 5)]
)
def test_drafted_output_equals_transformers(
    folder: Path, heads: dict[bool, str], parallel: bool, k: int
) -> None:
    config = {"model": heads[parallel], "num_speculative_tokens": k}
    # As drafted (nearly all wrong), and with drafts accepted and rejected at every position.
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


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_float32_differs_at_near_ties_only(
    folder: Path, heads: dict[bool, str], parallel: bool
) -> None:
    expected = reference_outputs(folder, torch.float32)
    config: dict[str, Any] = {"model": heads[parallel], "num_speculative_tokens": 7}
    for speculative in (None, config):
        outputs = engine_outputs(folder, speculative, dtype=torch.float32)
        pairs = zip(PROMPTS, outputs, expected, strict=True)
        gaps = [gap_of_first_difference(folder, p, o, e) for p, o, e in pairs]
        assert max(gaps) < NEAR_TIE, f"{sum(gap > 0 for gap in gaps)} outputs differ: {gaps}"


def test_a_difference_is_measured(folder: Path) -> None:
    right = reference_outputs(folder, torch.float32)[0]
    wrong = [*right[:5], (right[5] + 1) % 320, *right[6:]]
    assert gap_of_first_difference(folder, PROMPTS[0], right, right) == 0
    assert gap_of_first_difference(folder, PROMPTS[0], right, wrong) > NEAR_TIE
