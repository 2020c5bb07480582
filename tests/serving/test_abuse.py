"""One client that attacks, shortened, and what the load test of it concludes."""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from peagle.serving.config import ServerConfig
from serving.load_scripts import CHUNKED, DONE, LAST, chunked, event, load, scripts, serving

__all__ = ["load", "scripts"]

MAX_BODY = ServerConfig().max_body_bytes
GOOD_ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'


def answered(load: Any, *tokens: tuple[float, int]) -> Any:
    """A stream whose chunks tell at these times how many tokens there are so far."""
    events = [
        (time_s, b'{"choices": [], "usage": {"completion_tokens": %d}}' % count)
        for time_s, count in tokens
    ]
    return load.Answer(status=200, events=[*events, (tokens[-1][0], b"[DONE]")])


# ---- the server ---------------------------------------------------------------------------------


# The others are run by hand: `bench_serving.py abuse`.
ATTACKS = ["numbers", "strings", "tokenize", "prompts", "ambiguous", "repeats", "malformed"]
ATTACKS += ["silent", "template"]


def test_nobody_can_hang_the_server(scripts: dict[str, ModuleType]) -> None:
    """Attacks for a second each. The bounds are far from what the machine's speed can reach."""
    args = Namespace(threads=1, seconds=1.0, rest_s=0.1, recover_s=30.0, only=ATTACKS, list=False)
    figures, _ = scripts["abuse"].run(args)
    assert list(figures["attacks"]) == ATTACKS
    assert set(ATTACKS) < set(scripts["attacks"].ATTACKS)
    problems = [
        f"{name}: {problem}"
        for name, found in figures["attacks"].items()
        for problem in _problems(found)
    ]
    assert not problems, "\n".join(problems)


def _problems(found: dict[str, Any]) -> Iterator[str]:
    bound_ms = max(5000, 20 * found["rest"]["longest_gap_ms"])
    for figure in ("longest_gap_ms", "first_token_ms_max", "health_ms_max"):
        if found[figure] is None or found[figure] > bound_ms:
            yield f"{figure} is {found[figure]}; bound {bound_ms}"
    yield from found["faults"] + found["attacker"]["bad"]
    if not found["recovers"]:
        yield "the server does not recover"
    before, after = found["memory_mb"]["before"], found["memory_mb"]["after"]
    for part, value in after.items():
        if value > 1.5 * before[part]:
            yield f"memory of the {part} is {value} MB after {before[part]} MB"


# ---- what is attacked with ----------------------------------------------------------------------


def test_bodies_are_as_large_as_the_server_takes_and_no_larger(
    scripts: dict[str, ModuleType],
) -> None:
    attacks = scripts["attacks"]
    seen: list[bytes] = []

    class Recorder:
        """In the place of a client: it keeps bodies and answers nothing."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def send(self, method: str, path: str, body: bytes, *_: Any, **__: Any) -> Any:
            seen.append(body)
            attacker.end_s = time.perf_counter() + (0 if seen.count(body) > 1 else 60)
            return attacks.Answer(status=400, body=GOOD_ERROR)

    sizes: dict[str, int] = {}
    for name, attack in attacks.ATTACKS.items():
        if name in ("numbers", "strings", "ids", "tokenize", "prompts", "messages", "nesting"):
            seen.clear()
            attacker = attacks.Attacker(1, "k", end_s=time.perf_counter() + 60)
            attacker.client = Recorder()
            asyncio.run(attack.make()(attacker))
            sizes |= {f"{name} {number}": len(body) for number, body in enumerate(seen)}
    assert len(sizes) > 30
    assert all(MAX_BODY / 2 < size <= MAX_BODY for size in sizes.values()), sizes


def test_an_attacker_counts_what_it_is_answered(scripts: dict[str, ModuleType], load: Any) -> None:
    attacks = scripts["attacks"]

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        body = b"{}" if b"good" in request else GOOD_ERROR
        status = next(s for s in (200, 400, 500) if str(s).encode() in request)
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)

    async def work(client: Any) -> Any:
        attacker = attacks.Attacker(client.port, "k", end_s=time.perf_counter() + 0.5)
        requests = [attacks.Request("good", "/x", b'{"good": 200}')]
        requests += [attacks.Request(str(s), "/x", b"%d" % s) for s in (400, 500)]
        await attacks.storm(requests, clients=2)(attacker)
        return attacker

    attacker = asyncio.run(serving(load, answer, work))
    counts = {label: dict(found) for label, found in attacker.statuses.items()}
    assert {label: set(found) for label, found in counts.items()} == {
        "good": {"200"},
        "400": {"400"},
        "500": {"500"},
    }
    assert attacker.said == {"400": "no", "500": "no"}
    assert len(attacker.bad) == counts["500"]["500"] > 0
    assert all(bad.startswith("500: status 500") for bad in attacker.bad)


@pytest.mark.parametrize(
    ("answer", "is_bad"),
    [
        ({"status": 400, "body": GOOD_ERROR}, False),
        ({"status": 503, "body": GOOD_ERROR, "headers": {"retry-after": "2"}}, False),
        ({"status": 503, "body": GOOD_ERROR}, True),
        ({"status": 504, "body": GOOD_ERROR}, False),
        ({"status": 504, "body": b"oh"}, True),
        ({"status": 500, "body": GOOD_ERROR}, True),
        ({"status": 422, "body": b"oh"}, True),
        ({"status": 0, "problem": "unanswered"}, True),
    ],
)
def test_answers_that_a_server_must_not_give(
    scripts: dict[str, ModuleType], load: Any, answer: dict[str, Any], is_bad: bool
) -> None:
    assert bool(scripts["attacks"].fault_of(load.Answer(**answer))) == is_bad


# ---- what others notice -------------------------------------------------------------------------


def test_a_burst_counts_once_a_token(scripts: dict[str, ModuleType], load: Any) -> None:
    seen = scripts["abuse"].Observed()
    seen.add(answered(load, (10.0, 3), (10.2, 7), (10.2, 7), (10.3, 8)))
    assert seen.faults == []
    assert seen.inter_token_s == pytest.approx([0.05] * 4 + [0.1])
    assert seen.gaps_s == pytest.approx([0.2, 0.1])


def test_streams_are_watched_until_they_end(scripts: dict[str, ModuleType], load: Any) -> None:
    """A stall that goes on after the attack is seen whole."""
    abuse = scripts["abuse"]

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        assert json.loads(request.partition(b"\r\n\r\n")[2])["stream_options"] == {
            "include_usage": True,
            "continuous_usage_stats": True,
        }
        writer.write(CHUNKED + chunked(event("a", usage={"completion_tokens": 1})))
        await asyncio.sleep(0.6)
        last = event("b", "stop", usage={"completion_tokens": 2})
        writer.write(chunked(last, DONE) + LAST)

    class Server:
        def __init__(self, client: Any) -> None:
            self.client = client

        def resident_mb(self) -> dict[str, float]:
            return {"frontend": 1.0}

    seen = asyncio.run(serving(load, answer, lambda client: abuse.observe(Server(client), 0.1)))
    assert len(seen.gaps_s) == abuse.STREAMS and min(seen.gaps_s) >= 0.5
    assert not seen.faults and seen.health_s and seen.peak_mb == {"frontend": 1.0}


def test_what_misses_its_bound_is_told(scripts: dict[str, ModuleType]) -> None:
    abuse = scripts["abuse"]
    rest = abuse.Observed([0.01] * 100, [0.05] * 30, [0.1], [0.01])
    memory = {"before": {"frontend": 500}, "after": {"frontend": 549}, "back_s": 1.0}
    report = {"num_bad": 0, "bad": []}

    def judged(**changed: Any) -> str:
        given = {"inter_token_s": [0.049] * 100, "gaps_s": [0.9], "health_s": [0.9], **changed}
        return "; ".join(abuse.judge(abuse.Observed(**given), rest, memory, report))

    assert judged() == ""
    assert judged(inter_token_s=[0.01] * 98 + [0.051] * 2).startswith("p99 between tokens 51 ms")
    assert judged(inter_token_s=[0.01] * 99 + [0.051]) == ""
    assert judged(gaps_s=[1.1]) == "a stream stood still for 1.1 s; bound 1.0 s"
    assert judged(first_token_s=[5.1]) == "a first token came after 5.1 s; bound 5.0 s"
    assert judged(health_s=[0.01, 1.1]) == "/health answered after 1.1 s; bound 1 s"
    assert judged(inter_token_s=[]) == "no stream got two tokens"
    assert judged(faults=["lost"]) == "1 faults beside it, like lost"
    report |= {"num_bad": 2, "bad": ["status 500"]}
    assert judged() == "2 bad answers, like status 500"
    report["num_bad"], memory["after"] = 0, {"frontend": 551}
    assert judged().startswith("memory {'frontend': 551} MB from {'frontend': 500}")
    slow = abuse.Observed([0.1] * 100, [2.0], [0.1], [0.01])
    memory["after"] = memory["before"]
    assert abuse.judge(abuse.Observed([0.29] * 9, [5.9], [], [0.1]), slow, memory, report) == []
