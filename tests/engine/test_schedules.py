"""Random schedules: whatever happens around it, a request's output is that of the request alone.

The machine drives the real engine loop, scheduler, block manager and drafting over the fake models
of `fake_model.py`: arrivals, cancels, stops, pauses of drafting, and so few blocks that
sequences are preempted all the time. PEAGLE_SCHEDULES sets how many schedules run in all.
"""

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import LLMEngine, Sequence, SequenceStatus
from peagle.engine.block_manager import BlockManager
from peagle.engine.depth import AutomaticDepth, DecodeSeconds, ScheduledDepth
from peagle.engine.drafting import Drafting, HeadDrafting
from peagle.engine.features import FeatureRings
from peagle.engine.memory_plan import lookahead_slots
from peagle.engine.scheduler import Schedule, Scheduler
from peagle.engine.step.pipeline import Pipeline
from peagle.models.target import TargetModel
from peagle.speculation import ProposerInput
from tests.engine import fake_model
from tests.engine.fake_model import FakeGraphs, FakeProposer, FakeRunner, FakeSampler, digest

NUM_SCHEDULES = int(os.environ.get("PEAGLE_SCHEDULES", "210"))
MAX_MODEL_LEN = 48
K = 3


@dataclass(frozen=True)
class Kind:
    """What all schedules of one test have in common."""

    has_head: bool = True
    max_draft_len: int = MAX_MODEL_LEN
    features_kept: int = 256
    depths: tuple[int, ...] = (K,) * 5  # by how many run
    has_graphs: bool = False
    has_drawn_drafts: bool = False
    chooses_k: bool = False
    max_nodes: int = 0  # of trees; 0: chains
    has_copies: bool = False  # copies of the text join them
    has_drawn_chains: bool = False  # lead the trees of sampled requests
    beam: int = 0  # nodes of a depth that an EAGLE-3 head reads; 0: a P-EAGLE head
    draft_window: int | None = None


KINDS = {
    "a head": Kind(),
    "a head of short reach": Kind(max_draft_len=20, features_kept=6),
    "small holes": Kind(features_kept=4),
    "plain": Kind(has_head=False),
    "trees": Kind(max_nodes=7),
    "trees and the text": Kind(max_nodes=9, has_copies=True),
    "trees, K by load": Kind(features_kept=6, depths=(K, K, 0, 2, 0), max_nodes=9),
    "K by load": Kind(features_kept=6, depths=(K, K, 0, 2, 0)),
    "K by itself": Kind(features_kept=6, chooses_k=True),
    "a window, K by load": Kind(features_kept=6, depths=(K, K, 0, 2, 0), draft_window=6),
    "drawn drafts, a window": Kind(has_drawn_drafts=True, draft_window=4),
    "mostly no drafts": Kind(depths=(K, K, 0, 0, 0)),
    "graphs": Kind(depths=(K,) * 9, has_graphs=True),
    "graphs, K by itself": Kind(has_graphs=True, chooses_k=True),
    "graphs, drawn drafts": Kind(depths=(K,) * 9, has_graphs=True, has_drawn_drafts=True),
    "drawn drafts": Kind(features_kept=4, has_drawn_drafts=True),
    "drawn drafts, K by load": Kind(depths=(K, K, 0, 2, 0), has_drawn_drafts=True),
    "drawn chains": Kind(max_nodes=7, has_drawn_chains=True),
    "drawn chains, the text, K by load": Kind(
        features_kept=6,
        depths=(K, K, 0, 2, 0),
        max_nodes=9,
        has_copies=True,
        has_drawn_chains=True,
    ),
    "beams": Kind(max_nodes=7, beam=3),
    "beams, the text, K by load": Kind(
        features_kept=6, depths=(K, K, 0, 2, 0), max_nodes=9, has_copies=True, beam=2
    ),
}


@cache
def bare_target() -> Any:
    """What the engine asks a target for when a fake one runs."""

    class Bare:
        vocab_size, max_model_len, num_layers = fake_model.VOCAB, MAX_MODEL_LEN, 4
        device, dtype, kv_dtype = torch.device("cpu"), torch.float64, torch.float64
        kv_type, kv_scales = "float64", ()
        kv_caches: Any = ()
        model = torch.nn.Identity()

        def kv_shapes(self) -> list[tuple[int, int]]:
            return []

        def make_kv_caches(self, num_blocks: int, block_size: int) -> list[Any]:
            return []

        def tap_aux(self, layer_ids: Any) -> None: ...

        def set_kv_caches(self, caches: Any) -> None:
            self.kv_caches = caches

        def fix_rope(self, length: int) -> None: ...

    return Bare()


def make_engine(kind: Kind, config: EngineConfig) -> LLMEngine:
    """A real engine whose models are the fake ones."""
    target: TargetModel = bare_target()
    engine = LLMEngine(target, config, eos_token_ids=[0])
    assert config.num_kv_blocks is not None
    size = (config.num_kv_blocks, config.block_size)
    fake: Any = engine
    fake.runner, fake.sampler = FakeRunner(*size, kind.has_drawn_drafts), FakeSampler()
    if kind.has_head:
        fake.num_speculative_tokens = K
        sampling = "probabilistic" if kind.has_drawn_drafts else "argmax"
        has_shape = kind.has_copies or kind.has_drawn_chains
        shape = {"max_nodes": kind.max_nodes} if has_shape else None
        fake.speculative = SpeculativeConfig(
            model="head",
            num_speculative_tokens=K,
            draft_sampling=sampling,
            parallel_drafting_spec=shape,
            drawn_chains_from=0.5 if kind.has_drawn_chains else None,
            prompt_lookup=kind.has_copies if has_shape else None,
        )
        fake._depth = ScheduledDepth(kind.depths.__getitem__)
        if kind.chooses_k:
            # The fake graphs keep no features, so that drafting never pauses.
            fake._depth = restless_depth((3, 1, 3, 1) if kind.has_graphs else (3, 0, 1, 0))
        fake.max_draft_len = kind.max_draft_len
        fake._features = FeatureRings()
        fake.drafting = HeadDrafting(
            FakeProposer(  # type: ignore[arg-type]
                *size,
                kind.has_drawn_drafts or kind.has_drawn_chains,
                kind.max_nodes,
                kind.has_copies,
                kind.beam,
            ),
            fake.sampler,
            fake_model.VOCAB,
            MAX_MODEL_LEN,
            kind.max_draft_len,
            fake._features,
        )
        engine.scheduler.draft_window = kind.draft_window
        engine.scheduler.num_lookahead_slots = lookahead_slots(
            K,
            kind.max_nodes,
            beam=kind.beam,
            has_copies=kind.has_copies,
            is_pipelined=kind.has_graphs,
        )
    if kind.has_graphs:
        head = fake.drafting.proposer
        sizes = config.max_num_seqs, MAX_MODEL_LEN
        graphs: Any = FakeGraphs(fake.runner, head, *sizes, engine._depth)
        take = engine._append_tokens, engine._set_drafts
        fake._pipeline = Pipeline(graphs, engine.scheduler, *take, engine._prepare_grammars)
    return engine


def restless_depth(cheapest: tuple[int, ...]) -> AutomaticDepth:
    """K by costs of which each number of sequences has its own cheapest, so that it changes."""
    depth = AutomaticDepth(K)
    depth.measure(range(1, 5), lambda rows, k: 1 if k == cheapest[rows - 1] else 9)
    return depth


_ALONE: dict[tuple[Kind, tuple[int, ...], str], list[int]] = {}


def alone(kind: Kind, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The output of a request that nothing disturbs: no neighbour, chunk, cache or preemption.

    Without drafts either, unless they are drawn.
    """
    kind = replace(kind, has_graphs=False)
    key = (kind, prompt, repr(params))
    if key not in _ALONE:
        _ALONE[key] = _run_alone(kind, prompt, params)
    return _ALONE[key]


def _run_alone(kind: Kind, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    if not kind.has_drawn_drafts:
        params = replace(params, num_speculative_tokens=0 if kind.has_head else None)
    engine = make_engine(
        kind, EngineConfig(num_kv_blocks=20, block_size=8, enable_prefix_caching=False)
    )
    sequence = engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
    if params.is_greedy:
        assert sequence.output_token_ids == greedy(prompt, len(sequence.output_token_ids))
    return sequence.output_token_ids


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    """What the target says after the prompt, by its definition."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_model.next_token(tuple(tokens)))
    return tokens[len(prompt) :]


# Prompts of few different blocks, so that many begin the same way.
WHICH = st.integers(0, 9)
PIECES = st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 5), (7,), (8, 9), (4, 4, 4, 4, 4, 4)])
PROMPTS = st.lists(PIECES, min_size=1, max_size=6).map(lambda some: sum(some, ()))


class Schedules(RuleBasedStateMachine):
    """Arrivals, cancels, stops and pauses between the steps of one engine."""

    kind = Kind()

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        extra_blocks=st.integers(0, 20),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 40),
        caching=st.booleans(),
    )
    def start(
        self, block_size: int, extra_blocks: int, max_num_seqs: int, budget: int, caching: bool
    ) -> None:
        # The longest request just fits, and a few blocks more.
        config = EngineConfig(
            num_kv_blocks=-(-MAX_MODEL_LEN // block_size) + extra_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
        )
        self.engine = make_engine(self.kind, config)
        self.engine.scheduler.max_prompts = 2 if self.kind.has_graphs else None
        self.engine.scheduler.schedule = self._scheduled  # type: ignore[method-assign]
        self.sequences: list[Sequence] = []
        self.stopped: set[int] = set()
        self.prompts: dict[int, tuple[int, ...]] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([30, 12, 5, 2, 1]),
        sampled=st.booleans(),
        k=st.none() | st.integers(0, K),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        copies=st.integers(1, 2),
        predicted=st.none() | PROMPTS | st.integers(1, 40),
    )
    def arrive(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampled: bool,
        k: int | None,
        priority: int,
        ignore_eos: bool,
        copies: int,
        predicted: tuple[int, ...] | int | None,
    ) -> None:
        if not self.kind.has_copies or k not in (None, K):
            predicted = None
        if isinstance(predicted, int):  # the beginning of the greedy output
            predicted = tuple(greedy(prompt, predicted))
        params = SamplingParams(
            prediction=predicted or (),
            max_tokens=max_tokens,
            temperature=float(sampled),
            seed=None if self.kind.has_drawn_chains else 0,  # a seed keeps drawn chains away
            ignore_eos=ignore_eos,
            num_speculative_tokens=k if self.kind.has_head else None,
        )
        leader: Sequence | None = None
        for _ in range(copies):
            sequence = self.engine.add_request(prompt, params, priority=priority, leader=leader)
            leader = leader or sequence
            self.sequences.append(sequence)
            self.prompts[sequence.seq_id] = prompt

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.engine.has_unfinished:
                self._step()

    def _step(self) -> None:
        before = {s.seq_id: list(s.token_ids) for s in self.sequences}
        outputs = self.engine.step()
        assert len({output.sequence.seq_id for output in outputs}) == len(outputs)
        for output in outputs:
            old = before.pop(output.sequence.seq_id)
            assert output.sequence.token_ids == old + output.new_token_ids
            assert output.new_token_ids
            most = output.sequence.num_speculative_tokens
            assert output.num_drafted <= (self.kind.max_nodes if self.kind.max_nodes else most)
            # Copies are deeper than K.
            assert output.num_accepted <= (
                self.kind.max_nodes if output.sequence.has_copies else most
            )
        for sequence in self.sequences:
            if sequence.seq_id in before:
                assert sequence.token_ids == before[sequence.seq_id], "output without a report"

    def _scheduled(self) -> Schedule:
        """Choose a step, and hold it against the limits and the order."""
        scheduler = self.engine.scheduler
        before = list(scheduler.running)
        following = [s for s in scheduler.waiting if s.waits_for_leader]
        plan = Scheduler.schedule(scheduler)
        check_plan(scheduler, before, following, plan)
        return plan

    def _pick(self, which: int) -> Sequence | None:
        unfinished = [s for s in self.sequences if not s.is_finished]
        return unfinished[which % len(unfinished)] if unfinished else None

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        if sequence := self._pick(which):
            self.engine.cancel(sequence)

    @rule(which=WHICH, surplus=st.integers(0, 3))
    def stop(self, which: int, surplus: int) -> None:
        """A stop string ends it, and takes back some of its last tokens."""
        sequence = self._pick(which)
        if sequence and sequence.num_output_tokens:
            self.stopped.add(sequence.seq_id)
            self.engine.stop(sequence, min(surplus, sequence.num_output_tokens))

    @precondition(lambda self: self.kind.has_head and not self.kind.has_graphs)
    @rule(times=st.integers(1, 8))
    def pause_drafting(self, times: int) -> None:
        """Holes in the drafter's KV."""
        fake: Any = self.engine
        depth, fake._depth = fake._depth, ScheduledDepth(lambda n: 0)
        self.step(times)
        fake._depth = depth

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        blocks: Any = self.engine.blocks
        owners = Counter(block for s in self.sequences for block in s.block_table)
        assert owners == blocks._num_owners, "owners are counted wrong"
        assert not set(owners) & set(blocks._free), "a block is owned and free"
        assert len(owners) + blocks.num_free_blocks == blocks.num_blocks, "a block is lost"
        for sequence in self.sequences:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert bool(sequence.block_table) == (sequence.status is SequenceStatus.RUNNING)
        self._published_blocks_hold_what_they_say(blocks)

    def _published_blocks_hold_what_they_say(self, blocks: Any) -> None:
        runner: Any = self.engine.runner
        for sequence in self.sequences:
            for index, key in enumerate(sequence.block_hashes):
                block = blocks._published.get(key)
                if block is not None:
                    size = blocks.block_size
                    expected = sequence.token_ids[index * size : (index + 1) * size]
                    # After a stop string the tokens that were dropped are gone from the sequence.
                    held = runner.kv[block * size : (block + 1) * size][: len(expected)]
                    assert held == expected, "a published block holds something else"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Each step computes a token; preempted work is done again, hence the factor.
        most = 50 * sum(len(s) + s.params.max_tokens for s in self.sequences) + 10
        for _ in range(most):
            if not self.engine.has_unfinished:
                break
            self._step()
            self.blocks_are_accounted_for()
        assert not self.engine.has_unfinished, "a sequence starves"
        assert self.engine.blocks.num_free_blocks == self.engine.blocks.num_blocks
        for sequence in self.sequences:
            self._check_output(sequence)

    def _check_output(self, sequence: Sequence) -> None:
        output = sequence.output_token_ids
        params = replace(sequence.params, prediction=())
        expected = alone(self.kind, self.prompts[sequence.seq_id], params)
        if sequence.finish_reason == "cancelled" or sequence.seq_id in self.stopped:
            assert output == expected[: len(output)]
        else:
            assert output == expected


def check_plan(
    scheduler: Scheduler, before: list[Sequence], following: list[Sequence], plan: Schedule
) -> None:
    """One step; `before` ran until then, `following` waited for their leaders."""
    chunks = [*plan.prefill, *plan.decode]
    run_now = [chunk.sequence for chunk in chunks]
    assert len(set(run_now)) == len(run_now) > 0
    assert len(scheduler.running) <= scheduler.max_num_seqs
    used = sum(chunk.num_tokens for chunk in plan.prefill)
    assert used <= scheduler.max_num_batched_tokens
    assert all(chunk.num_tokens == 1 for chunk in plan.decode)
    stayed = [s for s in before if s not in plan.preempted]
    if used < scheduler.max_num_batched_tokens:
        assert set(stayed) | set(plan.admitted) == set(run_now), "a sequence was left out"
    # The last in order yield, the first come first, and none passes a waiting one.
    assert all(s.order < lost.order for s in stayed for lost in plan.preempted)
    assert [s.order for s in plan.admitted] == sorted(s.order for s in plan.admitted)
    standing = [s for s in scheduler.waiting if s not in following]
    if standing and plan.admitted:
        assert plan.admitted[-1].order < standing[0].order, "a sequence was overtaken"


def run_machine(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, count: int, *, fixed: bool = False
) -> None:
    monkeypatch.setattr("peagle.engine.features.FEATURES_KEPT", kind.features_kept)
    monkeypatch.setattr("peagle.engine.drafting.MIN_APART_POSITIONS", 4)
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 2)
    machine = type("Machine", (Schedules,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=25,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            derandomize=fixed,
            phases=[Phase.generate, *([] if fixed else [Phase.shrink])],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(KINDS[name], monkeypatch, NUM_SCHEDULES // len(KINDS))


@pytest.mark.parametrize(
    ("name", "ks"), [("K by itself", {0, 1, 3}), ("graphs, K by itself", {1, 3})]
)
def test_k_by_itself_changes_in_these_schedules(
    name: str, ks: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 2)
    engine = make_engine(KINDS[name], EngineConfig(num_kv_blocks=80, block_size=4))
    record, told = engine._depth.record, []

    def watched(k: int, accepted: list[int], num_sequences: int, seconds: DecodeSeconds) -> None:
        told.append((k, num_sequences, sum(accepted)))
        record(k, accepted, num_sequences, seconds)

    monkeypatch.setattr(engine._depth, "record", watched)
    for index, tokens in enumerate((4, 12, 20, 30)):
        engine.add_request([index] * 3, SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    engine._complete_drafts()  # the next step would begin with it
    stats = engine.stats
    assert set(stats.decode_steps) == {k for k, *_ in told} == ks
    assert sum(stats.decode_steps.values()) == len(told)
    # Without graphs the passes of the four prompts gave a token each. An output may end at an
    # accepted draft.
    num_first = 0 if KINDS[name].has_graphs else 4
    num_told = sum(count + accepted for _, count, accepted in told)
    assert 0 <= num_told + num_first - stats.num_output_tokens <= 4
    assert any(accepted for *_, accepted in told)


# ---- the machine notices what it is there for ----


def hash_of_the_block_alone(self: BlockManager, sequence: Sequence, index: int) -> bytes:
    end = (index + 1) * self.block_size
    return bytes(sequence.token_ids[:end])


def forget_drafts_too(self: Sequence) -> None:
    self.num_computed_tokens = self.num_drafter_tokens = self.drafter_start = 0
    self.num_published_blocks = self.num_read_blocks = 0
    self.pending_features = None
    self.drafts = []


def publish_what_the_drafter_has_not_read(self: LLMEngine, sequence: Sequence) -> None:
    settled = min(sequence.num_computed_tokens, len(sequence) - 1)
    self.blocks.publish(sequence, settled, settled)


def free_twice(self: BlockManager, sequence: Sequence) -> None:
    for block in sequence.block_table:
        self._free[block] = None
    FREE(self, sequence)


def keep_blocks(self: Scheduler, sequence: Sequence) -> None:
    blocks = sequence.block_table[:1]
    RETIRE(self, sequence)
    for block in blocks:
        self.blocks._free.pop(block, None)


def look_into_holes(self: HeadDrafting, done: Any, readings: Any) -> ProposerInput:
    return replace(STEP(self, done, readings), context_starts_B=None)


def plant_beyond_the_context(self: HeadDrafting, *parts: Any) -> None:
    self.max_model_len += 99
    PLANT(self, *parts)
    self.max_model_len -= 99


def read_the_prediction_as_prompt(self: Sequence) -> None:
    self.token_ids = [*self.prediction, *self.token_ids]
    BEGIN(self)


PLANT = HeadDrafting._set_trees
STEP = HeadDrafting._step
FREE, RETIRE, BEGIN = BlockManager.free, Scheduler.retire, Sequence.__post_init__
FAULTS: dict[str, tuple[type, str, Any]] = {
    "the drafter's last slot is not in the hash": (BlockManager, "_hash", hash_of_the_block_alone),
    "a block that is taken stays published": (BlockManager, "_unpublish", lambda self, block: None),
    "preemption loses the drafts": (Sequence, "forget_computed", forget_drafts_too),
    "unread slots are published": (LLMEngine, "_publish", publish_what_the_drafter_has_not_read),
    "shared blocks are freed": (BlockManager, "free", free_twice),
    "a block leaks": (Scheduler, "retire", keep_blocks),
    "holes are looked into": (HeadDrafting, "_step", look_into_holes),
    "K follows the load": (HeadDrafting, "max_drafts_of", Drafting.max_drafts_of),
    "trees grow beyond the context": (HeadDrafting, "_set_trees", plant_beyond_the_context),
    "a prediction is prompt": (Sequence, "__post_init__", read_the_prediction_as_prompt),
}
# Other drafts change no output.
FAULTS_OF_DRAWN_DRAFTS = ("preemption loses the drafts", "K follows the load")
FAULTS_OF_TREES = ("trees grow beyond the context", "a prediction is prompt")
FAULTS_OF_OTHERS = (*FAULTS_OF_DRAWN_DRAFTS, *FAULTS_OF_TREES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "small holes") for name in FAULTS if name not in FAULTS_OF_OTHERS),
        *((name, "drawn drafts") for name in FAULTS_OF_DRAWN_DRAFTS),
        ("holes are looked into", "K by load"),
        ("trees grow beyond the context", "trees"),
        ("a prediction is prompt", "trees and the text"),
    ],
)
def test_a_planted_fault_is_noticed(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError)):
        run_machine(KINDS[kind], monkeypatch, 400, fixed=True)


def test_the_fake_target_notices_another_order() -> None:
    assert digest((1, 2, 3)) != digest((1, 3, 2))
