"""The life of requests in the engine: ends, seeds, streams, cancellation, counters."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.engine import SpeculationStats
from peagle.llm import StreamChunk
from peagle.models.target import TargetModel
from peagle.speculation import Drafts, TargetStep
from tests.conftest import make_target_folder

PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 55))]
K = 5


@pytest.fixture(scope="module")
def heads(head_folders: Callable[..., Path]) -> dict[bool, Path]:
    """A P-EAGLE head (True) and an EAGLE-3 head (False)."""
    return {parallel: head_folders(parallel=parallel) for parallel in (True, False)}


def config_of(name: str, heads: dict[bool, Path]) -> dict[str, Any] | None:
    """A speculative configuration: plain, ngram, peagle or eagle3, maybe with a draft sampling."""
    kind, _, draft_sampling = name.partition(" ")
    if kind == "plain":
        return None
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": K}
    config = {"model": str(heads[kind == "peagle"]), "num_speculative_tokens": K}
    return {**config, "draft_sampling": draft_sampling or "argmax"}


@pytest.fixture(params=["plain", "peagle", "eagle3", "ngram"])
def speculative(request: pytest.FixtureRequest, heads: dict[bool, Path]) -> dict[str, Any] | None:
    """Every way to decode."""
    return config_of(request.param, heads)


def make_llm(folder: Path, speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM(folder, speculative_config=speculative, dtype="float64", **options)


def assert_idle(llm: LLM) -> None:
    blocks = llm.engine.scheduler.blocks
    assert not llm.engine.has_unfinished
    assert blocks.num_free_blocks == blocks.num_blocks


def know_the_answer(llm: LLM, answers: Sequence[list[int]], num_right: int = K) -> None:
    """Replace the first drafts by the right ones, so that drafts are accepted."""
    proposer: Any = llm.engine.drafting.proposer
    propose = proposer.propose

    def informed(step: TargetStep) -> Drafts:
        drafts = propose(step)
        tokens_BK = drafts.tokens_BK.clone()
        for b, history in enumerate(step.histories):
            (answer,) = (a for a in answers if a[: len(history)] == list(history))
            right = answer[len(history) : len(history) + num_right]
            tokens_BK[b, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return replace(drafts, tokens_BK=tokens_BK)

    proposer.propose = informed


# ---- how a request ends ---------------------------------------------------------------------


def test_max_tokens_end_a_request(target_folder: Path, speculative: dict[str, Any] | None) -> None:
    llm = make_llm(target_folder, speculative)
    lengths = [1, 2, 7, 30]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [len(o.token_ids) for o in outputs] == lengths
    assert {o.finish_reason for o in outputs} == {"length"}
    assert_idle(llm)


def test_the_context_ends_a_request(
    target_folder: Path, speculative: dict[str, Any] | None
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    whole = make_llm(target_folder).generate(PROMPTS, params)
    for max_model_len in (36, 40, 44):
        llm = make_llm(target_folder, speculative, max_model_len=max_model_len, block_size=3)
        outputs = llm.generate(PROMPTS, params)
        for prompt, output, longer in zip(PROMPTS, outputs, whole, strict=True):
            assert len(prompt) + len(output.token_ids) == max_model_len
            assert output.finish_reason == "length"
            assert output.token_ids == longer.token_ids[: len(output.token_ids)]
        assert_idle(llm)


def test_stop_ids_end_a_request(target_folder: Path, speculative: dict[str, Any] | None) -> None:
    llm = make_llm(target_folder, speculative)
    whole = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    for output, prompt in zip(whole, PROMPTS, strict=True):
        for stop in (output.token_ids[6], output.token_ids[11]):
            params = SamplingParams(max_tokens=24, stop_token_ids=(stop, 301))
            stopped = llm.generate([prompt], params)[0]
            end = output.token_ids.index(stop) + 1
            assert stopped.token_ids == output.token_ids[:end]
            assert stopped.finish_reason == "stop"
    assert_idle(llm)


def test_end_of_text_ends_a_request_unless_ignored(
    tmp_path: Path, target_folder: Path, heads: dict[bool, Path]
) -> None:
    prompt = PROMPTS[0]
    whole = make_llm(target_folder).generate([prompt], SamplingParams(max_tokens=24))[0]
    end_of_text = whole.token_ids[9]
    first = whole.token_ids.index(end_of_text)
    # The same weights, another end-of-text id.
    folder = make_target_folder(tmp_path / target_folder.name, eos_token_id=end_of_text)
    llm = make_llm(folder, {"model": str(heads[True]), "num_speculative_tokens": K})
    stopped = llm.generate([prompt], SamplingParams(max_tokens=24))[0]
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    ignored = llm.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    assert ignored.token_ids == whole.token_ids
    assert ignored.finish_reason == "length"
    # A stop id of the request counts even then.
    stop = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(end_of_text,))
    assert llm.generate([prompt], stop)[0].token_ids == stopped.token_ids


def test_text_leaves_the_end_of_text_token_out(target_folder: Path) -> None:
    llm = make_llm(target_folder)
    output = llm.generate(["hi"], SamplingParams(max_tokens=10, ignore_eos=True))[0]
    stop = SamplingParams(max_tokens=10, stop_token_ids=(output.token_ids[4],), ignore_eos=True)
    stopped = llm.generate(["hi"], stop)[0]
    assert stopped.token_ids[-1] == output.token_ids[4]
    expected = llm.tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
    assert stopped.text == expected


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


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
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

    def drafts_of_the_first(prompts: list[list[int]], shorter: int) -> list[tuple[int, list[int]]]:
        llm = make_llm(target_folder, config, block_size=4)
        know_the_answer(llm, answers, num_right=k)
        proposer: Any = llm.engine.drafting.proposer
        draw, seen = proposer._draw, []

        def watching(hidden_BJD: Any, sampling: Any, first: int) -> Drafts:
            drafts = draw(hidden_BJD, sampling, first)
            seen.append((int(sampling.num_outputs_B[0]), drafts.tokens_BK[0].tolist()))
            return drafts

        proposer._draw = watching
        limits = [params, replace(params, max_tokens=shorter)]
        llm.generate(prompts, limits[: len(prompts)])
        return seen

    for shorter in (10, 17):
        alone = drafts_of_the_first(prompts[:1], shorter)
        assert drafts_of_the_first(prompts, shorter) == alone


# ---- seeds ----------------------------------------------------------------------------------

SAMPLED = SamplingParams(max_tokens=16, temperature=1.2, top_k=50, top_p=0.95, ignore_eos=True)


@pytest.mark.parametrize(
    "name",
    ["plain", "ngram", "peagle", "eagle3", "peagle probabilistic", "eagle3 probabilistic"],
)
def test_a_seed_fixes_the_output_whatever_else_runs(
    target_folder: Path, heads: dict[bool, Path], name: str
) -> None:
    speculative = config_of(name, heads)
    params = [replace(SAMPLED, seed=7 + i) for i in range(len(PROMPTS))]
    llm = make_llm(target_folder, speculative)
    alone = [llm.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, params)]
    together = [o.token_ids for o in llm.generate(PROMPTS, params)]
    assert together == alone
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == alone, "and again"
    backwards = [o.token_ids for o in llm.generate(PROMPTS[::-1], params[::-1])]
    assert backwards[::-1] == alone
    # Among greedy neighbours, few seats, small blocks.
    mixed = [*params[:2], SamplingParams(max_tokens=5), params[3]]
    small = make_llm(target_folder, speculative, max_num_seqs=2, block_size=3)
    found = [o.token_ids for o in small.generate(PROMPTS, mixed)]
    assert [found[i] for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]


def test_greedy_requests_stay_greedy_among_sampled_ones(
    target_folder: Path, heads: dict[bool, Path]
) -> None:
    greedy = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [o.token_ids for o in make_llm(target_folder).generate(PROMPTS, greedy)]
    for draft_sampling in ("argmax", "probabilistic"):
        config = {
            "model": str(heads[True]),
            "num_speculative_tokens": K,
            "draft_sampling": draft_sampling,
        }
        params = [greedy, SAMPLED, greedy, replace(SAMPLED, max_tokens=5)]
        outputs = make_llm(target_folder, config).generate(PROMPTS, params)
        assert outputs[0].token_ids == expected[0]
        assert outputs[2].token_ids == expected[2]
        assert outputs[1].token_ids != expected[1]


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


# ---- streams --------------------------------------------------------------------------------


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


def test_leaving_a_stream_early_frees_its_blocks(
    target_folder: Path, speculative: dict[str, Any] | None
) -> None:
    llm = make_llm(target_folder, speculative, max_num_seqs=2)
    expected = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=12))
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


def test_cancel_leaves_the_others_alone(
    target_folder: Path, speculative: dict[str, Any] | None
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = make_llm(target_folder, speculative, max_num_seqs=2)
    expected = [o.token_ids for o in llm.generate(PROMPTS, params)]
    engine = llm.engine
    sequences = [engine.add_request(prompt, params) for prompt in PROMPTS]
    engine.step()
    engine.step()
    engine.cancel(sequences[0])  # running
    engine.cancel(sequences[3])  # waiting
    while engine.has_unfinished:
        engine.step()
    engine.cancel(sequences[1])  # finished
    assert [s.finish_reason for s in sequences] == ["cancelled", "length", "length", "cancelled"]
    assert [sequences[i].output_token_ids for i in (1, 2)] == expected[1:3]
    assert sequences[3].output_token_ids == []
    assert_idle(llm)


# ---- counters -------------------------------------------------------------------------------


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


def test_prompt_lookup_verifies_only_what_it_found(target_folder: Path) -> None:
    llm = make_llm(target_folder, {"method": "ngram", "num_speculative_tokens": K})
    proposer: Any = llm.engine.drafting.proposer
    tokens, found = PROMPTS[0], []
    for chunk in llm.stream([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True)):
        tokens = tokens + chunk.token_ids
        found.append((chunk.num_drafted, len(proposer.lookup(tokens))))
    verified, looked_up = zip(*found, strict=True)
    assert verified[1:] == looked_up[:-1]
    assert len(set(verified[1:])) > 2, "none, some and K drafts"


def test_plain_decoding_counts_no_drafts(target_folder: Path) -> None:
    output = make_llm(target_folder).generate(["abc"], SamplingParams(max_tokens=4))[0]
    assert output.stats.num_drafts == 0
    assert output.stats.acceptance_length == 1.0


# ---- one target, several engines ------------------------------------------------------------


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
    """The drafter has its own cache shapes in the block ids of the target."""
    head = head_folders(hidden_size=48, num_attention_heads=6, num_kv_heads=3, head_dim=16)
    llm = make_llm(target_folder, {"model": str(head), "num_speculative_tokens": K})
    proposer: Any = llm.engine.drafting.proposer
    blocks = llm.engine.scheduler.blocks
    assert [tuple(c.keys.shape) for c in proposer.caches] == [
        (blocks.num_blocks + 1, blocks.block_size, 3, 16)
    ] * 2
    assert [tuple(c.keys.shape) for c in llm.target.kv_caches] == [
        (blocks.num_blocks + 1, blocks.block_size, 2, 8)
    ] * 4


def test_the_cache_keeps_to_its_bound(target_folder: Path, heads: dict[bool, Path]) -> None:
    config = {"model": str(heads[True]), "num_speculative_tokens": K}
    llm = make_llm(target_folder, config, kv_cache_gib=2**-10)  # 1 MiB
    proposer: Any = llm.engine.drafting.proposer
    blocks = llm.engine.scheduler.blocks.num_blocks
    caches = [*llm.target.kv_caches, *proposer.caches]
    per_block = sum(c.keys[0].nbytes + c.values[0].nbytes for c in caches)
    assert blocks * per_block <= 2**20 < (blocks + 1) * per_block
    assert_idle(llm)


def test_drafting_deeper_than_the_head_was_trained_warns(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    head = str(head_folders(trained_depth=3))
    with pytest.warns(UserWarning, match="num_speculative_tokens is 4.*trained for 3"):
        LLM(target_folder, speculative_config={"model": head, "num_speculative_tokens": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(target_folder, speculative_config={"model": head, "num_speculative_tokens": 3})
