"""LLM(engine="vllm"): the same facade, on a stand-in for vLLM."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends.conftest import HEAD, TARGET
from peagle import LLM, AsyncLLM, SamplingParams
from peagle.backends.vllm.command import VllmLaunch
from peagle.backends.vllm.offline import VllmOffline, vllm_params
from peagle.config import SpeculativeConfig, StructuredOutput
from peagle.errors import UserError
from peagle.vllm_llm import VllmLLM

SPECULATIVE = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llm(gpu_python):
    made = LLM(TARGET, speculative_config=SPECULATIVE, engine="vllm", vllm_python=gpu_python)
    yield made
    assert isinstance(made, VllmLLM)
    made.close()


def ended(prompt: list[int], count: int) -> list[int]:
    return [(prompt[-1] + i) % 1000 for i in range(1, count + 1)]


def test_generate(llm):
    prompts = [[1, 2, 3], [10], [7, 7]]
    params = [SamplingParams(max_tokens=count) for count in (9, 1, 30)]
    before = llm.stats
    outputs = llm.generate(prompts, params)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        expected = ended(prompt, one.max_tokens)
        assert output.token_ids == expected
        assert output.text == "".join(f"<{token}>" for token in expected)
        assert (output.prompt_token_ids, output.finish_reason) == (prompt, "length")
        assert output.num_cached_tokens == 2 and output.logprobs is None
        assert 0 < output.time_to_first_token_s <= output.elapsed_s
        assert output.stats.num_draft_tokens == 4 * output.stats.num_drafts
        # Each token is a step's own or an accepted draft.
        own = 1 + output.stats.num_drafts
        assert own + output.stats.num_accepted_tokens == one.max_tokens
        json.dumps(output.to_json())
    after = llm.stats
    assert after.num_finished - before.num_finished == 3
    assert after.num_output_tokens - before.num_output_tokens == 40
    assert after.num_prompt_tokens - before.num_prompt_tokens == 6
    counted = after.speculation.since(before.speculation)
    assert counted.num_drafts == sum(output.stats.num_drafts for output in outputs)


def test_stream_adds_up(llm):
    chunks = list(llm.stream([[1], [5]], SamplingParams(max_tokens=20)))
    outputs = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
    for index, output in outputs.items():
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == output.text
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert mine[0].num_drafted == 0 and all(c.num_drafted == 4 for c in mine[1:])
        assert all(c.num_accepted == len(c.token_ids) - 1 for c in mine[1:])
    assert len(outputs) == 2


def test_leaving_a_stream_early_stops_it(llm):
    stream = llm.stream([1], SamplingParams(max_tokens=100_000))
    assert next(stream).token_ids == [2]
    with pytest.raises(UserError, match="generating already"):
        llm.generate([1], SamplingParams(max_tokens=1))
    stream.close()
    assert llm.generate([4], SamplingParams(max_tokens=1))[0].token_ids == [5]


def test_logprobs(llm):
    (output,) = llm.generate([1], SamplingParams(max_tokens=3, logprobs=1))
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert all(one.logprob == float("-inf") and one.rank == 2 for one in output.logprobs)
    assert all(one.top == [(0, -0.5)] for one in output.logprobs)


def test_text_is_encoded_as_ever_and_chats_go_behind_the_template(llm):
    (output,) = llm.generate("hello", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == llm.tokenizer.encode("hello")
    (answer,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2))
    from peagle.chat import render_chat

    rendered = render_chat(llm.tokenizer, [{"role": "user", "content": "hello"}])
    assert answer.output.prompt_token_ids == rendered
    assert answer.messages[-1]["role"] == "assistant"


def test_default_params_are_the_models(llm):
    own = LLM(TARGET, speculative_config=SPECULATIVE)
    assert llm.default_params() == own.default_params()


def test_refused_prompts_and_parameters_leave_it_usable(llm):
    with pytest.raises(UserError, match="Prompt 2: vLLM refuses: ValueError: the prompt is too"):
        llm.generate([[1], [2] * 5000], SamplingParams(max_tokens=1))
    for params, message in (
        (SamplingParams(typical_p=0.5), "typical_p"),
        (SamplingParams(min_p=0.1), "min_p 0.1 with speculative"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias with speculative"),
        (SamplingParams(num_speculative_tokens=2), "K is the engine's"),
        (SamplingParams(bad_words=[(1, 2)]), "bad_words as token ids"),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate([1], params)
    with pytest.raises(UserError, match="priority is 3"):
        llm.generate([1], SamplingParams(max_tokens=1), priority=3)
    assert llm.generate([4], SamplingParams(max_tokens=1))[0].token_ids == [5]


def test_arguments_of_the_engine(gpu_python, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_ARGUMENTS", str(tmp_path / "arguments"))
    options = {"max_model_len": 300, "tensor_parallel_size": 2, "kv_cache_gib": 1.0, "seed": 3}
    made = LLM(
        TARGET,
        speculative_config={**SPECULATIVE, "enforce_eager": True},
        engine="vllm",
        vllm_python=gpu_python,
        vllm_options={"kv_cache_dtype": "fp8"},
        **options,
    )
    made.close()
    found = json.loads((tmp_path / "arguments").read_text())
    speculative = found.pop("speculative_config")
    assert speculative == {**SPECULATIVE, "parallel_drafting": True, "enforce_eager": True}
    assert found == {
        "model": TARGET,
        "dtype": "auto",
        "load_format": "safetensors",
        "disable_log_stats": False,
        "max_model_len": 300,
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 3,
        "kv_cache_dtype": "fp8",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enigne": 1}, "Unknown engine option 'enigne'"),
        ({"device": "cuda"}, "vLLM runs on what it was built for"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"data_parallel_size": 2}, "for servers only"),
        ({"vllm_options": {"trust_remote_code": True}}, "trust-remote-code"),
        ({"vllm_options": {"tensor_parallel_size": 2}}, "give it as peagle's"),
        ({"vllm_python": "/bin/true"}, "no python that runs"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_refused_options(gpu_python, options, message):
    with pytest.raises(UserError, match=message):
        LLM(TARGET, engine="vllm", **{"vllm_python": gpu_python, **options})


def test_unknown_engines():
    with pytest.raises(UserError, match="engine is 'sglang'; expected one of peagle, vllm"):
        LLM(TARGET, engine="sglang")
    with pytest.raises(UserError, match="AsyncLLM has its own only"):
        AsyncLLM(TARGET, engine="vllm")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("not told", "parallel_drafting is False in the engine"),
        ("no drafts", "no drafts at all"),
        ("crash", "no such architecture"),
        ("dies", "ended unexpectedly"),
    ],
)
def test_engines_that_do_not_draft_as_asked(gpu, monkeypatch, mode, message):
    monkeypatch.setenv("FAKE_VLLM", mode)
    launch = VllmLaunch(TARGET, SpeculativeConfig(model=HEAD, num_speculative_tokens=4))
    with pytest.raises(UserError, match=message):
        VllmOffline(launch, gpu)


def test_parameters_under_vllms_names(gpu, cpu):
    plain = VllmLaunch(TARGET)
    told = vllm_params(
        SamplingParams(
            temperature=0.7,
            top_k=5,
            stop=("a", "b"),
            seed=3,
            n=2,
            logit_bias={3: 1.5},
            allowed_token_ids=(1, 2),
            ignore_eos=True,
        ),
        plain,
        gpu,
    )
    assert told["logit_bias"] == {"3": 1.5} and told["stop"] == ["a", "b"]
    assert (told["temperature"], told["top_k"], told["seed"], told["n"]) == (0.7, 5, 3, 2)
    assert told["allowed_token_ids"] == [1, 2] and "bad_words" not in told
    for structure, expected in (
        (StructuredOutput("json"), {"json_object": True}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("json_schema", {"type": "object"}), {"json": '{"type":"object"}'}),
    ):
        params = SamplingParams(structured_output=structure)
        assert vllm_params(params, plain, gpu)["structured_outputs"] == expected
    with pytest.raises(UserError, match="-inf"):
        vllm_params(SamplingParams(logit_bias={3: float("-inf")}), plain, gpu)
    drafting = replace(plain, speculative=SpeculativeConfig(method="ngram"))
    assert vllm_params(SamplingParams(temperature=1.0), plain, cpu)["temperature"] == 1.0
    with pytest.raises(UserError, match="on a CPU, where it samples wrongly"):
        vllm_params(SamplingParams(temperature=1.0), drafting, cpu)


def test_nothing_is_left_behind(gpu):
    engine = VllmOffline(VllmLaunch(TARGET), gpu)
    pid = engine._child.pid
    assert Path(f"/proc/{pid}").exists()
    del engine
    assert not Path(f"/proc/{pid}").exists()
