"""What the tests of training share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peagle import LLM, SamplingParams


@pytest.fixture(scope="session")
def responses(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses that the tiny target generated, as JSONL."""
    llm = LLM(target_folder, max_num_seqs=48)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 300, (6,), generator=generator).tolist() for _ in range(48)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    path = tmp_path_factory.mktemp("data") / "responses.jsonl"
    with path.open("w") as lines:
        for prompt, output in zip(prompts, outputs, strict=True):
            row = {"prompt_token_ids": prompt, "response_token_ids": output.token_ids}
            lines.write(json.dumps(row) + "\n")
    return path
