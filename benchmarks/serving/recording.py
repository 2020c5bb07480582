"""What recording adds to a step: requests that are recorded, that are not, and no recording.

    python benchmarks/serving/bench_serving.py recording --target models/smollm2-135m \\
        --draft smollm2

Two servers take turns on the same requests. `none` runs without --record; `again` is `none` once
more and shows what the machine makes of equal work. The other server gets requests with "store":
false (`off`) and without (`on`). The steps of a round share its time and that of the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from itertools import cycle, islice
from typing import Any

from load import run_clients
from offline import prompts
from script import compare, take_turns
from served import Served, ServerError
from soak import fault

# The side to compare with, whether the server records, and more fields of the requests.
SIDES: dict[str, tuple[str | None, bool, dict[str, Any]]] = {
    "none": (None, False, {}),
    "again": ("none", False, {}),
    "off": ("none", True, {"store": False}),
    "on": ("off", True, {}),
}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--streams", type=int, default=64, help="requests in flight (64)")
    options.add_argument("--requests", type=int, default=256, help="of a round (256)")
    options.add_argument("--tokens", type=int, default=128, help="of an output (128)")
    options.add_argument("--repeats", type=int, default=7, help="rounds of each side (7)")
    options.add_argument("--target", default="bundled", help="(bundled)")
    options.add_argument("--draft", default="bundled", help="(bundled)")
    options.add_argument("--bound", type=float, default=0.01, help="share that `on` adds (0.01)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    # Without shared prefixes the work of a round is that of the first. A GPU has room for both.
    options = [args.target, "--draft", args.draft, "--max-num-seqs", str(args.streams)]
    options += ["--no-prefix-caching", "--gpu-memory-utilization"]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        recording = ["0.8", "--record", folder, "--record-all"]
        async with (
            Served(*options, "0.4", threads=args.threads) as plain,
            Served(*options, *recording, threads=args.threads) as recorder,
        ):
            for name in take_turns(SIDES, args.repeats):
                _, records, fields = SIDES[name]
                rows[name].append(await _round(recorder if records else plain, args, fields))
            await asyncio.sleep(1.0)  # the last records are written
            found = await recorder.metrics()
    counts = [found[f"{kind}_answers_total"] for kind in ("recorded", "unrecorded")]
    if counts != (expected := [(args.repeats + 1) * args.requests, 0]):
        raise ServerError(f"{counts} answers were recorded and dropped; expected {expected}")
    over = {name: side for name, (side, _, _) in SIDES.items()}
    return compare(rows, over, "on", "again", args.bound)


async def _round(
    server: Served, args: argparse.Namespace, fields: dict[str, Any]
) -> dict[str, float]:
    """Milliseconds of a step: the clock's, and of the processors in front end and engine."""
    fields = {"max_tokens": args.tokens, "ignore_eos": True, **fields}
    texts = islice(cycle(prompts()), args.requests)
    before, cpu, start = await server.metrics(), server.cpu_s(), time.perf_counter()
    answers = await run_clients(
        args.streams, [*texts], lambda text: server.client.complete(text, **fields)
    )
    seconds = {"step_ms": time.perf_counter() - start}
    await server.wait_idle(10)
    seconds |= {f"{name}_ms": value - cpu[name] for name, value in server.cpu_s().items()}
    if lost := [fault(answer) for answer in answers if not answer.is_complete]:
        raise ServerError(f"{len(lost)} requests were lost, like {lost[0]}")
    steps = (await server.metrics())["decode_steps_total"] - before.get("decode_steps_total", 0)
    return {name: 1000 * value / steps for name, value in seconds.items()}
