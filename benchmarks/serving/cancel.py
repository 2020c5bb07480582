"""Clients that leave at random moments: what they asked for goes with them."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from typing import Any

from load import Client
from offline import LENGTHS, prompts
from served import Served
from soak import fault

REFERENCE_TOKENS = 48


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with Served(threads=args.threads) as server:
        reference = await server.client.complete(prompts(1)[0], max_tokens=REFERENCE_TOKENS)
        counts, failed = await leave_at_random(server.client, 60 * args.minutes, args)
        load = await server.wait_idle(10)
        again = await server.client.complete(prompts(1)[0], max_tokens=REFERENCE_TOKENS)
    missed = [f"{name} is {value} at the end" for name, value in load.items() if value]
    if failed:
        missed.append(f"{len(failed)} requests that stayed were lost, like {failed[0]}")
    if not again.is_complete or again.text != reference.text:
        missed.append(f"the last text is {again.text!r}, expected {reference.text!r}")
    if not counts["dropped"]:
        missed.append("no request was dropped")
    return {"requests": dict(counts), "left": load, "clients": args.clients}, missed


async def leave_at_random(
    client: Client, seconds: float, args: argparse.Namespace
) -> tuple[Counter[str], list[str]]:
    """Send requests for so long and drop half of them; how they ended, and what was lost."""
    source, texts = random.Random(args.seed), prompts()
    counts: Counter[str] = Counter()
    failed: list[str] = []
    end = time.monotonic() + seconds
    usual = 1.0  # seconds that a request takes, as it turns out

    async def work() -> None:
        nonlocal usual
        while time.monotonic() < end:
            leaves = source.random() < 0.5
            # The power lets many leave at once, before the first token.
            after = usual * source.random() ** 2 if leaves else None
            answer = await client.complete(
                source.choice(texts),
                max_tokens=source.choice(LENGTHS),
                stream=source.random() < 0.8,
                drop_after_s=after,
            )
            counts[answer.problem or "whole"] += 1
            if answer.is_complete:
                usual += 0.05 * (answer.seconds - usual)
            elif answer.problem != "dropped":
                failed.append(fault(answer))

    await asyncio.gather(*(work() for _ in range(args.clients)))
    return counts, failed
