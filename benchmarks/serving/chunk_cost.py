"""What a chunk costs the host: CPU microseconds in the engine process and in the front end.

    python benchmarks/serving/chunk_cost.py
    python benchmarks/serving/chunk_cost.py --streams 16 --json

A chunk is what one step adds to one stream. `peagle serve` runs with the bundled pair, but its
decode steps are made up, one in each interval, so that nothing computes beside the host's work.
Only CPU time counts: other work on the machine makes no difference but that of shared caches.

step     the engine's own work: sequences, stop ids, blocks
text     tokens to text
message  the chunks of a step, pickled and written to the pipe
receive  reading and unpickling them, in a thread of the front end
events   the event loop: handing chunks over, counting them, writing JSON and HTTP
write    the system's part of sending an event
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, ClassVar

from served import Served

from peagle.bundled import BUNDLED_TARGET
from peagle.environment import environment
from peagle.errors import UserError

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ROUTES = {
    "completions": ("/v1/completions", {"prompt": "def f(x):\n"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def f(x):\n"}]}),
}
COUNTERS = ("steps", "chunks", "step", "text", "message", "write")
MAX_TOKENS = 2000
WARM_UP = 20  # events of each stream before the time is taken
START_S = 60.0  # and the longest time in which nothing comes


class Counters:
    """Numbers that the processes under test write, and this one reads: a file in their memory."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap(file.fileno(), 8 * len(COUNTERS))

    def add(self, name: str, value: float) -> None:
        at = 8 * COUNTERS.index(name)
        (before,) = struct.unpack_from("d", self._memory, at)
        struct.pack_into("d", self._memory, at, before + value)

    def read(self) -> dict[str, float]:
        return dict(zip(COUNTERS, struct.unpack_from(f"{len(COUNTERS)}d", self._memory)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds the CPU seconds of each call."""

        def run(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            self.add(name, time.thread_time() - start)
            return result

        return run


# ---- the processes under test ----


def serve() -> None:
    """Be `peagle serve` whose engine makes its steps up."""
    from asyncio import selector_events

    from peagle.cli.main import main
    from peagle.serving import engine_pool

    counters = Counters(os.environ["CHUNK_COST_COUNTERS"])
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    transport.write = counters.timed("write", transport.write)
    engine_pool.run_engine = run_engine
    main()


def run_engine(*args: Any) -> None:
    """Be an engine process that makes its steps up."""
    from peagle.engine import LLMEngine
    from peagle.engine.loop import EngineLoop
    from peagle.serving import engine_process

    counters = Counters(os.environ["CHUNK_COST_COUNTERS"])
    load, deliver = engine_process._load, engine_process.EngineWorker.deliver

    def load_made_up(*args: Any) -> Any:
        llms = load(*args)
        make_steps_up(next(iter(llms.values())), counters)
        return llms

    def deliver_counted(worker: Any, chunks: list[Any]) -> None:
        deliver(worker, chunks)
        counters.add("steps", 1)
        counters.add("chunks", len(chunks))

    worker = engine_process.EngineWorker
    engine_process._load = load_made_up
    worker.deliver = counters.timed("message", deliver_counted)  # type: ignore[method-assign]
    LLMEngine.step = counters.timed("step", LLMEngine.step)  # type: ignore[method-assign]
    EngineLoop.step = counters.timed("text", EngineLoop.step)  # type: ignore[method-assign]
    engine_process.run_engine(*args)


def make_steps_up(llm: Any, counters: Counters) -> None:
    """Let an engine decode without a device, one step in each interval."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from host_step import MadeUpSteps

    from peagle.engine.step.pipeline import Pipeline
    from peagle.evaluation.prompts import load_prompt_set

    interval_s = float(os.environ["CHUNK_COST_INTERVAL_S"])

    class PacedSteps(MadeUpSteps):
        due_s = 0.0
        times: ClassVar[dict[int, Any]] = {}

        def read(self, flight: MadeUpSteps) -> Any:
            start = time.thread_time()
            now = time.monotonic()
            self.due_s = max(self.due_s + interval_s, now)
            time.sleep(self.due_s - now)
            reports = super().read(flight)
            counters.add("step", start - time.thread_time())  # a device's work, not the host's
            return reports

        def read_drafts(self, flight: MadeUpSteps, *, follows: bool) -> Any:
            start = time.thread_time()
            reports = super().read_drafts(flight, follows=follows)
            counters.add("step", start - time.thread_time())
            return reports

    tokens = llm.tokenizer(load_prompt_set("humaneval", 1)[0].text * 8)["input_ids"]
    steps: Any = PacedSteps(tokens, llm.engine.num_speculative_tokens)
    engine = llm.engine
    taking = engine._append_tokens, engine._set_drafts, engine._prepare_grammars
    engine._pipeline = Pipeline(steps, engine.scheduler, *taking)


# ---- the measurement ----


def thread_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process's main thread, and of all its others together."""
    main = others = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) * 1e-9
        if task.name == str(pid):
            main = seconds
        else:
            others += seconds
    return main, others


async def until(
    server: Served, is_reached: Callable[[], bool], progress: Callable[[], float], fault: str
) -> None:
    """Wait; a UserError if the server is dead, or there is no progress for START_S seconds."""
    last, deadline = progress(), time.monotonic() + START_S
    while not is_reached():
        if (now := progress()) != last:
            last, deadline = now, time.monotonic() + START_S
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"{fault}; the server said:\n{server.log()}")
        await asyncio.sleep(0.01)


async def measure(server: Served, counters: Counters, route: str, streams: int, steps: int) -> Any:
    """Return microseconds a chunk by part, in steps in which all streams are under way."""
    path, fields = ROUTES[route]
    fields = {**fields, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    (engine,) = server.engine_pids()
    loop = asyncio.get_running_loop()
    counts = [0] * streams

    class Reader(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self.number = number

        def data_received(self, data: bytes) -> None:
            counts[self.number] += data.count(b"data: {")

    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    transports: list[asyncio.Transport] = []
    try:
        for number in range(streams):
            transport, _ = await loop.create_connection(
                lambda number=number: Reader(number), "127.0.0.1", server.port
            )
            transports.append(transport)
            transport.write(request)
        fault = "The streams do not begin"
        await until(server, lambda: min(counts) >= WARM_UP, lambda: sum(counts), fault)

        def look() -> Iterator[float]:
            yield from counters.read().values()
            yield from thread_seconds(server.process.pid)
            yield from thread_seconds(engine)
            yield sum(counts)

        start, first = time.perf_counter(), list(look())

        def is_over() -> bool:
            """Also of the events: the front end may be behind the engine."""
            return counters.read()["steps"] >= first[0] + steps and sum(counts) > first[-1]

        fault = "The streams ended before the steps did (--interval-ms may be too short)"
        await until(server, is_over, lambda: counters.read()["steps"] + sum(counts), fault)
        seconds = time.perf_counter() - start
        spent = [now - then for now, then in zip(look(), first)]
    finally:
        for transport in transports:
            transport.abort()
    found = dict(zip(COUNTERS, spent))
    front_main, front_others, engine_main, engine_others, events = spent[len(COUNTERS) :]
    chunks = found["chunks"]
    parts = {
        "step": found["step"],
        "text": found["text"] - found["step"],
        "message": found["message"],
        "receive": front_others,
        "events": front_main - found["write"],
        "write": found["write"],
        "engine process": engine_main + engine_others,
        "front end": front_main + front_others,
        "both": engine_main + engine_others + front_main + front_others,
    }
    return {
        "route": route,
        "chunks": int(chunks),
        "chunks_per_s": round(chunks / seconds),
        "events": int(events),
        "us_a_chunk": {name: round(1e6 * value / chunks, 1) for name, value in parts.items()},
    }


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server, and measure each route."""
    with tempfile.TemporaryDirectory() as folder:
        path, template = Path(folder, "counters"), Path(folder, "template.jinja")
        path.write_bytes(bytes(8 * len(COUNTERS)))
        template.write_text(TEMPLATE)
        os.environ["CHUNK_COST_COUNTERS"] = str(path)
        os.environ["CHUNK_COST_INTERVAL_S"] = str(args.interval_ms / 1e3)
        options = ["--target", str(BUNDLED_TARGET), "--method", "ngram"]
        options += ["--num-speculative-tokens", str(args.k), "--max-num-seqs", str(args.streams)]
        options += ["--chat-template", str(template)]
        async with Served(*options, program=(__file__, "serve")) as server:
            counters, runs = Counters(str(path)), list[dict[str, Any]]()
            for route in args.routes:
                runs.append(await measure(server, counters, route, args.streams, args.steps))
                await server.wait_idle(30)
            return runs


def table(runs: list[dict[str, Any]]) -> str:
    """Return the parts as rows and the routes as columns."""
    names = runs[0]["us_a_chunk"]
    lines = ["us a chunk".ljust(16) + "".join(run["route"].rjust(14) for run in runs)]
    for name in names:
        lines.append(name.ljust(16) + "".join(f"{r['us_a_chunk'][name]:14.1f}" for r in runs))
    lines.append("chunks a second".ljust(16) + "".join(f"{r['chunks_per_s']:14}" for r in runs))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--streams", type=int, default=64, help="that decode together (64)")
    options.add_argument("--k", type=int, default=7, help="drafts a step (7)")
    options.add_argument("--steps", type=int, default=250, help="measured, at most 300 (250)")
    options.add_argument("--interval-ms", type=float, default=6.0, help="of two steps (6)")
    options.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    options.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    args = options.parse_args()
    runs = asyncio.run(run(args))
    if args.json:
        print(json.dumps({"environment": environment(), "runs": runs}, indent=2))
    else:
        print(table(runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        main()
