"""What the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.training import history
from peagle.training.curves import draw_curves


@pytest.fixture(autouse=True)
def _undrawn() -> Iterator[None]:
    """Pictures are left out: each takes longer than a tiny run needs for all its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "draw_curves", lambda *_: True)
        yield


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, as they are outside of tests."""
    monkeypatch.setattr(history, "draw_curves", draw_curves)


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
