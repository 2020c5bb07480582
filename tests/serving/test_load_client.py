"""The client of the load tests against a small server, and what is read of processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from serving.load_scripts import (
    CHUNKED,
    DONE,
    HEAD,
    LAST,
    USAGE,
    ask,
    chunked,
    event,
    load,
    play,
    scripts,
    serving,
)

__all__ = ["load", "scripts"]


# ---- the client -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_stream_in_pieces_of_any_size(load: Any, size: int) -> None:
    text = event("hé") + b": a comment\n\n" + event("llo", "stop") + USAGE + DONE
    # Chunks of HTTP and events need not end together.
    raw = CHUNKED + chunked(text[:10], text[10:90], text[90:]) + LAST
    answer = ask(load, play(*(raw[i : i + size] for i in range(0, len(raw), size))))
    assert answer.is_complete and (answer.status, answer.problem) == (200, "")
    assert (answer.text, answer.finish_reason) == ("héllo", "stop")
    assert answer.usage == {"completion_tokens": 3}


def test_a_body_and_headers(load: Any) -> None:
    body = b'{"choices": [{"text": "hi", "finish_reason": "length"}], "usage": {"a": 1}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nRetry-After: 2\r\n\r\n" % len(body)
    answer = ask(load, play(head + body), stream=False)
    assert answer.is_complete and (answer.text, answer.finish_reason) == ("hi", "length")
    assert answer.headers["retry-after"] == "2" and answer.usage == {"a": 1}


def test_what_is_sent(load: Any) -> None:
    seen: list[bytes] = []

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    ask(load, answer, max_tokens=3, speculation={"report": True})
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert json.loads(body) == {
        "prompt": "x",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "speculation": {"report": True},
    }


def test_times_are_those_of_the_chunks(load: Any) -> None:
    first = CHUNKED + chunked(event("a"))
    answer = ask(load, play(0.1, first, 0.2, chunked(event("b", "stop"), DONE) + LAST))
    assert 0.09 < answer.first_token_s < answer.seconds - 0.15


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((), "unanswered"),
        ((b"HTTP/1.1 200",), "unanswered"),
        ((CHUNKED + chunked(event("a")),), "cut"),
        ((CHUNKED + chunked(event("a"))[:-4],), "cut"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",), "cut"),
    ],
)
def test_answers_that_end_too_soon(load: Any, parts: tuple[bytes, ...], problem: str) -> None:
    answer = ask(load, play(*parts))
    assert answer.problem == problem and not answer.is_complete


def test_an_answer_up_to_the_end_of_the_connection(load: Any) -> None:
    answer = ask(load, play(HEAD + b"\r\n" + event("a", "stop") + DONE))
    assert answer.is_complete and answer.text == "a"


def test_an_error_in_a_stream(load: Any) -> None:
    error = b'data: {"error": {"message": "died", "type": "server_error"}}\n\n'
    answer = ask(load, play(CHUNKED + chunked(event("a"), error) + LAST))
    assert answer.problem == "" and not answer.is_complete
    assert answer.error["message"] == "died"


def test_a_stream_without_its_end(load: Any) -> None:
    assert not ask(load, play(CHUNKED + chunked(event("a", "stop")) + LAST)).is_complete


def test_dropping_closes_the_connection(load: Any) -> None:
    closed = asyncio.Event()

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunked(event("a")))
        assert await reader.read(1) == b""
        closed.set()

    async def work(client: Any) -> Any:
        dropped = await client.complete("x", drop_after_s=0.1)
        await asyncio.wait_for(closed.wait(), 5)
        return dropped

    dropped = asyncio.run(serving(load, answer, work))
    assert dropped.problem == "dropped" and dropped.text == "a"


def test_nobody_there(load: Any) -> None:
    async def work(client: Any) -> Any:
        return client

    client = asyncio.run(serving(load, play(), work))
    answer = asyncio.run(client.get("/ready"))
    assert (answer.status, answer.problem) == (0, "refused")


def test_so_many_at_a_time(load: Any) -> None:
    now = most = 0

    async def work(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (number % 3))
        now -= 1
        return 2 * number

    assert asyncio.run(load.at_most(4, range(20), work)) == [2 * i for i in range(20)]
    assert most == 4


def test_percentiles_and_slopes(load: Any) -> None:
    values = [float(i) for i in range(1, 101)]
    assert [load.percentile(values, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert load.percentile([3.0], 0.95) == 3
    assert load.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert load.slope([(0, 1), (1, 3), (2, 1)]) == pytest.approx(0)
    assert load.slope([(5, 1), (5, 3)]) == 0


# ---- what is read of the server -------------------------------------------------------------


def test_metrics(scripts: dict[str, ModuleType]) -> None:
    text = (
        "# HELP peagle:num_requests_running Outputs.\n# TYPE peagle:num_requests_running gauge\n"
        'peagle:num_requests_running{engine="0",model_name="a b"} 2.0\n'
        'peagle:num_requests_running{engine="1",model_name="a b"} 1.0\n'
        "peagle:kv_cache_usage_perc 2.5e-01\nup 1\n"
    )
    expected = {"num_requests_running": 3, "kv_cache_usage_perc": 0.25, "up": 1}
    assert scripts["served"].parse_metrics(text) == expected


def test_processes(scripts: dict[str, ModuleType]) -> None:
    served = scripts["served"]
    code = "x = bytearray(50_000_000); print('made', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"made\n"
        assert child.pid in served.children(os.getpid())
        assert 50 < served.resident_mb(child.pid) < 200
        child.kill()
    assert served.resident_mb(child.pid) == served.cpu_s(child.pid) == 0
    before, end = served.cpu_s(os.getpid()), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0.05 < served.cpu_s(os.getpid()) - before < 5
