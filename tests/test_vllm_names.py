"""Code that was written for vLLM's offline API runs on `LLM`."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams, StructuredOutputsParams
from peagle.errors import UserError
from tests.engine.engines import make_llm

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return make_llm(target_folder)


def test_the_attributes_of_a_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, n=2, seed=1, max_tokens=6, logprobs=2)
    prompts: list[Any] = [
        "one",
        [5, 6],
        {"prompt": "two"},
        {"prompt_token_ids": [7], "prompt": "t"},
    ]
    outputs = llm.generate(prompts=prompts, sampling_params=params)
    assert [output.prompt for output in outputs] == ["one", None, "two", "t"]
    ids = [llm.tokenizer.encode("one"), [5, 6], llm.tokenizer.encode("two"), [7]]
    assert [output.prompt_token_ids for output in outputs] == ids
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    for output in outputs:
        assert output.finished and output.metrics is None and output.num_cached_tokens >= 0
        assert [one.index for one in output.outputs] == [0, 1]
        assert (output.text, output.token_ids) == (output.outputs[0].text, output.token_ids)
        for one in output.outputs:
            assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
            assert one.finish_reason in ("length", "stop") and one.stop_reason is None
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
            chosen = [
                by_id[token] for by_id, token in zip(one.logprobs, one.token_ids, strict=True)
            ]
            assert one.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
    assert llm.generate("one", SamplingParams(max_tokens=1))[0].cumulative_logprob is None


def test_log_probabilities_by_token_id(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2, temperature=2.0, seed=3)
    (output,) = llm.generate("hello", params)
    assert output.prompt_logprobs is not None and output.logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == len(output.prompt_token_ids) - 1
    for token, given in zip(
        output.prompt_token_ids[1:] + output.token_ids, [*others, *output.logprobs], strict=True
    ):
        assert given is not None and next(iter(given)) == token == given.token_id
        assert {token_id: one.logprob for token_id, one in given.items()} == {
            token: given.logprob,
            **dict(given.top),
        }
        assert len(given) == len(set(given)) and token in given and -1 not in given
        ranks = {token_id: one.rank for token_id, one in given.items()}
        assert all(ranks[token_id] <= len(given.top) for token_id, _ in given.top)
        assert ranks[token] == given.rank
        for token_id, one in given.items():
            assert one.decoded_token == llm.tokenizer.decode([token_id])
    assert pickle.loads(pickle.dumps(output)) == output


def test_why_an_output_ended(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    (free,) = llm.generate("hello", plain)
    token = free.token_ids[3]
    end = free.token_ids.index(token)
    (by_id,) = llm.generate("hello", SamplingParams(max_tokens=8, stop_token_ids=(token,)))
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
    assert by_id.token_ids == free.token_ids[: end + 1]
    text = next(character for character in free.text if character.isascii())
    (by_text,) = llm.generate("hello", SamplingParams(max_tokens=8, stop=("\0never", text)))
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", text)
    assert (free.finish_reason, free.stop_reason) == ("length", None)


def test_conversations(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 5
    options: dict[str, Any] = {
        "use_tqdm": False,
        "chat_template": TEMPLATE,
        "chat_template_content_format": "openai",
        "add_generation_prompt": True,
        "continue_final_message": False,
        "lora_request": None,
        "tools": None,
        "chat_template_kwargs": None,
    }
    (one,) = llm.chat(HELLO, params, **options)
    outputs = llm.chat(messages=[HELLO, HELLO], sampling_params=params, **options)
    for output in (one, *outputs):
        assert output.prompt == "[user]hello[assistant]"
        assert output.outputs[0].text == output.answer == output.output.text
        assert output.finished and len(output.outputs[0].token_ids) == 5
    assert copy.copy(one) == one and pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError, match="nothing"):
        one.nothing  # noqa: B018


def test_a_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=2)
    llm.generate(["a", "b"], params)
    assert not capsys.readouterr().err
    llm.generate(["a", "b"], params, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_structured_outputs(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    params = SamplingParams(structured_outputs=choice)
    (output,) = llm.generate("Classify: ", params)
    assert output.outputs[0].text in ("Positive", "Negative")


def test_neutral_options_of_the_engine(target_folder: Path) -> None:
    llm = LLM(
        model=str(target_folder),
        tokenizer=str(target_folder),
        tensor_parallel_size=1,
        trust_remote_code=False,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=None,
        gpu_memory_utilization=0.4,
        seed=3,
        quantization=None,
        disable_log_stats=False,
        enable_chunked_prefill=True,
    )
    assert llm.engine.max_model_len == 64 and llm.engine.config.max_num_seqs == 16
    assert llm.get_tokenizer() is llm.tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; expected 1 or nothing: one"),
        ({"trust_remote_code": True}, "trust_remote_code is True; expected False or nothing"),
        ({"engine": "vllm"}, "engine is 'vllm'; expected 'peagle' or nothing: peagle serve"),
        (
            {"quantization": "awq"},
            "quantization is 'awq'; expected one of fp8, int8, int4, or none",
        ),
        ({"tokenizer": "other/tokenizer"}, "tokenizer is 'other/tokenizer'; expected that of"),
        ({"max_model_length": 5}, "Did you mean 'max_model_len'?"),
    ],
)
def test_other_options_are_refused(
    target_folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        LLM(model=str(target_folder), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": SamplingParams(), "sampling_params": SamplingParams()}, "params and sampling_"),
        ({"lora_request": 1}, "lora_request is 1; expected None or nothing"),
        ({"prompts": {"prompt": "a", "multi_modal_data": {}}}, "A prompt has 'multi_modal_data'"),
        ({"prompts": {}}, "A prompt is None; expected text or token ids"),
    ],
)
def test_other_requests_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        llm.generate(**{"prompts": "a", **options})
    assert message in str(caught.value)
    assert not llm.requests.has_unfinished
