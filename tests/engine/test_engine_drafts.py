"""Drafts in the engine: counters, each request's own K, holes, the head's reach."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.engine import Sequence, SpeculationStats
from peagle.engine.depth import ScheduledDepth
from tests.engine.engines import (
    PROMPTS,
    K,
    config_of,
    drive,
    know_the_answer,
    look_before_contexts,
    make_llm,
    watch_drafts,
)

KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])


# ---- each request its own K, and changes of it ----

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def plain_outputs(folder: Path, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.token_ids for o in make_llm(folder).generate(PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peagle", "eagle3", "ngram"])
def test_requests_of_one_batch_may_draft_differently(
    target_folder: Path, heads: dict[bool, Path], name: str
) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(K + 1)]
    params = [replace(GREEDY, num_speculative_tokens=k) for k in range(K + 1)]
    expected = plain_outputs(target_folder)
    outputs = make_llm(target_folder, config_of(name, heads)).generate(prompts, params)
    for k, output in enumerate(outputs):
        assert output.token_ids == expected[k % len(PROMPTS)]
        if name == "ngram":
            assert len(output.stats.num_accepted_tokens_per_pos) <= k
        else:
            assert output.stats.num_draft_tokens == k * output.stats.num_drafts
        own = make_llm(target_folder, config_of(name, heads)).generate([prompts[k]], params[k])
        assert output.stats == own[0].stats, "as if it were alone"


# ---- holes in the drafter's KV ----


def switch_off(llm: LLM, first: int, last: int) -> Callable[[int, list[Sequence]], None]:
    """No sequence drafts in the steps from `first` to before `last`."""

    def switch(step: int, sequences: list[Sequence]) -> None:
        if step in (first, last):
            llm.engine._depth = ScheduledDepth(lambda n: 0 if step == first else K)

    return switch


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("first", [0, 3], ids=["from the prompt on", "while decoding"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "in a batch"])
def test_a_small_hole_is_closed(
    target_folder: Path,
    heads: dict[bool, Path],
    parallel: bool,
    first: int,
    prompts: list[list[int]],
) -> None:
    """Drafts are then those of a run that was never interrupted."""
    config = config_of("peagle" if parallel else "eagle3", heads)
    whole, holed = make_llm(target_folder, config), make_llm(target_folder, config)
    expected, found = watch_drafts(whole), watch_drafts(holed)
    drive(whole, prompts, GREEDY)
    drive(holed, prompts, GREEDY, switch_off(holed, first, first + 9))
    after = [t for t in found if t[:4] == tuple(PROMPTS[0]) and len(t) > 4 + first + 9]
    assert len(after) > 5
    assert len(found) < len(expected)
    assert found == {text: expected[text] for text in found}


def run_with_a_large_hole(
    llm: LLM, poison: float | None, *, looks_inside: bool = False
) -> tuple[dict[tuple[int, ...], list[int]], int]:
    """The drafts after a hole and its size; what is poisoned are the hole's drafter slots."""
    drafting: Any = llm.engine.drafting
    proposer = drafting.proposer
    if looks_inside:
        look_before_contexts(proposer)
    drafts = watch_drafts(llm)
    switch, before, hole = switch_off(llm, 3, 15), set[tuple[int, ...]](), list[int]()

    def step(number: int, sequences: list[Sequence]) -> None:
        if number == 15:
            sequence = sequences[0]
            assert sequence.pending_features is not None
            hole.extend(range(sequence.num_drafter_tokens, sequence.pending_features.first))
            before.update(drafts)
            size = llm.engine.blocks.block_size
            for position in hole if poison is not None else ():
                place = sequence.block_table[position // size], position % size
                for cache in proposer.caches:
                    cache.keys[place] = cache.values[place] = poison
        switch(number, sequences)

    drive(llm, PROMPTS[:2], GREEDY, step)
    mine = {t: d for t, d in drafts.items() if t not in before and t[:4] == tuple(PROMPTS[0])}
    return mine, len(hole)


@pytest.mark.slow
@KINDS
def test_a_large_hole_is_never_looked_into(
    target_folder: Path, heads: dict[bool, Path], parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.features.FEATURES_KEPT", 3)

    def run(poison: float | None, **options: bool) -> dict[tuple[int, ...], list[int]]:
        config = config_of("peagle" if parallel else "eagle3", heads)
        drafts, hole = run_with_a_large_hole(make_llm(target_folder, config), poison, **options)
        assert hole >= 8
        assert len(drafts) > 8
        return drafts

    clean = run(None)
    assert run(1e6) == clean
    assert run(1e6, looks_inside=True) != clean, "the poison shows if attention looks"


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("hole", ["never drafts", "large", "small"])
def test_blocks_with_holes_are_not_shared(
    target_folder: Path,
    heads: dict[bool, Path],
    parallel: bool,
    hole: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later request with the same tokens drafts as if it were the first one."""
    config = config_of("peagle" if parallel else "eagle3", heads)
    prompt = PROMPTS[3]
    monkeypatch.setattr("peagle.engine.features.FEATURES_KEPT", 3 if hole == "large" else 256)
    llm = make_llm(target_folder, config, block_size=4)
    if hole == "never drafts":
        (first,) = drive(llm, [prompt], replace(GREEDY, num_speculative_tokens=0))
    else:
        (first,) = drive(llm, [prompt], GREEDY, switch_off(llm, 0, 9))
    longer = [first.token_ids[:-2]]
    fresh = make_llm(target_folder, config, block_size=4)
    expected = watch_drafts(fresh)
    drive(fresh, longer, GREEDY)
    found = watch_drafts(llm)
    (again,) = drive(llm, longer, GREEDY)
    assert found == expected
    assert again.num_cached_tokens is not None
    shared = {"never drafts": 0, "large": 0}
    if hole in shared:
        assert again.num_cached_tokens == shared[hole]
    else:
        assert again.num_cached_tokens > len(prompt), "a closed hole is shared"


# ---- how far a head drafts ----


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A sequence has .* goes on without drafts")
@KINDS
@pytest.mark.parametrize("own_limit", [True, False], ids=["the head's length", "asked for"])
def test_drafting_stops_beyond_the_heads_length(
    target_folder: Path, head_folders: Callable[..., Path], parallel: bool, own_limit: bool
) -> None:
    limit = 24
    head = head_folders(parallel=parallel, **({"max_position_embeddings": 24} if own_limit else {}))
    config: dict[str, Any] = {"model": str(head), "num_speculative_tokens": K}
    if not own_limit:
        config["max_model_len"] = limit
    llm = make_llm(target_folder, config)
    lens = [len(prompt) for prompt in PROMPTS]
    drafted: dict[int, int] = {}
    for chunk in llm.stream(PROMPTS, GREEDY):
        if chunk.index < 3 and lens[chunk.index] > len(PROMPTS[chunk.index]):
            drafted[lens[chunk.index]] = chunk.num_drafted
        elif chunk.index == 3:
            assert chunk.num_drafted == 0, "the prompt alone is longer"
        lens[chunk.index] += len(chunk.token_ids)
    # With N tokens, draft k comes from the slot N - 3 + k, which must stand before the limit.
    assert drafted == {n: max(0, min(K, limit - n + 2)) for n in drafted}
    assert set(range(20, 30)) <= set(drafted), "the end is passed slowly"
    again = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert again == plain_outputs(target_folder)


# ---- drafts whatever the schedule ----


@cache
def drafts_alone(
    target: Path, config: str
) -> tuple[dict[tuple[int, ...], list[int]], list[SpeculationStats]]:
    """Return drafts and counters of prompts that each have an engine of their own."""
    expected: dict[tuple[int, ...], list[int]] = {}
    counters: list[SpeculationStats] = []
    for prompt in PROMPTS:
        roomy = make_llm(target, json.loads(config))
        seen = watch_drafts(roomy)
        counters += [sequence.stats for sequence in drive(roomy, [prompt], GREEDY)]
        expected |= seen
    return expected, counters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "window"), [(True, 36), (False, 0)], ids=["peagle, a window", "eagle3"]
)  # outputs pass the window, no prompt does
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 22, "block_size": 4},
        {"max_num_seqs": 2, "block_size": 3},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_drafts_do_not_depend_on_the_schedule(
    target_folder: Path,
    heads: dict[bool, Path],
    parallel: bool,
    options: dict[str, Any],
    window: int,
) -> None:
    """Prompts in chunks, preemption, shared prefixes: the head reads the same all the time."""
    config = {**(config_of("peagle" if parallel else "eagle3", heads) or {})}
    config["draft_window"] = window
    expected, counters = drafts_alone(target_folder, json.dumps(config))
    llm = make_llm(target_folder, config, **options)
    found = watch_drafts(llm)
    for _ in range(2):  # the second time on what the first run left
        found.clear()
        sequences = drive(llm, PROMPTS, GREEDY)
        assert found == expected
        assert [sequence.stats for sequence in sequences] == counters
    stats = llm.engine.stats
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    if "num_kv_blocks" not in options:  # there the space is needed at once
        assert (stats.num_cached_tokens > 0) == ("enable_prefix_caching" not in options)


@pytest.mark.slow
@KINDS
def test_a_request_that_ends_leaves_its_neighbours_drafts_alone(
    target_folder: Path, heads: dict[bool, Path], parallel: bool
) -> None:
    """Blocks of another sequence are never written: the neighbour's drafts stay the same."""
    prompts = [[17] * 5, [5, 9, 200] * 5]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = [
        prompt + output.token_ids
        for prompt, output in zip(prompts, make_llm(target_folder).generate(prompts, params))
    ]
    k = 7
    config = {"model": str(heads[parallel]), "num_speculative_tokens": k}

    def drafts_of_the_first(prompts: list[list[int]], shorter: int) -> dict[int, list[int]]:
        llm = make_llm(target_folder, config, block_size=4)
        drafts = watch_drafts(llm)
        know_the_answer(llm, answers, num_right=k)
        limits = [params, replace(params, max_tokens=shorter)]
        llm.generate(prompts, limits[: len(prompts)])
        return {len(text): found for text, found in drafts.items() if text[0] == prompts[0][0]}

    for shorter in (10, 17):
        alone = drafts_of_the_first(prompts[:1], shorter)
        assert len(alone) > 6
        assert drafts_of_the_first(prompts, shorter) == alone


# ---- counters ----


@pytest.mark.parametrize("num_right", [0, 2, K])
def test_counters_say_what_happened(
    target_folder: Path, heads: dict[bool, Path], num_right: int
) -> None:
    prompts, params = PROMPTS[:2], SamplingParams(max_tokens=25, ignore_eos=True)
    longer = make_llm(target_folder).generate(prompts, replace(params, max_tokens=40))
    answers = [prompt + output.token_ids for prompt, output in zip(prompts, longer)]
    config = {"model": str(heads[True]), "num_speculative_tokens": K}
    llm = make_llm(target_folder, config)
    know_the_answer(llm, answers, num_right)
    pooled = SpeculationStats()
    for output in llm.generate(prompts, params):
        stats = output.stats
        pooled.add(stats)
        assert stats.num_draft_tokens == K * stats.num_drafts
        assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
        assert len(stats.num_accepted_tokens_per_pos) == K
        assert stats.num_accepted_tokens_per_pos[:num_right] == [stats.num_drafts] * num_right
        # One token of the prompt's pass, then a bonus token a step; the last step may be cut.
        emitted = 1 + stats.num_accepted_tokens + stats.num_drafts
        assert 25 <= emitted <= 25 + K
        if num_right == K:
            assert stats.num_drafts == 4
            assert stats.acceptance_length == 1 + K, "counted before the output is trimmed"
    assert llm.engine.stats.speculation == pooled


def test_a_trimmed_last_step_reports_what_it_kept(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    prompt, params = PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True)
    longer = make_llm(target_folder).generate([prompt], replace(params, max_tokens=20))[0]
    config = {"model": str(heads[True]), "num_speculative_tokens": K}
    llm = make_llm(target_folder, config)
    know_the_answer(llm, [prompt + longer.token_ids])
    first, last = llm.stream([prompt], params)
    assert (len(first.token_ids), first.num_accepted, first.num_drafted) == (1, 0, 0)
    assert (len(last.token_ids), last.num_accepted, last.num_drafted) == (3, 3, K)
    assert last.output is not None
    assert last.output.stats.num_accepted_tokens == K


def test_engine_counters(target_folder: Path) -> None:
    llm = make_llm(target_folder, block_size=4, max_num_seqs=2)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    sequences = [llm.engine.add_request(p, params) for p in PROMPTS]
    llm.engine.step()
    stats = llm.engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 2, 1)
    held = sum(len(s.block_table) for s in sequences)
    assert stats.num_kv_blocks - stats.num_free_kv_blocks == held > 0
    llm.engine.cancel(sequences[0])
    while llm.engine.has_unfinished:
        llm.engine.step()
    first = llm.engine.stats
    lens = list(map(len, PROMPTS))
    assert (first.num_finished, first.num_cancelled, first.num_preemptions) == (3, 1, 0)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (sum(lens), 3 * 9 + 1)
    assert (first.num_cached_tokens, first.num_running, first.num_waiting) == (0, 0, 0)
    llm.generate(PROMPTS, params)
    # The longest prefix in whole blocks, with one token left to compute.
    cached = sum((n - 1) // 4 * 4 for n in lens)
    assert llm.engine.stats.num_cached_tokens == cached
