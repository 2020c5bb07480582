"""Output against transformers' own generation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig
from peagle.engine.placement import load_target
from peagle.evaluation.certify.reference import (
    Reference,
    TargetReference,
    first_difference,
    load_reference,
)
from peagle.evaluation.engine_backend import build_llms
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.target import TargetModel
from tests.models.test_packed_loading import dense, distance, logits, mixture, write_checkpoint

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


@pytest.mark.filterwarnings("ignore:The target is quantised", "ignore:The target's weights are")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [dense, mixture])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_reference_has_the_quantised_weights(
    tmp_path: Path, make: Callable[[], Any], quantization: Any, dtype: torch.dtype
) -> None:
    model = make()
    if quantization is None:
        write_checkpoint(tmp_path, "fp8 blocks", model)
    else:
        model.save_pretrained(tmp_path)
    reference = load_reference(tmp_path, dtype, quantization=quantization)
    target = TargetModel.load(tmp_path, dtype=dtype, quantization=quantization)
    assert distance(logits(reference), logits(model)) < (5e-2 if quantization else 1e-6)
    weights = dict(target.model.named_parameters())
    assert all(torch.equal(weights[name], own) for name, own in reference.named_parameters())


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
