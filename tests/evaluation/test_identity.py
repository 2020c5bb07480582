"""Output against transformers' own generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig
from peagle.engine.placement import load_target
from peagle.evaluation.certify.reference import Reference, TargetReference, first_difference
from peagle.evaluation.engine_backend import build_llms
from peagle.evaluation.prompts import load_prompt_set

LOGITS = torch.tensor([[0.0, 1.0, 0.5], [2.0, 2.0 - 5e-5, 0.0], [1.0, 0.0, 3.0]])
REFERENCE = Reference([1, 0, 2], LOGITS)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 0, 2], None),
        ([1, 1, 0], (1, 0, 1, True)),  # nearly tied with the reference's choice
        ([1, 2, 2], (1, 0, 2, False)),  # its top two are tied, but this is the third
        ([2, 0, 2], (0, 1, 2, False)),
        ([1, 0], (2, 2, None, False)),
        ([1, 0, 2, 2], (3, None, 2, False)),
    ],
)
def test_first_difference(
    tokens: list[int], expected: tuple[int, int | None, int | None, bool] | None
) -> None:
    found = first_difference("p", tokens, REFERENCE)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.position, found.reference_token, found.token, found.is_near_tie) == expected


def test_the_engine_gives_what_transformers_generates(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    params = SamplingParams(max_tokens=30)
    config = {"model": str(head_folders()), "num_speculative_tokens": 3}
    llm = LLM(target_folder, dtype="float64", speculative_config=config)
    (output,) = llm.generate("def f(x):", params)
    model = TargetReference(target_folder, torch.float64)
    reference = model.greedy(output.prompt_token_ids, params)
    assert reference.logits_NV.argmax(-1).tolist() == reference.token_ids
    assert first_difference("p", output.token_ids, reference) is None


@pytest.mark.slow
def test_bundled_pair_equals_transformers_in_float64() -> None:
    # All prompts: benchmarks/identity.py.
    prompts = load_prompt_set("humaneval", 2) + load_prompt_set("mt_bench", 1)
    params = SamplingParams(max_tokens=48)
    target = load_target(BUNDLED_TARGET, EngineConfig(dtype="float64", device="cpu"))
    heads = (BUNDLED_EAGLE3, BUNDLED_PEAGLE)
    configs = {folder.name: SpeculativeConfig(model=str(folder)) for folder in heads}
    llms = build_llms(target, {"plain": None, **configs})
    texts = [prompt.text for prompt in prompts]
    outputs = {name: llm.generate(texts, params) for name, llm in llms.items()}
    model = TargetReference(BUNDLED_TARGET, torch.float64)
    for i, prompt in enumerate(prompts):
        reference = model.greedy(outputs["plain"][i].prompt_token_ids, params)
        for name in llms:
            assert first_difference(prompt.id, outputs[name][i].token_ids, reference) is None, name
    for folder in heads:
        assert sum(output.stats.num_accepted_tokens for output in outputs[folder.name]) > 0
