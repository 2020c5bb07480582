"""The scripts of benchmarks/serving as modules, and a small server for them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "serving"
if not FOLDER.is_dir():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)

Answering = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, by name."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert not names & set(sys.modules), "another module has the name of a script"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: __import__(name) for name in sorted(names)}
    for name in names & set(sys.modules):
        del sys.modules[name]


@pytest.fixture
def load(scripts: dict[str, ModuleType]) -> Any:
    return scripts["load"]


async def serving(load: Any, answer: Answering, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `work` gives with a client of a server that answers so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if b"content-length" in line
                ),
                0,
            )
            await answer(head + await reader.readexactly(length), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await work(load.Client(server.sockets[0].getsockname()[1], timeout_s=10))


def play(*parts: bytes | float) -> Answering:
    """An answer in these parts; a number is a pause in seconds."""

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(part if isinstance(part, float) else 0)

    return answer


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def ask(load: Any, answer: Answering, **fields: Any) -> Any:
    return asyncio.run(serving(load, answer, lambda client: client.complete("x", **fields)))
