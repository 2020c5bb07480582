"""Prompts that wait for others, on a clock that tests move."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.config import EngineConfig
from peagle.engine.block_manager import BlockManager
from peagle.engine.gathering import LOSS_SHARE, MAX_WAITING_TOKENS, Gathering
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence
from peagle.engine.step.graph_runner import GraphRunner
from peagle.engine.step.pipeline import Pipeline
from peagle.errors import UserError
from tests.engine.step.test_pipeline import Steps
from tests.engine.test_schedules import KINDS, run_machine

STEP_MS, ADDED_MS, PLACES = 2.0, 3.0, 64


class Clock:
    """Time that stands still until a test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def sequence(number: int, num_tokens: int = 8, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=999, ignore_eos=True)
    return Sequence(number, [1] * num_tokens, params, number, frozenset(), priority)


def scheduler(clock: Clock, limit_ms: float) -> Scheduler:
    """A scheduler that has measured both kinds of steps."""
    made = Scheduler(
        BlockManager(4096, 16),
        max_num_seqs=PLACES,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        num_lookahead_slots=8,
    )
    made._gathering = Gathering(limit_ms, clock)
    for _ in range(9):
        made.prompt_budget._step_s.append(STEP_MS / 1000)
        made.prompt_budget._added_s.append(ADDED_MS / 1000)
    return made


class Server:
    """A closed loop: requests of random lengths, of which `num_clients` are always under way."""

    def __init__(self, limit_ms: float, num_clients: int = PLACES, seed: int = 0) -> None:
        self.clock, self.dice = Clock(), random.Random(seed)
        self.scheduler = scheduler(self.clock, limit_ms)
        self.left: dict[Sequence, int] = {}  # steps to the end of each
        self.came_s: dict[Sequence, float] = {}
        self.waits_ms: list[float] = []
        self.num_steps = self.num_prompt_steps = self.num_prompts = 0
        for _ in range(num_clients):
            self.add()

    def add(self) -> None:
        one = sequence(self.num_prompts, self.dice.randrange(8, 64))
        self.num_prompts += 1
        self.left[one], self.came_s[one] = self.dice.randrange(1, 120), self.clock.now_s
        self.scheduler.add(one)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        for one in plan.admitted:
            self.waits_ms.append(1000 * (self.clock.now_s - self.came_s[one]))
            one.num_computed_tokens = one.prefill_end
        self.num_steps += 1
        self.num_prompt_steps += bool(plan.prefill)
        self.clock.now_s += (STEP_MS + ADDED_MS * bool(plan.prefill)) / 1000
        for chunk in plan.decode:
            self.left[chunk.sequence] -= 1
            if not self.left[chunk.sequence]:
                self.scheduler.retire(chunk.sequence)
                self.add()

    def speed(self, num_steps: int) -> float:
        """Requests a second."""
        for _ in range(num_steps):
            self.step()
        return (self.num_prompts - len(self.scheduler.running)) / self.clock.now_s


def test_a_busy_server_begins_prompts_together_and_is_faster() -> None:
    none, some = Server(0.0), Server(15.0)
    assert some.speed(2000) > 1.3 * none.speed(2000)
    assert some.num_prompt_steps < none.num_prompt_steps / 3
    assert max(none.waits_ms) == 0
    longest_step_ms = STEP_MS + ADDED_MS
    assert 2 < sum(some.waits_ms) / len(some.waits_ms) < 12
    assert max(some.waits_ms) < 15 + longest_step_ms


def test_a_lone_prompt_does_not_wait() -> None:
    """Nothing else comes: to wait would save nothing."""
    server = Server(15.0, num_clients=0)
    for _ in range(8):
        server.add()
    for one in server.left:
        server.left[one] = 10_000
    server.step()
    for _ in range(12):
        server.clock.now_s += 1.0
        one = sequence(1000 + server.num_prompts)
        server.num_prompts += 1
        server.left[one], server.came_s[one] = 10_000, server.clock.now_s
        server.scheduler.add(one)
        server.step()
    assert server.waits_ms == [0.0] * 20


@settings(deadline=None, max_examples=150)
@given(
    limit_ms=st.floats(1, 50),
    num_empty=st.integers(1, 64),
    num_decoding=st.integers(1, 256),
    added_ms=st.floats(0.01, 50),
    step_ms=st.floats(0.1, 20),
)
def test_a_wait_ends_at_the_limit_or_when_it_has_cost_its_share(
    limit_ms: float, num_empty: int, num_decoding: int, added_ms: float, step_ms: float
) -> None:
    clock = Clock()
    gathering = Gathering(limit_ms, clock)
    gathering.began(16)
    waited_ms = 0.0
    while gathering.waits(num_empty, num_decoding, 10, added_ms / 1000):
        assert waited_ms < limit_ms * (1 + 1e-6)
        assert waited_ms * num_empty / num_decoding <= LOSS_SHARE * added_ms * (1 + 1e-6)
        clock.now_s += step_ms / 1000
        waited_ms += step_ms
    assert not gathering.waits(num_empty, num_decoding, 10, added_ms / 1000)


def after_a_burst(**changes: Any) -> bool:
    clock = Clock()
    gathering = Gathering(changes.pop("limit_ms", 15.0), clock)
    gathering.began(changes.pop("begun", 16))
    clock.now_s += changes.pop("later_s", 0.001)
    asked = {"num_empty": 1, "num_decoding": 63, "num_tokens": 10, "added_s": 0.003}
    return gathering.waits(**{**asked, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"limit_ms": 0.0},
        {"num_empty": 0},
        {"num_decoding": 0},
        {"added_s": 0.0},
        {"num_tokens": MAX_WAITING_TOKENS + 1},
        {"later_s": 60.0},
        {"begun": 15},
    ],
    ids=str,
)
def test_what_lets_no_prompt_wait(changes: dict[str, Any]) -> None:
    assert after_a_burst()
    assert not after_a_burst(**changes)


CHANGES = ["priority", "preempted", "long", "prompt under way", "a full step", "plan"]


@pytest.mark.parametrize("change", CHANGES)
def test_which_prompts_do_not_wait(change: str) -> None:
    clock = Clock()
    made = scheduler(clock, 15.0)
    for number in range(40):
        made.add(sequence(number))
    for one in made.schedule().admitted:
        one.num_computed_tokens = one.prefill_end
    made.add(sequence(90, *(600,) if change == "long" else ()))
    assert change == "long" or made.holds(40)
    if change == "priority":
        made.add(sequence(91, priority=-1))
    elif change == "preempted":
        made.waiting[0].num_preemptions = 1
    elif change == "a full step":
        made.max_prompts = 1
    elif change == "prompt under way":
        made.running[0].num_computed_tokens -= 1
    assert made.holds(40) is (change == "plan")
    plan = made.schedule()
    assert bool(plan.admitted) is not (change == "plan")
    assert made.is_holding is (change == "plan")
    if made.is_holding:
        clock.now_s += 0.016
        assert len(made.schedule().admitted) == 1 and not made.is_holding


# ---- in an engine ----

PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 14, 9, 6, 12, 7, 4) * 2]


@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
def test_outputs_are_the_same_and_a_held_prompt_begins(
    target_folder: Path, head_folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on without the scheduler while prompts wait, and every prompt begins at last."""
    pytest.importorskip("triton")
    monkeypatch.setattr(GraphRunner, "time_step", lambda self, rows, n: 1.0)
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 64}
    head = {"model": str(head_folders(parallel=True)), "num_speculative_tokens": 2}
    llm = LLM(target_folder, speculative_config=head, max_num_seqs=3, **options)
    if llm.engine._pipeline is None:
        pytest.skip("needs the interpreter")
    asked: list[bool] = []

    def waits(self: Gathering, num_empty: int, num_decoding: int, *_: object) -> bool:
        assert num_empty and num_decoding
        asked.append(len(asked) % 4 < 3)
        return asked[-1]

    went_on: list[bool] = []

    def go_on(self: Pipeline, go_on: Callable[[Pipeline], bool] = Pipeline.go_on) -> bool:
        is_holding, goes_on = llm.engine.scheduler.is_holding, go_on(self)
        went_on.append(is_holding and goes_on)
        return goes_on

    monkeypatch.setattr(Pipeline, "go_on", go_on)
    monkeypatch.setattr(Gathering, "waits", waits)
    prompts = [[5 + i, 9, 200, 31][: 2 + i % 3] for i in range(len(PARAMS))]
    found = llm.generate(prompts, PARAMS)
    plain = LLM(target_folder, enforce_eager=True, **options).generate(prompts, PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert len(asked) > 4 and not all(asked)
    assert any(went_on), "a step runs behind the last one while prompts wait"
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


def hold_at_random(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let prompts wait at random; returns what steps found that went on without the scheduler.

    None goes on past prompts that could begin unless they wait: it asks each time.
    """
    answers: dict[Gathering, list[bool]] = {}
    passed: list[bool] = []

    def waits(self: Gathering, num_empty: int, num_decoding: int, *_: object) -> bool:
        assert num_empty > 0 < num_decoding
        given = answers.setdefault(self, [])
        given.append(random.Random(len(given)).random() < 0.8)
        return given[-1]

    def go_on(self: Pipeline, go_on: Callable[[Pipeline], bool] = Pipeline.go_on) -> bool:
        scheduler = self._scheduler
        num_empty = scheduler.max_num_seqs - len(scheduler.running)
        first = next((s for s in scheduler.waiting if num_empty and s.can_begin), None)
        slots = 0 if first is None else scheduler.slots_for(len(first))
        num_reserved = len(scheduler.running)
        has_room = first and scheduler.blocks.can_admit([], slots, num_reserved=num_reserved)
        given = answers.setdefault(scheduler._gathering, [])
        num_given = len(given)
        if not go_on(self):
            return False
        assert not has_room or given[num_given:] == [True], "a prompt waits for nothing"
        passed.append(bool(has_room))
        return True

    monkeypatch.setattr(Gathering, "waits", waits)
    monkeypatch.setattr(Pipeline, "go_on", go_on)
    return passed


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("graphs")])
def test_schedules_in_which_prompts_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = hold_at_random(monkeypatch)
    run_machine(KINDS[name], monkeypatch, 120, fixed=True)
    assert set(passed) == {True, False}


def look_once(self: Scheduler, num_decoding: int) -> bool:
    return self.is_holding or HOLDS(self, num_decoding)


HOLDS, NEVER = Scheduler.holds, property(lambda _: False, lambda *_: None)


@pytest.mark.parametrize(("method", "fault"), [("holds", look_once), ("may_begin_more", NEVER)])
def test_the_schedules_notice_a_prompt_that_waits_for_nothing(
    method: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that goes on must look at the limit, and at what the plan left waiting."""
    hold_at_random(monkeypatch)
    monkeypatch.setattr(Scheduler, method, fault, raising=False)
    with pytest.raises(AssertionError, match="a prompt waits for nothing"):
        run_machine(KINDS["graphs"], monkeypatch, 400, fixed=True)


@pytest.mark.parametrize("num_asked", [1, 4])
def test_steps_go_on_until_a_prompt_has_waited(
    num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def waits(self: Gathering, *_: object) -> bool:
        asked.append(1)
        return len(asked) <= num_asked

    steps = Steps([20, 20], max_num_seqs=4)
    steps.step()
    monkeypatch.setattr(Gathering, "waits", waits)
    steps.add(3)
    assert [steps.step() for _ in range(num_asked)] == [False] + [True] * (num_asked - 1)
    assert steps.sequences[2] in steps.engine.scheduler.waiting
    assert not steps.step() and steps.sequences[2] in steps.engine.scheduler.running
    steps.run_to_the_end()


def test_the_limit_is_checked() -> None:
    with pytest.raises(UserError, match="max_hold_ms is -1; expected a number of at least 0"):
        EngineConfig(max_hold_ms=-1)
