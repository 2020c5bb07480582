"""SIGTERM under load: what runs finishes, what is new is refused, the exit status is 0."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from load import Answer
from offline import prompts
from served import Served
from soak import fault

CLIENTS = 16
TOKENS = 200


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--bound", type=float, default=60.0, help="seconds to the exit (60)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    # Half of them run, half still wait when the signal comes.
    async with Served("--max-num-seqs", str(CLIENTS // 2), threads=args.threads) as server:
        running = [
            asyncio.create_task(server.client.complete(text, max_tokens=TOKENS, ignore_eos=True))
            for text in prompts(CLIENTS)
        ]
        while (await server.load())["num_requests_running"] < CLIENTS // 2:
            await asyncio.sleep(0.1)
        server.process.terminate()
        start = time.perf_counter()
        # The signal has to arrive before anybody can be refused.
        await asyncio.sleep(0.5)
        late: list[Answer] = []
        while server.process.poll() is None and time.perf_counter() - start < args.bound:
            late.append(await server.client.complete("def late():", max_tokens=4))
            await asyncio.sleep(0.1)
        answers = await asyncio.gather(*running)
        status = await server.exit_status(args.bound)
        seconds = time.perf_counter() - start
    return judge(answers, late, status, seconds, start)


def judge(
    answers: list[Answer], late: list[Answer], status: int | None, seconds: float, start: float
) -> tuple[dict[str, Any], list[str]]:
    """Who was served and who refused, and whether each should have been."""
    missed = []
    for answer in answers:
        if not answer.is_complete or answer.usage.get("completion_tokens") != TOKENS:
            missed.append(f"a running request did not finish: {fault(answer)}, {answer.usage}")
    last_s = max(answer.ended_s for answer in answers)
    refused = [answer for answer in late if answer.status == 503]
    for answer in late:
        is_after = answer.problem in ("refused", "unanswered") and answer.ended_s >= last_s
        if answer.status == 503 and "retry-after" not in answer.headers:
            missed.append(f"a 503 without Retry-After: {answer.headers}")
        elif answer.status != 503 and not is_after:
            when = f"{last_s - answer.ended_s:.2f} s before the last was done"
            missed.append(f"a new request got {fault(answer)}, {when}")
    if not refused:
        missed.append("no new request was refused with 503 while others ran")
    if status != 0:
        missed.append(f"the exit status is {status}; expected 0")
    figures = {
        "finished": sum(answer.is_complete for answer in answers),
        "refused_503": len(refused),
        "refused_after_the_last": sum(bool(answer.problem) for answer in late),
        "last_done_s": round(last_s - start, 2),
        "exit_s": round(seconds, 2),
        "exit_status": status,
    }
    return figures, missed
