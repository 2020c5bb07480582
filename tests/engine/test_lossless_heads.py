"""Whatever the shape of the head, greedy output equals transformers' own, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.greedy import engine_outputs, reference_outputs

K = 5
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


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_is_lossless(
    target_folder: Path, head_folders: Callable[..., Path], name: str, parallel: bool
) -> None:
    head = head_folders(parallel=parallel, **HEADS[name])
    config = {"model": str(head), "num_speculative_tokens": K}
    outputs = engine_outputs(target_folder, config, right_share=0.5)
    assert outputs == reference_outputs(target_folder)
