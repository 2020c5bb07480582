"""The engine process is killed: clients are told at once, the server restarts it or exits."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import Any

from load import Answer
from offline import prompts
from served import Served
from soak import fault

CLIENTS = 16
# Half of the clients stream, half wait for their turn.
OPTIONS = ("--max-num-seqs", str(CLIENTS // 2))
LONG = 600  # tokens: nobody is done by then


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--bound", type=float, default=2.0, help="seconds to an error (2)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    restart, missed = asyncio.run(_restart(args))
    leave, also = asyncio.run(_exit(args))
    return {"clients": CLIENTS, "restart": restart, "exit": leave}, missed + also


async def _restart(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    options = (*OPTIONS, "--on-engine-failure", "restart")
    async with Served(*options, threads=args.threads) as server:
        reference = await server.client.complete(prompts(1)[0], max_tokens=32)
        answers, killed_s = await kill_under_load(server)
        figures, missed = told(answers, killed_s, args.bound, "restart")
        await server.wait_ready()
        figures["ready_again_s"] = round(time.perf_counter() - killed_s, 2)
        again = await server.client.complete(prompts(1)[0], max_tokens=32)
        if not again.is_complete or again.text != reference.text:
            missed.append(f"restart: after it {fault(again)}; expected {reference.text!r}")
        return figures, missed


async def _exit(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    options = (*OPTIONS, "--on-engine-failure", "exit")
    async with Served(*options, threads=args.threads) as server:
        answers, killed_s = await kill_under_load(server)
        figures, missed = told(answers, killed_s, args.bound, "exit")
        figures["exit_status"] = status = await server.exit_status(15)
        figures["exit_s"] = round(time.perf_counter() - killed_s, 2)
        if not status:
            missed.append(f"exit: the exit status is {status}; expected one that is not 0")
        return figures, missed


async def kill_under_load(server: Served) -> tuple[list[Answer], float]:
    """Kill the engine while clients stream and wait; their answers, and when it was."""
    requests, (engine,) = await load_up(server), server.engine_pids()
    os.kill(engine, signal.SIGKILL)
    killed_s = time.perf_counter()
    return await asyncio.gather(*requests), killed_s


async def load_up(server: Served) -> list[asyncio.Task[Answer]]:
    """Clients that stream, wait for a whole answer, and wait for their turn."""
    requests = [
        asyncio.create_task(
            server.client.complete(text, max_tokens=LONG, ignore_eos=True, stream=i % 4 != 3)
        )
        for i, text in enumerate(prompts(CLIENTS))
    ]
    while (await server.load())["num_requests_running"] < CLIENTS // 2:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    return requests


def told(
    answers: list[Answer], killed_s: float, bound: float, name: str
) -> tuple[dict[str, Any], list[str]]:
    """How clients heard of it, and who did not, or too late."""
    missed = []
    late = [answer.ended_s - killed_s for answer in answers]
    for answer in answers:
        is_told = answer.error is not None and (answer.status >= 500 or bool(answer.events))
        if not is_told or answer.problem:
            missed.append(f"{name}: a client was not told: {fault(answer)}")
    if max(late) > bound:
        missed.append(f"{name}: a client heard of it after {max(late):.2f} s; bound {bound} s")
    figures = {
        "by_event": sum(bool(answer.events) for answer in answers),
        "by_status": sum(answer.status >= 500 for answer in answers),
        "latest_s": round(max(late), 3),
    }
    return figures, missed
