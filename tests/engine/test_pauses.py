"""K = 0 where many run together: outputs stay, and drafting goes on as if it had never paused."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.engine.depth import RESUME_STEPS, DecodeSeconds, ScheduledDepth
from peagle.engine.drafting import HeadDrafting
from peagle.engine.features import FEATURES_KEPT, FeatureRing, FeatureRings
from peagle.engine.sequence import Sequence
from peagle.engine.step.graph_runner import GraphRunner, graph_sizes
from peagle.models.drafter import Drafter
from tests.engine.engines import PROMPTS, K, config_of, drive, make_llm, watch_drafts, watch_steps

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
# One outlives the others by far: drafting pauses while they run and goes on when it is alone.
PARAMS = [replace(GREEDY, max_tokens=n) for n in (48, 9, 12, 7)]
SCHEDULE = [[1, 2, K], [3, 4, 0]]


def scheduled(config: dict[str, Any] | None, schedule: Any = SCHEDULE) -> dict[str, Any]:
    assert config is not None
    return {**config, "num_speculative_tokens_per_batch_size": schedule}


# ---- when K changes ----


@given(loads=st.lists(st.integers(0, 6), max_size=60))
def test_drafting_stops_at_once_and_resumes_after_a_while(loads: list[int]) -> None:
    scheduled = (7, 7, 3, 3, 0, 2, 0)  # by load; not even monotone
    policy = ScheduledDepth(scheduled.__getitem__)
    for now, load in enumerate(loads):
        policy.observe(load)
        seen = loads[: now + 1]
        since = max((i for i, n in enumerate(seen) if n and not scheduled[n]), default=-100)
        was_idle = 0 in seen[since + 1 :]
        rested = len(seen) - 1 - since >= RESUME_STEPS or was_idle or since < 0
        expected = scheduled[load] if rested else 0
        assert policy(load) == expected
        assert policy(4) == policy(6) == 0


def test_every_bucket_has_a_graph_without_drafts_if_one_has() -> None:
    depths = (0, 7, 7, 0, 0, 0, 0, 0, 0)
    possible = ScheduledDepth(depths.__getitem__).possible
    assert graph_sizes(8, possible) == [(1, 0), (1, 7), (2, 0), (2, 7), (4, 0), (8, 0)]
    assert graph_sizes(4, lambda n: {3}) == [(1, 3), (2, 3), (4, 3)]
    assert graph_sizes(2, lambda n: {0}) == [(1, 0), (2, 0)]


# ---- the engine that launches kernel by kernel ----


@pytest.mark.slow
def test_prompts_are_shared_while_nobody_drafts(
    target_folder: Path, heads: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head does not read them. Who drafts then computes them again, and shares what is read."""
    config = scheduled(config_of("peagle", heads), [[1, 4, 0]])
    llm = make_llm(target_folder, config, block_size=4)
    fresh = make_llm(target_folder, config_of("peagle", heads), block_size=4)
    cached: list[int] = []

    def once(engine: LLM) -> None:
        before = engine.engine.stats.num_cached_tokens
        drive(engine, [PROMPTS[3]], GREEDY)
        cached.append(engine.engine.stats.num_cached_tokens - before)

    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "forward", None)  # a call would fail
        patch.setattr(Drafter, "read", None)
        once(llm)
        once(llm)
    expected = watch_drafts(fresh)
    drive(fresh, [PROMPTS[3]], GREEDY)
    llm.engine._depth = ScheduledDepth(lambda n: K)
    found = watch_drafts(llm)
    once(llm)
    assert found == expected, "what the head reads is whole"
    once(llm)
    shared = (len(PROMPTS[3]) - 1) // 4 * 4
    assert cached == [0, shared, 0, shared] and shared > 0
    llm.engine._depth = ScheduledDepth(lambda n: 0)
    once(llm)
    assert cached[-1] == shared, "blocks that the head has read serve all"


@pytest.mark.slow
def test_a_prompt_of_unread_blocks_is_drafted_for_behind_them(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    """Drafting resumes while its last tokens are computed: the head's context begins there."""
    config = scheduled(config_of("peagle", heads), [[1, 4, 0]])
    llm = make_llm(target_folder, config, block_size=4, max_num_batched_tokens=4)
    prompt = [*PROMPTS[3], *range(40, 50)]
    drive(llm, [PROMPTS[3]], GREEDY)
    starts: list[int] = []

    def resume(step: int, sequences: list[Sequence]) -> None:
        if step == 1:
            starts.append(sequences[0].drafter_start)
            llm.engine._depth = ScheduledDepth(lambda n: K)

    found = watch_drafts(llm)
    (sequence,) = drive(llm, [prompt], GREEDY, before_step=resume)
    assert starts == [len(PROMPTS[3]) // 4 * 4] == [sequence.drafter_start]
    assert found
    plain = make_llm(target_folder)
    (expected,) = drive(plain, [prompt], GREEDY)
    assert sequence.output_token_ids == expected.output_token_ids


@pytest.mark.slow
def test_a_seed_of_drawn_drafts_does_not_see_what_others_left_unread(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    """Its output follows from its drafts, which go on while those of others pause."""
    drawn = {**(config_of("peagle", heads) or {}), "draft_sampling": "probabilistic"}
    llm = make_llm(target_folder, scheduled(drawn, [[1, 4, 0]]), block_size=4)
    seeded = replace(GREEDY, temperature=1.0, seed=7)
    drive(llm, [PROMPTS[3]], GREEDY)
    (found,) = drive(llm, [PROMPTS[3]], seeded)
    fresh = make_llm(target_folder, scheduled(drawn, [[1, 4, 0]]), block_size=4)
    (expected,) = drive(fresh, [PROMPTS[3]], seeded)
    assert found.output_token_ids == expected.output_token_ids
    assert found.stats == expected.stats and found.stats.num_drafts > 0
    assert found.num_cached_tokens == 0


@pytest.mark.slow
def test_the_head_times_its_reading_and_changes_nothing(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    llm = make_llm(target_folder, config_of("peagle", heads))
    expected = watch_drafts(llm)
    drive(llm, PROMPTS, GREEDY)
    again = make_llm(target_folder, config_of("peagle", heads))
    drafting = again.engine.drafting
    assert isinstance(drafting, HeadDrafting)
    assert 0 < drafting.time_reading(9) < 1
    found = watch_drafts(again)
    drive(again, PROMPTS, GREEDY)
    assert found == expected


# ---- rings in one tensor ----


def test_rings_of_a_reserved_store_are_handed_out_and_taken_back() -> None:
    store = FeatureRings()
    store.reserve(2, 3, torch.float32, torch.device("cpu"))
    rings = [store.open(seq_id, 5) for seq_id in (0, 1)]
    assert {ring.slot for ring in rings} == {0, 1}
    store.release(3)  # has none
    store.release(0)
    again = store.open(2, 7)
    assert (again.slot, again.first, again.end) == (rings[0].slot, 7, 7)
    again.advance(FEATURES_KEPT + 2)
    assert (again.first, again.end) == (9, 9 + FEATURES_KEPT)


# ---- captured steps; on a CPU they run as they are, under Triton's interpreter ----

NO_INTERPRETER = os.environ.get("TRITON_INTERPRET") != "1"
INTERPRETED = pytest.mark.skipif(NO_INTERPRETER, reason="needs the interpreter")
CAPTURED: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64}
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("prompts", "lengths"),
    # The second ring keeps position 0, where padding stands once the first sequence has ended.
    [(PROMPTS[:2], (11, 4)), ([[3], [5]], (4, 11))],
    ids=["the first row goes on", "the last row goes on"],
)
def test_captured_steps_keep_features_and_resume(
    target_folder: Path,
    heads: dict[bool, Path],
    device: str,
    prompts: list[list[int]],
    lengths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 2)
    options = {**CAPTURED, "device": device}
    params = [replace(GREEDY, max_tokens=n) for n in lengths]
    config = {"model": str(heads[True]), "num_speculative_tokens": 3}
    whole = LLM(target_folder, speculative_config=config, enforce_eager=True, **options)
    expected = watch_drafts(whole)
    outputs = whole.generate(prompts, params)

    llm = LLM(
        target_folder, speculative_config=scheduled(config, [[1, 1, 3], [2, 2, 0]]), **options
    )
    found, apart = watch_steps(llm), watch_drafts(llm)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in outputs]
    pipeline = llm.engine._pipeline
    assert pipeline is not None
    sizes = set(pipeline.runner._graphs)
    assert sizes == {(2, 0), (1, 0), (1, 3)}, "each size has a depth of its own"
    # The head has read what four captured steps and more have left: its drafts are the same.
    assert found and found == {text: expected[text] for text in found}
    assert not apart and not llm.engine.stats.eager_steps


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize("device", DEVICES)
def test_captured_steps_choose_k_and_change_no_output(
    target_folder: Path, heads: dict[bool, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 1)
    # Drafts of two sequences are dear, and those of one cheap.
    monkeypatch.setattr(GraphRunner, "time_step", lambda self, rows, k: rows + 0.01 * k * rows**8)
    options = {**CAPTURED, "device": device}
    params = [
        replace(GREEDY, max_tokens=11),
        replace(GREEDY, max_tokens=4, temperature=0.8, seed=11),
    ]
    fixed = {"model": str(heads[True]), "num_speculative_tokens": 3}
    whole = LLM(target_folder, speculative_config=fixed, enforce_eager=True, **options)
    expected = whole.generate(PROMPTS[:2], params)

    llm = LLM(target_folder, speculative_config=scheduled(fixed, "auto"), **options)
    found = llm.generate(PROMPTS[:2], params)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    steps = llm.engine.stats.decode_steps
    assert {0, 3} <= set(steps) <= {0, 1, 3}
    # A step gives what it accepts and one token more.
    assert sum(steps.values()) == 11 - found[0].stats.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_that_has_no_drafts_yet_says_nothing_of_acceptance(
    target_folder: Path, heads: dict[bool, Path], device: str
) -> None:
    config = {"model": str(heads[True]), "num_speculative_tokens": 3}
    llm = LLM(target_folder, speculative_config=config, **CAPTURED, device=device)
    counted: list[tuple[int, int]] = []

    class Watching(ScheduledDepth):
        def record(
            self, k: int, accepted: list[int], num_sequences: int, seconds: DecodeSeconds
        ) -> None:
            counted.append((len(accepted), num_sequences))

    llm.engine._depth = Watching(lambda n: 3)
    outputs = llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=9))
    llm.engine._complete_drafts()  # the next step would begin with it
    num_steps = sum(output.stats.num_drafts for output in outputs)
    assert sum(known for known, _ in counted) == num_steps
    assert sum(running for _, running in counted) == num_steps + len(outputs)


# ---- K by load ----

# A schedule, and K by the number of sequences that run.
BY_LOAD = {
    "falling": ([[1, 1, 4], [2, 2, 3], [3, 4, 1]], {1: 4, 2: 3, 3: 1, 4: 1}),
    "with pauses": ([[1, 2, 4], [3, 4, 0]], {1: 4, 2: 4, 3: 0, 4: 0}),
}
LENGTHS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 30, 12, 20)]


def watch_load(llm: LLM) -> list[tuple[int, int]]:
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


@pytest.mark.parametrize("name", BY_LOAD)
@pytest.mark.parametrize("method", ["ngram", "eagle3", "peagle"])
def test_depth_follows_the_load(
    target_folder: Path, heads: dict[bool, Path], method: str, name: str
) -> None:
    schedule, k_of = BY_LOAD[name]
    plain = LLM(target_folder, dtype="float64", max_num_seqs=4).generate(PROMPTS, LENGTHS)
    config = scheduled(config_of(method, heads), schedule) | {"num_speculative_tokens": 4}
    options = {"dtype": "float64", "max_num_seqs": 4}
    options["enforce_eager"] = method == "ngram"  # its plain graphs look drafts up too
    llm = LLM(target_folder, speculative_config=config, **options)
    seen = watch_load(llm)
    found = llm.generate(PROMPTS, LENGTHS)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    # The last step of a sequence drafts nothing, or less; one that another's end follows keeps K.
    assert all(drafts <= k_of[max(running - 1, 1)] for running, drafts in seen)
    if method != "ngram":
        most = {n: max((d for r, d in seen if r == n), default=0) for n in (1, 4)}
        assert most == {1: 4, 4: k_of[4]}


# ---- one ring ----


@given(
    capacity=st.integers(1, 9),
    before=st.integers(0, 12),
    behind=st.integers(0, 3),
    later=st.integers(0, 2),
)
def test_takes_the_positions_before_its_first_one(
    capacity: int, before: int, behind: int, later: int
) -> None:
    """As many as displace none, nor what a step in flight has written behind them."""
    ring = FeatureRing(torch.empty(capacity, 1, dtype=torch.float64), 20)

    def rows(first: int, end: int) -> torch.Tensor:
        return torch.arange(float(first), float(end), dtype=torch.float64).unsqueeze(1)

    ring.put(rows(20, 20 + behind))
    first, end = ring.first, 20 + behind
    ring._rows_CA[end % capacity] = end  # by the step
    ring.put_before(rows(first - before, first))
    assert ring.first == first - min(before, capacity - 1 - (end - first))
    ring.advance(1)
    assert ring.get().squeeze(1).tolist() == list(range(ring.first, end + 1))
    ring.put(rows(end + 1, end + 1 + later))
    assert ring.get().squeeze(1).tolist() == list(range(ring.first, end + 1 + later))


@given(
    capacity=st.integers(1, 9),
    position=st.integers(0, 30),
    puts=st.lists(st.integers(0, 20), max_size=8),
)
def test_keeps_the_last_positions(capacity: int, position: int, puts: list[int]) -> None:
    ring = FeatureRing(torch.empty(capacity, 2, dtype=torch.float64), position)
    kept: list[int] = []
    before: list[tuple[torch.Tensor, list[list[float]]]] = []
    end = position
    for count in puts:
        new = list(range(end, end + count))
        end += count
        ring._rows_CA[end % capacity] = -1  # by a step in flight
        ring.put(torch.tensor([[p, -p] for p in new], dtype=torch.float64).view(-1, 2))
        kept = (kept + new)[::-1][: capacity - 1][::-1]
        assert ring._rows_CA[end % capacity].tolist() == [-1, -1]
        assert all(got.tolist() == rows for got, rows in before), "what was got is a copy"
        assert (ring.first, ring.end) == (end - len(kept), end)
        assert ring.get().tolist() == [[p, -p] for p in kept]
        assert ring.get().dtype == torch.float64
        before.append((ring.get(), ring.get().tolist()))
