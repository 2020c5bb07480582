"""One client attacks, others stream: what they notice, the probes' answers and the memory left.

Each attack of attacks.py runs in a process of its own for --seconds, beside a few clients that
stream one short request after the other. Their inter-token latency is counted as the server's
metrics count it: a burst of n tokens counts n times, each with an n-th of the time since the chunk
before. A stall of some seconds hardly moves the 99th percentile of many thousand tokens, so the
longest time between two chunks and the longest time to a first token have bounds too.

The same clients stream alone before each attack ("rest"), and after it beside an ordinary client
that keeps the server equally busy ("control"): it streams as many requests at once as the attack
had running on average, at least one. A server that does not recover is restarted for the next
attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks import ATTACKS
from fuzz import TEMPLATE
from load import Answer, Client, percentile
from offline import prompts
from served import Served, ServerError
from soak import fault

ATTACKS_SCRIPT = Path(__file__).with_name("attacks.py")
STREAMS = 8
TOKENS = 64
OPEN_FILES = 1024
MAX_CONNECTIONS = 100
PROBES = ("/health", "/live")
KEY, ATTACKING_KEY = "the-key-of-the-others", "the-key-of-the-attacker"
PROBE_S = 0.5
RECOVER_S = 60.0
STREAM_S = 60.0  # of a stream of the others, after which it is lost
FLOOR_S = 0.05  # an inter-token latency that is no miss, however fast the server is at rest
HEALTH_S = 1.0
STALL_S = 1.0
FIRST_S = 5.0
TIMES = 3  # the latency in the control, or at rest
MEMORY = 1.1  # the memory before the attack
SPIN = "{%- if spin -%}" + "{%- for a in range(9999) -%}" * 5 + "{%- endfor -%}" * 5


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--seconds", type=float, default=60.0, help="of an attack (60)")
    options.add_argument("--rest-s", type=float, default=15.0, help="at rest before each (15)")
    options.add_argument("--recover-s", type=float, default=RECOVER_S, help="until memory is back")
    options.add_argument("--only", action="append", choices=ATTACKS, help="an attack; repeatable")
    options.add_argument("--list", action="store_true", help="tell what attacks there are")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    if args.list:
        return {"attacks": {name: attack.what for name, attack in ATTACKS.items()}}, []
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    waiting = list(args.only or ATTACKS)
    figures: dict[str, Any] = {"seconds": args.seconds, "attacks": {}}
    missed: list[str] = []
    while waiting:
        async with _server(args) as server:
            await observe(server, args.rest_s)  # what a first request allocates is no damage
            is_well = True
            while waiting and is_well:
                name = waiting.pop(0)
                found, faults, is_well = await suffer(server, name, args)
                figures["attacks"][name] = found
                missed += [f"{name}: {fault}" for fault in faults]
                told = "; ".join(faults) or "within all bounds"
                print(f"{name}: {told}", file=sys.stderr, flush=True)
    return figures, missed


@contextlib.asynccontextmanager
async def _server(args: argparse.Namespace) -> AsyncIterator[Served]:
    """A server with two keys, few files, and a template that can be made to loop."""
    with tempfile.TemporaryDirectory() as folder:
        keys, template = Path(folder, "keys"), Path(folder, "chat.jinja")
        keys.write_text(f"{KEY}\n{ATTACKING_KEY}\n")
        keys.chmod(0o600)
        template.write_text(f"{SPIN}{{%- endif -%}}\n{TEMPLATE}")
        options = ("--api-key-file", str(keys), "--chat-template", str(template))
        options += ("--max-connections", str(MAX_CONNECTIONS))
        async with Served(*options, threads=args.threads, key=KEY, open_files=OPEN_FILES) as server:
            server.client.timeout_s = STREAM_S
            yield server


# ---- what others notice ----


@dataclass
class Observed:
    """What well-behaved clients and probers noticed.

    Attributes:
        inter_token_s: one value a token after the first of its stream.
        gaps_s: times between two chunks with tokens.
        first_token_s: times to the first token.
        health_s, live_s: times of the answers of /health and /live.
        num_running: requests that ran in the engine, looked at again and again.
        faults: streams and probes that were not answered as they should have been.
        peak_mb: most memory of the front end, and of the engines.
        is_over: the last stream has ended.
    """

    inter_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    num_running: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    peak_mb: dict[str, float] = field(default_factory=dict)
    is_over: bool = False

    def add(self, answer: Answer) -> None:
        """Take the times of a stream."""
        if not answer.is_complete:
            self.faults.append(f"a stream was lost: {fault(answer)}")
        gaps = list(token_gaps(answer))
        self.gaps_s += [gap_s for gap_s, _ in gaps]
        self.inter_token_s += [gap_s / tokens for gap_s, tokens in gaps for _ in range(tokens)]
        if answer.events:
            self.first_token_s.append(answer.first_token_s)

    @property
    def mean_running(self) -> float:
        return sum(self.num_running) / max(1, len(self.num_running))

    def figures(self) -> dict[str, Any]:
        """Milliseconds, counts and MB."""
        return {
            "inter_token_ms_p50": _ms(self.inter_token_s, 0.5),
            "inter_token_ms_p99": _ms(self.inter_token_s, 0.99),
            "longest_gap_ms": _ms(self.gaps_s, 1),
            "first_token_ms_max": _ms(self.first_token_s, 1),
            "health_ms_max": _ms(self.health_s, 1),
            "live_ms_max": _ms(self.live_s, 1),
            "tokens": len(self.inter_token_s),
            "streams": len(self.first_token_s),
            "probes": len(self.health_s) + len(self.live_s),
            "running": round(self.mean_running, 1),
            "faults": self.faults[:10],
            "peak_mb": {part: round(value, 1) for part, value in self.peak_mb.items()},
        }


def _ms(values: Sequence[float], share: float) -> float | None:
    return round(1000 * percentile(values, share), 1) if values else None


def token_gaps(answer: Answer) -> Iterator[tuple[float, int]]:
    """Seconds between two chunks with tokens, and how many tokens the later one brought.

    The chunks tell the tokens so far in their usage.
    """
    last_s, last_tokens = 0.0, 0
    for time_s, data in answer.events:
        try:
            tokens = json.loads(data)["usage"]["completion_tokens"]
        except (ValueError, KeyError, TypeError):  # the end of the stream, or an error
            continue
        if tokens > last_tokens:
            if last_tokens:
                yield time_s - last_s, tokens - last_tokens
            last_s, last_tokens = time_s, tokens


async def observe(server: Served, seconds: float, num_others: int = 0) -> Observed:
    """Stream, probe and look at the memory for so long, and until the last stream has ended.

    `num_others` streams more are not looked at.
    """
    seen = Observed()
    end = time.perf_counter() + seconds
    others = [_stream(server, text, end, Observed()) for text in prompts()[:num_others]]
    probing = [_probe(server, path, seen) for path in PROBES]
    works = (*others, *probing, _weigh(server, seen))
    beside = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*(_stream(server, text, end, seen) for text in prompts(STREAMS)))
    finally:
        # The flag too: until Python 3.12 a wait_for that is just done swallows a cancellation.
        seen.is_over = True
        for task in beside:
            task.cancel()
        for result in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    return seen


async def _stream(server: Served, prompt: str, end: float, seen: Observed) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    while time.perf_counter() < end:
        answer = await server.client.complete(
            prompt, max_tokens=TOKENS, ignore_eos=True, stream_options=usage
        )
        seen.add(answer)
        if not answer.is_complete:
            await asyncio.sleep(PROBE_S)


async def _probe(server: Served, path: str, seen: Observed) -> None:
    """Ask /health or /live on a new connection each time, as an orchestrator does."""
    client = Client(server.client.port, timeout_s=RECOVER_S)
    times_s = seen.health_s if path == "/health" else seen.live_s
    while not seen.is_over:
        start = time.perf_counter()
        try:
            answer = await client.get(path)
        except asyncio.CancelledError:
            # The streams are done: a probe that still waits has waited for so long.
            times_s.append(time.perf_counter() - start)
            raise
        times_s.append(time.perf_counter() - start)
        if answer.status != 200:
            seen.faults.append(f"{path}: {fault(answer)}")
        await asyncio.sleep(PROBE_S)


async def _weigh(server: Served, seen: Observed) -> None:
    """Look at the memory, and at the number of requests that run."""
    while not seen.is_over:
        for part, value in server.resident_mb().items():
            seen.peak_mb[part] = max(value, seen.peak_mb.get(part, 0.0))
        with contextlib.suppress(ServerError):
            seen.num_running.append((await server.load())["num_requests_running"])
        await asyncio.sleep(PROBE_S)


# ---- an attack ----


async def suffer(
    server: Served, name: str, args: argparse.Namespace
) -> tuple[dict[str, Any], list[str], bool]:
    """Attack a server, after a look at it at rest.

    Returns:
        figures, what missed its bound, and whether the server can be attacked further.
    """
    rest = await observe(server, args.rest_s)
    if rest.faults:
        raise ServerError(f"not attacked yet, {rest.faults[0]}; the log ends:\n{server.log()}")
    before = server.resident_mb()
    restarts = (await server.metrics())["engine_restarts_total"]
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ATTACKS_SCRIPT), name, "--key", ATTACKING_KEY),
        *("--port", str(server.client.port), "--seconds", str(args.seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert attacker.stdout is not None
    try:
        if await attacker.stdout.readline() != b"begins\n":
            raise RuntimeError(f"the attack {name} did not begin")
        seen = await observe(server, args.seconds)
        report = json.loads(await attacker.stdout.read())
    except BaseException:
        attacker.kill()
        raise
    finally:
        await attacker.wait()
    memory, is_well = await recovery(server, before, args.recover_s)
    control = Observed()
    if is_well:
        report["engine_restarts"] = (await server.metrics())["engine_restarts_total"] - restarts
        control = await observe(server, args.seconds, max(1, round(seen.mean_running) - STREAMS))
    if ATTACKS[name].fills_queue:
        report["fills_queue"] = True
    missed = judge(seen, rest, control, memory, report)
    if not is_well:
        missed.append("the server does not recover")
    figures = {
        **seen.figures(),
        "rest": rest.figures(),
        "control": control.figures(),
        "memory_mb": memory,
        "attacker": report,
        "missed": missed,
        "recovers": is_well,
    }
    return figures, missed, is_well


async def recovery(
    server: Served, before: dict[str, float], limit_s: float
) -> tuple[dict[str, Any], bool]:
    """The memory once it is back or the time is over, and whether nothing runs any more."""
    start = time.perf_counter()
    is_well = False
    server.client.timeout_s = limit_s
    with contextlib.suppress(ServerError):
        is_well = not any((await server.wait_idle(limit_s)).values())
    while is_larger(after := server.resident_mb(), before) and _since(start) < limit_s:
        await asyncio.sleep(PROBE_S)
    seconds = _since(start)
    if is_well:
        is_well = (await server.client.complete("def f():", max_tokens=4)).is_complete
    server.client.timeout_s = STREAM_S
    told = {"before": before, "after": after}
    rounded = {when: {k: round(v, 1) for k, v in mb.items()} for when, mb in told.items()}
    return {**rounded, "back_s": round(seconds, 1)}, is_well


def _since(start: float) -> float:
    return time.perf_counter() - start


def is_larger(after: dict[str, float], before: dict[str, float]) -> bool:
    """Whether the front end or the engines hold more than they may."""
    return any(after[part] > MEMORY * before[part] for part in before)


def judge(
    seen: Observed,
    rest: Observed,
    control: Observed,
    memory: dict[str, Any],
    report: dict[str, Any],
) -> list[str]:
    """What missed its bound."""
    missed = []
    bound_s = max(TIMES * percentile(control.inter_token_s or rest.inter_token_s, 0.99), FLOOR_S)
    if not seen.inter_token_s:
        missed.append("no stream got two tokens")
    elif (p99_s := percentile(seen.inter_token_s, 0.99)) > bound_s:
        missed.append(f"p99 between tokens {1000 * p99_s:.0f} ms; bound {1000 * bound_s:.0f} ms")
    bound_s = max(TIMES * max(rest.gaps_s), STALL_S)
    if seen.gaps_s and (gap_s := max(seen.gaps_s)) > bound_s:
        missed.append(f"a stream stood still for {gap_s:.1f} s; bound {bound_s:.1f} s")
    bound_s = max(TIMES * max(rest.first_token_s), FIRST_S)
    if report.get("fills_queue"):  # of work that is allowed, behind which others wait their turn
        bound_s = float("inf")
    if seen.first_token_s and (first_s := max(seen.first_token_s)) > bound_s:
        missed.append(f"a first token came after {first_s:.1f} s; bound {bound_s:.1f} s")
    for path, times_s in zip(PROBES, (seen.health_s, seen.live_s)):
        if (slowest_s := max(times_s)) > HEALTH_S:
            missed.append(f"{path} answered after {slowest_s:.1f} s; bound {HEALTH_S:g} s")
    if restarts := report.get("engine_restarts"):
        missed.append(f"the engine was restarted {restarts:g} times; expected never")
    if is_larger(memory["after"], memory["before"]):
        missed.append(
            f"memory {memory['after']} MB from {memory['before']} after {memory['back_s']} s; "
            f"bound {MEMORY:g} times"
        )
    if seen.faults:
        missed.append(f"{len(seen.faults)} faults beside it, like {seen.faults[0]}")
    if report["num_bad"]:
        missed.append(f"{report['num_bad']} bad answers, like {report['bad'][0]}")
    return missed
