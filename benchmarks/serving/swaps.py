"""Swaps of the head under load: no request is lost, no output changes, few tokens come late."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from load import Answer, Client, percentile, run_clients
from offline import prompts
from served import Served, ServerError
from soak import fault

from peagle.models.loading import resolve_model

MOST_MEMORY = 0.01  # that may be added, of the memory before


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--swaps", type=int, default=20)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--tokens", type=int, default=64, help="of an output (64)")
    options.add_argument("--target", default="bundled", help="(bundled)")
    options.add_argument("--draft", default="bundled", help="(bundled)")
    options.add_argument("--other", help="the head that it takes turns with (the same one)")
    options.add_argument("--dtype", default="float32", help="(float32)")
    options.add_argument("--bound", type=float, default=2.0, help="of p99 between tokens (2)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_serve(args, Path(folder)))


async def _serve(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    heads = [str(folder / "heads" / name) for name in ("one", "two")]
    for head, source in zip(heads, (args.draft, args.other or args.draft)):
        shutil.copytree(resolve_model(source, role="draft"), head)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(), encoding="utf-8")
    options = [args.target, "--draft", heads[0], "--dtype", args.dtype]
    options += ["--admin-key-file", str(key), "--allow-heads", str(folder / "heads")]
    texts = prompts()
    jobs = [_fields(texts[n % len(texts)], n, args.tokens) for n in range(2 * args.clients)]
    async with Served(*options, threads=args.threads) as server:
        admin = Client(server.port, key=key.read_text(encoding="utf-8"))
        # The first pass warms up. Swaps begin the prefix cache anew, so that the second pass
        # computes its prompts as requests beside swaps do.
        for _ in range(2):
            await admin_swap(admin, heads[1])
            await admin_swap(admin, heads[0])
            quiet = await run_clients(args.clients, jobs, lambda job: _ask(server.client, job))
        before = _memory_mb(server)
        swapping = asyncio.create_task(_swap(admin, heads, args.swaps))
        busy: list[Answer] = []
        while not swapping.done():
            busy += await run_clients(args.clients, jobs, lambda job: _ask(server.client, job))
        seconds = await swapping
        after = _memory_mb(server)
    figures, missed = judge(quiet, busy, args.bound)
    grown = {name: after[name] / before[name] - 1 for name in before if before[name]}
    missed += [
        f"memory of {name} grew by {share:.1%}"
        for name, share in grown.items()
        if share > MOST_MEMORY
    ]
    figures |= {"swaps": args.swaps, "swap_ms_p50": round(1000 * percentile(seconds, 0.5), 1)}
    return figures | {"clients": args.clients, "memory_mb": [before, after]}, missed


def _fields(text: str, number: int, tokens: int) -> dict[str, Any]:
    """A request: every other one is sampled with a seed."""
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": text, "max_tokens": tokens, "ignore_eos": True, **sampled}


async def _ask(client: Client, job: dict[str, Any]) -> Answer:
    return await client.complete(job["prompt"], **{k: v for k, v in job.items() if k != "prompt"})


async def _swap(admin: Client, heads: Sequence[str], count: int) -> list[float]:
    """Swap the heads so many times, one after the other; seconds of each swap."""
    return [await admin_swap(admin, heads[(n + 1) % 2]) for n in range(count)]


async def admin_swap(admin: Client, head: str) -> float:
    """Swap the head; the seconds that it took.

    Raises:
        ServerError: the server refused.
    """
    answer = await admin.send("POST", "/admin/head", {"head": head})
    if answer.status != 200:
        raise ServerError(f"POST /admin/head has status {answer.status}: {answer.body[:300]!r}")
    return answer.ended_s - answer.sent_s


def judge(
    quiet: Sequence[Answer], busy: Sequence[Answer], bound: float
) -> tuple[dict[str, Any], list[str]]:
    """Compare answers beside swaps with those of the same requests without."""
    lost = [fault(answer) for answer in (*quiet, *busy) if not answer.is_complete]
    changed = [
        (answer.text, expected.text)
        for n, answer in enumerate(busy)
        if answer.is_complete and answer.text != (expected := quiet[n % len(quiet)]).text
    ]
    late = [1000 * percentile(_gaps(answers), 0.99) for answers in (quiet, busy)]
    missed = [f"{len(lost)} requests were lost, like {lost[0]}"] if lost else []
    if changed:
        missed.append(f"{len(changed)} outputs changed, like {changed[0]}")
    if late[1] > bound * late[0]:
        missed.append(f"p99 between tokens rose from {late[0]:.1f} to {late[1]:.1f} ms")
    return {
        "requests": len(busy),
        "lost": len(lost),
        "changed": len(changed),
        "between_tokens_ms_p99": [round(value, 2) for value in late],
    }, missed


def _gaps(answers: Sequence[Answer]) -> list[float]:
    """Seconds between the events of each answer."""
    times = [[at for at, _ in answer.events] for answer in answers]
    return [b - a for one in times for a, b in pairwise(one)] or [0.0]


def _memory_mb(server: Served) -> dict[str, float]:
    """Memory of the engines, on GPUs too where there is one."""
    found = {"engines": round(server.resident_mb()["engines"], 1)}
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]):
        told = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout
        found["gpus"] = sum(map(float, told.split()))
    return found
