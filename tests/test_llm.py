"""Mistakes of a user of `LLM`: every message names the value, the expectation and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.engine.drafting import HeadDrafting
from peagle.errors import UserError
from peagle.llm import RequestOutput
from peagle.models.target import TargetModel

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(target_folder)


@pytest.fixture(scope="module")
def heads(head_folders: Callable[..., Path]) -> dict[bool, str]:
    return {parallel: str(head_folders(parallel=parallel)) for parallel in (True, False)}


# ---- what works ----


def test_every_form_of_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hi")
    expected = llm.generate("hi", GREEDY)[0].token_ids
    forms: list[Any] = ["hi", ["hi"], ids, [ids], tuple(ids), [tuple(ids)]]
    for prompts in forms:
        (output,) = llm.generate(prompts, GREEDY)
        assert output.token_ids == expected
        assert output.prompt_token_ids == ids
    mixed = llm.generate(["hi", ids, "ho"], [GREEDY, SamplingParams(max_tokens=2), GREEDY])
    assert [o.prompt_token_ids for o in mixed] == [ids, ids, llm.tokenizer.encode("ho")]
    assert [len(o.token_ids) for o in mixed] == [4, 2, 4]
    assert llm.generate([]) == []


def test_output_as_json(llm: LLM, heads: dict[bool, str]) -> None:
    config = {"model": heads[True], "num_speculative_tokens": 3}
    output = LLM(model=llm.target, speculative_config=config).generate("hi", GREEDY)[0]
    assert isinstance(output, RequestOutput)
    data = json.loads(json.dumps(output.to_json()))
    queued, first = data.pop("queue_time_s"), data.pop("time_to_first_token_s")
    assert 0 <= queued < first < data.pop("elapsed_s")
    stats = output.stats
    assert data == {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": "length",
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": 3 * stats.num_drafts,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
        "acceptance_length": stats.acceptance_length,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
    }


def test_every_form_of_the_speculative_configuration(llm: LLM, heads: dict[bool, str]) -> None:
    data = {"method": "eagle3", "model": heads[True], "num_speculative_tokens": 3}
    forms: list[Any] = [data, json.dumps(data), SpeculativeConfig(**data)]
    forms += [{**data, "model": Path(heads[True])}, {**data, "parallel_drafting": True}]
    for config in forms:
        engine = LLM(model=llm.target, speculative_config=config).engine
        assert isinstance(engine.drafting, HeadDrafting)
        assert engine.num_speculative_tokens == 3


# ---- the target ----


def test_a_target_without_tokenizer(target_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(target_folder / name, tmp_path)
    message = message_of(lambda: LLM(tmp_path))
    assert f"The tokenizer of {str(tmp_path)!r} does not load" in message


def test_a_device_that_is_not_there(target_folder: Path) -> None:
    if not torch.cuda.is_available():
        assert "device is 'cuda'" in message_of(lambda: LLM(target_folder, device="cuda"))
    message = message_of(lambda: LLM(target_folder, device="toaster"))
    assert "device is 'toaster'" in message
    assert 'expected "auto", "cpu" or "cuda"' in message


# ---- the prompts ----


@pytest.mark.parametrize(
    ("prompts", "params", "expected"),
    [
        *((p, None, "Prompt 1 of 1: The prompt is empty; expected") for p in ("", [""], [[]])),
        *(
            ([[5, t, 7]], None, f"prompt_token_ids is {t!r}; expected token ids from 0 to 319")
            for t in (-1, 320, 10**9, 1.5, True, "x")
        ),
        *((p, None, "expected text") for p in (5, None, [None], [1.5], [[5], 7])),
        ("hi", SamplingParams(stop_token_ids=(3, 320)), "stop_token_ids is 320; expected token"),
        (["a", "b", "c"], [GREEDY, GREEDY], "2 sampling params for 3 prompts; expected one each"),
        (["a"], [{"max_tokens": 3}], "[{'max_tokens': 3}]; expected SamplingParams, or a list of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_prompts_and_params(llm: LLM, prompts: Any, params: Any, expected: str) -> None:
    assert expected in message_of(lambda: llm.generate(prompts, params))
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target": "NONE"}, "NONE' is not there; expected a folder with config.json"),
        (
            {"target": "EMPTY"},
            "EMPTY' has no config.json; expected a folder",
        ),
        ({"speculative_config": {"model": "NONE"}}, "The draft head 'NONE' is not there"),
        (
            {"speculative_config": {"model": "TARGET"}},
            "is a whole model (LlamaForCausalLM), not a draft head",
        ),
        (
            {"speculative_config": {"model": "HEAD", "num_speculative_tokens": 0}},
            "num_speculative_tokens is 0; expected a whole number from 1 to 64",
        ),
        ({"max_seqs": 3}, "Unknown engine option 'max_seqs'; known options: block_size, device"),
        ({"max_model_len": 257}, "max_model_len is 257; the target's positions end at 256"),
        ({"kv_cache_gib": 1e-9}, "Raise kv_cache_gib"),
    ],
    ids=str,
)
def test_bad_options_of_an_llm(
    target_folder: Path, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    places = {"TARGET": str(target_folder), **{n: str(tmp_path / n) for n in ("NONE", "EMPTY")}}
    config = options.get("speculative_config")
    if config is not None:
        options = {"speculative_config": {**config, "model": places.get(config["model"], "HEAD")}}
    options = {**options, "target": places.get(options.get("target", ""), str(target_folder))}
    message = message_of(lambda: LLM(**options)).replace(f"{tmp_path}/", "")
    assert expected in message


def test_a_prompt_longer_than_the_context(llm: LLM, target_folder: Path) -> None:
    for length in (256, 300):
        message = message_of(lambda n=length: llm.generate([5] * n))
        assert f"The prompt has {length} tokens; expected at most 255" in message
        assert "the context of 256. Shorten the prompt." in message
    assert len(llm.generate([5] * 255, GREEDY)[0].token_ids) == 1
    short = LLM(target_folder, max_model_len=10)
    assert "expected at most 9" in message_of(lambda: short.generate([5] * 10))


def test_half_of_a_surrogate_pair_is_refused_by_its_place(llm: LLM) -> None:
    half = "a\ud800"
    for name, call in {
        "The prompt": lambda: llm.generate({"prompt": half}),
        "bad_words": lambda: SamplingParams(bad_words=[half]),
        "prediction": lambda: SamplingParams(prediction=half),
    }.items():
        message = message_of(call)
        assert f"{name} has '\\ud800' at character 1, half of a surrogate pair" in message
        assert "Remove it" in message


def test_a_request_larger_than_the_cache(target_folder: Path, heads: dict[bool, str]) -> None:
    config = {"model": heads[True], "num_speculative_tokens": 3}
    small = LLM(target_folder, speculative_config=config, num_kv_blocks=4, block_size=8)
    params = SamplingParams(max_tokens=100)
    message = message_of(lambda: small.generate([5] * 20, params))
    assert "needs 16 KV blocks of 8 tokens, the cache has 4" in message
    assert "Lower max_tokens (100), or raise num_kv_blocks." in message
    message = message_of(lambda: small.generate([5] * 40, SamplingParams(max_tokens=1)))
    assert "Shorten the prompt (40 tokens), or raise num_kv_blocks." in message
    assert len(small.generate([5] * 20, GREEDY)[0].token_ids) == 4


def test_two_streams_of_one_llm(llm: LLM) -> None:
    stream = llm.stream("hi", GREEDY)
    next(stream)
    message = message_of(lambda: llm.generate("ho", GREEDY))
    assert "generating already; finish or close the other stream first" in message
    assert sum(chunk.output is not None for chunk in stream) == 1
    assert len(llm.generate("ho", GREEDY)) == 1


# ---- sampling ----


@pytest.mark.slow
def test_the_limits_of_sampling_values_are_accepted(llm: LLM) -> None:
    limits: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"temperature": 1e-300},
        {"temperature": 1e300, "seed": 2**63 - 1},
        {"top_k": 2**80, "temperature": 1.0, "seed": 0},
        {"top_p": 1e-300, "temperature": 1.0},
        {"max_tokens": 2**80, "stop_token_ids": [0]},
    ]
    greedy = llm.generate("hi", GREEDY)[0].token_ids
    for values in limits:
        params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **values})
        (output,) = llm.generate("hi", params)
        assert output.token_ids
        if values.get("top_p") or values.get("temperature", 1) < 1:
            assert output.token_ids == greedy


# ---- speculation ----


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_a_head_of_the_other_kind(llm: LLM, heads: dict[bool, str], parallel: bool) -> None:
    config = {"model": heads[parallel], "parallel_drafting": not parallel}
    message = message_of(lambda: LLM(model=llm.target, speculative_config=config))
    kind = "a P-EAGLE head" if parallel else "an autoregressive EAGLE-3 head"
    assert f"parallel_drafting is {not parallel}, but {heads[parallel]!r} is {kind}" in message
    assert f"Set it to {parallel} or leave it out." in message
    LLM(model=llm.target, speculative_config={**config, "parallel_drafting": parallel})


def test_a_refused_head_leaves_the_target_usable(llm: LLM, heads: dict[bool, str]) -> None:
    expected = llm.generate("hi", GREEDY)[0].token_ids
    config = {"model": heads[True], "parallel_drafting": False}
    message_of(lambda: LLM(model=llm.target, speculative_config=config))
    assert llm.generate("hi", GREEDY)[0].token_ids == expected


# ---- the model ----


def test_an_unnamed_target_has_no_tokenizer(target_folder: Path) -> None:
    named = TargetModel.load(target_folder)
    message = message_of(lambda: LLM(model=TargetModel(named.model)))
    assert "tokenizer of '' does not load" in message


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"device": "cpu"}], ids=str)
def test_a_loaded_model_keeps_its_type_and_place(
    target_folder: Path, option: dict[str, str]
) -> None:
    model = TargetModel.load(target_folder, dtype=torch.float64)
    found = r"float64 on cpu, quantization None, .* kv_cache_dtype 'auto'\. Leave them out"
    with pytest.raises(UserError, match=found):
        LLM(model=model, **option)


def test_the_target_has_the_name_that_other_engines_give_it(target_folder: Path) -> None:
    for model in (target_folder, str(target_folder)):
        llm = LLM(model=model)
        assert llm.target.name == LLM(target_folder).target.name
        assert [out.text for out in llm.generate("abc", GREEDY)] == [
            out.text for out in LLM(target_folder).generate("abc", GREEDY)
        ]
    message = message_of(lambda: LLM("one", model="two"))
    assert "target is 'one' and model is 'two'" in message
    message = message_of(lambda: LLM(model=7))  # type: ignore[arg-type]
    assert "model is of type int; expected a folder" in message
