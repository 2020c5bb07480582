"""Servers as backends: what they are sent, what is read of their answers, and their failures."""

import asyncio
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.streams import Stream, by_name
from peagle.client.answers import ForeignAnswer
from peagle.client.events import DONE
from peagle.config import SamplingParams, StructuredOutput
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation import http_client
from peagle.evaluation.decoding import Answer, DecodeCounts, Request
from peagle.evaluation.endpoint import KEY_VARIABLES, EndpointBackend
from peagle.evaluation.endpoint_answers import read_answer
from peagle.evaluation.http_client import Reply
from tests.evaluation.fake_endpoint import NUM_TOKENS, STEPS, TEXT, Script, endpoint, metrics

COUNTS = [count for _, count in STEPS]
PARAMS = SamplingParams(max_tokens=7)


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KEY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


TOOL = {"type": "function", "function": {"name": "f"}}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def requests(count: int, prompt: Any = "Count.") -> list[Request]:
    return [Request(str(number), prompt, PARAMS) for number in range(count)]


def ask(script: Script, prompt: Any = "Count.", **options: Any) -> tuple[Answer, list[str]]:
    """The answer to one request, and the notes."""
    with endpoint(script) as url:
        backend = EndpointBackend(url, **options)
        (answer,) = backend.run(requests(1, prompt), 1).answers
        return answer, [note.removeprefix(url) for note in backend.notes]


# ---- what is sent ----


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_API_KEY", "secret,another")
    script = Script(key="secret")
    params = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        stop=("x",),
        ignore_eos=True,
        logit_bias=((4, -5.0),),
    )
    with endpoint(script) as url:
        backend = EndpointBackend(url + "/v1/", "other", extra_body={"top_p": 0.5})
        messages = [{"role": "user", "content": "Hi"}]
        chats = [Request("b", messages, PARAMS), Request("c", messages, PARAMS, tools=[TOOL])]
        backend.run([Request("a", "text", params), *chats], 1)
    text, chat, with_tools = script.bodies[-3:]
    options = {"include_usage": True, "continuous_usage_stats": True}
    common = {"model": "other", "stream": True, "stream_options": options, "top_p": 0.5}
    assert text == {
        **common,
        **{"prompt": "text", "max_tokens": 7, "temperature": 0.5, "top_k": 3, "stop": ["x"]},
        **{"ignore_eos": True, "logit_bias": {"4": -5}},
    }
    assert chat == {**common, "messages": messages, "max_tokens": 7, "temperature": 0}
    assert with_tools == {**chat, "tools": [TOOL]}
    posted = [path for path in script.paths if "completions" in path]
    assert posted[-3:] == ["/v1/completions", *["/v1/chat/completions"] * 2]
    assert {headers["authorization"] for headers in script.headers} == {"Bearer secret"}


def test_openai_key_and_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "general")
    with endpoint(Script(key="general")) as url:
        assert EndpointBackend(url).model == "m"
    with endpoint(Script(key="own")) as url:
        assert EndpointBackend(url, api_key="own").model == "m"


@pytest.mark.parametrize(
    ("params", "named"),
    [({"n": 2, "temperature": 1}, "n"), ({"prompt_logprobs": 1}, "prompt_logprobs")],
)
def test_what_is_not_asked_of_servers(params: dict[str, Any], named: str) -> None:
    with endpoint(Script()) as url, pytest.raises(UserError, match=f"Request a: {named} is not"):
        EndpointBackend(url).run([Request("a", "x", SamplingParams(**params))], 1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", {"logprobs": 3}),
        ([{"role": "user", "content": "x"}], {"logprobs": True, "top_logprobs": 3}),
    ],
)
def test_log_probabilities_and_structures_are_asked_for(
    prompt: Any, expected: dict[str, Any]
) -> None:
    script = Script()
    params = SamplingParams(logprobs=3, structured_output=StructuredOutput("regex", "a+"))
    with endpoint(script) as url:
        EndpointBackend(url).run([Request("a", prompt, params)], 1)
    body = script.bodies[-1]
    assert {name: body[name] for name in expected} == expected
    assert body["response_format"] == {"type": "regex", "pattern": "a+"}


def test_k_is_asked_of_ours_only() -> None:
    wish = Request("a", "x", SamplingParams(num_speculative_tokens=3))
    with endpoint(Script()) as url, pytest.raises(UserError, match="K is 3, but http"):
        EndpointBackend(url).run([wish], 1)
    proposers = [{"name": "peagle", "num_speculative_tokens": 5}]
    ours = {"id": "m", "speculation": {"default": "peagle", "proposers": proposers}}
    script = Script(models=[ours], report=True)
    with endpoint(script) as url:
        backend = EndpointBackend(url)
        assert backend.is_ours and backend.num_speculative_tokens() == 5
        backend.run([wish], 1)
    assert script.bodies[-1]["speculation"] == {"report": True, "num_speculative_tokens": 3}
    assert script.bodies[-1]["store"] is False


# ---- what is read ----


@pytest.mark.parametrize("prompt", ["Count.", [{"role": "user", "content": "Count."}]])
@pytest.mark.parametrize("usage", ["continuous", "last", "final", "none"])
def test_tokens_by_chunk(prompt: Any, usage: str) -> None:
    answer, notes = ask(Script(usage=usage), prompt)
    assert (answer.text, answer.finish_reason, answer.error) == (TEXT, "length", "")
    assert answer.texts == [text for text, _ in STEPS]
    counts = [count for _, count in answer.chunks]
    assert answer.num_tokens == sum(counts)
    estimate = [" does not tell the tokens of a chunk: they are estimated by characters"]
    if usage == "continuous":
        assert counts == COUNTS and estimate[0] not in notes
    elif usage == "none":  # a chunk is all there is
        assert counts == [1] * len(STEPS) and estimate[0] in notes
    else:
        assert answer.num_tokens == NUM_TOKENS and answer.num_prompt_tokens == 5
        assert all(counts) and abs(counts[-1] - COUNTS[-1]) <= 1
        assert estimate[0] in notes or usage == "final"


def test_reports_of_our_server() -> None:
    facts = {"id": "m", "speculation": {"default": "p", "proposers": []}}
    answer, _ = ask(Script(models=[facts], report=True))
    drafted = [0, 4, 4, 4]
    steps = [DecodeCounts(count, k, count - 1) for count, k in zip(COUNTS, drafted, strict=True)]
    assert answer.steps == steps
    assert answer.stats == SpeculationStats(3, 12, 3, [2, 1, 0, 0])


def test_a_server_that_does_not_stream() -> None:
    answer, notes = ask(Script(streams=False))
    assert (answer.text, answer.num_tokens, answer.finish_reason) == (TEXT, NUM_TOKENS, "length")
    assert [count for _, count in answer.chunks] == [NUM_TOKENS]
    assert answer.time_to_first_token_s == answer.seconds
    assert " does not stream: the time to the first token is that of the answer" in notes


@pytest.mark.parametrize(
    "refused", [("continuous_usage_stats",), ("continuous_usage_stats", "include_usage")]
)
def test_servers_that_know_fewer_options(refused: tuple[str, ...]) -> None:
    script = Script(refuses=refused, usage="last")
    answer, _ = ask(script)
    options = script.bodies[-1].get("stream_options", {})
    assert not set(options) & set(refused) and answer.text == TEXT
    assert answer.num_tokens == (len(STEPS) if "include_usage" in refused else NUM_TOKENS)


def test_times_are_those_of_the_chunks() -> None:
    answer, _ = ask(Script(delay_s=0.05))
    times = [when for when, _ in answer.chunks]
    for number, when in enumerate(times, 1):
        assert 0.05 * number - 0.005 <= when
    assert answer.time_to_first_token_s == times[0] < times[-1] <= answer.seconds


@given(st.lists(st.text("ab c", max_size=9), min_size=1, max_size=12), st.integers(0, 60))
def test_estimated_tokens_add_up(texts: list[str], count: int) -> None:
    choices = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
    choices[-1]["finish_reason"] = "stop"
    events = [b'{"choices": [%b]}' % as_json(choice) for choice in choices]
    events += [b'{"choices": [], "usage": {"completion_tokens": %d}}' % count, DONE]
    headers = {"content-type": "text/event-stream"}
    reply = Reply(200, headers, events=[(float(i), data) for i, data in enumerate(events)])
    answer = read_answer(reply)
    assert answer.text == "".join(texts) == "".join(answer.texts)
    assert answer.num_tokens == count and not answer.error
    if any(texts):
        assert sum(n for _, n in answer.chunks) == count
        assert all(n >= 0 for _, n in answer.chunks)
        assert not count or answer.chunks[0][1] >= 1


def test_reasoning_is_output_but_not_the_answer() -> None:
    deltas = [{"reasoning_content": "Well. "}, {"reasoning": "So. "}, {"content": "Yes."}]
    events = [{"choices": [{"delta": d, "finish_reason": None}]} for d in deltas]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    data = [(0.1 * i, as_json(event)) for i, event in enumerate(events)]
    reply = Reply(200, {"content-type": "text/event-stream"}, events=[*data, (1.0, DONE)])
    answer = read_answer(reply)
    assert answer.text == "Yes." and "".join(answer.texts) == "Well. So. Yes."


@by_name
def test_recorded_streams_of_four_servers(stream: Stream) -> None:
    with endpoint(Script(stream=[stream.raw[:700], stream.raw[700:]])) as url:
        backend = EndpointBackend(url)
        chat = [{"role": "user", "content": "hello"}]
        request = Request("a", chat if stream.is_chat else "hello", PARAMS)
        if stream.error:
            with pytest.raises(UserError, match=re.escape(stream.error)):
                backend.run([request], 1)
            return
        (answer,) = backend.run([request], 1).answers
    assert answer.error == ""
    if len(stream.texts) == 1:  # it asks for one choice
        assert answer.text == stream.texts[0]
        assert "".join(answer.texts) == stream.reasoning + stream.texts[0]
    assert answer.finish_reason == stream.finish_reasons[0]
    if stream.usage is not None:
        assert (answer.num_prompt_tokens, answer.num_tokens) == (
            stream.usage.num_prompt_tokens,
            stream.usage.num_tokens,
        )
        assert (answer.stats is None) == (stream.usage.drafts is None)


# ---- counters ----


def test_counters_of_a_run() -> None:
    script = Script(metrics=metrics(0), counts=True)
    with endpoint(script) as url:
        backend = EndpointBackend(url)
        assert backend.num_speculative_tokens() == 4
        backend.run(requests(1), 1)
        run = backend.run(requests(3), 2)
        assert run.counters == SpeculationStats(27, 108, 27, [18, 9, 0, 0])
        assert backend.notes == []


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (None, "has no page /metrics"),
        ("up 1\n", "counts no drafts at /metrics"),
    ],
)
def test_servers_without_counters(page: str | None, told: str) -> None:
    with endpoint(Script(metrics=page)) as url:
        backend = EndpointBackend(url)
        for _ in range(2):
            run = backend.run(requests(1), 1)
            assert run.counters is None and run.answers[0].text == TEXT
        (note,) = backend.notes
        assert note.startswith(f"{url} {told}") and "speed and texts are" in note
        assert backend.num_speculative_tokens() == (None if page is None else 0)


def test_others_on_the_server_and_a_restart_are_noticed() -> None:
    script = Script(metrics=metrics(9))

    def meddle(page: str) -> list[str]:
        with endpoint(script) as url:
            backend = EndpointBackend(url)
            backend.run(requests(1), 1, lambda *_: setattr(script, "metrics", page))
            return [note.removeprefix(f"{url} ") for note in backend.notes]

    (note,) = meddle(metrics(40))
    assert note.startswith("answers others too")
    script.metrics = metrics(9)
    (note,) = meddle(metrics(1))
    assert note.startswith("was restarted")


# ---- the loop ----


@pytest.mark.parametrize(("concurrency", "count"), [(1, 3), (3, 8), (8, 5)])
def test_so_many_in_flight(concurrency: int, count: int) -> None:
    script, seen = Script(holds=min(concurrency, count)), list[int]()
    with endpoint(script) as url:
        backend = EndpointBackend(url)
        start = time.perf_counter()
        run = backend.run(requests(count), concurrency, lambda index, _: seen.append(index))
        took = time.perf_counter() - start
    assert script.most_in_flight == min(concurrency, count)
    assert sorted(seen) == list(range(count)) and len(run.answers) == count
    assert max(answer.seconds for answer in run.answers) <= run.seconds <= took
    # Connections are used again, but for those of the models, the counters and the first question.
    completions = [path for path in script.paths if "completions" in path]
    others = len(script.paths) - len(completions)
    assert script.num_connections <= others + 1 + min(concurrency, count)


def test_a_connection_that_the_server_closed_is_made_anew() -> None:
    script = Script(keep_alive=False)
    with endpoint(script) as url:
        run = EndpointBackend(url).run(requests(5), 1)
        assert [answer.error for answer in run.answers] == [""] * 5
    assert script.num_connections > 5


# ---- failures ----


def test_models_that_are_not_there() -> None:
    with endpoint(Script()) as url, pytest.raises(UserError, match="'x'; it has: m, other"):
        EndpointBackend(url, "x")
    with endpoint(Script(models=None)) as url:
        with pytest.raises(UserError, match="lists no models; name the one"):
            EndpointBackend(url)
        backend = EndpointBackend(url, "hidden")
        assert backend.run(requests(1), 1).answers[0].text == TEXT


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([b"hello"], "hello"),
        ([b'{"generated_text": "x"}'], "generated_text"),
        ([b'{"choices": [{"text": 3}]}'], "choices"),
        ([b'{"choices": 3}'], "choices"),
    ],
)
def test_events_of_another_kind(events: list[bytes], shown: str) -> None:
    data = [(0.0, event) for event in events]
    reply = Reply(200, {"content-type": "text/event-stream"}, events=data)
    with pytest.raises(ForeignAnswer, match=shown):
        read_answer(reply)


def test_a_request_that_fails_alone() -> None:
    with endpoint(Script()) as url:
        mixed = [*requests(2), Request("x", "[fail]", PARAMS)]
        run = EndpointBackend(url).run(mixed, 2)
        assert [answer.error for answer in run.answers] == ["", "", "500: planned"]
        with pytest.raises(UserError, match="answered none of 2 requests; the first: 500: planned"):
            EndpointBackend(url).run(requests(2, "[fail]"), 1)


def test_an_error_within_a_stream() -> None:
    events = [b'{"choices": [{"text": "a"}]}', b'{"error": {"message": "out of\\nmemory"}}']
    data = [(0.0, event) for event in events]
    answer = read_answer(Reply(200, {"content-type": "text/event-stream"}, events=data))
    assert (answer.text, answer.error, answer.finish_reason) == ("a", "out of memory", "")


def test_a_server_that_dies_in_the_middle() -> None:
    answers: list[Answer] = []
    with endpoint(Script(dies_after=3, delay_s=0.01)) as url:
        backend = EndpointBackend(url)
        with pytest.raises(UserError, match=r"went away after \d of 20 requests"):
            backend.run(requests(20), 2, lambda _, answer: answers.append(answer))
    whole = [answer for answer in answers if not answer.error]
    assert 2 <= len(whole) <= 3  # one of the three asked for the stream options
    assert {answer.error for answer in answers} <= {"", "the answer ended in the middle"}


def test_a_timeout() -> None:
    with endpoint(Script(delay_s=0.3)) as url:
        backend = EndpointBackend(url, timeout_s=0.5)
        with pytest.raises(UserError, match="the first: no whole answer in time"):
            backend.run(requests(1), 1)


def test_an_endless_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_BYTES", 100)
    script = Script(answers=lambda *_: (200, "x" * (1 << 21), {}))
    with endpoint(script) as url, pytest.raises(UserError, match="ended in the middle"):
        EndpointBackend(url).ask("/v1/completions", [{}])


def ask_raw(*parts: bytes) -> Reply:
    """Return the answer that a server sends in these parts, on a connection that stays open."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01)
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()

    async def exchange() -> Reply:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = http_client.HttpClient(f"http://127.0.0.1:{port}", timeout_s=2.0)
            reply = await client.send("GET", "/")
            client.close()
            await ended.wait()
        return reply

    return asyncio.run(exchange())


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize(
    "header", [b"", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"]
)
def test_answers_that_have_no_body(status: int, header: bytes) -> None:
    reply = ask_raw(b"HTTP/1.1 %d X\r\n%s\r\n" % (status, header))
    assert (reply.status, reply.body, reply.problem) == (status, b"", "")


def test_lines_that_end_in_line_feeds_alone() -> None:
    reply = ask_raw(b"HTTP/1.1 200 OK\nX-A: a\x85b\nContent-Length: 3\n", b"\nabc")
    assert (reply.headers["x-a"], reply.body, reply.problem) == ("a\x85b", b"abc", "")
    head = b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n"
    reply = ask_raw(head + b"3\nabc", b"\n2;x=y\nd", b"e\n0\n", b"\n")
    assert (reply.body, reply.problem) == (b"abcde", "")
