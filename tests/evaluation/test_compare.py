"""Several engines on one target, timed runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.evaluation.engine_backend import build, load_target, measure
from peagle.llm import StreamChunk
from peagle.models.target import TargetModel

PROMPTS = ["def f(x):", "import", "class Stack:\n    "]
PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture
def llms(target_folder: Path, head_folders: Callable[..., Path]) -> dict[str, LLM]:
    target = load_target(target_folder, dtype="float64", device="cpu")
    heads = {"peagle": head_folders(parallel=True), "eagle3": head_folders(parallel=False)}
    configurations: dict[str, SpeculativeConfig | None] = {
        name: SpeculativeConfig(model=str(folder), num_speculative_tokens=3)
        for name, folder in heads.items()
    }
    configurations["ngram"] = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    return build(target, {"plain": None, **configurations}, max_num_seqs=2)


def test_engines_on_one_target_do_not_disturb_each_other(
    llms: dict[str, LLM], target_folder: Path
) -> None:
    alone = LLM(target_folder, dtype="float64").generate(PROMPTS, PARAMS)
    expected = [output.token_ids for output in alone]
    for name in [*llms, *llms]:
        run = measure(llms[name], PROMPTS, PARAMS)
        assert run.token_ids == expected, name
        assert run.tokens_per_s > 0


def test_engines_on_one_target_may_even_take_turns_by_the_step(llms: dict[str, LLM]) -> None:
    expected = [llm.generate(PROMPTS, PARAMS) for llm in llms.values()]
    streams = [llm.stream(PROMPTS, PARAMS) for llm in llms.values()]
    found: list[dict[int, list[int]]] = [{} for _ in streams]
    running = list(range(len(streams)))
    while running:
        for i in list(running):
            chunk = next(streams[i], None)
            if chunk is None:
                running.remove(i)
            elif chunk.output is not None:
                found[i][chunk.index] = chunk.output.token_ids
    for ours, theirs in zip(found, expected, strict=True):
        assert [ours[i] for i in range(len(PROMPTS))] == [output.token_ids for output in theirs]


def test_measure_counts_steps_and_leaves_the_watcher_out(llms: dict[str, LLM]) -> None:
    chunks: list[StreamChunk] = []

    def watch(chunk: StreamChunk) -> None:
        chunks.append(chunk)
        time.sleep(0.02)

    start = time.perf_counter()
    run = measure(llms["ngram"], PROMPTS, PARAMS, watch)
    passed = time.perf_counter() - start
    assert run.seconds < passed - 0.02 * len(chunks)
    assert len(run.completions) == len(PROMPTS)
    for completion in run.completions:
        output, steps = completion.output, completion.steps
        assert sum(step.num_tokens for step in steps) == len(output.token_ids)
        assert steps[0].num_drafted == 0
        assert sum(step.num_drafted for step in steps) == output.stats.num_draft_tokens
        assert sum(step.num_drafted > 0 for step in steps) == output.stats.num_drafts
    assert run.num_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert run.stats.num_accepted_tokens > 0


def test_engines_on_one_card_share_what_is_free(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plans with an equal part of what the others before it have left."""
    free, total = 2**28, 2**28 + 2**26
    plan: list[tuple[int, int]] = []

    def card(device: torch.device) -> tuple[int, int]:
        return free, total

    make = LLM.__init__

    def watched(self: LLM, **options: Any) -> None:
        nonlocal free
        share = options["gpu_memory_utilization"]
        given = int(total * share) - (total - free)
        make(self, **{**options, "num_kv_blocks": 2})
        plan.append((given, free))
        free -= given

    monkeypatch.setattr("peagle.evaluation.engine_backend.free_and_total", card)
    monkeypatch.setattr(LLM, "__init__", watched)
    target = load_target(target_folder, dtype="float64", device="cpu")
    build(target, dict.fromkeys("abc"), gpu_memory_utilization=0.8)
    shares = [given for given, _ in plan]
    assert max(shares) - min(shares) <= len(shares)
    assert 0 <= int(0.8 * total) - (total - free) <= len(shares)
    assert free > 0


def test_load_target(target_folder: Path) -> None:
    target = load_target(target_folder, dtype="bfloat16", device="auto")
    assert isinstance(target, TargetModel)
    assert target.dtype == torch.bfloat16
