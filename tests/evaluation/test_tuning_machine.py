"""Steps of the engine itself, timed: what runs in them, and that nothing is left behind."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config import SamplingParams
from peagle.engine.stats import GraphTimes
from peagle.errors import UserError
from peagle.evaluation.journal import TUNE_LOG, Journal
from peagle.evaluation.prompts import Prompt
from peagle.evaluation.tuning import machine as machine_module
from peagle.evaluation.tuning.acceptance import AcceptanceByK, measure_acceptance
from peagle.evaluation.tuning.machine import (
    WARM_UP_STEPS,
    CostPoint,
    DecodeCost,
    EngineMachine,
    contexts,
)
from peagle.evaluation.tuning.tune import Grid, measure_costs
from peagle.llm import LLM
from peagle.models.target import TargetModel, load_tokenizer

SETS = {"mine": [Prompt("a", ("def f(x):", "and")), Prompt("b", ("class Stack:\n    pass",))]}
STEPS, CONTEXT = 3, 20


def make(target: TargetModel, head: Path, **options: Any) -> EngineMachine:
    given: dict[str, Any] = {"context": CONTEXT, "steps": STEPS, "temperature": 0.0, **options}
    acceptance = AcceptanceByK({3: [1.0, 0.5, 0.0]})
    prompts = contexts(target, SETS, 3, given["context"])
    return EngineMachine(target, str(head), acceptance, (1, 2, 3), prompts, **given)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_timed(
    target: TargetModel,
    head_folders: Callable[..., Path],
    parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = machine_module.time_steps
    rows: list[int] = []

    def watched(llm: LLM, steps: int) -> DecodeCost:
        run = llm.engine.runner.run

        def counting(chunks: list[Any], *others: Any) -> Any:
            rows.append(sum(chunk.num_tokens + chunk.num_draft_tokens for chunk in chunks))
            return run(chunks, *others)

        llm.engine.runner.run = counting  # type: ignore[method-assign]
        try:
            return timed(llm, steps)
        finally:
            llm.engine.runner.run = run  # type: ignore[method-assign]

    monkeypatch.setattr(machine_module, "time_steps", watched)
    machine = make(target, head_folders(parallel=parallel))
    for point in (CostPoint(1, 0), CostPoint(3, 0), CostPoint(2, 1), CostPoint(3, 3)):
        rows.clear()
        cost = machine.measure(point)
        # Every timed step is one pass over the newest token and K drafts of every sequence.
        assert rows[-STEPS:] == [point.batch * (point.k + 1)] * STEPS
        assert 0 < cost.target_s < cost.seconds
        assert (cost.draft_s > 0) == (point.k > 0)
        assert cost.rest_s == pytest.approx(cost.seconds - cost.target_s - cost.draft_s, abs=1e-3)
        llm = machine._llm(point.k)
        assert not llm.engine.has_unfinished and not llm.requests.has_unfinished
        drafting = llm.engine.drafting
        assert "timed_call" not in f"{llm.engine.runner.run}{drafting and drafting.draft}"
    # As synthetic as it was told: of two drafts the first always passes, the second half the time.
    machine.measure(CostPoint(3, 2))
    stats = machine._llm(2).engine.speculation_stats
    assert stats.num_accepted_tokens_per_pos[0] == stats.num_drafts > WARM_UP_STEPS * 3
    assert 0 < stats.num_accepted_tokens_per_pos[1] < stats.num_drafts


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_steps_of_graphs(
    target_folder: Path, head_folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.engine_plan.runs_as_graphs", lambda *parts: True)
    target = TargetModel.load(target_folder, dtype=torch.float32)
    monkeypatch.setattr(machine_module, "WARM_UP_STEPS", 0)
    acceptance = AcceptanceByK({1: [1.0]})
    options: dict[str, Any] = {"context": 3, "steps": 1, "temperature": 0.0}
    head = str(head_folders(parallel=True))
    machine = EngineMachine(target, head, acceptance, (1,), contexts(target, SETS, 1, 3), **options)
    for _ in range(2):
        assert machine.measure(CostPoint(1, 1)).seconds > 0
        engine = machine._llm(1).engine
        assert engine._pipeline is not None
        assert not engine.has_unfinished
        assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_device_parts() -> None:
    before = {2: GraphTimes(10, 1.0, 0.1, 0.5)}
    after = {2: GraphTimes(14, 1.8, 0.18, 0.9), 4: GraphTimes(1, 0.3, 0.02, 0.1)}
    target_s, draft_s = machine_module.device_parts(before, after) or (0.0, 0.0)
    assert target_s == pytest.approx((0.8 + 0.08 + 0.3 + 0.02) / 5)
    assert draft_s == pytest.approx((0.4 + 0.1) / 5)
    assert machine_module.device_parts(before, before) is None


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    time = machine_module.time
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert machine_module.clock_of(cpu) is time.thread_time
    assert machine_module.clock_of(cuda) is time.perf_counter
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert machine_module.clock_of(cpu) is time.perf_counter


def test_a_context_that_is_too_long(target: TargetModel, head_folders: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"target and head go to 256\. Lower --context or --steps"):
        make(target, head_folders(parallel=True), context=230)
    short = head_folders(parallel=True, max_position_embeddings=48)
    with pytest.raises(UserError, match=r"target and head go to 48\."):
        make(target, short)


def test_contexts_are_the_prompts_begun_at_many_places(target: TargetModel) -> None:
    whole = load_tokenizer(target.name).encode("def f(x):\nand\nclass Stack:\n    pass")
    found = contexts(target, SETS, 4, 50)
    for number, ids in enumerate(found):
        start = number * len(whole) // 4
        assert ids == [whole[(start + i) % len(whole)] for i in range(50)]


@pytest.mark.slow
def test_acceptance_of_a_head(
    target: TargetModel, head_folders: Callable[..., Path], tmp_path: Path
) -> None:
    head, params = head_folders(parallel=True), SamplingParams(max_tokens=12, seed=0)

    def measure(journal: Journal) -> AcceptanceByK:
        return measure_acceptance(
            target, str(head), (1, 3), SETS, params, journal, chat=False, kv_cache_gib=0.01
        )

    found = measure(Journal(tmp_path / TUNE_LOG, {}))
    # The same from the engine's own counters, turn by turn.
    for k in (1, 3):
        config = {"model": str(head), "num_speculative_tokens": k}
        llm = LLM(model=target, speculative_config=config)
        for prompt in SETS["mine"]:
            text = prompt.text
            for turn in range(len(prompt.turns)):
                (output,) = llm.generate(text, params)
                if turn + 1 < len(prompt.turns):
                    text = f"{text}{output.text}\n\n{prompt.turns[turn + 1]}"
        stats = llm.engine.speculation_stats
        assert list(found.rates(k)) == pytest.approx((stats.acceptance_per_pos + [0.0] * k)[:k])
    assert measure(Journal(tmp_path / TUNE_LOG, {})) == found


@pytest.mark.slow
def test_released_engines_are_gone(target: TargetModel, head_folders: Callable[..., Path]) -> None:
    machine = make(target, head_folders(parallel=True))
    machine.measure(CostPoint(1, 2))
    engine = weakref.ref(machine._llm(2).engine)
    cache = weakref.ref(target.kv_caches[0])
    machine._llms.clear()
    machine_module.release(target)
    assert engine() is None
    assert cache() is None
    assert machine.measure(CostPoint(1, 2)).seconds > 0


@pytest.mark.slow
def test_one_engine_at_a_time_where_memory_is_dear(
    target: TargetModel, head_folders: Callable[..., Path]
) -> None:
    machine = make(target, head_folders(parallel=False))
    machine.changes_k_cheaply = False
    held: list[list[int]] = []
    grid = Grid((1, 3), (1, 2, 3))
    costs = measure_costs(
        machine.measure,
        grid,
        2,
        Journal(None, {}),
        lambda point, there: held.append([*machine._llms]),
        interleave_k=False,
    )
    assert held == [[k] for k in (0, 1, 2, 3) for _ in range(4)]
    assert set(costs.by_point) == set(grid.points)
