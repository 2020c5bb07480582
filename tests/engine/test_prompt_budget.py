"""Chunks of prompts against a limit of inter-token latency, on a clock that tests move."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.engine.prompt_budget import FIRST_TOKENS, MIN_SHARE, MIN_TOKENS, PromptBudget


class Machine:
    """Takes step_ms for a step, and token_ms for each prompt token in it."""

    def __init__(self, step_ms: float, token_ms: float, pass_ms: float = 0.0) -> None:
        self.step_ms, self.token_ms, self.pass_ms = step_ms, token_ms, pass_ms
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def run(self, num_tokens: int) -> float:
        """Milliseconds of a step."""
        prompts_ms = self.pass_ms + num_tokens * self.token_ms if num_tokens else 0.0
        self.now_s += (self.step_ms + prompts_ms) / 1000
        return self.step_ms + prompts_ms


def drive(budget: PromptBudget, machine: Machine, num_steps: int, prompts: bool = True) -> float:
    """The time of the last of some steps."""
    taken = 0.0
    for _ in range(num_steps):
        tokens = budget(decoding=True) if prompts else 0
        if tokens:
            budget.ran(tokens)
        taken = machine.run(tokens)
        budget.gave()
    return taken


def test_a_limit_of_tokens_holds_for_every_step() -> None:
    machine = Machine(10.0, 0.001)
    budget = PromptBudget(100.0, 4096, machine.clock)
    drive(budget, machine, 20)
    assert budget(decoding=True) == budget(decoding=False) == 4096
    budget.limit(2048)
    assert budget(decoding=True) == budget(decoding=False) == 2048
    budget.limit(3000)
    assert budget(decoding=False) == 2048


@settings(deadline=None, max_examples=200)
@given(
    limit_ms=st.floats(5, 500),
    share=st.floats(0.05, 0.79),
    token_ms=st.floats(0.002, 2),
    pass_ms=st.floats(0, 3),
)
def test_steps_come_close_to_the_limit(
    limit_ms: float, share: float, token_ms: float, pass_ms: float
) -> None:
    """Whatever tokens cost: neither later than it, nor with smaller chunks than it allows."""
    machine = Machine(share * limit_ms, token_ms, pass_ms)
    budget = PromptBudget(limit_ms, 4096, machine.clock)
    drive(budget, machine, 3, prompts=False)
    taken = drive(budget, machine, 60)
    tokens = budget(decoding=True)
    assert taken <= limit_ms * 1.05 or tokens == MIN_TOKENS
    assert taken >= limit_ms * 0.9 - token_ms or tokens == 4096


def test_without_a_limit_and_without_decoding_chunks_are_whole() -> None:
    machine = Machine(10, 1)
    free = PromptBudget(0, 4096, machine.clock)
    drive(free, machine, 4)
    assert free(decoding=True) == 4096
    bound = PromptBudget(50, 4096, machine.clock)
    assert bound(decoding=True) == FIRST_TOKENS
    drive(bound, machine, 4)
    assert bound(decoding=False) == 4096 > bound(decoding=True)
    assert PromptBudget(50, 100, machine.clock)(decoding=True) == 100


def test_one_slow_step_and_a_pause_change_nothing() -> None:
    machine = Machine(10, 0.1)
    budget = PromptBudget(60, 4096, machine.clock)
    drive(budget, machine, 5, prompts=False)
    drive(budget, machine, 20)
    before = budget(decoding=True)
    machine.token_ms, usual = 50.0, machine.token_ms
    drive(budget, machine, 1)  # it compiles
    machine.token_ms = usual
    assert budget(decoding=True) == pytest.approx(before, rel=0.05)
    machine.now_s += 1000
    budget.pause()
    machine.now_s += 1000
    drive(budget, machine, 2)
    assert budget(decoding=True) == pytest.approx(before, rel=0.05)


def test_a_limit_that_no_chunk_can_meet_is_told_once() -> None:
    machine = Machine(30, 0.02)
    budget = PromptBudget(20, 4096, machine.clock)
    drive(budget, machine, 3, prompts=False)
    with pytest.warns(
        UserWarning, match="max_itl_ms is 20, but a step without prompts takes 30 ms"
    ):
        drive(budget, machine, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = drive(budget, machine, 20)
    assert taken == pytest.approx(30 * (1 + MIN_SHARE), rel=0.01)
    machine.token_ms = 5.0
    drive(budget, machine, 20)
    assert budget(decoding=True) == MIN_TOKENS


def test_an_engine_cuts_prompts_while_others_decode(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt that comes later: in one chunk without a limit, in several with one."""
    monkeypatch.setattr("peagle.engine.prompt_budget.FIRST_TOKENS", 64)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    long = [5 + i % 200 for i in range(200)]

    def chunks_of(max_itl_ms: float) -> tuple[list[int], list[Any]]:
        llm = LLM(target_folder, dtype="float64", max_itl_ms=max_itl_ms)
        engine, seen, machine = llm.engine, [], Machine(10, 0.5)
        budget = engine.scheduler.prompt_budget
        monkeypatch.setattr(budget, "_clock", machine.clock)
        ran, gave = budget.ran, budget.gave

        def counted(num_tokens: int) -> None:
            seen.extend([num_tokens] * (num_tokens > 0))
            ran(num_tokens)

        def timed() -> None:
            machine.run(budget._num_tokens)
            gave()

        monkeypatch.setattr(budget, "ran", counted)
        monkeypatch.setattr(budget, "gave", timed)
        sequences = [engine.add_request([3, 4, 5], params)]
        for _ in range(5):
            engine.step()
        sequences.append(engine.add_request(long, params))
        while engine.has_unfinished:
            engine.step()
        return seen, [s.output_token_ids for s in sequences]

    whole, expected = chunks_of(0)
    assert whole == [3, 200]
    cut, found = chunks_of(50)
    assert found == expected
    # FIRST_TOKENS, then (50 - 10) / 0.5, then the rest.
    assert cut == [3, 64, 80, 56]
