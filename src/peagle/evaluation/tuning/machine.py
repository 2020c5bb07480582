"""Seconds of decode steps, measured through the engine itself."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from peagle.config import CandidateTrees, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.stats import GraphTimes
from peagle.engine.step.graph_runner import buckets
from peagle.errors import UserError
from peagle.evaluation.dialogues import PromptSets
from peagle.evaluation.engine_backend import release
from peagle.evaluation.touched_experts import ExpertCounts, count_by_batch, recorded_passes
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.llm import LLM
from peagle.models.checkpoint import read_head
from peagle.models.routing import num_experts_of
from peagle.models.target import TargetModel, load_tokenizer

Clock = Callable[[], float]
# Steps before the timed ones: the first steps find cold caches.
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, order=True)
class CostPoint:
    """A batch of sequences that decode together with k draft tokens each; 0 decodes plainly."""

    batch: int
    k: int


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step, and of its parts: target with verification, and drafter."""

    seconds: float
    target_s: float
    draft_s: float

    @property
    def rest_s(self) -> float:
        """Return the seconds of a step outside target and drafter: scheduling, text, gaps."""
        return max(0.0, self.seconds - self.target_s - self.draft_s)


class EngineMachine:
    """This machine, with the engine that serves on it.

    A measurement runs sequences of `context` tokens together and times `steps` decode steps after a
    few that warm up. On a GPU, where steps are graphs, the parts are the device's own stamps; on a
    CPU they are the time in the target's pass and in drafting. A CPU with one thread counts the
    thread's own time, so that a busy machine measures like a quiet one. Drafts are accepted at the
    head's acceptance rates, whatever the text. `changes_k_cheaply` says whether K may change
    between any two measurements: a CPU keeps an engine for each K, a GPU has room for one.

    Args:
        target: the target.
        head: folder of the head.
        acceptance: acceptance of the head for each of `ks`.
        ks: draft tokens per step; 0 is added.
        trees: shapes of candidate trees. The texts of the prompts decide about their drafts.
        prompts: token ids, at least `context` of each; one for every sequence of the largest batch.
        context: tokens of a sequence when the steps begin.
        steps: number of timed steps.
        temperature: temperature of the requests.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: the context with the tokens of the steps is longer than target and head go.
    """

    def __init__(
        self,
        target: TargetModel,
        head: str,
        acceptance: AcceptanceByK,
        ks: Sequence[int],
        prompts: Sequence[Sequence[int]],
        *,
        context: int,
        steps: int,
        temperature: float = 0.0,
        trees: Sequence[CandidateTrees] = (),
        **engine_options: Any,
    ) -> None:
        self.target = target
        self.changes_k_cheaply = target.device.type == "cpu"
        self._ks = (0, *sorted(ks))
        self._configurations: dict[int | CandidateTrees, SpeculativeConfig | None] = {0: None}
        for k in ks:
            self._configurations[k] = SpeculativeConfig(
                model=head, num_speculative_tokens=k, synthetic_acceptance_rates=acceptance.rates(k)
            )
        for shape in trees:
            self._configurations[shape] = SpeculativeConfig(
                model=head,
                num_speculative_tokens=shape.prediction_depth,
                parallel_drafting_spec=shape,
            )
        self._prompts = [list(prompt[:context]) for prompt in prompts]
        self._steps = steps
        # Sequences decode while others still read their prompts; one more step is in flight.
        chunk = EngineConfig().max_num_batched_tokens
        most_steps = -(-len(prompts) * context // chunk) + WARM_UP_STEPS + steps + 3
        depths = (shape.prediction_depth for shape in trees)
        most = most_steps * (max(*self._ks, *depths) + 1)
        config = read_head(head, num_target_layers=target.num_layers).config
        longest = min(target.max_model_len, config.max_position_embeddings)
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
        self._llms: dict[int | CandidateTrees, LLM] = {}

    def batch_rows(self, batch: int) -> int:
        """Return the number of sequences that a step computes: on a GPU the size of the graph."""
        if self.target.device.type != "cuda":
            return batch
        return next((size for size in buckets(len(self._prompts)) if size >= batch), batch)

    def measure(self, point: CostPoint) -> DecodeCost:
        """Return the cost of a decode step at a batch size and K."""
        return self._measure(point.batch, point.k)

    def measure_trees(self, batch: int, shape: CandidateTrees) -> DecodeCost:
        """Return the cost of a decode step with candidate trees."""
        return self._measure(batch, shape)

    def _measure(self, batch: int, drafts: int | CandidateTrees) -> DecodeCost:
        """Return the cost of a decode step with chains of K drafts or with trees."""
        llm = self._llm(drafts)
        with self._running(llm, batch):
            for _ in range(WARM_UP_STEPS):
                llm.requests.step()
            cost = time_steps(llm, self._steps)
            assert len(llm.engine.scheduler.running) == batch, "a sequence ended too early"
            return cost

    def count_experts(self) -> ExpertCounts | None:
        """Count the distinct experts that decode steps touch; None for a dense target.

        The counted steps have the largest batch and the largest K, apart from the timed ones.
        """
        if not (num_experts := num_experts_of(self.target)):
            return None
        ks, batch = self._ks, len(self._prompts)
        llm = self._llm(ks[-1])
        with recorded_passes(llm) as passes, self._running(llm, batch):
            for _ in range(self._steps):
                llm.requests.step()
        full = [one for one in passes if one.num_rows == (ks[-1] + 1,) * batch]
        return count_by_batch(full, num_experts, ks)

    @contextmanager
    def _running(self, llm: LLM, batch: int) -> Iterator[None]:
        """Let `batch` sequences decode, and cancel them at the end."""
        engine = llm.requests
        for index in range(batch):
            engine.add(index, self._prompts[index], self._params)
        try:
            waiting = set(range(batch))
            while waiting:
                waiting -= {chunk.index for chunk in engine.step()}
            yield
        finally:
            engine.cancel_all()

    def _llm(self, drafts: int | CandidateTrees) -> LLM:
        if drafts not in self._llms:
            if not self.changes_k_cheaply:
                self._llms.clear()
                release(self.target)
            config = self._configurations[drafts]
            llm = LLM(model=self.target, speculative_config=config, **self._options)
            self._llms[drafts] = llm
            self._measure(1, drafts)  # warms up: the first visit is as fast as later ones
        return self._llms[drafts]


def contexts(target: TargetModel, sets: PromptSets, count: int, length: int) -> list[list[int]]:
    """Return `count` texts of `length` token ids: the prompts in a row, begun at many places."""
    tokenizer = load_tokenizer(target.name)
    text = "\n".join(turn for prompts in sets.values() for one in prompts for turn in one.turns)
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = (number * len(ids) // count for number in range(count))
    return [[ids[(start + i) % len(ids)] for i in range(length)] for start in starts]


def clock_of(device: torch.device) -> Clock:
    """Return the clock of this thread if it alone computes, else the wall clock.

    The thread's clock leaves out the time that other processes take of the machine.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def time_steps(llm: LLM, steps: int) -> DecodeCost:
    """Return the median costs of decode steps of the running sequences."""
    engine, clock = llm.engine, clock_of(llm.target.device)
    spent = [0.0, 0.0]  # in the target's pass and in drafting, within this step

    def timed(part: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any) -> Any:
            start = clock()
            try:
                return call(*arguments)
            finally:
                spent[part] += clock() - start

        return timed_call

    run, draft = engine.runner.run, engine.drafting and engine.drafting.draft
    engine.runner.run = timed(0, run)
    if engine.drafting is not None:
        engine.drafting.draft = timed(1, engine.drafting.draft)
    rows: list[tuple[float, ...]] = []
    before = engine.stats.step_times
    try:
        for _ in range(steps):
            start = clock()
            llm.requests.step()
            rows.append((clock() - start, *spent))
            spent[:] = 0.0, 0.0
    finally:
        engine.runner.run = run
        if engine.drafting is not None and draft is not None:
            engine.drafting.draft = draft
    seconds, *own_parts = (median(column) for column in zip(*rows))
    target_s, draft_s = device_parts(before, engine.stats.step_times) or own_parts
    return DecodeCost(seconds, target_s, draft_s)


def device_parts(
    before: Mapping[int, GraphTimes], after: Mapping[int, GraphTimes]
) -> tuple[float, float] | None:
    """Return mean seconds of target and drafter in steps that ran as graphs; None without one."""
    steps = target = draft = 0.0
    for rows, times in after.items():
        earlier = before.get(rows, GraphTimes())
        steps += times.num_steps - earlier.num_steps
        target += times.target + times.verify - earlier.target - earlier.verify
        draft += times.draft - earlier.draft
    return (target / steps, draft / steps) if steps else None
