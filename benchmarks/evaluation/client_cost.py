"""What the client of `peagle bench` costs: CPU seconds per chunk it reads, and the delay it adds.

A server in a process of its own streams chunks of a real server's size at a steady pace, and puts
into each the time at which it wrote it. CPU time does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from peagle.config import SamplingParams
from peagle.environment import environment
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.timing import spread_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def serve(chunks: int, interval_s: float, ready: Connection) -> None:
    """Answer completions with so many chunks at this pace."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            lines = head.lower().split(b"\r\n")
            lengths = (int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(next(lengths, 0))
            if head.startswith(b"GET /v1/models"):
                body = b'{"data": [{"id": "m"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            elif head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n")
            else:
                await stream(writer)

    async def stream(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        start = time.perf_counter()
        for number in range(1, chunks + 1):
            await asyncio.sleep(start + number * interval_s - time.perf_counter())
            # The clock is that of the whole machine on Linux.
            send(writer, chunk(number, f"{time.perf_counter():.6f} " + 10 * "x"))
        send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def chunk(number: int, text: str) -> str:
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        usage = {"prompt_tokens": 100, "completion_tokens": number, "total_tokens": 100 + number}
        names = {"id": "cmpl-" + 32 * "0", "object": "text_completion", "created": 1, "model": "m"}
        return json.dumps({**names, "choices": [choice], "usage": usage})

    def send(writer: asyncio.StreamWriter, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def measure(concurrency: int, chunks: int, interval_s: float) -> dict[str, Any]:
    """CPU per chunk and the delay from a chunk's writing to its time in the answer."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(chunks, interval_s, theirs), daemon=True)
    server.start()
    backend = EndpointBackend(f"http://127.0.0.1:{ours.recv()}")
    params = SamplingParams(max_tokens=chunks)
    requests = [Request(str(number), "Count.", params) for number in range(2 * concurrency)]
    before = time.process_time()
    sent = time.perf_counter()
    run = backend.run(requests, concurrency)
    cpu = time.process_time() - before
    server.terminate()
    written = [
        (float(text.split()[0]) - sent, when)
        for answer in run.answers
        for text, (when, _) in zip(answer.texts, answer.chunks, strict=True)
    ]
    # Times of answers count from their sending: the gaps between chunks are what is compared.
    gaps = [(b[1] - a[1]) - (b[0] - a[0]) for a, b in pairwise(written) if b[1] > a[1]]
    return {
        "concurrency": concurrency,
        "chunks": len(written),
        "chunks_per_s": len(written) / run.seconds,
        "cpu_us_per_chunk": 1e6 * cpu / len(written),
        "core_share": cpu / run.seconds,
        "gap_error_ms": {k: 1e3 * v for k, v in spread_of([abs(g) for g in gaps]) if v},
    }


def main() -> None:
    """Measure and print JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--chunks", type=int, default=100)
    options.add_argument("--interval-ms", type=float, default=20.0)
    args = options.parse_args()
    runs = [measure(c, args.chunks, args.interval_ms / 1e3) for c in args.concurrency]
    print(json.dumps({"environment": environment(), "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
