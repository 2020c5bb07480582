"""Many clients for a long while: nothing lost, nothing wrong, no memory that grows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

from load import Answer, run_clients, slope
from offline import Job, Offline, make_llm, mixed_jobs
from served import Served

WARM_UP = 0.3  # share of the requests in which memory may still grow
OPTIONS = ("--max-queue", "1024")


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--requests", type=int, default=2000)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--bound", type=float, default=1.0, help="MB per 100 requests (1)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    jobs = mixed_jobs(args.requests)
    offline = Offline(make_llm(args.threads, max_num_seqs=32))
    offline.run(jobs)
    answers, memory, seconds = asyncio.run(_serve(args, jobs))
    return judge(args, offline, list(zip(jobs, answers)), memory, seconds)


async def _serve(
    args: argparse.Namespace, jobs: list[Job]
) -> tuple[list[Answer], list[dict[str, float]], float]:
    async with Served(*OPTIONS, threads=args.threads) as server:
        memory: list[dict[str, float]] = []
        finished = 0

        async def watch() -> None:
            while True:
                memory.append({"requests": finished, **server.resident_mb()})
                await asyncio.sleep(0.5)

        async def work(job: Job) -> Answer:
            nonlocal finished
            answer = await server.client.complete(job.prompt, max_tokens=job.max_tokens)
            finished += 1
            return answer

        watching = asyncio.create_task(watch())
        start = time.perf_counter()
        answers = await run_clients(args.clients, jobs, work)
        seconds = time.perf_counter() - start
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        memory.append({"requests": finished, **server.resident_mb()})
        return answers, memory, seconds


def judge(
    args: argparse.Namespace,
    offline: Offline,
    answered: list[tuple[Job, Answer]],
    memory: list[dict[str, float]],
    seconds: float,
) -> tuple[dict[str, Any], list[str]]:
    """Compare every answer with the offline one, and fit a line through the memory."""
    lost = [f"{job.name}: {fault(answer)}" for job, answer in answered if not answer.is_complete]
    verdicts: Counter[str] = Counter()
    different: list[str] = []
    for job, answer in answered:
        if answer.is_complete:
            verdict = offline.verdict(job, answer.text, answer.finish_reason)
            verdicts[verdict] += 1
            if verdict == "different":
                different.append(f"{job.name}: {answer.text!r}, expected {offline.text(job)!r}")
    settled = [m for m in memory if m["requests"] >= WARM_UP * len(answered)]
    growth = {
        part: 100 * slope([(m["requests"], m[part]) for m in settled])
        for part in ("frontend", "engines")
    }
    total = sum(growth.values())
    tokens = sum(answer.usage.get("completion_tokens", 0) for _, answer in answered)
    missed = [f"{len(lost)} requests were lost, like {lost[0]}"] if lost else []
    if different:
        missed.append(f"{len(different)} texts differ, like {different[0]}")
    if total > args.bound:
        missed.append(f"memory grows by {total:.2f} MB per 100 requests; bound {args.bound}")
    return {
        "requests": len(answered),
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "lost": len(lost),
        "verdicts": dict(verdicts),
        "growth_mb_per_100_requests": {
            **{part: round(value, 3) for part, value in growth.items()},
            "total": round(total, 3),
        },
        "resident_mb": [{k: round(v, 1) for k, v in m.items()} for m in _some(memory)],
    }, missed


def _some(samples: list[dict[str, float]], count: int = 12) -> list[dict[str, float]]:
    """About so many of the samples, the last among them."""
    return samples[:: -max(1, len(samples) // count)][::-1]


def fault(answer: Answer) -> str:
    """Why an answer is not complete."""
    said = answer.error or answer.body[:200]
    return f"status {answer.status}, {answer.problem or 'ended'}, {said!r}"
