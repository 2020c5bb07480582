"""Greedy output with speculation equals transformers' own generation, in float64 to the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from tests.conftest import CONFIGS, make_drafter, make_target_folder

PROMPTS = [[5, 9, 200, 31], [17] * 40, [3], list(range(20, 95)), [8, 8, 9, 9, 8, 8, 9, 9, 8, 8]]
NEW_TOKENS = 40


def reference_outputs(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def engine_outputs(folder: Path, speculative: dict | None, **options: int) -> list[list[int]]:
    llm = LLM(folder, speculative_config=speculative, dtype="float64", **options)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_plain_and_drafted_output_equals_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_target_folder(tmp_path / "target", kind)
    expected = reference_outputs(folder)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "outputs must differ"
    assert engine_outputs(folder, None) == expected
    for parallel in (True, False):
        head = tmp_path / f"head-{parallel}"
        save_drafter(head, make_drafter(TargetModel.load(folder), parallel=parallel))
        for k in (1, 2, 7):
            config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
            assert engine_outputs(folder, config) == expected, (kind, parallel, k)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab_size": 100},
        {"hidden_size": 48, "num_attention_heads": 2, "num_kv_heads": 1, "head_dim": 16},
        {"num_layers": 1, "norm_before_residual": True},
        {"num_layers": 4, "norm_before_fc": True},
        {"fc_norm": True, "attention_bias": True},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_kind_of_head_is_lossless(
    target_folder: Path, head_folders: Callable[..., Path], options: dict, parallel: bool
) -> None:
    head = head_folders(parallel=parallel, **options)
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    assert engine_outputs(target_folder, config) == reference_outputs(target_folder)


def test_prompt_lookup_is_lossless_and_accepts(target_folder: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    assert engine_outputs(target_folder, config) == reference_outputs(target_folder)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "block_size": 3},
        {"num_kv_blocks": 9, "block_size": 16},
    ],
    ids=str,
)
def test_scheduling_does_not_change_output(
    target_folder: Path, head_folders: Callable[..., Path], options: dict
) -> None:
    config = {"model": str(head_folders()), "num_speculative_tokens": 4}
    assert engine_outputs(target_folder, config, **options) == reference_outputs(target_folder)
