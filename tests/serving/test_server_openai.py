"""The server as the official client sees it, against the engine used offline."""

import asyncio
import json
import runpy
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import openai
import pytest

from peagle import LLM, SamplingParams
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.prompts import load_prompt_set
from serving.live import LiveServer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "openai_client.py"
PROMPTS = [prompt.text for prompt in load_prompt_set("humaneval", 6)]
PROMPT = "def fibonacci(n):"
MODEL = "peagle-code"
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def greedy(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_tokens": 40, **options}


def texts(offline: LLM, prompts: list[str], **params: Any) -> list[str]:
    outputs = offline.generate(prompts, SamplingParams(**{"max_tokens": 40, **params}))
    return [one.text for output in outputs for one in output.outputs]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    extra: Any = model.model_extra
    assert extra["chat"] is True and extra["max_model_len"] == 2048
    names = [one["name"] for one in extra["speculation"]["proposers"]]
    assert names == ["peagle", "eagle3", "plain"]


def test_completions_equal_the_offline_engine(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(prompt=PROMPTS, **greedy())
    assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))
    assert [choice.text for choice in answer.choices] == texts(offline, PROMPTS)
    assert answer.usage and answer.usage.completion_tokens <= 40 * len(PROMPTS)
    lengths = [len(offline.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert answer.usage.prompt_tokens == sum(lengths)


@pytest.mark.parametrize("proposer", ["peagle", "eagle3", "plain"])
def test_a_stream_is_the_whole_answer_in_pieces(
    client: openai.OpenAI, offline: LLM, proposer: str
) -> None:
    extra = {"speculation": {"proposer": proposer, "report": True}}
    events = list(
        client.completions.create(prompt=PROMPT, stream=True, extra_body=extra, **greedy())
    )
    *pieces, last = events
    assert "".join(event.choices[0].text for event in pieces) == texts(offline, [PROMPT])[0]
    assert [event.choices[0].finish_reason for event in pieces[-2:]] == [None, "length"]
    reports: list[Any] = [event.model_extra["speculation"] for event in pieces]  # type: ignore[index]
    tokens = [token for report in reports for token, _ in report["tokens"]]
    assert last.usage and len(tokens) == last.usage.completion_tokens == 40
    usage: Any = last.usage.model_extra
    told = usage["speculation"]
    assert told["num_drafts"] == sum(bool(report["num_drafted"]) for report in reports)
    assert told["num_draft_tokens"] == sum(report["num_drafted"] for report in reports)
    assert told["num_accepted_tokens"] >= sum(report["num_accepted"] for report in reports)
    for report in reports[:-1]:
        marks = [accepted for _, accepted in report["tokens"]]
        assert marks == [True] * report["num_accepted"] + [False]
        assert len(report["rejected"]) == report["num_drafted"] - report["num_accepted"]
    if proposer == "plain":
        assert told["num_drafts"] == 0
        assert all(len(report["tokens"]) == 1 for report in reports)
    else:
        assert told["acceptance_length"] > 1.5
        assert max(len(report["tokens"]) for report in reports) > 1


def test_echo_stop_and_stream_options(client: openai.OpenAI, offline: LLM) -> None:
    (plain,) = texts(offline, [PROMPT])
    stop = plain[len(plain) // 2 :][:6]
    answer = client.completions.create(prompt=PROMPT, echo=True, stop=[stop], **greedy())
    assert answer.choices[0].text == PROMPT + plain[: plain.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    options: Any = {"include_usage": True}
    events = list(
        client.completions.create(
            prompt=PROMPT, echo=True, stop=stop, stream=True, stream_options=options, **greedy()
        )
    )
    assert "".join(c.text for event in events for c in event.choices) == answer.choices[0].text
    assert events[-1].usage == answer.usage and not events[-1].choices


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"speculation": {"report": True}}
    common: Any = {"stream": True, "stream_options": options, "extra_body": extra}
    message: Any = {"role": "user", "content": "hello"}
    for events in (
        list(client.completions.create(prompt=PROMPT, **common, **greedy())),
        list(client.chat.completions.create(messages=[message], **common, **greedy())),
    ):
        *pieces, last = [event for event in events if event.usage]
        assert len(pieces) == len(events) - 1 and last.usage and not last.choices
        told = [event.usage.completion_tokens for event in pieces if event.usage]
        reports: list[Any] = [(event.model_extra or {}).get("speculation") for event in pieces]
        counts = [len(report["tokens"]) if report else 0 for report in reports]
        assert told == list(accumulate(counts)) and told[-1] == last.usage.completion_tokens
        assert {event.usage.prompt_tokens for event in pieces if event.usage} == {
            last.usage.prompt_tokens
        }


def test_seeded_outputs_and_n(client: openai.OpenAI, offline: LLM) -> None:
    options = {"n": 3, "seed": 7, "temperature": 0.8, "top_p": 0.9, "max_tokens": 24}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **options)
    again = client.completions.create(model=MODEL, prompt=PROMPT, **options)
    expected = texts(offline, [PROMPT], **options)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.text for choice in again.choices] == expected
    assert len(set(expected)) == 3


def test_logprobs_add_up(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **greedy(max_tokens=6))
    given = answer.choices[0].logprobs
    assert given and given.tokens and given.token_logprobs and given.text_offset
    text = answer.choices[0].text
    assert "".join(given.tokens) == text
    assert given.token_logprobs[0] is None and all(x <= 0 for x in given.token_logprobs[1:] if x)
    for token, offset in zip(given.tokens, given.text_offset, strict=True):
        assert text[offset:].startswith(token)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "hello"}],
        logprobs=True,
        top_logprobs=3,
        **greedy(max_tokens=5),
    )
    content: Any = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert len(content) == 5
    assert all(one.top_logprobs[0].token == one.token for one in content)  # greedy
    assert (
        bytes(b for one in content for b in one.bytes).decode() == chat.choices[0].message.content
    )


def test_scoring_a_prompt_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, logprobs=0, echo=True, **greedy(max_tokens=0))
    given = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT and given and given.tokens
    assert "".join(given.tokens) == PROMPT
    assert answer.usage and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_ends_the_same_way_in_a_stream(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True} if stream else None
    answer: Any = client.completions.create(
        prompt=PROMPT, echo=True, stream=stream, stream_options=options, **greedy(max_tokens=0)
    )
    events = list(answer) if stream else [answer]
    choices = [choice for event in events for choice in event.choices]
    assert "".join(choice.text for choice in choices) == PROMPT
    assert choices[-1].finish_reason == "length"
    assert {event.usage.completion_tokens for event in events} == {0}


def test_prompt_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    """As vLLM has them: in each choice of a completion, beside the choices of a chat."""
    extra = {"prompt_logprobs": 2}
    answer: Any = client.completions.create(prompt=PROMPT, extra_body=extra, **greedy(max_tokens=2))
    messages: Any = [{"role": "user", "content": "def f("}]
    chat: Any = client.chat.completions.create(
        messages=messages, extra_body=extra, **greedy(max_tokens=2)
    )
    prompts = [PROMPT, "# user: def f(\n# assistant:"]
    outputs = offline.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=2))
    for found, output in zip(
        (answer.choices[0].prompt_logprobs, chat.prompt_logprobs), outputs, strict=True
    ):
        assert output.prompt_logprobs is not None and len(found) == len(output.prompt_token_ids)
        assert found[0] is None is output.prompt_logprobs[0]
        for one, wanted in zip(found[1:], output.prompt_logprobs[1:], strict=True):
            assert wanted is not None and [*map(int, one)] == [*wanted]
            for token_id, value in wanted.items():
                told = one[str(token_id)]
                assert told["logprob"] == pytest.approx(value.logprob, abs=1e-4)
                assert told["rank"] == value.rank
    assert "prompt_logprobs" not in client.completions.create(prompt=PROMPT, **greedy()).model_extra
    for create, prompt in (
        (client.completions.create, {"prompt": PROMPT}),
        (client.chat.completions.create, {"messages": messages}),
    ):
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs does not stream"):
            create(**prompt, stream=True, extra_body=extra, **greedy())  # type: ignore[operator]


def test_logprobs_of_several_outputs(client: openai.OpenAI, offline: LLM) -> None:
    """Each output has its own, behind those of the prompt that all share."""
    options: Any = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    asked = SamplingParams(logprobs=2, prompt_logprobs=2, **options)
    (output,) = offline.generate([PROMPT], asked)
    ask: dict[str, Any] = {**greedy(), **options, "prompt": PROMPT, "logprobs": 2}
    extra = {"prompt_logprobs": 2}
    own: Any = client.completions.create(**ask, extra_body=extra).choices
    echo: Any = client.completions.create(**ask, echo=True).choices
    assert len(own) == len(echo) == 3
    num_prompt_tokens = len(output.prompt_token_ids)
    for choice, whole, wanted in zip(own, echo, output.outputs, strict=True):
        assert choice.text == wanted.text and whole.text == PROMPT + wanted.text
        assert choice.prompt_logprobs == own[0].prompt_logprobs
        assert len(choice.prompt_logprobs) == num_prompt_tokens
        expected = [one.logprob for one in wanted.logprobs or ()]
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
        told = whole.logprobs
        assert told.token_logprobs[num_prompt_tokens:] == pytest.approx(expected, abs=1e-4)
        assert told.tokens[num_prompt_tokens:] == choice.logprobs.tokens
        assert told.tokens[:num_prompt_tokens] == echo[0].logprobs.tokens[:num_prompt_tokens]
        assert told.text_offset[num_prompt_tokens:] == [
            len(PROMPT) + at for at in choice.logprobs.text_offset
        ]


def test_chat(client: openai.OpenAI, offline: LLM) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "def f("}]},
    ]
    prompt = "# system: Be brief.\n# user: def f(\n# assistant:"
    answer = client.chat.completions.create(messages=messages, **greedy())
    assert answer.choices[0].message.content == texts(offline, [prompt])[0]
    assert answer.choices[0].message.role == "assistant"
    events = list(client.chat.completions.create(messages=messages, stream=True, **greedy()))
    assert events[0].choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == answer.choices[0].message.content
    assert events[-1].choices[0].finish_reason == answer.choices[0].finish_reason


@pytest.mark.parametrize(
    ("wish", "drafts"),
    [({"proposer": "plain"}, False), ({"num_speculative_tokens": 0}, False), ({}, True)],
)
def test_chats_are_drafted_as_they_ask(
    client: openai.OpenAI, wish: dict[str, Any], drafts: bool
) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "def f("}],
        extra_body={"speculation": {**wish, "report": True}},
        **greedy(),
    )
    usage: Any = answer.usage
    assert bool(usage.model_extra["speculation"]["num_drafts"]) == drafts


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls(client: openai.OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "add"}]
    options = greedy(messages=messages, tools=[FUNCTION], tool_choice="required")
    options["parallel_tool_calls"] = False
    if stream:
        events = list(client.chat.completions.create(stream=True, **options))
        calls: list[Any] = [
            call for event in events for call in event.choices[0].delta.tool_calls or ()
        ]
        name = calls[0].function.name
        arguments = "".join(call.function.arguments or "" for call in calls)
        reason = events[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls or ()
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason  # type: ignore[union-attr]
    assert name == "add" and reason == "tool_calls"
    assert set(json.loads(arguments)) == {"a"}


def test_response_format(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}}
    schema |= {"required": ["x"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "x"}],
        response_format=wanted,
        **greedy(max_tokens=120),
    )
    assert json.loads(answer.choices[0].message.content or "")["x"] in ("p", "q")
    pattern: Any = {"response_format": {"type": "regex", "pattern": "[0-9]{3}"}}
    text = client.completions.create(prompt="x", extra_body=pattern, **greedy()).choices[0].text
    assert len(text) == 3 and text.isdigit()


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(client: openai.OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    pattern: Any = {"response_format": {"type": "regex", "pattern": "<think>abc</think>de"}}
    options = greedy(messages=messages, extra_body=pattern)
    if stream:
        events = list(client.chat.completions.create(stream=True, **options))
        deltas: list[Any] = [event.choices[0].delta for event in events]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas)
    else:
        message: Any = client.chat.completions.create(**options).choices[0].message
        content, reasoning = message.content, message.model_extra["reasoning_content"]
    assert (reasoning, content) == ("abc", "de")


def test_tokenize_and_back(server: LiveServer) -> None:
    with server.client() as client:
        given = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert "".join(given["token_strs"]) == PROMPT and given["count"] == len(given["tokens"])
        back = client.post("/detokenize", json={"tokens": given["tokens"]}).json()
        assert back == {"prompt": PROMPT}
        messages = [{"role": "user", "content": "hi"}]
        chat = client.post("/tokenize", json={"messages": messages}).json()
        text = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()
        assert text == {"prompt": "# user: hi\n# assistant:"}


def test_sagemaker_takes_either_body(server: LiveServer) -> None:
    with server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        completion = client.post("/invocations", json=body)
        assert completion.json()["object"] == "text_completion"
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert client.post("/invocations", json=chat).json()["object"] == "chat.completion"
        assert client.post("/invocations", json={"x": 1}).status_code == 400


def test_async_clients_together(server: LiveServer, offline: LLM) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(prompt=prompt, stream=True, **greedy())
                return "".join([event.choices[0].text async for event in stream])

            return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))

    assert asyncio.run(run()) == texts(offline, PROMPTS)


def test_metrics_count_as_usage_does(server: LiveServer, client: openai.OpenAI) -> None:
    def counts() -> dict[str, float]:
        return {k: v for k, v in server.metrics().items() if "_total" in k or "_count" in k}

    before = counts()
    extra = {"speculation": {"report": True}}
    answer = client.completions.create(prompt=PROMPT, extra_body=extra, **greedy())
    after = counts()

    def grown(name: str) -> float:
        key = f'peagle:{name}{{engine="0"}}'
        return after[key] - before.get(key, 0)

    usage: Any = answer.usage
    told = usage.model_extra["speculation"]
    assert grown("spec_decode_num_drafts_total") == told["num_drafts"]
    assert grown("spec_decode_num_draft_tokens_total") == told["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == told["num_accepted_tokens"]
    assert grown("prompt_tokens_total") == usage.prompt_tokens
    assert grown("generation_tokens_total") == usage.completion_tokens
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1


def test_the_example_of_a_client_runs(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), f"{server.url}/v1"])
    monkeypatch.delenv("PEAGLE_API_KEY", raising=False)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("acceptance length") == 2
    assert "--- the texts are equal" in printed


# ---- a backend of evaluations ----


@pytest.mark.parametrize("report", [True, False])
def test_the_server_answers_as_the_engine(server: LiveServer, offline: LLM, report: bool) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request(p.id, p.text, params) for p in load_prompt_set("humaneval", 4)]
    here = EngineBackend(offline).run(requests, 2)
    backend = EndpointBackend(server.url, report=report)
    assert backend.is_ours and backend.num_speculative_tokens() == 7 and backend.has_chat
    there = backend.run(requests, 2)
    assert backend.notes == [] and there.counters == here.counters
    for one, other in zip(there.answers, here.answers, strict=True):
        assert (one.text, one.num_tokens, one.finish_reason) == (
            other.text,
            other.num_tokens,
            other.finish_reason,
        )
        assert one.num_prompt_tokens == other.num_prompt_tokens
        assert sum(count for _, count in one.chunks) == one.num_tokens
        assert one.stats == (other.stats if report else None)
        if report:
            assert one.steps == other.steps
        # Chunks with half a character wait for the next one.
        assert len(one.chunks) <= len(other.chunks)
