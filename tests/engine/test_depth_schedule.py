"""K follows the number of sequences that run together, and outputs stay what they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from tests.engine.engines import PROMPTS

SCHEDULE = [[1, 1, 4], [2, 2, 3], [3, 4, 1]]
K_OF = {1: 4, 2: 3, 3: 1, 4: 1}
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 30, 12, 20)]


def config_of(method: str, head_folders: Callable[..., Path], schedule: Any) -> dict[str, Any]:
    source = {"method": "ngram"}
    if method != "ngram":
        source = {"model": str(head_folders(parallel=method == "peagle"))}
    keys = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": schedule}
    return {**source, **keys}


def watch(llm: LLM) -> list[tuple[int, int]]:
    """(sequences that run, drafts that one of them verified) of every step and sequence."""
    seen: list[tuple[int, int]] = []
    engine = llm.engine
    step = engine.step

    def watched() -> Any:
        outputs = step()
        running = len(engine.scheduler.running)
        seen.extend((running, len(o.sequence.drafts)) for o in outputs if running)
        return outputs

    engine.step = watched
    return seen


@pytest.mark.parametrize("method", ["ngram", "eagle3", "peagle"])
def test_depth_follows_the_load(
    target_folder: Path, head_folders: Callable[..., Path], method: str
) -> None:
    plain = LLM(target_folder, dtype="float64", max_num_seqs=4).generate(PROMPTS, PARAMS)
    config = config_of(method, head_folders, SCHEDULE)
    llm = LLM(target_folder, speculative_config=config, dtype="float64", max_num_seqs=4)
    seen = watch(llm)
    found = llm.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    # The last step of a sequence drafts nothing, or less; one that another's end follows keeps K.
    assert all(drafts <= K_OF[max(running - 1, 1)] for running, drafts in seen)
    if method != "ngram":
        most = {n: max((d for r, d in seen if r == n), default=0) for n in (1, 4)}
        assert most == {1: 4, 4: 1}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_steps_of_graphs_have_a_depth_each(
    target_folder: Path, head_folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "peagle.engine.engine.runs_as_graphs", lambda *parts: not parts[1].enforce_eager
    )
    config = config_of("peagle", head_folders, [[1, 1, 3], [2, 2, 1]])
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64}
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 8)]
    plain = LLM(target_folder, **options).generate(PROMPTS[:2], params)
    llm = LLM(target_folder, speculative_config=config, **options)
    found = llm.generate(PROMPTS[:2], params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    pipeline = llm.engine._pipeline
    assert pipeline is not None
    assert {size for size, _ in pipeline.runner._graphs} == {(2, 1), (1, 3)}
