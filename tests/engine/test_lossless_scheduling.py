"""How requests are batched and where their KV lies does not change greedy output, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from peagle.kernels.expand import slot_mapping
from tests.engine.greedy import NEW_TOKENS, PROMPTS, engine_outputs, reference_outputs

SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "two at a time, small blocks": {"max_num_seqs": 2, "block_size": 3},
    "one slot a block": {"block_size": 1},
    "one block a sequence": {"block_size": 256},
    "few blocks": {"num_kv_blocks": 9, "block_size": 16},
    "prompts in several passes": {"max_num_batched_tokens": 45},
    "context just long enough": {"max_model_len": max(map(len, PROMPTS)) + NEW_TOKENS},
}


@pytest.fixture(scope="module", params=["plain", "peagle", "eagle3", "ngram"])
def speculative(
    request: pytest.FixtureRequest, head_folders: Callable[..., Path]
) -> dict[str, Any] | None:
    if request.param == "plain":
        return None
    if request.param == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 4}
    head = head_folders(parallel=request.param == "peagle")
    return {"model": str(head), "num_speculative_tokens": 4}


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduling_does_not_change_output(
    target_folder: Path, speculative: dict[str, Any] | None, name: str
) -> None:
    share = 0.6 if speculative and "model" in speculative else 0.0
    outputs = engine_outputs(target_folder, speculative, right_share=share, **SCHEDULES[name])
    assert outputs == reference_outputs(target_folder)


def test_a_wrong_slot_is_noticed(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when keys and values are written one slot too low."""

    def off_by_one(*args: Any) -> Tensor:
        return (slot_mapping(*args) - 1).clamp_min(0)

    monkeypatch.setattr("peagle.engine.model_runner.slot_mapping", off_by_one)
    assert engine_outputs(target_folder, None) != reference_outputs(target_folder)
