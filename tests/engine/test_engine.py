"""The life of requests in the engine: ends, seeds, streams, cancellation, shared targets."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.llm import StreamChunk
from peagle.models.target import TargetModel
from tests.engine.engines import (
    PROMPTS,
    K,
    assert_idle,
    config_of,
    know_the_answer,
    make_llm,
)


@pytest.fixture(params=["plain", "peagle", "trees", "eagle3", "ngram"])
def speculative(request: pytest.FixtureRequest, heads: dict[bool, Path]) -> dict[str, Any] | None:
    """Every way to decode."""
    return config_of(request.param, heads)


@pytest.mark.slow
def test_the_context_ends_a_request(
    target_folder: Path, speculative: dict[str, Any] | None
) -> None:
    params = SamplingParams(max_tokens=44, ignore_eos=True)
    whole = make_llm(target_folder).generate(PROMPTS, params)
    for max_model_len in (36, 43):
        llm = make_llm(target_folder, speculative, max_model_len=max_model_len, block_size=3)
        outputs = llm.generate(PROMPTS, params)
        for prompt, output, longer in zip(PROMPTS, outputs, whole, strict=True):
            assert len(prompt) + len(output.token_ids) == max_model_len
            assert output.finish_reason == "length"
            assert output.token_ids == longer.token_ids[: len(output.token_ids)]
        assert_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_accepted_drafts_beyond_the_end_are_dropped(
    target_folder: Path, heads: dict[bool, Path], parallel: bool
) -> None:
    """A request that ends with drafts to spare harms neither itself nor a neighbour: the drafter
    then stands furthest beyond the last token that is kept.
    """
    prompts = [[17] * 5, [5, 9, 200] * 5]
    long = SamplingParams(max_tokens=70, ignore_eos=True)
    answers = [
        prompt + output.token_ids
        for prompt, output in zip(prompts, make_llm(target_folder).generate(prompts, long))
    ]
    k = 7
    config = {"model": str(heads[parallel]), "num_speculative_tokens": k}
    for shorter in range(9, 18):
        llm = make_llm(target_folder, config, block_size=4)
        know_the_answer(llm, answers, num_right=k)
        params = [replace(long, max_tokens=shorter + 10), replace(long, max_tokens=shorter)]
        for prompt, output, answer in zip(prompts, llm.generate(prompts, params), answers):
            assert output.token_ids == answer[len(prompt) :][: len(output.token_ids)]
            assert output.stats.acceptance_length > 5, "the drafts were accepted"
        assert_idle(llm)


class Unsearched(list[Any]):
    """A queue that nothing walks through."""

    def _walked(self, *_: object) -> Any:
        raise AssertionError("a step costs more, the longer the queue is")

    __iter__ = __contains__ = remove = index = copy = _walked


def test_a_step_does_not_walk_through_the_queue(target_folder: Path) -> None:
    """Tens of thousands of prompts may wait."""
    llm = make_llm(target_folder, max_num_seqs=3)
    engine = llm.requests.engine
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = llm.generate([PROMPTS[0]] * 12, params)
    engine.scheduler.waiting = Unsearched()
    ids = [llm.requests.add(number, PROMPTS[0], params)[0] for number in range(12)]
    found: dict[int, list[int]] = {}
    llm.requests.cancel(ids[7:9])
    while engine.scheduler.has_unfinished:
        for chunk in llm.requests.step():
            found.setdefault(chunk.index, []).extend(chunk.token_ids)
    answers = [output.token_ids for output in expected]
    assert [found.get(n, []) for n in range(12)] == [*answers[:7], [], [], *answers[9:]]
    assert_idle(llm)


SAMPLED = SamplingParams(max_tokens=16, temperature=1.2, top_k=50, top_p=0.95, ignore_eos=True)


def test_other_seeds_give_other_outputs(target_folder: Path) -> None:
    llm = make_llm(target_folder)
    params = [replace(SAMPLED, seed=seed) for seed in range(20)]
    outputs = llm.generate([PROMPTS[0]] * 20, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 20


def test_requests_without_seed_draw_from_the_engines(target_folder: Path) -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        llm = make_llm(target_folder, seed=seed)
        return [tuple(o.token_ids) for o in llm.generate([PROMPTS[0]] * 4, SAMPLED)]

    first = run(0)
    assert len(set(first)) == 4
    assert run(0) == first
    assert not set(run(1)) & set(first)


@pytest.mark.slow
def test_streaming_equals_generate(target_folder: Path, speculative: dict[str, Any] | None) -> None:
    llm = make_llm(target_folder, speculative, max_num_seqs=3)
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)
    chunks: dict[int, list[StreamChunk]] = {i: [] for i in range(len(PROMPTS))}
    for chunk in llm.stream(PROMPTS, params):
        chunks[chunk.index].append(chunk)
    for index, output in enumerate(expected):
        mine = chunks[index]
        assert "".join(c.text for c in mine) == output.text
        assert [t for c in mine for t in c.token_ids] == output.token_ids
        assert all(c.token_ids for c in mine)
        assert [c.output is None for c in mine] == [True] * (len(mine) - 1) + [False]
        last = mine[-1].output
        assert last is not None
        assert (last.text, last.token_ids, last.stats) == (
            output.text,
            output.token_ids,
            output.stats,
        )
        assert mine[0].num_drafted == mine[0].num_accepted == 0, "the prompt's own token"
        assert sum(c.num_drafted for c in mine) == output.stats.num_draft_tokens
        for c in mine[1:-1]:
            assert len(c.token_ids) == c.num_accepted + 1
    assert_idle(llm)


@pytest.mark.slow
def test_leaving_a_stream_early_frees_its_blocks(
    target_folder: Path, speculative: dict[str, Any] | None
) -> None:
    llm = make_llm(target_folder, speculative, max_num_seqs=2)
    expected = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    stream: Any = llm.stream(PROMPTS, SamplingParams(max_tokens=12))
    for _ in range(3):
        next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert_idle(llm)
    for chunk in llm.stream(PROMPTS[:2], SamplingParams(max_tokens=12)):
        if len(chunk.token_ids) >= 1:
            break
    again = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    assert [o.token_ids for o in again] == [o.token_ids for o in expected]
    assert_idle(llm)


def test_an_error_in_one_prompt_queues_none(target_folder: Path) -> None:
    llm = make_llm(target_folder)
    with pytest.raises(ValueError, match="Prompt 2 of 3: The prompt is empty"):
        llm.generate([[1, 2], [], [3]])
    assert_idle(llm)


@pytest.mark.slow
def test_engines_may_share_a_target(target_folder: Path, heads: dict[bool, Path]) -> None:
    target = TargetModel.load(target_folder, dtype=torch.float64)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [o.token_ids for o in make_llm(target_folder).generate(PROMPTS, params)]
    configs = [
        None,
        {"model": str(heads[True]), "num_speculative_tokens": K},
        {"model": str(heads[False]), "num_speculative_tokens": 2},
    ]
    llms = [
        LLM(model=target, speculative_config=config, num_kv_blocks=20 + i)
        for i, config in enumerate(configs)
    ]
    for _ in range(2):
        for llm in llms:
            assert [o.token_ids for o in llm.generate(PROMPTS, params)] == expected
    # Even step by step in turn.
    streams = [llm.stream(PROMPTS, params) for llm in llms]
    finished: list[dict[int, list[int]]] = [{} for _ in llms]
    for chunks in itertools.zip_longest(*streams):
        for chunk, mine in zip(chunks, finished, strict=True):
            if chunk is not None and chunk.output is not None:
                mine[chunk.index] = chunk.output.token_ids
    assert finished == [dict(enumerate(expected))] * len(llms)


def test_a_drafter_of_another_width_shares_the_blocks(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """The drafter has its own cache shapes in the block ids of the target; both keep to a bound."""
    head = head_folders(hidden_size=48, num_attention_heads=6, num_kv_heads=3, head_dim=16)
    config = {"model": str(head), "num_speculative_tokens": K}
    llm = make_llm(target_folder, config, kv_cache_gib=2**-10)  # 1 MiB
    drafting: Any = llm.engine.drafting
    blocks, caches = llm.engine.blocks, [*llm.target.kv_caches, *drafting.proposer.caches]
    sizes = (blocks.num_blocks + 1, blocks.block_size)
    shapes = [tuple(cache.keys.shape) for cache in caches]
    assert shapes == [(*sizes, 2, 8)] * 4 + [(*sizes, 3, 16)] * 2
    per_block = sum(cache.keys[0].nbytes + cache.values[0].nbytes for cache in caches)
    assert blocks.num_blocks * per_block <= 2**20 < (blocks.num_blocks + 1) * per_block


def test_drafting_deeper_than_the_head_was_trained_warns(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    head = str(head_folders(trained_depth=3))
    with pytest.warns(UserWarning, match="num_speculative_tokens is 4.*trained for 3"):
        LLM(target_folder, speculative_config={"model": head, "num_speculative_tokens": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(target_folder, speculative_config={"model": head, "num_speculative_tokens": 3})
