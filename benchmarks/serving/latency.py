"""Time to the first token: at idle, and under requests that come at random (open loop)."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from load import Answer, Client, percentile, run_clients
from offline import prompts
from served import Served
from soak import fault

SPECULATION = {"on": {}, "off": {"speculation": {"num_speculative_tokens": 0}}}
CONCURRENCY = 16


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--requests", type=int, default=150, help="of each measurement (150)")
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--rate", type=float, help="requests a second (half of what plain can do)")
    options.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    # The cache would make a request of a prompt that came before another one than the first.
    async with Served("--no-prefix-caching", threads=args.threads) as server:
        await _capacity(server.client, args, {})
        capacity = {k: await _capacity(server.client, args, v) for k, v in SPECULATION.items()}
        rate = args.rate or 0.5 * min(capacity.values())
        answers: dict[str, list[Answer]] = {}
        for name, fields in SPECULATION.items():
            answers[f"idle, speculation {name}"] = await _one_by_one(server.client, args, fields)
            answers[f"loaded, speculation {name}"] = await poisson(
                server.client, args, rate, fields
            )
    lost = [fault(answer) for some in answers.values() for answer in some if not answer.is_complete]
    figures = {
        "capacity_requests_per_s": {name: round(value, 2) for name, value in capacity.items()},
        "arrivals_per_s": round(rate, 2),
        "max_tokens": args.max_tokens,
        "cells": {name: _cell(some) for name, some in answers.items()},
    }
    return figures, [f"{len(lost)} requests were lost, like {lost[0]}"] if lost else []


async def _capacity(client: Client, args: argparse.Namespace, fields: dict[str, Any]) -> float:
    """Requests a second that many clients together get answered."""
    texts = prompts(4 * CONCURRENCY)
    start = time.perf_counter()
    await run_clients(CONCURRENCY, texts, lambda text: _ask(client, text, args, fields))
    return len(texts) / (time.perf_counter() - start)


async def _one_by_one(
    client: Client, args: argparse.Namespace, fields: dict[str, Any]
) -> list[Answer]:
    return await run_clients(1, _texts(args), lambda text: _ask(client, text, args, fields))


async def poisson(
    client: Client, args: argparse.Namespace, rate: float, fields: dict[str, Any]
) -> list[Answer]:
    """Requests at exponential distances, whether or not earlier ones are answered."""
    source = random.Random(args.seed)
    requests, due = [], time.perf_counter()
    for text in _texts(args):
        due += source.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        requests.append(asyncio.create_task(_ask(client, text, args, fields)))
    return await asyncio.gather(*requests)


def _texts(args: argparse.Namespace) -> list[str]:
    texts = prompts()
    return [texts[i % len(texts)] for i in range(args.requests)]


async def _ask(
    client: Client, text: str, args: argparse.Namespace, fields: dict[str, Any]
) -> Answer:
    return await client.complete(text, max_tokens=args.max_tokens, ignore_eos=True, **fields)


def _cell(answers: list[Answer]) -> dict[str, float]:
    whole = [answer for answer in answers if answer.is_complete]
    if not whole:
        return {}
    times = {
        "first_token_ms": [1000 * answer.first_token_s for answer in whole],
        "whole_ms": [1000 * answer.seconds for answer in whole],
    }
    return {
        f"{name}_p{share}": round(percentile(values, share / 100), 1)
        for name, values in times.items()
        for share in (50, 95)
    }
