"""A step in flight: when the next is launched before the last is read, and when it must not be.

The engine is real; the device of `fake_model.FakeGraphs` keeps its own books. `test_schedules` runs
random workloads on both.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import LLMEngine, Sequence
from peagle.engine.depth import DecodeSeconds, ScheduledDepth
from peagle.engine.drafting import fixes_k
from peagle.engine.features import FeatureRing
from peagle.engine.outputs import SequenceOutput, StreamChunk
from peagle.engine.requests import Requests
from peagle.engine.step.graph_runner import (
    Flight,
    GraphRunner,
    Report,
    RowDrafts,
    RowTokens,
    read_drafts,
    read_tokens,
)
from peagle.engine.step.pipeline import Pipeline
from tests.conftest import byte_tokenizer
from tests.engine.test_schedules import KINDS, make_engine


class Steps:
    """An engine, its device, and the requests; a step brings one token, as nothing is drafted."""

    def __init__(self, max_tokens: list[int], **options: Any) -> None:
        sizes = {"num_kv_blocks": 100, "block_size": 4, "max_num_seqs": 4, **options}
        self.engine: LLMEngine = make_engine(KINDS["graphs"], EngineConfig(**sizes))
        assert self.engine._pipeline is not None
        self.pipeline: Pipeline = self.engine._pipeline
        self.device: Any = self.pipeline.runner
        self.sequences: list[Sequence] = []
        for count in max_tokens:
            self.add(count)

    def add(self, max_tokens: int, prompt: int = 3) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=0)
        self.sequences.append(self.engine.add_request([7] * prompt, params))

    def step(self) -> bool:
        """Returns whether it launched the next step without looking."""
        given, launches = len(self.device.launches), self.device.num_launches
        self.engine.step()
        return len(self.device.launches) == given and self.device.num_launches > launches

    def run_to_the_end(self) -> None:
        while self.engine.has_unfinished:
            self.step()
        for sequence in self.sequences:
            done = sequence.num_output_tokens
            assert sequence.finish_reason == "cancelled" or done == sequence.params.max_tokens
        assert self.engine.blocks.num_free_blocks == self.engine.blocks.num_blocks


def started(max_tokens: list[int], **options: Any) -> Steps:
    """Sequences whose prompts are computed, with a step in flight and one that went on."""
    steps = Steps(max_tokens, **options)
    assert not steps.step(), "prompts, and the first launch"
    assert steps.step(), "nothing has happened"
    assert steps.device.launches == [len(max_tokens)]
    return steps


@pytest.mark.parametrize(("prompt", "num_mixed"), [(3, 1), (5, 0)])
def test_which_steps_follow_the_one_before_with_nothing_between(
    prompt: int, num_mixed: int
) -> None:
    steps = started([9, 9])
    steps.add(9, prompt)
    assert not steps.step(), "a prompt, in the step's pass or before it"
    steps.run_to_the_end()
    device = steps.device
    steps.pipeline.read_drafts()
    assert device.num_mixed == num_mixed
    assert device.num_reads - device.num_following == 2 - num_mixed, "the first step follows none"


def test_one_step_is_in_flight_while_the_last_is_read() -> None:
    steps = started([9, 9])
    for _ in range(4):
        assert steps.device.num_launches - steps.device.num_reads == 1
        lens = [s.num_output_tokens for s in steps.sequences]
        assert steps.step()
        assert [s.num_output_tokens for s in steps.sequences] == [n + 1 for n in lens]
    steps.run_to_the_end()
    # The step that was in flight when both ended brings nothing.
    assert (steps.device.launches, steps.device.num_launches) == ([2], 10)


@pytest.mark.parametrize(
    ("max_tokens", "starts"),
    [
        ([3, 6, 9, 12], [4, 2, 1]),  # 3 need the graph of 4; 2 and 1 have graphs of their own
        ([9, 5], [2, 1]),
        ([5, 9, 9], [3, 2]),
        ([5, 9, 9, 9], [4]),
        ([7, 7, 7], [3]),
    ],
)
def test_goes_on_past_ends_while_the_graph_is_tight(
    max_tokens: list[int], starts: list[int]
) -> None:
    steps = started(max_tokens)
    steps.run_to_the_end()
    assert steps.device.launches == starts
    assert steps.device.num_launches == steps.device.num_reads + 1, "no request asks for the last"
    steps.pipeline.drain()
    steps.pipeline.drain()
    assert steps.device.num_launches == steps.device.num_reads
    steps.add(5)  # the next ones start afresh
    steps.run_to_the_end()
    assert steps.device.launches == [*starts, 1]


def test_text_is_made_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps([])
    requests = Requests(steps.engine, byte_tokenizer())
    seen: list[tuple[int, int]] = []  # a chunk's request, and the steps in flight at its text
    chunk_of = requests._chunk

    def watched(step: SequenceOutput) -> StreamChunk:
        seen.append((step.sequence.seq_id, steps.device.num_launches - steps.device.num_reads))
        return chunk_of(step)

    monkeypatch.setattr(requests, "_chunk", watched)
    params = SamplingParams(max_tokens=9, ignore_eos=True, num_speculative_tokens=0)
    requests.add(0, [7, 7, 7], params)
    for _ in range(4):
        requests.step()
    requests.add(1, [7, 7, 7], params)
    while requests.has_unfinished:
        requests.step()
    assert len(seen) == 18
    assert {in_flight for _, in_flight in seen} == {1}


def test_a_waiting_request_does_not_stop_those_that_run() -> None:
    """Until a place is free there is nothing for the host to decide."""
    steps = Steps([8, 8, 3], max_num_seqs=2)
    steps.step()
    steps.step()
    for _ in range(6):
        assert steps.step()
        assert len(steps.engine.scheduler.waiting) == 1
    steps.run_to_the_end()
    assert steps.device.launches == [2, 1]


def test_siblings_begin_behind_the_first_token_of_their_leader() -> None:
    steps = Steps([20])
    leader = steps.sequences[0]
    for _ in range(2):
        steps.sequences.append(
            steps.engine.add_request(leader.prompt_token_ids, leader.params, leader=leader)
        )
    for _ in range(3):
        steps.step()
    assert len(steps.engine.scheduler.running) == 3 and leader.num_output_tokens == 2
    steps.run_to_the_end()


def test_prompts_that_no_step_had_room_for_begin_in_the_next() -> None:
    steps = Steps([20] * 4)
    steps.engine.scheduler.max_prompts = 3
    steps.step()
    assert len(steps.engine.scheduler.running) == 3
    steps.step()
    assert len(steps.engine.scheduler.running) == 4
    assert steps.step(), "nothing is left to decide"
    steps.run_to_the_end()


def test_restarts_when_one_ends_and_another_waits() -> None:
    steps = Steps([5, 20, 20, 20, 3])
    went_on = False
    while not steps.sequences[0].is_finished:
        went_on = steps.step()
    assert went_on, "it ended while they went on"
    assert not steps.step(), "three of four would do, but for the one that waits"
    assert steps.sequences[4] in steps.engine.scheduler.running
    steps.run_to_the_end()


def change(steps: Steps) -> None:
    """A change of a sequence, as the scheduler counts it."""
    steps.engine.scheduler.version += 1


EVENTS: dict[str, Callable[[Steps], Any]] = {
    "arrival": lambda steps: steps.add(4),
    "cancel": lambda steps: steps.engine.cancel(steps.sequences[1]),
    "stop": lambda steps: steps.engine.stop(steps.sequences[1], 1),
    "change": change,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_restarts_when_the_host_changes_something(event: str, num_steps: int) -> None:
    steps = started([6, 20, 20, 20], max_num_seqs=6)
    for _ in range(num_steps):
        assert steps.step()
    device, launches, reads = steps.device, steps.device.num_launches, steps.device.num_reads
    EVENTS[event](steps)
    lens = [s.num_output_tokens for s in steps.sequences]
    assert not steps.pipeline.go_on()
    assert (device.num_launches, device.num_reads) == (launches, reads)
    # What is in flight counts for the sequences that are there.
    steps.pipeline.drain()
    assert device.num_reads == reads + 1
    for sequence, before in zip(steps.sequences[:4], lens, strict=False):
        gained = sequence.num_output_tokens - before
        assert gained == (0 if sequence.finish_reason in ("cancelled", "stop") else 1)
    assert not steps.pipeline.go_on(), "nothing is in flight"
    if event != "stop":
        steps.run_to_the_end()


def test_restarts_when_something_changes_while_a_step_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One ends by itself, which alone would not matter, and another is cancelled on that."""
    steps = Steps([5] + [20] * 7, max_num_seqs=8)
    first, last = steps.sequences[0], steps.sequences[-1]
    append = steps.pipeline._append_tokens

    def cancel_too(sequence: Sequence, report: RowTokens) -> None:
        append(sequence, report)
        if first.is_finished:
            steps.engine.cancel(last)

    monkeypatch.setattr(steps.pipeline, "_append_tokens", cancel_too)
    while not first.is_finished:
        steps.step()
    assert last.finish_reason == "cancelled"
    assert not steps.step(), "on the device the last one still runs"
    assert steps.device.launches == [8, 6]
    steps.run_to_the_end()


def test_arrivals_do_not_stop_decoding() -> None:
    """Chunks of a prompt run within steps, a step is always in flight, all get a token."""
    steps = started([20, 20], max_num_batched_tokens=6)
    num_mixed = steps.device.num_mixed
    steps.add(3, prompt=15)
    # 14 tokens of the prompt in 3 chunks; the last token decodes behind the third.
    for goes_on, new in ((False, 0), (False, 0), (False, 0), (True, 1)):
        before = [s.num_output_tokens for s in steps.sequences]
        assert steps.step() == goes_on
        assert steps.device.num_launches - steps.device.num_reads == 1
        gained = [s.num_output_tokens - n for s, n in zip(steps.sequences, before, strict=True)]
        assert gained == [1, 1, new]
    assert steps.device.launches == [2, 2, 2, 3]
    assert steps.device.num_mixed - num_mixed == 3
    steps.run_to_the_end()


def test_one_leaves_while_a_step_is_in_flight() -> None:
    """One that is cancelled loses its row, and one that waited takes it: nobody else waits."""
    steps = started([20, 20, 20, 20])
    steps.add(5)
    steps.engine.cancel(steps.sequences[1])
    for _ in range(2):
        before = [s.num_output_tokens for s in steps.sequences]
        steps.step()
        assert steps.device.num_launches - steps.device.num_reads == 1
        gained = [s.num_output_tokens - n for s, n in zip(steps.sequences, before, strict=True)]
        assert gained[0] == gained[2] == gained[3] == 1
    assert gained == [1, 0, 1, 1, 1]
    steps.run_to_the_end()


def test_one_that_is_preempted_in_flight_computes_the_same_again() -> None:
    steps = Steps([35, 35], num_kv_blocks=18, enable_prefix_caching=False)
    while not steps.sequences[1].num_preemptions:
        steps.step()
    assert steps.device.num_launches - steps.device.num_reads == 1, "what is in flight stays"
    steps.run_to_the_end()
    first, second = (s.output_token_ids for s in steps.sequences)
    assert first == second


def test_restarts_when_blocks_run_out() -> None:
    steps = Steps([35, 35], num_kv_blocks=18, enable_prefix_caching=False)
    steps.step()
    steps.step()
    launches = steps.device.num_launches
    while steps.pipeline.go_on():
        launches = steps.device.num_launches
    assert not any(s.is_finished for s in steps.sequences)
    assert steps.device.num_launches == launches > 4, "for some time there were enough blocks"
    assert launches == steps.device.num_reads + 1, "what is in flight stays"
    steps.run_to_the_end()
    assert steps.sequences[1].num_preemptions > 0


@pytest.mark.parametrize(
    ("row", "tokens", "drafts"),
    [
        ([3, 0, 3, 7, -1, -1, -1, 4, 5, 6], RowTokens(3, 0, [7]), [4, 5, 6]),
        ([3, 3, 1, 7, 8, 9, 2, 4, 5, 6], RowTokens(3, 3, [7, 8, 9, 2]), [4]),
        ([0, 0, 0, 7, -1, -1, -1, 4, 5, 6], RowTokens(0, 0, [7]), []),
        ([2, 1, 2, 7, 8, -1, -1, 4, 5, 6], RowTokens(2, 1, [7, 8]), [4, 5]),
    ],
)
def test_reading_a_report(row: list[int], tokens: RowTokens, drafts: list[int]) -> None:
    report_BX = np.array([row, [0] * len(row)])
    assert read_tokens(report_BX, 3) == [tokens, RowTokens(0, 0, [0])]
    assert read_drafts(report_BX, 3, 3) == [RowDrafts(drafts), RowDrafts([])]


# ---- steps that no graph can run ----

PLAIN = SamplingParams(max_tokens=9)
INSIDE = replace(PLAIN, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3)


def sequence_with(**changes: Any) -> Sequence:
    given = {"stop_token_ids": frozenset(), "params": PLAIN, **changes}
    stops, params = given["stop_token_ids"], given["params"]
    made = Sequence(0, [3, 4], params, 0, stops, grammar=changes.get("grammar"))
    made.draft_probs_KV = changes.get("draft_probs_KV")
    return made


def test_what_steps_take_is_read_from_their_stamps() -> None:
    """Of a step behind another, from end to end too: the card may have waited between them."""

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is captured")

    nothing: Any = None
    depth = ScheduledDepth(lambda n: 0)
    graphs = GraphRunner(nothing, never, 2, 100, depth, never, nothing, None, nothing)

    def seconds_of(
        *stamps_us: int, follows: bool = False, first_tokens: tuple[int, ...] = (7, 8), **of: Any
    ) -> DecodeSeconds:
        rows = [[0, 0, 0, token, 0] for token in first_tokens]
        rows.append([1000 * stamp for stamp in stamps_us])
        done: Any = SimpleNamespace(synchronize=lambda: None)
        report, sequences = Report(torch.tensor(rows), done), [None] * len(first_tokens)
        graphs.read_drafts(Flight(0, sequences, 0, 0, report, report, None, **of), follows=follows)
        return graphs.last_seconds

    def is_about(found: DecodeSeconds, device: float, period: float | None) -> bool:
        assert found.device == pytest.approx(device * 1e-6)
        return found.period == (None if period is None else pytest.approx(period * 1e-6))

    assert is_about(seconds_of(10, 20, 30, 30, 60), 50, None)
    assert is_about(seconds_of(75, 80, 90, 90, 100, follows=True), 25, 40)
    assert seconds_of(101, 150, 180, 181, 200, follows=True, has_prompts=True) == DecodeSeconds()
    assert is_about(seconds_of(230, 240, 250, 250, 260, follows=True), 30, 60), "prompts are over"
    assert is_about(seconds_of(900, 910, 920, 920, 930), 30, None), "something ran between"
    assert is_about(seconds_of(940, 950, 960, 990, 999), 29, None), "the head read prompts"
    assert seconds_of(1000, 1010, 1020, 1020, 1030, first_tokens=(7, -1)) == DecodeSeconds()
    assert seconds_of(1040, 1050, 1060, 1060, 1070, first_tokens=(-1, -1)) == DecodeSeconds()


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (None, {}),
        (None, {"params": INSIDE}),
        (None, {"stop_token_ids": frozenset(range(8))}),
        ("stop_token_ids", {"stop_token_ids": frozenset(range(9))}),
        (None, {"params": replace(PLAIN, typical_p=0.5, temperature=1.0)}),
        (None, {"params": replace(PLAIN, repetition_penalty=1.1)}),
        (None, {"params": replace(PLAIN, presence_penalty=0.1, logprobs=2)}),
        (None, {"params": replace(PLAIN, frequency_penalty=0.1)}),
        (None, {"params": replace(PLAIN, logit_bias={3: 1.0})}),
        (None, {"params": replace(PLAIN, bad_words=((3,),))}),
        (None, {"params": replace(PLAIN, allowed_token_ids=(3,))}),
        (None, {"params": replace(PLAIN, logprobs=0)}),
        (None, {"params": replace(PLAIN, min_tokens=2), "stop_token_ids": frozenset([5])}),
        (None, {"grammar": object()}),
        (None, {"draft_probs_KV": torch.zeros(1, 4)}),
    ],
)
def test_why_no_graph_can_run_a_step(reason: str | None, changes: dict[str, Any]) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is captured")

    nothing: Any = None
    depth = ScheduledDepth(lambda n: 0)
    buffers: Any = SimpleNamespace(drawn=None, trees=None)
    graphs = GraphRunner(buffers, never, 4, 100, depth, never, nothing, None, nothing)
    assert graphs.obstacle([sequence_with(), sequence_with(**changes)]) == reason
    buffers.trees = object()
    assert graphs.obstacle([sequence_with(), sequence_with(**changes)]) == reason
    missed = sequence_with()
    missed.pending_features = FeatureRing(torch.zeros(2, 3), 0)
    assert graphs.obstacle([missed]) == "missed_features"
    with pytest.warns(UserWarning, match="5 sequences decode together"):
        assert graphs.obstacle([sequence_with()] * 5) == "too_many_sequences"


@pytest.mark.parametrize(
    ("reason", "sampling", "changes"),
    [
        (None, "probabilistic", {}),
        (None, "probabilistic", {"seed": 1}),
        (None, "probabilistic", {"temperature": 0.7}),
        ("kept_k", "probabilistic", {"seed": 1, "temperature": 0.7}),
        (None, "argmax", {"seed": 1, "temperature": 0.7}),
    ],
)
def test_drawn_drafts_of_a_seed_keep_a_step_out_of_the_graphs(
    reason: str | None, sampling: Any, changes: dict[str, Any]
) -> None:
    """Where K is less than theirs."""
    unused: Any = None
    buffers: Any = SimpleNamespace(trees=None)
    params = replace(PLAIN, **changes)
    speculative = SpeculativeConfig(model="head", num_speculative_tokens=2, draft_sampling=sampling)
    for k in (1, 2):
        depth = ScheduledDepth(lambda n, k=k: k)
        graphs = GraphRunner(buffers, unused, 4, 100, depth, unused, unused, None, unused)
        sequence = sequence_with(params=params)
        sequence.fixes_k = fixes_k(params, speculative)
        sequence.num_speculative_tokens = 2
        assert graphs.obstacle([sequence]) == (reason if k == 1 else None)


def test_eager_steps_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = started([9, 9])
    assert steps.engine.stats.eager_steps == {}
    monkeypatch.setattr(steps.device, "obstacle", lambda sequences: "grammar")
    steps.add(1)
    while steps.engine.has_unfinished:
        outputs = steps.engine.step()
        assert len({output.sequence for output in outputs}) == len(outputs), "one output a step"
    # The steps that were launched before brought two tokens, and each eager one brings one.
    assert steps.engine.stats.eager_steps == {"grammar": 7}
    assert steps.device.launches == [2]
