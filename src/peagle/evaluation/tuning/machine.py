"""Seconds of decode steps, measured through the engine itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.graph_runner import buckets
from peagle.engine.stats import StepTimes
from peagle.errors import UserError
from peagle.evaluation.compare import release
from peagle.llm import LLM
from peagle.models.target import TargetModel

Clock = Callable[[], float]
# Steps before those that count: the first ones find cold caches.
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, order=True)
class CostPoint:
    """What one measurement is about.

    Attributes:
        batch: sequences that decode together.
        k: draft tokens of each; 0 decodes plainly.
    """

    batch: int
    k: int

    @property
    def num_tokens(self) -> int:
        """Rows of the target's pass: the newest token and K drafts of every sequence."""
        return self.batch * (self.k + 1)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step.

    Attributes:
        seconds: from one step to the next.
        target_s: the target's pass and the verification, part of it.
        draft_s: the drafter, part of it.
    """

    seconds: float
    target_s: float
    draft_s: float

    @property
    def rest_s(self) -> float:
        """All else: scheduling, text, gaps."""
        return max(0.0, self.seconds - self.target_s - self.draft_s)

    @classmethod
    def median(cls, costs: Sequence[StepCost]) -> StepCost:
        """The medians of each part; at least one cost."""
        return cls(
            median(cost.seconds for cost in costs),
            median(cost.target_s for cost in costs),
            median(cost.draft_s for cost in costs),
        )


class Machine(Protocol):
    """Something whose steps can be measured.

    Attributes:
        changes_k_cheaply: K may change between any two measurements.
    """

    changes_k_cheaply: bool

    def measure(self, cell: CostPoint) -> StepCost:
        """The cost of a step of this cell."""
        ...


class EngineMachine:
    """This machine, with the engine that serves on it.

    A measurement runs `cell.batch` sequences of `context` tokens together and times `steps` decode
    steps after a few that warm up. On a GPU, where steps are graphs, the parts are the device's own
    stamps; on a CPU the time in the target's pass and in drafting. Where all is computed by one
    thread its own time counts, so that a busy machine measures like a quiet one.

    Args:
        target: the target.
        configurations: how to draft, for each K; None for K = 0.
        prompts: token ids, at least `context` of each; one for every sequence of the largest batch.
        context: tokens of a sequence when the steps begin.
        steps: that are timed.
        longest: tokens up to which the target and the head go.
        temperature: of the requests.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: the context with the tokens of the steps is longer than that.
    """

    def __init__(
        self,
        target: TargetModel,
        configurations: Mapping[int, SpeculativeConfig | None],
        prompts: Sequence[Sequence[int]],
        *,
        context: int,
        steps: int,
        longest: int,
        temperature: float = 0.0,
        **engine_options: Any,
    ) -> None:
        self.target = target
        self.changes_k_cheaply = target.device.type == "cpu"
        self._configurations = configurations
        self._prompts = [list(prompt[:context]) for prompt in prompts]
        self._steps = steps
        # Who has its prompt decodes while others still read theirs; one more step is in flight.
        chunk = EngineConfig().max_num_batched_tokens
        most_steps = -(-len(prompts) * context // chunk) + WARM_UP_STEPS + steps + 3
        most = most_steps * (max(configurations) + 1)
        if context + most > longest:
            raise UserError(
                f"A context of {context} tokens and {most} for the steps make {context + most}; "
                f"target and head go to {longest}. Lower --context or --steps."
            )
        self._params = SamplingParams(max_tokens=most, temperature=temperature, ignore_eos=True)
        self._options = {
            "max_num_seqs": len(prompts),
            "max_model_len": context + most,
            **engine_options,
        }
        self._llms: dict[int, LLM] = {}

    @property
    def batch_rows(self) -> Callable[[int], int]:
        """Sequences for which a step has rows, of those that run: on a GPU the graph's."""
        if self.target.device.type != "cuda":
            return lambda batch: batch
        sizes = buckets(len(self._prompts))
        return lambda batch: next((size for size in sizes if size >= batch), batch)

    def measure(self, cell: CostPoint) -> StepCost:
        llm = self._llm(cell.k)
        running = llm.requests
        for index in range(cell.batch):
            running.add(index, self._prompts[index], self._params)
        try:
            waiting = set(range(cell.batch))
            while waiting:
                waiting -= {chunk.index for chunk in running.step()}
            for _ in range(WARM_UP_STEPS):
                running.step()
            cost = _timed_steps(llm, self._steps)
            assert len(llm.engine.scheduler.running) == cell.batch, "a sequence ended meanwhile"
            return cost
        finally:
            running.cancel_all()

    def _llm(self, k: int) -> LLM:
        """The engine of that K: a CPU keeps all of them, a GPU has room for one."""
        if k not in self._llms:
            if not self.changes_k_cheaply:
                self._llms.clear()
                release(self.target)
            self._llms[k] = LLM(
                model=self.target, speculative_config=self._configurations[k], **self._options
            )
            self.measure(CostPoint(1, k))  # warms up: what follows is not slower than later visits
        return self._llms[k]


def clock_of(device: torch.device) -> Clock:
    """What tells the time: of this thread where it alone computes, else of the clock on the wall.

    What other processes take of the machine is left out of the former.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def _timed_steps(llm: LLM, steps: int) -> StepCost:
    """Time steps of the sequences that run."""
    engine, drafting = llm.engine, llm.engine.drafting
    clock = clock_of(llm.target.device)
    target, draft = _Stopwatch(engine.runner.run, clock), None
    engine.runner.run = target  # type: ignore[method-assign]
    if drafting is not None:
        draft = _Stopwatch(drafting.draft, clock)
        drafting.draft = draft  # type: ignore[method-assign]
    costs: list[StepCost] = []
    before = engine.stats.step_times
    try:
        for _ in range(steps):
            start = clock()
            llm.requests.step()
            seconds = clock() - start
            costs.append(StepCost(seconds, target.take(), draft.take() if draft else 0.0))
    finally:
        engine.runner.run = target.call  # type: ignore[method-assign]
        if drafting is not None and draft is not None:
            drafting.draft = draft.call  # type: ignore[method-assign]
    cost = StepCost.median(costs)
    if (device := _device_parts(before, engine.stats.step_times)) is not None:
        return StepCost(cost.seconds, *device)
    return cost


def _device_parts(
    before: Mapping[int, StepTimes], after: Mapping[int, StepTimes]
) -> tuple[float, float] | None:
    """Mean seconds of target and drafter in the steps that ran as graphs; None without one."""
    steps = target = draft = 0.0
    for rows, times in after.items():
        earlier = before.get(rows, StepTimes())
        steps += times.num_steps - earlier.num_steps
        target += times.target + times.verify - earlier.target - earlier.verify
        draft += times.draft - earlier.draft
    return (target / steps, draft / steps) if steps else None


class _Stopwatch:
    """A function that adds up the seconds spent in it."""

    def __init__(self, call: Callable[..., Any], clock: Clock) -> None:
        self.call, self._clock = call, clock
        self._seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = self._clock()
        try:
            return self.call(*arguments)
        finally:
            self._seconds += self._clock() - start

    def take(self) -> float:
        """The seconds since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
