"""The outputs of `LLM` for each request: n outputs, log-probabilities, defaults, refusals."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams, StructuredOutput
from peagle.engine.outputs import RequestOutput
from peagle.engine.requests import word_ids
from peagle.engine.stats import SpeculationStats
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.engine_backend import time_requests
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.messages import ChatMessage
from peagle.models.target import TargetModel
from tests.conftest import byte_tokenizer, make_target_folder
from tests.engine.engines import assert_idle, know_the_answer, make_llm

PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.2, seed=5)
BLOCK = 16
K = 5


@pytest.fixture(scope="module")
def head(head_folders: Callable[..., Path]) -> dict[str, Any]:
    return {"model": str(head_folders(parallel=True)), "num_speculative_tokens": K}


@pytest.fixture(params=["plain", "peagle"])
def llm(request: pytest.FixtureRequest, target_folder: Path, head: dict[str, Any]) -> LLM:
    speculative = head if request.param == "peagle" else None
    return make_llm(target_folder, speculative, block_size=BLOCK)


@pytest.fixture
def plain(target_folder: Path) -> LLM:
    return make_llm(target_folder)


def every(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return [one for output in outputs for one in output.outputs]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in every(outputs)]


# ---- n outputs ----


@pytest.mark.slow
def test_n_outputs_of_a_prompt(llm: LLM) -> None:
    (single,) = llm.generate([PROMPT], SAMPLED)
    params = [replace(SAMPLED, n=4), SAMPLED, replace(SAMPLED, n=2)]
    found = llm.generate([PROMPT, [3], PROMPT], params)
    assert [len(output.outputs) for output in found] == [4, 1, 2]
    assert [output.outputs[0] is output for output in found] == [True] * 3
    outputs = every(found)
    assert [output.index for output in outputs] == [0, 1, 2, 3, 0, 0, 1]
    assert [len(output.prompt_token_ids) for output in outputs] == [40] * 4 + [1] + [40] * 2
    tokens = tokens_of(found)
    assert len(set(map(tuple, tokens[:4]))) == 4, "a seed of its own each"
    assert tokens[0] == single.token_ids == tokens[5], "output 0 is that of n = 1"
    assert tokens[1] == tokens[6], "output 1 does not depend on how many there are"
    assert tokens_of(llm.generate([PROMPT], params[0])) == tokens[:4], "and again"
    assert_idle(llm)


def test_n_outputs_without_seed_differ(llm: LLM) -> None:
    outputs = llm.generate([PROMPT], replace(SAMPLED, seed=None, n=5))
    assert len(set(map(tuple, tokens_of(outputs)))) == 5


def test_the_prompt_of_n_outputs_is_computed_once(llm: LLM) -> None:
    outputs = llm.generate([PROMPT], replace(SAMPLED, n=4))
    # All but the tokens after the last full block.
    assert [output.num_cached_tokens for output in every(outputs)] == [0, 32, 32, 32]
    stats = llm.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (160, 96)


def test_n_answers_to_a_conversation(plain: LLM) -> None:
    messages = [ChatMessage("user", "hi")]
    (turn,) = plain.chat(messages, replace(SAMPLED, n=3), chat_template="{{ 'hi' }}")
    assert [one.index for one in turn.outputs] == [0, 1, 2]
    assert tokens_of([turn.output]) == tokens_of(plain.generate(["hi"], replace(SAMPLED, n=3)))


def test_a_request_that_cannot_be_queued_whole_is_not_queued_at_all(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request, calls = llm.engine.add_request, iter(range(9))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError("no room")
        return add_request(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "add_request", failing)
    with pytest.raises(MemoryError):
        llm.requests.add(0, PROMPT, replace(SAMPLED, n=4))
    assert not llm.requests.has_unfinished
    assert_idle(llm)
    monkeypatch.undo()
    assert len(every(llm.generate([PROMPT], replace(SAMPLED, n=4)))) == 4


@pytest.mark.slow
def test_measuring_n_outputs(llm: LLM) -> None:
    params = [replace(SAMPLED, n=3), replace(SAMPLED, max_tokens=7)]
    run = time_requests(llm, ["hello", "ho"], params)
    assert run.token_ids == tokens_of(llm.generate(["hello", "ho"], params))
    for answer in run.answers:
        assert sum(step.num_tokens for step in answer.steps or []) == answer.num_tokens
    assert [answer.num_tokens for answer in run.answers] == [24, 24, 24, 7]


# ---- priority ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("priority", "order"),
    [(0, [0, 1, 2, 3]), ([3, 1, 2, 1], [1, 3, 2, 0]), ([0, 0, -5, 0], [2, 0, 1, 3])],
)
def test_lower_priorities_go_first(
    target_folder: Path, priority: int | list[int], order: list[int]
) -> None:
    llm = make_llm(target_folder, max_num_seqs=1)
    chunks = llm.stream([PROMPT] * 4, GREEDY, priority=priority)
    assert [chunk.index for chunk in chunks if chunk.output is not None] == order


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1, 2, 3], "3 priorities for 2 prompts; expected one each"),
        ("high", "priorities are 'high'; expected int"),
        ([1, 1.5], "priorities are [1, 1.5]; expected int, or a list of them"),
        (True, "priority is True; expected a whole number; lower goes first"),
    ],
)
def test_wrong_priorities(plain: LLM, priority: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plain.generate(["a", "b"], GREEDY, priority=priority)
    assert message in str(caught.value)
    assert_idle(plain)


# ---- log-probabilities ----


def reference_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return log-probabilities of every token but the first, by transformers, [T - 1, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)


def assert_logprobs(found: list[TokenLogprobs], expected_NV: torch.Tensor, num_top: int) -> None:
    assert len(found) == len(expected_NV)
    for one, expected_V in zip(found, expected_NV, strict=True):
        assert one.logprob == pytest.approx(expected_V[one.token_id].item())
        assert one.rank == 1 + int((expected_V > expected_V[one.token_id]).sum())
        top = expected_V.topk(num_top)
        assert [token for token, _ in one.top] == top.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(top.values.tolist())


@pytest.mark.slow
def test_logprobs_are_the_targets(llm: LLM, target_folder: Path) -> None:
    params = replace(SAMPLED, n=2, logprobs=3, prompt_logprobs=2)
    chunks = list(llm.stream([PROMPT], params))
    for output in (chunk.output for chunk in chunks if chunk.output is not None):
        assert output.logprobs is not None and output.prompt_logprobs is not None
        assert [one.token_id for one in output.logprobs] == output.token_ids
        first, *of_prompt = output.prompt_logprobs
        given = [one for one in of_prompt if one is not None]
        assert first is None and [one.token_id for one in given] == PROMPT[1:]
        expected_TV = reference_logprobs(target_folder, PROMPT + output.token_ids)
        assert_logprobs(given, expected_TV[: len(PROMPT) - 1], 2)
        assert_logprobs(output.logprobs, expected_TV[len(PROMPT) - 1 :], 3)
        mine = [chunk for chunk in chunks if chunk.output_index == output.index]
        assert [one for chunk in mine for one in chunk.logprobs] == output.logprobs
        data = json.loads(json.dumps(output.to_json(), allow_nan=False))
        assert [one["logprob"] for one in data["logprobs"]] == [o.logprob for o in output.logprobs]
        assert [len(one["top"]) for one in data["prompt_logprobs"]] == [2] * 39


def test_logprobs_only_for_those_who_ask(llm: LLM) -> None:
    asked, not_asked = llm.generate([PROMPT, PROMPT], [replace(GREEDY, logprobs=0), GREEDY])
    assert asked.logprobs is not None and [one.top for one in asked.logprobs] == [[]] * 24
    assert asked.prompt_logprobs is not_asked.logprobs is not_asked.prompt_logprobs is None
    assert "logprobs" in asked.to_json()
    assert not {"logprobs", "prompt_logprobs"} & set(not_asked.to_json())


def test_json_has_null_where_a_token_cannot_come() -> None:
    impossible = TokenLogprobs(7, -math.inf, 3, [(2, -0.25), (7, -math.inf)])
    output = RequestOutput("", [7], [1], "stop", SpeculationStats(), 0.1, logprobs=[impossible])
    data = json.loads(json.dumps(output.to_json(), allow_nan=False))
    expected = {"token_id": 7, "logprob": None, "rank": 3, "top": [[2, -0.25], [7, None]]}
    assert data["logprobs"] == [expected]


def test_a_stop_string_trims_tokens_logprobs_and_counters_alike(
    target_folder: Path, head: dict[str, Any]
) -> None:
    whole = make_llm(target_folder).generate([PROMPT], GREEDY)[0]
    llm = make_llm(target_folder, head)
    know_the_answer(llm, [PROMPT + whole.token_ids])
    # From the second token on, six come at once; the stop string, a byte, ends amid them.
    bytes_of = [str(llm.tokenizer.decode([token])) for token in whole.token_ids]
    at, stop = next(
        (at, c)
        for at, c in enumerate(bytes_of)
        if at > K and at % (K + 1) in range(1, K) and c.isprintable() and bytes_of.index(c) == at
    )
    params = replace(GREEDY, stop=(stop,), logprobs=1)
    chunks = list(llm.stream([PROMPT], params))
    output = chunks[-1].output
    assert output is not None and output.logprobs is not None
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.token_ids == whole.token_ids[: at + 1]
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert [one for chunk in chunks for one in chunk.logprobs] == output.logprobs
    assert [t for chunk in chunks for t in chunk.token_ids] == output.token_ids
    assert all(chunk.num_accepted <= len(chunk.token_ids) for chunk in chunks)
    assert llm.stats.num_output_tokens == len(output.token_ids)


# ---- counters ----


def test_stats_are_a_look_at_one_moment(llm: LLM) -> None:
    before = llm.stats
    outputs = llm.generate([PROMPT, [3]], GREEDY)
    after = llm.stats
    assert (before.num_steps, before.num_output_tokens, before.speculation.num_drafts) == (0, 0, 0)
    assert before.speculation.num_accepted_tokens_per_pos == []
    assert after.num_output_tokens == sum(map(len, tokens_of(outputs))) == 48
    assert after.speculation.num_drafts == sum(output.stats.num_drafts for output in outputs)
    assert (after.num_prompt_tokens, after.num_finished, after.num_cancelled) == (41, 2, 0)
    assert (after.num_waiting, after.num_running) == (0, 0)


def test_the_first_token_comes_before_the_last(llm: LLM) -> None:
    many, one = llm.generate([PROMPT, [3]], [GREEDY, replace(GREEDY, max_tokens=1)])
    assert 0 < many.time_to_first_token_s < many.elapsed_s
    assert 0 < one.time_to_first_token_s <= one.elapsed_s


@pytest.mark.slow
@pytest.mark.parametrize(("k", "drafted"), [(0, {0}), (2, {0, 2}), (None, {0, K})])
def test_a_request_says_how_much_to_draft(
    target_folder: Path, head: dict[str, Any], k: int | None, drafted: set[int]
) -> None:
    llm = make_llm(target_folder, head)
    chunks = list(llm.stream([PROMPT], replace(GREEDY, num_speculative_tokens=k)))
    assert {chunk.num_drafted for chunk in chunks} == drafted
    assert chunks[-1].output is not None
    assert [chunks[-1].output.token_ids] == tokens_of(
        make_llm(target_folder).generate([PROMPT], GREEDY)
    )


def test_a_request_cannot_draft_more_than_the_engine(llm: LLM) -> None:
    most = llm.engine.num_speculative_tokens
    with pytest.raises(UserError, match=f"of the request is {most + 1}; .* at most {most}"):
        llm.generate([PROMPT], replace(GREEDY, num_speculative_tokens=most + 1))


# ---- what the model's folder says ----


def with_generation_config(folder: Path, **values: Any) -> LLM:
    """The tiny target with another generation_config.json."""
    make_target_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return LLM(model=TargetModel.load(folder, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        (
            {"do_sample": True, "repetition_penalty": 1.1, "max_new_tokens": 7},
            SamplingParams(temperature=1.0, repetition_penalty=1.1, max_tokens=7),
        ),
    ],
)
def test_default_params_are_those_of_the_model(
    tmp_path: Path, values: dict[str, Any], expected: SamplingParams
) -> None:
    llm = with_generation_config(tmp_path, **values)
    assert llm.default_params() == expected
    same = LLM(model=llm.target).generate([PROMPT], expected)
    assert tokens_of(llm.generate([PROMPT])) == tokens_of(same)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; expected a number above 0 and at most 1"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number of at least 0"),
        ({"top_k": -2}, "top_k is -2; expected a whole number of at least 0"),
    ],
)
def test_wrong_defaults_name_their_file(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    llm = with_generation_config(tmp_path, do_sample=True, **values)
    with pytest.raises(CheckpointError) as caught:
        llm.generate("hi")
    assert f"{tmp_path / 'generation_config.json'}: {message}" in str(caught.value)
    assert "Mend the file, or give params" in str(caught.value)
    assert len(llm.generate("hi", GREEDY)[0].token_ids) == 24


def test_any_of_several_end_of_text_ids_ends_an_output(tmp_path: Path, plain: LLM) -> None:
    whole = plain.generate([PROMPT], GREEDY)[0].token_ids
    ends = [
        next(i for i, t in enumerate(whole) if i >= least and t not in whole[:i])
        for least in (3, 9)
    ]
    llm = with_generation_config(tmp_path, eos_token_id=[319, whole[ends[1]], whole[ends[0]]])
    output = llm.generate([PROMPT], replace(GREEDY, ignore_eos=False))[0]
    assert (output.token_ids, output.finish_reason) == (whole[: ends[0] + 1], "stop")
    llm = with_generation_config(tmp_path, eos_token_id=[whole[ends[1]]])
    output = llm.generate([PROMPT], replace(GREEDY, ignore_eos=False))[0]
    assert output.token_ids == whole[: ends[1] + 1]


# ---- bad words ----


@pytest.mark.slow
def test_bad_words_are_banned_with_and_without_a_space_before(llm: LLM) -> None:
    ban = replace(SAMPLED, max_tokens=60, top_k=3, seed=1)
    x, y, space = (llm.tokenizer.encode(c)[0] for c in "xy ")
    # The model says nothing but x, y and blanks; then not "xy", nor a "yx" after a blank.
    only = replace(ban, allowed_token_ids=(x, y, space), top_k=0, temperature=3.0)
    free = llm.generate("hi", only)[0].text
    assert "xy" in free and " yx" in free
    assert "xy" not in llm.generate("hi", replace(only, bad_words=("xy",)))[0].text
    spaced = llm.generate("hi", replace(only, bad_words=(" yx",)))[0].text
    assert " yx" not in spaced and "yx" in spaced
    words = word_ids(llm.tokenizer, ("x", " y", (5, 6)))
    assert words == ((x,), (space, x), (space, y), (5, 6))


def test_a_bad_word_that_is_nothing_to_the_tokenizer(plain: LLM) -> None:
    core: Any = plain.tokenizer
    core.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(UserError, match=r"bad_words has '\\u200b', of which the tokenizer leaves"):
        plain.generate("hi", replace(GREEDY, bad_words=("x", "\u200b")))
    assert_idle(plain)


# ---- structured output ----

JSON = replace(GREEDY, ignore_eos=False, structured_output=StructuredOutput.json_object())


def test_structured_output_needs_an_end_of_text(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    folder = make_target_folder(tmp_path, eos_token_id=None)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    llm = make_llm(folder)
    with pytest.raises(UserError, match="needs an end-of-text id, and the model has none"):
        llm.generate("hi", JSON)
    assert_idle(llm)


def test_a_schema_that_does_not_compile_is_named(llm: LLM) -> None:
    pytest.importorskip("xgrammar")
    schema = StructuredOutput.json_schema({"type": "string", "pattern": "(unclosed"})
    with pytest.raises(UserError) as caught:
        llm.generate(["hi", "ho"], [JSON, replace(JSON, structured_output=schema)])
    assert str(caught.value).startswith("Prompt 2 of 2: json_schema ")
    assert "(unclosed" in str(caught.value)
    assert_idle(llm)


def test_without_xgrammar(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UserError, match=r"run \S+ -m pip install .*\[grammar\]'"):
        plain.generate("hi", JSON)
    assert len(plain.generate("hi", GREEDY)[0].token_ids) == 24, "the rest works"
