"""Requests to an endpoint over boto3, its event streams included, against the stand-in of AWS."""

import json
import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from botocore.eventstream import EventStream
from botocore.parsers import EventStreamJSONParser

from client.streams import by_name
from deploy.aws_wire import payload_part, service_model, stream_error
from deploy.fake_aws import FakeAws
from deploy.fake_endpoints import ContainerError, Frame
from deploy.operating import STREAM, USAGE, WHOLE, WORDS, chunk, events, make_endpoint
from peagle.deploy import invoke
from peagle.errors import UserError

NUM_SPLITS = 200
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


@pytest.fixture(scope="module")
def aws() -> Iterator[FakeAws]:
    with FakeAws(change_s=0) as fake:
        make_endpoint(fake)
        yield fake


@pytest.fixture
def runtime(aws):
    return aws.clients(retries=invoke.RETRIES).client("sagemaker-runtime")


def ask(
    runtime, answer: invoke.Completion | None = None
) -> tuple[invoke.Completion, list[dict], str]:
    """What came: the answer, its events, and the text as it was yielded."""
    answer = answer or invoke.Completion()
    found, text = [], ""
    for event in invoke.stream(runtime, "code", CHAT, answer):
        found.append(event.body)
        text += "".join(choice.text for choice in event.choices)
    return answer, found, text


# ---- streams ----


class CutClient:
    """A client whose answer comes in parts, and these over the network in pieces.

    botocore's own parser takes the frames of the parts apart again.
    """

    def __init__(self, parts: Iterable[bytes], sizes: Iterator[int]) -> None:
        self._frames = b"".join(payload_part(part) for part in parts)
        self._sizes = sizes

    def stream(self) -> Iterator[bytes]:
        data = self._frames
        while data:
            size = next(self._sizes)
            yield data[:size]
            data = data[size:]

    def close(self) -> None:
        pass

    def invoke_endpoint_with_response_stream(self, **_) -> dict:
        operation = service_model("sagemaker-runtime").operation_model(
            "InvokeEndpointWithResponseStream"
        )
        shape = operation.output_shape.members["Body"]
        return {"Body": EventStream(self, shape, EventStreamJSONParser(), operation.name)}


def cut(draw: random.Random, data: bytes) -> list[bytes]:
    edges = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(1, 40)))
    return [data[a:b] for a, b in pairwise([0, *edges, len(data)])]


def test_random_splits_over_payload_parts_give_the_same_events():
    draw, whole = random.Random(8), None
    for _ in range(NUM_SPLITS):
        sizes = iter(lambda: draw.randrange(1, 400), None)
        answer, found, text = ask(CutClient(cut(draw, STREAM), sizes))
        whole = whole or found
        assert found == whole
        assert text == answer.texts[0] == "".join(WORDS)
        assert (answer.problem, answer.usage) == ("", USAGE)
    assert whole is not None and len(whole) == len(WORDS) + 2


def test_splits_over_payload_parts_of_a_server_give_the_same_events(aws, runtime):
    draw, every = random.Random(8), []
    for _ in range(10):
        parts = cut(draw, STREAM)
        aws.endpoints.answer_with = lambda _, parts=parts: parts
        every.append(ask(runtime)[1])
    assert all(found == every[0] for found in every)


def test_the_body_asks_for_a_stream_with_its_usage(aws, runtime):
    bodies = []

    def answer(invocation) -> list[bytes]:
        bodies.append(json.loads(invocation.body))
        assert invocation.streams
        return [STREAM]

    aws.endpoints.answer_with = answer
    ask(runtime)
    assert bodies == [{**CHAT, "stream": True, "stream_options": {"include_usage": True}}]


def test_text_comes_before_the_answer_ends(aws, runtime):
    sent = []

    def answer(_) -> Iterable[bytes]:
        for word in WORDS:
            sent.append(word)
            yield events(chunk(word))
        yield events("[DONE]")

    aws.endpoints.answer_with = answer
    stream = invoke.stream(runtime, "code", CHAT, invoke.Completion())
    assert next(stream).choices[0].text == WORDS[0]
    assert [event.choices[0].text for event in stream] == list(WORDS[1:])


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (stream_error("ModelStreamError", "it hangs", "StreamBroken"), "Error: it hangs"),
        (stream_error("ModelStreamError", "it hangs"), "broke off"),
        (stream_error("InternalStreamFailure", "oh"), "failed inside SageMaker"),
    ],
)
def test_a_stream_that_fails_keeps_what_came(aws, runtime, end, said):
    parts = [payload_part(events(chunk("Zür"), chunk("ich"))[:-4]), end]
    aws.endpoints.answer_with = lambda _: [Frame(part) for part in parts]
    answer, found, text = ask(runtime)
    assert (text, len(found)) == ("Zür", 1)
    assert said in answer.problem
    assert "no [DONE]" not in answer.problem


def test_a_stream_without_done_is_told(aws, runtime):
    aws.endpoints.answer_with = lambda _: [events(chunk("Zür"))]
    answer, _, text = ask(runtime)
    assert text == "Zür"
    assert "no [DONE]" in answer.problem


def test_a_frame_that_is_damaged_on_the_way_is_no_traceback(aws, runtime):
    damaged = bytearray(payload_part(events(chunk("ich"))))
    damaged[-6] ^= 1
    aws.endpoints.answer_with = lambda _: [events(chunk("Zür")), Frame(damaged)]
    answer, _, text = ask(runtime)
    assert text == "Zür"
    assert "Checksum" in answer.problem


def test_an_error_of_the_container_in_the_middle(aws, runtime):
    error = {"error": {"message": "The server failed; its log says why.", "code": "internal_error"}}
    aws.endpoints.answer_with = lambda _: [events(chunk("Zür"), error, "[DONE]")]
    answer, found, text = ask(runtime)
    assert text == "Zür"
    assert "its log says why" in answer.problem
    assert found[-1] == error


def test_several_choices_and_reasoning_are_kept_apart(aws, runtime):
    def of(index: int, **delta: str) -> dict:
        return {"choices": [{"index": index, "delta": delta}]}

    every = [of(1, content="B"), of(0, reasoning_content="hm"), of(0, content="A")]
    aws.endpoints.answer_with = lambda _: [events(*every, "[DONE]")]
    answer, _, _ = ask(runtime)
    assert dict(answer.texts) == {0: "A", 1: "B"}
    aws.endpoints.answer_with = lambda _: [events({"choices": [{"text": "C"}]}, "[DONE]")]
    assert dict(ask(runtime)[0].texts) == {0: "C"}


@by_name
def test_recorded_streams_of_four_servers(stream):
    draw = random.Random(8)
    answer, _, _ = ask(CutClient(cut(draw, stream.raw), iter(lambda: draw.randrange(1, 400), None)))
    assert tuple(answer.texts[index] for index in range(len(stream.texts))) == stream.texts
    reasons = tuple(answer.finish_reasons.get(i, "") for i in range(len(stream.texts)))
    assert reasons == stream.finish_reasons
    assert answer.problem == (stream.error and f"the container ended the answer: {stream.error}")
    if stream.usage is not None:
        assert answer.usage["completion_tokens"] == stream.usage.num_tokens


@pytest.mark.parametrize("body", ["no JSON", "[1]", '{"a": 1}', '{"choices": 3}'])
def test_events_that_are_none_of_a_completion(aws, runtime, body):
    aws.endpoints.answer_with = lambda _: [events(chunk("Zür"), body)]
    with pytest.raises(UserError, match=r"JSON object|something else"):
        ask(runtime)


def test_a_line_without_end_is_refused(aws, runtime, monkeypatch):
    monkeypatch.setattr("peagle.client.events.MAX_EVENT_BYTES", 50)
    aws.endpoints.answer_with = lambda _: [b"data: " + b"x" * 100]
    with pytest.raises(UserError, match="no event stream: an event of more than 50 bytes"):
        ask(runtime)


# ---- whole answers ----


def test_a_whole_answer(aws, runtime):
    aws.endpoints.answer_with = lambda _: [json.dumps(WHOLE).encode()]
    answer = invoke.invoke(runtime, "code", CHAT)
    assert dict(answer.texts) == {0: "Zürich"}
    assert (answer.body, answer.usage, answer.variant) == (WHOLE, USAGE, "AllTraffic")


def refuse(status: int, body: str):
    def answer(_) -> list[bytes]:
        raise ContainerError(status, body)

    return answer


@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_of_the_container_is_shown_as_such(aws, runtime, streams):
    error = {"error": {"message": "max_tokens is 0; expected at least 1.", "code": None}}
    aws.endpoints.answer_with = refuse(400, json.dumps(error))
    with pytest.raises(UserError, match=r"container answered 400: max_tokens is 0") as caught:
        ask(runtime) if streams else invoke.invoke(runtime, "code", CHAT)
    assert "peagle deploy sagemaker logs code" in str(caught.value)
    aws.endpoints.answer_with = refuse(502, "<html>\x1b[31m bad gateway")
    with pytest.raises(UserError, match="502: <html>") as caught:
        ask(runtime) if streams else invoke.invoke(runtime, "code", CHAT)
    assert "\x1b" not in str(caught.value)


def test_an_endpoint_that_is_not_there(aws, runtime):
    with pytest.raises(UserError, match="no endpoint 'nobody'"):
        invoke.invoke(runtime, "nobody", CHAT)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("access denied", "InvokeEndpoint"), ("throttling", "throttl"), ("internal", "inside AWS")],
)
def test_faults_of_aws(aws, runtime, kind, said):
    aws.faults.clear()
    before = len(aws.calls)
    aws.fail(kind, "InvokeEndpoint")
    aws.endpoints.answer_with = lambda _: [json.dumps(WHOLE).encode()]
    with pytest.raises(UserError, match=f"(?i){said}"):
        invoke.invoke(runtime, "code", CHAT)
    assert len(aws.calls) == before + 1  # not sent again: it would be computed again
    aws.faults.clear()


def test_a_request_that_takes_too_long_points_to_streaming():
    from botocore.exceptions import ReadTimeoutError

    error = invoke.explain_invocation(ReadTimeoutError(endpoint_url="https://x"), "code")
    assert "--stream" in str(error)
