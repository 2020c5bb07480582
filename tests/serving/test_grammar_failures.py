"""A client hears that the grammar of its request failed, as a stream and as one answer."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_TARGET
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import GrammarState
from peagle.engine.outputs import StreamChunk
from peagle.serving.app import create_app
from peagle.serving.config import ServerConfig
from peagle.serving.engine_process import EngineInfo
from peagle.serving.metrics import Metrics
from peagle.serving.service import Service
from peagle.serving.tokenizer import Tokenizer
from serving.asgi import JSON, AsgiClient

pytest.importorskip("xgrammar")

BODY = {"prompt": "# sort", "max_tokens": 20, "response_format": {"type": "regex", "pattern": "a+"}}


class Replay:
    """An engine whose requests all end as the one did whose chunks it has."""

    def __init__(self, chunks: list[StreamChunk]) -> None:
        self.chunks = chunks

        self.info = EngineInfo(2048, 2048, 1, {"plain": 0}, {}, "cpu", {})
        self.ready = [SimpleNamespace(number=0)]

    def choose(self, _: int) -> Any:
        return self.ready[0]

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[list[tuple[int, StreamChunk]]]:
        for chunk in self.chunks:
            yield [(0, chunk)]


@pytest.fixture(scope="module")
def chunks() -> list[StreamChunk]:
    """Of a request whose matcher refuses the fourth token."""
    llm = LLM(max_num_seqs=1, kv_cache_gib=0.1)
    structure = StructuredOutput.regex("[a-z ]+")
    params = SamplingParams(max_tokens=20, temperature=0.0, structured_output=structure)
    try_advance, calls = GrammarState.try_advance, []

    def refuses(state: GrammarState, token: int) -> bool:
        calls.append(token)
        return len(calls) < 4 and try_advance(state, token)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarState, "try_advance", refuses)
        llm.requests.add(0, BODY["prompt"], params)
        while llm.requests.has_unfinished:
            found += llm.requests.step()
    assert [len(chunk.token_ids) for chunk in found] == [1, 1, 1, 0]
    return found


@pytest.fixture
def client(chunks: list[StreamChunk]) -> AsgiClient:
    pool: Any = Replay(chunks)
    service = Service(ServerConfig(), "m", ("plain",), pool, Metrics("m"))
    service.tokenizer = Tokenizer(str(BUNDLED_TARGET))
    return AsgiClient(create_app(service))


def test_one_answer_is_an_error(client: AsgiClient) -> None:
    answer = client("POST", "/v1/completions", headers=JSON, body=json.dumps(BODY).encode())
    assert answer.status == 500
    assert answer.error["code"] == "grammar_failed"
    assert "matcher of its grammar failed" in answer.error["message"]


def test_a_stream_ends_with_an_error(client: AsgiClient, chunks: list[StreamChunk]) -> None:
    body = json.dumps({**BODY, "stream": True}).encode()
    answer = client("POST", "/v1/completions", headers=JSON, body=body)
    assert answer.status == 200
    events = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    *steps, last = map(json.loads, events)
    text = "".join(step["choices"][0]["text"] for step in steps)
    assert text == "".join(chunk.text for chunk in chunks[:-1])
    assert last["error"]["code"] == "grammar_failed"
    assert "matcher of its grammar failed" in last["error"]["message"]
