"""What the way through HTTP costs: tokens a second of the served and of the offline engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from statistics import median
from typing import Any

from load import Answer, run_clients
from offline import make_llm, prompts
from served import Served

from peagle import LLM, SamplingParams

CONCURRENCY = 16
# Without shared prefixes the work of a repeat is that of the first.
OPTIONS = ("--max-num-seqs", str(CONCURRENCY), "--no-prefix-caching")


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--bound", type=float, default=0.10, help="share of the speed lost (0.1)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    llm = make_llm(args.threads, max_num_seqs=CONCURRENCY, enable_prefix_caching=False)
    return asyncio.run(_alternate(args, llm))


async def _alternate(args: argparse.Namespace, llm: LLM) -> tuple[dict[str, Any], list[str]]:
    texts = prompts(args.prompts)
    async with Served(*OPTIONS, threads=args.threads) as server:
        offline, served, cpu = [], [], []
        _run_offline(llm, texts[:CONCURRENCY], args.max_tokens)
        await _run_served(server, texts[:CONCURRENCY], args.max_tokens)
        for _ in range(args.repeats):
            offline.append(_run_offline(llm, texts, args.max_tokens))
            before, client = server.cpu_s(), os.times()
            served.append(await _run_served(server, texts, args.max_tokens))
            after, now = server.cpu_s(), os.times()
            spent = now.user + now.system - client.user - client.system
            cpu.append({"client": spent, **{k: after[k] - before[k] for k in after}})
    lost = 1 - median(served) / median(offline)
    figures = {
        "concurrency": CONCURRENCY,
        "prompts": len(texts),
        "max_tokens": args.max_tokens,
        "offline_tokens_per_s": round(median(offline), 1),
        "served_tokens_per_s": round(median(served), 1),
        "runs": {
            "offline": [round(speed, 1) for speed in offline],
            "served": [round(speed, 1) for speed in served],
        },
        "overhead": round(lost, 4),
        "overhead_of_neighbours": round(1 - median(s / o for s, o in zip(served, offline)), 4),
        "cpu_s_of_a_run": {k: round(median(run[k] for run in cpu), 2) for k in cpu[0]},
    }
    missed = [f"overhead {lost:.1%}; bound {args.bound:.0%}"] if lost > args.bound else []
    return figures, missed


def _run_offline(llm: LLM, texts: list[str], max_tokens: int) -> float:
    start = time.perf_counter()
    outputs = llm.generate(texts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - start)


async def _run_served(server: Served, texts: list[str], max_tokens: int) -> float:
    async def work(text: str) -> Answer:
        return await server.client.complete(text, max_tokens=max_tokens, ignore_eos=True)

    start = time.perf_counter()
    answers = await run_clients(CONCURRENCY, texts, work)
    seconds = time.perf_counter() - start
    return sum(answer.usage["completion_tokens"] for answer in answers) / seconds
