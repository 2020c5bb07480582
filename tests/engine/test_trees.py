"""Candidate trees in the engine: counters, depths, blocks ahead, heads that cannot draft them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle import SamplingParams
from peagle.errors import UserError
from tests.engine.engines import PROMPTS, TREES, K, config_of, know_the_answer, make_llm

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
WAYS = pytest.mark.parametrize("way", ["trees", "eagle3 trees"])


@WAYS
def test_counters_are_of_nodes_and_depths(
    target_folder: Path, heads: dict[bool, Path], way: str
) -> None:
    plain = [o.token_ids for o in make_llm(target_folder).generate(PROMPTS, GREEDY)]
    llm = make_llm(target_folder, config_of(way, heads))
    know_the_answer(llm, [p + o for p, o in zip(PROMPTS, plain, strict=True)], share=0.9)
    stats, accepted, deepest = llm.stats.speculation, [0] * K, 0
    drafted = 0
    for chunk in llm.stream(PROMPTS, GREEDY):
        drafted += chunk.num_drafted
        if chunk.num_drafted:
            assert chunk.draft_depth is not None and chunk.draft_depth <= K
            deepest = max(deepest, chunk.draft_depth)
            assert len(chunk.rejected_token_ids) >= chunk.num_drafted - chunk.draft_depth
            tree = chunk.draft_tree
            assert tree is not None and len(tree.tokens) == chunk.num_drafted
            path = tree.path(chunk.token_ids[: chunk.num_accepted])
            assert [tree.tokens[node] for node in path] == chunk.token_ids[: len(path)]
            if chunk.output is None:  # a last chunk may be cut
                rest = [token for i, token in enumerate(tree.tokens) if i not in path]
                assert rest == list(chunk.rejected_token_ids)
        if chunk.output is None:  # a last chunk may be cut
            accepted = [a + (i < chunk.num_accepted) for i, a in enumerate(accepted)]
    stats = llm.stats.speculation
    assert stats.num_draft_tokens == drafted
    assert len(stats.num_accepted_tokens_per_pos) == deepest == K
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    pairs = zip(stats.num_accepted_tokens_per_pos, accepted, strict=True)
    assert all(0 <= counted - seen <= len(PROMPTS) for counted, seen in pairs)


@pytest.mark.slow
@WAYS
def test_each_request_has_its_own_depth(
    target_folder: Path, heads: dict[bool, Path], way: str
) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(K + 1)]
    params = [replace(GREEDY, num_speculative_tokens=k) for k in range(K + 1)]
    expected = [o.token_ids for o in make_llm(target_folder).generate(prompts, GREEDY)]
    outputs = make_llm(target_folder, config_of(way, heads)).generate(prompts, params)
    for k, output in enumerate(outputs):
        assert output.token_ids == expected[k]
        assert len(output.stats.num_accepted_tokens_per_pos) <= k
        per_draft = output.stats.num_draft_tokens / max(1, output.stats.num_drafts)
        # The last trees are cut to the room of the context, here far away.
        assert per_draft == (0, TREES["num_parallel_trees"], 9, 9, 9, 9)[k]


@pytest.mark.slow
@WAYS
def test_requests_share_the_nodes_of_a_schedule(
    target_folder: Path, heads: dict[bool, Path], way: str
) -> None:
    schedule = [[1, 1, 9], [2, 2, 4], [3, 4, 2]]
    expected = [o.token_ids for o in make_llm(target_folder).generate(PROMPTS, GREEDY)]
    config = {
        **(config_of(way, heads) or {}),
        "num_speculative_tokens_per_batch_size": schedule,
    }
    llm = make_llm(target_folder, config)
    know_the_answer(llm, [p + o for p, o in zip(PROMPTS, expected, strict=True)], share=0.7)
    engine, shares = llm.engine, list[list[int]]()
    params = [replace(GREEDY, max_tokens=n) for n in (30, 12, 25, 18)]
    sequences = [engine.add_request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    while engine.has_unfinished:
        load = len(engine.scheduler.running)
        counts = [one.num_drafted for one in engine.step()]
        assert not load or sum(counts) <= load * engine._depth(load)
        shares.append(counts)
    assert [s.output_token_ids for s in sequences] == [
        tokens[: one.max_tokens] for tokens, one in zip(expected, params, strict=True)
    ]
    assert any(len(set(counts)) > 1 for counts in shares), "one has more than another"
    assert set(engine.stats.decode_steps) == {9, 4, 2}
    assert engine.stats.speculation.num_accepted_tokens > 0


def test_blocks_ahead_are_those_of_the_nodes(target_folder: Path, heads: dict[bool, Path]) -> None:
    """A beam takes its nodes of all depths but the last, behind the accepted tokens."""
    beams = 3 * (K - 1)
    cases = ("trees", 9, 2 * (K + 1)), ("trees", 20, 21), ("eagle3 trees", 9, K + 1 + beams)
    for way, nodes, slots in cases:
        config = config_of(way, heads) or {}
        config |= {"parallel_drafting_spec": TREES | {"max_nodes": nodes}, "prompt_lookup": False}
        plan = make_llm(target_folder, config).engine.memory_plan
        assert plan.num_lookahead_slots == slots


@pytest.mark.parametrize(
    ("head", "keys", "message"),
    [
        (
            {"trained_depth": 4},
            {},
            "prediction_depth is 5; expected at most 4, which the head .* Each key",
        ),
        (
            {"parallel": False},
            {"num_parallel_trees": 9},
            "num_parallel_trees is 9; expected 1 to 8: the nodes of each depth .* Each key",
        ),
        (
            {"parallel": False},
            {"num_parallel_trees": 8, "prediction_depth": 10, "max_nodes": 20},
            "go on from 8 nodes at 9 depths; expected at most 64 nodes in all",
        ),
    ],
)
def test_heads_that_cannot_draft_these_trees(
    target_folder: Path,
    head_folders: Callable[..., Path],
    head: dict[str, Any],
    keys: dict[str, int],
    message: str,
) -> None:
    folder = head_folders(**{"parallel": True, **head})
    config = {"model": str(folder), "parallel_drafting_spec": TREES | keys, "prompt_lookup": False}
    with pytest.raises(UserError, match=message):
        make_llm(target_folder, config)


def test_no_chains_are_drawn_beside_the_trees_of_an_eagle3_head(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    config = {**(config_of("eagle3 trees", heads) or {}), "drawn_chains_from": 1.0}
    with pytest.raises(UserError, match=r"drawn_chains_from is 1\.0, but .* is an EAGLE-3 head"):
        make_llm(target_folder, config)


def test_a_width_that_is_left_out_is_a_beam(target_folder: Path, heads: dict[bool, Path]) -> None:
    for parallel, shape, width in ((True, {}, 15), (False, {}, 4), (False, {"max_nodes": 2}, 2)):
        for k in (None, 2):
            config = {"model": str(heads[parallel]), "parallel_drafting_spec": shape}
            llm = make_llm(target_folder, {**config, "num_speculative_tokens": k})
            trees = llm.engine.speculative and llm.engine.speculative.trees
            assert trees and trees.num_parallel_trees == width
