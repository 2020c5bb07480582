"""The engine process is stopped: it is seen, clients are told, another engine serves again."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import time
from typing import Any

from kill import CLIENTS, OPTIONS, load_up, told
from offline import prompts
from served import Served
from soak import fault

# The front end looks twice a second.
_LOOK_S = 1.0


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--bound", type=float, default=5.0, help="seconds from not ready to an error (5)"
    )


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_hang(args))


async def _hang(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with Served(*OPTIONS, threads=args.threads) as server:
        ready_s = time.perf_counter() - server.started_s
        reference = await server.client.complete(prompts(1)[0], max_tokens=32)
        requests, (engine,) = await load_up(server), server.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        stopped_s = time.perf_counter()
        while (await server.client.get("/health")).status == 200:
            await asyncio.sleep(0.05)
        not_ready_s = time.perf_counter()
        answers = await asyncio.gather(*requests)
        figures, missed = told(answers, not_ready_s, args.bound, "hang")
        await server.wait_ready()
        again_s = time.perf_counter()
        again = await server.client.complete(prompts(1)[0], max_tokens=32)
        if not again.is_complete or again.text != reference.text:
            missed.append(f"after it {fault(again)}; expected {reference.text!r}")
        found = await server.metrics()
        if found["engine_hangs_total"] != 1:
            missed.append(f"engine_hangs_total is {found['engine_hangs_total']}; expected 1")
        allowed_s = float(re.findall(r"no sign of life for .*, of ([\d.]+) s", server.log(0))[0])
        if not_ready_s - stopped_s > allowed_s + _LOOK_S:
            missed.append(f"not ready after {not_ready_s - stopped_s:.1f} s of {allowed_s} s")
        figures |= {
            "clients": CLIENTS,
            "allowed_s": allowed_s,
            "not_ready_s": round(not_ready_s - stopped_s, 2),
            "ready_again_s": round(again_s - not_ready_s, 2),
            "first_start_s": round(ready_s, 2),
        }
        return figures, missed
