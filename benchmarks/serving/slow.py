"""A client that reads slowly, and many that rest between requests, beside normal ones.

The slow client's request is work for the engine too. So the normal clients are compared with
themselves beside the same request of a client that reads as fast as it comes; their speed without
any other client is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

from load import Answer, run_clients
from offline import prompts
from served import Served

NORMAL = 8
KINDS = ("alone", "fast", "slow")
LONG = {"max_tokens": 800, "ignore_eos": True, "speculation": {"report": True}}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--idle", type=int, default=1000, help="idle connections (1000)")
    options.add_argument("--prompts", type=int, default=32)
    options.add_argument("--max-tokens", type=int, default=48)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--bound", type=float, default=0.05, help="share of the speed lost (0.05)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = args.idle + 512  # the server inherits it, and keeps some for other files
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    idle_left: list[int] = []
    async with Served("--no-prefix-caching", threads=args.threads) as server:
        await _normal(server, args)
        for _ in range(args.repeats):
            speeds["alone"].append(await _normal(server, args))
            async with _fast_reader(server):
                speeds["fast"].append(await _normal(server, args))
            async with _slow_reader(server), _idle(server, args.idle) as connections:
                speeds["slow"].append(await _normal(server, args))
                idle_left.append(sum(_is_open(connection) for connection in connections))
        is_well = (await server.client.complete("def f():", max_tokens=4)).is_complete
    medians = {kind: median(runs) for kind, runs in speeds.items()}
    lost = 1 - medians["slow"] / medians["fast"]
    missed = [f"the clients lose {lost:.1%}; bound {args.bound:.0%}"] if lost > args.bound else []
    if not is_well:
        missed.append("the server answers no more")
    figures = {
        "tokens_per_s": {kind: round(value, 1) for kind, value in medians.items()},
        "runs": {kind: [round(speed, 1) for speed in runs] for kind, runs in speeds.items()},
        "lost": round(lost, 4),
        "lost_of_neighbours": round(
            1 - median(s / f for s, f in zip(speeds["slow"], speeds["fast"])), 4
        ),
        "idle": args.idle,
        "idle_still_open": idle_left,
    }
    return figures, missed


async def _normal(server: Served, args: argparse.Namespace) -> float:
    """Tokens per second of the normal clients together."""

    async def work(text: str) -> Answer:
        return await server.client.complete(text, max_tokens=args.max_tokens, ignore_eos=True)

    start = time.perf_counter()
    answers = await run_clients(NORMAL, prompts(args.prompts), work)
    seconds = time.perf_counter() - start
    return sum(answer.usage["completion_tokens"] for answer in answers) / seconds


def _long_request() -> bytes:
    body = json.dumps({"prompt": "def main():\n", "temperature": 0, "stream": True, **LONG})
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()


@contextlib.asynccontextmanager
async def _fast_reader(server: Served) -> AsyncIterator[None]:
    """A long stream, read as it comes."""
    reading = asyncio.create_task(server.client.complete("def main():\n", **LONG))
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await server.wait_idle(30)


@contextlib.asynccontextmanager
async def _slow_reader(server: Served) -> AsyncIterator[None]:
    """The same stream, of which a byte is read every 100 ms."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        # As little room as there can be: what is not read soon stays with the server.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await loop.sock_connect(sock, (server.client.host, server.client.port))
        await loop.sock_sendall(sock, _long_request())

        async def read() -> None:
            while await loop.sock_recv(sock, 1):
                await asyncio.sleep(0.1)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.2)
        try:
            yield
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reading
    await server.wait_idle(30)


@contextlib.asynccontextmanager
async def _idle(server: Served, count: int) -> AsyncIterator[list[socket.socket]]:
    """Connections on which nothing is said after a first request: others are closed soon."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in connections:
            connection.setblocking(False)
            await loop.sock_connect(connection, (server.client.host, server.client.port))
            await loop.sock_sendall(connection, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for connection in connections:
            assert (await loop.sock_recv(connection, 4096)).startswith(b"HTTP/1.1 200")
        yield connections


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
