"""The load tests of benchmarks/serving: their client, what they send, and what they conclude."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.serving.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "serving"
if not FOLDER.is_dir():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)

Answering = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
MAX_BODY = ServerConfig().max_body_bytes
GOOD_ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'
Scripts = dict[str, ModuleType]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    """The scripts as modules, by name."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert not names & set(sys.modules), "another module has the name of a script"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: __import__(name) for name in sorted(names)}
    for name in names & set(sys.modules):
        del sys.modules[name]


@pytest.fixture
def load(scripts: Scripts) -> Any:
    return scripts["load"]


async def serving(load: Any, answer: Answering, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the result of `work` with a client of a server that answers so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
            length = int(lengths[0][15:]) if lengths else 0
            await answer(head + await reader.readexactly(length), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await work(load.Client(server.sockets[0].getsockname()[1], timeout_s=10))


def play(*parts: bytes) -> Answering:
    """Answer in these parts."""

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode()


def ask(load: Any, answer: Answering, **fields: Any) -> Any:
    return asyncio.run(serving(load, answer, lambda client: client.complete("x", **fields)))


# ---- the client ----


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_in_pieces_of_any_size(load: Any, size: int) -> None:
    text = event("hé") + b": a comment\n\n" + event("llo", "stop") + USAGE + DONE
    # Chunks of HTTP and events need not end together.
    raw = CHUNKED + chunked(text[:10], text[10:90], text[90:]) + LAST
    answer = ask(load, play(*(raw[i : i + size] for i in range(0, len(raw), size))))
    assert answer.is_complete and (answer.status, answer.problem) == (200, "")
    assert (answer.text, answer.finish_reason) == ("héllo", "stop")
    assert answer.usage == {"completion_tokens": 3} and answer.first_token_s <= answer.seconds


def test_what_is_sent_and_a_whole_body(load: Any) -> None:
    seen: list[bytes] = []
    body = b'{"choices": [{"text": "hi", "finish_reason": "length"}], "usage": {"a": 1}}'

    async def reply(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        size = b"%d" % len(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\nRetry-After: 2\r\n\r\n" % size)
        writer.write(body)

    answer = ask(load, reply, max_tokens=3, speculation={"report": True}, stream=False)
    assert answer.is_complete and (answer.text, answer.finish_reason) == ("hi", "length")
    assert answer.headers["retry-after"] == "2" and answer.usage == {"a": 1}
    head, _, sent = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    expected = {"prompt": "x", "temperature": 0, "max_tokens": 3, "speculation": {"report": True}}
    assert expected.items() <= json.loads(sent).items() and not json.loads(sent)["stream"]


@pytest.mark.parametrize(
    ("parts", "problem", "is_complete"),
    [
        ((), "unanswered", False),
        ((b"HTTP/1.1 200",), "unanswered", False),
        ((CHUNKED + chunked(event("a")),), "cut", False),
        ((CHUNKED + chunked(event("a"))[:-4],), "cut", False),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",), "cut", False),
        ((CHUNKED + chunked(event("a", "stop")) + LAST,), "", False),  # no [DONE]
        ((CHUNKED + chunked(event("a"), b'data: {"error": {"a": 1}}\n\n') + LAST,), "", False),
        ((HEAD + b"\r\n" + event("a", "stop") + DONE,), "", True),  # up to the end
    ],
)
def test_ends_of_answers(
    load: Any, parts: tuple[bytes, ...], problem: str, is_complete: bool
) -> None:
    answer = ask(load, play(*parts))
    assert (answer.problem, answer.is_complete) == (problem, is_complete)


def test_dropping_closes_the_connection_and_nobody_may_be_there(load: Any) -> None:
    closed = asyncio.Event()

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunked(event("a")))
        assert await reader.read(1) == b""
        closed.set()

    async def work(client: Any) -> Any:
        dropped = await client.complete("x", drop_after_s=0.1)
        await asyncio.wait_for(closed.wait(), 30)
        return client, dropped

    client, dropped = asyncio.run(serving(load, answer, work))
    assert dropped.problem == "dropped" and dropped.text == "a"
    answer = asyncio.run(client.get("/ready"))
    assert (answer.status, answer.problem) == (0, "refused")


def test_so_many_at_a_time_percentiles_and_slopes(load: Any) -> None:
    now = most = 0

    async def work(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (number % 3))
        now -= 1
        return 2 * number

    assert asyncio.run(load.run_clients(4, range(20), work)) == [2 * i for i in range(20)]
    assert most == 4
    values = [float(i) for i in range(1, 101)]
    assert [load.percentile(values, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert load.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert load.slope([(5, 1), (5, 3)]) == 0


def test_metrics_and_processes(scripts: Scripts) -> None:
    served = scripts["served"]
    text = (
        "# HELP peagle:num_requests_running Outputs.\n# TYPE peagle:num_requests_running gauge\n"
        'peagle:num_requests_running{engine="0",model_name="a b"} 2.0\n'
        'peagle:num_requests_running{engine="1",model_name="a b"} 1.0\n'
        "peagle:kv_cache_usage_perc 2.5e-01\nup 1\n"
    )
    expected = {"num_requests_running": 3, "kv_cache_usage_perc": 0.25, "up": 1}
    assert served.parse_metrics(text) == expected
    code = "x = bytearray(50_000_000); print('made', flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"made\n"
        assert child.pid in served.children(os.getpid())
        assert 50 < served.resident_mb(child.pid) < 200 and served.cpu_s(os.getpid()) > 0
        child.kill()
    assert served.resident_mb(child.pid) == served.cpu_s(child.pid) == 0


# ---- what the experiments conclude ----


def whole(load: Any, text: str = "a", tokens: int = 1, **more: Any) -> Any:
    data = [event(text, "stop"), b'data: {"usage": {"completion_tokens": %d}}' % tokens, DONE]
    events = [(0.0, raw.removeprefix(b"data: ").strip()) for raw in data]
    return load.Answer(status=200, events=events, **more)


def test_the_soak_finds_losses_differences_and_growth(scripts: Scripts, load: Any) -> None:
    soak, job = scripts["soak"], scripts["offline"].Job("1/8", "x", 8)
    judge = SimpleNamespace(
        verdict=lambda job, text, reason: "same" if text == "a" else "different",
        text=lambda job: "a",
    )
    args = Namespace(bound=1.0, clients=2)
    flat = [{"requests": n, "frontend": 100.0, "engines": 500.0} for n in range(0, 101, 10)]
    good = [(job, whole(load))] * 100
    figures, missed = soak.judge(args, judge, good, flat, 2.0)
    assert missed == [] and figures["verdicts"] == {"same": 100} and figures["tokens_per_s"] == 50
    growing = [{**sample, "engines": 500 + 0.02 * sample["requests"]} for sample in flat]
    assert soak.judge(args, judge, good, growing, 2.0)[1] == [
        "memory grows by 2.00 MB per 100 requests; bound 1.0"
    ]
    # Memory that grows while all is warmed up is no growth.
    warming = [{**s, "engines": 500 + min(s["requests"], 30)} for s in flat]
    assert soak.judge(args, judge, good, warming, 2.0)[1] == []
    bad = [*good[:97], (job, whole(load, "b")), (job, load.Answer(problem="cut", status=200))]
    _, missed = soak.judge(args, judge, bad, flat, 2.0)
    assert "1 requests were lost" in missed[0] and "1 texts differ" in missed[1]


def test_a_killed_engine_must_be_told_of_in_time(scripts: Scripts, load: Any) -> None:
    told, body = scripts["kill"].told, b'{"error": {"message": "gone"}}'
    by_status = load.Answer(status=500, body=body, ended_s=10.5)
    by_event = load.Answer(status=200, events=[(10.4, body)], ended_s=10.6)
    figures, missed = told([by_status, by_event], 10.0, 2.0, "restart")
    assert missed == [] and figures == {"by_event": 1, "by_status": 1, "latest_s": 0.6}
    silent = load.Answer(status=200, events=[(10.4, b'{"choices": []}')], problem="cut")
    for answer, words in (
        (load.Answer(status=503, body=body, ended_s=12.5), "after 2.50 s"),
        (silent, "was not told"),
        (load.Answer(status=400, body=body), "was not told"),
    ):
        assert words in told([answer], 10.0, 2.0, "x")[1][0]


def test_a_drained_server_must_finish_and_refuse(scripts: Scripts, load: Any) -> None:
    drain = scripts["drain"]
    done = [whole(load, tokens=drain.TOKENS, ended_s=5.0)]
    busy = load.Answer(status=503, headers={"retry-after": "2"}, ended_s=4.0)
    gone = load.Answer(problem="refused", ended_s=5.1)
    assert drain.judge(done, [busy, gone], 0, 2.0, 3.0)[1] == []
    for answers, late, status, text in (
        (done, [busy, load.Answer(problem="refused", ended_s=4.9)], 0, "0.10 s before the last"),
        (done, [busy, whole(load, ended_s=4.0)], 0, "a new request got status 200"),
        (done, [load.Answer(status=503, ended_s=4.0)], 0, "without Retry-After"),
        (done, [gone], 0, "no new request was refused"),
        (done, [busy], 1, "exit status is 1"),
        ([whole(load, tokens=3)], [busy], 0, "did not finish"),
    ):
        assert text in "; ".join(drain.judge(answers, late, status, 2.0, 3.0)[1])


def test_swaps_must_lose_change_and_delay_nothing(scripts: Scripts, load: Any) -> None:
    judge = scripts["swaps"].judge

    def timed(text: str, *times: float) -> Any:
        one = whole(load, text)
        return load.Answer(status=200, events=list(zip(times, (raw for _, raw in one.events))))

    quiet = [timed("a", 0.0, 0.1, 0.2), timed("b", 0.0, 0.1, 0.2)]
    figures, missed = judge(quiet, [*quiet, *quiet, quiet[0]], 2.0)
    assert missed == [] and figures["between_tokens_ms_p99"] == [100.0, 100.0]
    for busy, text in (
        ([quiet[1]], "1 outputs changed"),
        ([load.Answer(status=503)], "1 requests were lost"),
        ([timed("a", 0.0, 0.1, 0.4)], "rose from 100.0 to 300.0"),
    ):
        assert text in "; ".join(judge(quiet, busy, 2.0)[1])


def test_sides_take_turns_and_what_they_add_is_a_share_of_a_step(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    script = scripts["script"]
    assert [*script.take_turns("ab", 2)] == [*"abbaab"]
    rows = {
        "zero": [{"step_ms": step, "host_ms": 1.0} for step in (99, 10, 20, 40)],
        "more": [{"step_ms": step, "host_ms": 2.0} for step in (99, 11, 20, 50)],
    }
    over = {"zero": None, "more": "zero"}
    found, _ = script.compare(rows, over, "more", "more", 0.1)
    assert found["sides"]["zero"]["step_ms"] == [20, 10, 40]
    added = {"step_ms": [0.1, 0, 0.25], "host_ms": [0.05, 0.025, 0.1]}
    assert found["added"] == {"more": added}, "without the round that warms up"
    assert "over zero: +10.00% (+0.00% to +25.00%)" in capsys.readouterr().out
    assert found["verdict"] == "undecided" and found["ci"] == {}, "three repeats show no spread"


@pytest.mark.parametrize(
    ("equal", "judged", "verdict"),
    [
        ((0, 0.002, -0.002), (0.004, 0.006, 0.005), "passed"),
        ((0, 0.002, -0.002), (0.03, 0.02, 0.03), "missed"),
        ((0, 0.002, -0.002), (0, 0.02, -0.01), "undecided"),
        ((0.3, -0.3, 0.4), (-0.59, -0.14, -0.31), "undecided"),
        ((0.3, -0.3, 0.4), (0.03, 0.02, 0.03), "undecided"),
        ((0.3, -0.3, 0.4), (2.0, 2.1, 2.0), "missed"),
    ],
)
def test_noise_is_no_verdict(
    scripts: Scripts, equal: tuple[float, ...], judged: tuple[float, ...], verdict: str
) -> None:
    """With a bound of 1%; "none" takes 10 ms in each of six repeats."""
    shares = {"none": [0] * 6, "again": [*equal] * 2, "on": [*judged] * 2}
    rows = {
        name: [{"step_ms": 10 * (1 + one)} for one in (9, *values)]
        for name, values in shares.items()
    }
    over = {"none": None, "again": "none", "on": "none"}
    found, missed = scripts["script"].compare(rows, over, "on", "again", 0.01)
    low, high = found["ci"]["on"]
    assert low < sum(judged) / 3 < high and found["verdict"] == verdict
    texts = [f"`on` adds {low:.2%} to {high:.2%} to a step; bound 1.00%"]
    if verdict == "undecided":
        noise = max(map(abs, found["ci"]["again"]))
        texts = [f"undecided: {texts[0]}, and equal work adds up to {noise:.2%}; raise --repeats"]
    assert missed == ([] if verdict == "passed" else texts)


def test_recording_is_measured_where_all_is_recorded(
    scripts: Scripts, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        """In the place of `Served`: each answer is two steps."""

        def __init__(self, *options: str, threads: int) -> None:
            self.client, self.records, self.steps, self.recorded = self, "--record" in options, 0, 0

        async def __aenter__(self) -> Server:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def wait_idle(self, timeout_s: float) -> None: ...

        async def complete(self, text: str, **fields: Any) -> Any:
            self.steps += 2
            self.recorded += self.records and fields.get("store", True)
            return whole(load)

        async def metrics(self) -> dict[str, float]:
            counts = {"recorded_answers_total": self.recorded, "unrecorded_answers_total": lost}
            return {"decode_steps_total": self.steps, **counts}

        def cpu_s(self) -> dict[str, float]:
            return {"frontend": 0.002 * self.steps, "engines": 0.01 * self.steps}

    recording, lost = scripts["recording"], 0
    monkeypatch.setattr(recording, "Served", Server)
    models = {"target": "x", "draft": "x", "threads": 1, "bound": 1e9}
    args = Namespace(streams=2, requests=3, tokens=4, repeats=2, **models)
    figures, _ = recording.run(args)
    assert figures["sides"].keys() == recording.SIDES.keys()
    assert figures["sides"]["on"]["frontend_ms"] == pytest.approx([2, 2, 2])
    assert figures["added"].keys() == {"again", "off", "on"}
    lost = 1
    with pytest.raises(
        scripts["served"].ServerError, match=r"\[9, 1\] answers .* expected \[9, 0\]"
    ):
        recording.run(args)


def test_corrections_chosen_by_request_are_measured(scripts: Scripts) -> None:
    wait = torch.cuda.Event.synchronize
    models = {"target": "bundled", "draft": "bundled", "threads": 1, "bound": 1e9}
    sizes = {"sequences": 2, "k": 3, "nodes": None, "context": 4, "steps": 2, "repeats": 1}
    figures, missed = scripts["corrections"].run(Namespace(**models, **sizes))
    assert figures["added"].keys() == {"again", "alike", "mixed"}
    assert figures["verdict"] == "undecided" and "undecided: `mixed`" in missed[0]
    for times in figures["sides"].values():
        assert 0 < times["device_ms"][0] < 1.5 * times["step_ms"][0]
    assert torch.cuda.Event.synchronize is wait


def test_arrivals_do_not_wait_for_answers(scripts: Scripts, load: Any) -> None:
    arrived, may_answer = 0, asyncio.Event()

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 30:
            may_answer.set()
        await may_answer.wait()
        writer.write(CHUNKED + chunked(event("a", "stop"), USAGE, DONE) + LAST)

    args = Namespace(seed=0, requests=30, max_tokens=4)
    poisson = scripts["latency"].poisson
    answers = asyncio.run(serving(load, answer, lambda client: poisson(client, args, 100, {})))
    assert len(answers) == 30 and all(answer.is_complete for answer in answers)


# ---- broken bodies ----


def test_cases_are_those_of_their_seed(scripts: Scripts) -> None:
    make_case, names = scripts["mutations"].make_case, dict(scripts["mutations"].MUTATIONS)
    cases = [make_case(0, number) for number in range(600)]
    assert cases == [make_case(0, number) for number in range(600)]
    assert cases[:50] != [make_case(1, number) for number in range(50)]
    assert {case.mutation for case in cases} == set(names)
    assert {case.path for case in cases} == {path for path, _ in scripts["mutations"].VALID}
    assert len({case.body for case in cases}) > 450
    assert any(b"\\ud800" in case.body for case in cases)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"status": 400, "body": GOOD_ERROR}, ""),
        ({"status": 200, "body": b"{}"}, ""),
        ({"status": 200, "events": [(0.0, b'{"error": {"type": "invalid_request_error"}}')]}, ""),
        ({"status": 200, "events": [(0.0, b'{"error": {"type": "server_error"}}')]}, "server err"),
        ({"status": 500, "body": GOOD_ERROR}, "status 500"),
        ({"status": 0, "problem": "unanswered"}, "no whole answer"),
        ({"status": 400, "body": b'{"detail": "no"}'}, "another form"),
        ({"status": 422, "body": b'{"error": "no"}'}, "another form"),
        ({"status": 400, "body": b'{"error": {"message": "", "type": "x"}}'}, "another form"),
        ({"status": 404, "body": b"Not Found"}, "another form"),
    ],
)
def test_bad_answers_are_found(
    scripts: Scripts, load: Any, answer: dict[str, Any], problem: str
) -> None:
    fuzz, mutations = scripts["fuzz"], scripts["mutations"]
    case = mutations.Case(1, "/tokenize", b"{}", {}, "value")
    found = fuzz.problem_of(case, load.Answer(**answer))
    assert found.startswith(problem) and bool(found) == bool(problem)
    untouched = mutations.Case(1, "/tokenize", b"{}", {}, "untouched")
    is_fine = fuzz.problem_of(untouched, load.Answer(**answer)) == ""
    assert is_fine == (answer == {"status": 200, "body": b"{}"})


# ---- near-ties ----


@pytest.mark.parametrize(
    ("text", "gap", "verdict"),
    [
        ("abc", 1.0, "same"),
        ("aXc", 1e-6, "near-tie"),
        ("aXc", 1e-2, "different"),
        ("aYc", 1e-6, "different"),  # not the token that was as likely
        ("ab", 1e-6, "different"),
        ("abcd", 1e-6, "different"),
    ],
)
def test_verdicts(scripts: Scripts, text: str, gap: float, verdict: str) -> None:
    import torch

    offline = scripts["offline"]
    decode = lambda ids, **_: "".join(map(chr, ids))  # noqa: E731
    judge = offline.Offline(SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)))
    job = offline.Job("1/3", "p", 3)
    judge._outputs[job] = SimpleNamespace(
        text="abc", finish_reason="length", token_ids=[97, 98, 99], prompt_token_ids=[112, 113]
    )
    logits_TV = torch.zeros(5, 128)
    for position, token in ((1, 97), (2, 98), (3, 99)):
        logits_TV[position, token] = 5.0
    logits_TV[2, ord("X")] = 5.0 - gap
    judge.__dict__["_reference"] = lambda _: SimpleNamespace(logits=logits_TV[None])
    assert judge.verdict(job, text, "length") == verdict


# ---- attacks ----

# The others are run by hand: `bench_serving.py abuse`.
ATTACKS = ["numbers", "strings", "tokenize", "prompts", "ambiguous", "repeats", "malformed"]
ATTACKS += ["silent", "unread_health", "chunk_extensions", "template"]


def test_nobody_can_hang_the_server(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short attacks. The bounds are far from what the machine's speed can reach."""

    def is_larger(after: dict[str, float], before: dict[str, float]) -> bool:
        return any(value > 1.5 * before[part] for part, value in after.items())

    monkeypatch.setattr(scripts["abuse"], "is_larger", is_larger)  # 10% takes minutes
    monkeypatch.setattr(scripts["abuse"], "TOKENS", 12)
    monkeypatch.setattr(scripts["abuse"], "STREAMS", 4)
    monkeypatch.setattr(scripts["abuse"], "PROBE_S", 0.2)
    args = Namespace(threads=1, seconds=0.3, rest_s=0.1, recover_s=30.0, only=ATTACKS, list=False)
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
    for figure in ("longest_gap_ms", "first_token_ms_max", "health_ms_max", "live_ms_max"):
        if found[figure] is None or found[figure] > bound_ms:
            yield f"{figure} is {found[figure]}; bound {bound_ms}"
    yield from found["faults"] + found["attacker"]["bad"]
    assert found["control"]["tokens"] > 0 and found["attacker"]["engine_restarts"] == 0
    if not found["recovers"]:
        yield "the server does not recover"
    before, after = found["memory_mb"]["before"], found["memory_mb"]["after"]
    for part, value in after.items():
        if value > 1.5 * before[part]:
            yield f"memory of the {part} is {value} MB after {before[part]} MB"


def test_bodies_are_as_large_as_the_server_takes_and_no_larger(scripts: Scripts) -> None:
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
    scripts: Scripts, load: Any, answer: dict[str, Any], is_bad: bool
) -> None:
    assert bool(scripts["attacks"].fault_of(load.Answer(**answer))) == is_bad


def test_bursts_and_missed_bounds_are_told(scripts: Scripts, load: Any) -> None:
    abuse = scripts["abuse"]
    seen = abuse.Observed()
    counts = [
        (time_s, b'{"choices": [], "usage": {"completion_tokens": %d}}' % count)
        for time_s, count in ((10.0, 3), (10.2, 7), (10.2, 7), (10.3, 8))
    ]
    seen.add(load.Answer(status=200, events=[*counts, (10.3, b"[DONE]")]))
    assert seen.faults == []
    assert seen.inter_token_s == pytest.approx([0.05] * 4 + [0.1])
    assert seen.gaps_s == pytest.approx([0.2, 0.1])

    rest = abuse.Observed([0.01] * 100, [0.05] * 30, [0.1], [0.01])
    control = abuse.Observed([0.01] * 100)
    memory = {"before": {"frontend": 500}, "after": {"frontend": 549}, "back_s": 1.0}
    report = {"num_bad": 0, "bad": []}

    def judged(**changed: Any) -> str:
        given = {"inter_token_s": [0.049] * 100, "gaps_s": [0.9], "health_s": [0.9]}
        seen = abuse.Observed(**{**given, "live_s": [0.9], **changed})
        return "; ".join(abuse.judge(seen, rest, control, memory, report))

    assert judged() == ""
    assert judged(inter_token_s=[0.01] * 98 + [0.051] * 2).startswith("p99 between tokens 51 ms")
    assert judged(inter_token_s=[0.01] * 99 + [0.051]) == ""
    assert judged(gaps_s=[1.1]) == "a stream stood still for 1.1 s; bound 1.0 s"
    assert judged(first_token_s=[5.1]) == "a first token came after 5.1 s; bound 5.0 s"
    assert judged(health_s=[0.01, 1.1]) == "/health answered after 1.1 s; bound 1 s"
    assert judged(live_s=[0.01, 1.1]) == "/live answered after 1.1 s; bound 1 s"
    assert judged(inter_token_s=[]) == "no stream got two tokens"
    assert judged(faults=["lost"]) == "1 faults beside it, like lost"
    control.inter_token_s = [0.02] * 100
    assert judged(inter_token_s=[0.059] * 100) == ""
    assert judged(inter_token_s=[0.061] * 100) == "p99 between tokens 61 ms; bound 60 ms"
    report["engine_restarts"] = 2.0
    assert judged() == "the engine was restarted 2 times; expected never"
    report |= {"num_bad": 2, "bad": ["status 500"], "engine_restarts": 0.0}
    assert judged() == "2 bad answers, like status 500"
    report["num_bad"], memory["after"] = 0, {"frontend": 551}
    assert judged().startswith("memory {'frontend': 551} MB from {'frontend': 500}")


# ---- the command ----


@pytest.mark.parametrize(("missed", "status"), [([], 0), (["too slow"], 1)], ids=["kept", "missed"])
def test_a_missed_bound_is_status_1(
    scripts: Scripts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missed: list[str],
    status: int,
) -> None:
    monkeypatch.setattr(scripts["drain"], "run", lambda args: ({"bound": args.bound}, missed))
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "drain", "--bound", "7"])
    assert scripts["bench_serving"].main() == status
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line.removeprefix("RESULT "))
    assert result["experiment"] == "drain" and result["bound"] == 7
    assert result["passed"] == (not missed) and result["missed"] == missed
    assert {"commit", "cpu", "torch"} <= result["environment"].keys()
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "soak", "--requests", "0"])
    with pytest.raises(UserError, match="--requests is 0; expected more than 0"):
        scripts["bench_serving"].main()


def test_the_cost_of_a_chunk_is_measured(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # it tells its server two variables
    # All steps together take some ten seconds: the client may be that late.
    words = ["--streams", "2", "--steps", "3", "--interval-ms", "20", "--json"]
    monkeypatch.setattr(sys, "argv", ["chunk_cost.py", *words])
    scripts["chunk_cost"].main()
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["route"] for run in runs] == ["completions", "chat"]
    for run in runs:
        assert run["chunks"] >= 2 * 3 and run["events"] > 0
        parts = run["us_a_chunk"]
        assert min(parts.values()) >= 0 and parts["front end"] > 0 < parts["engine process"]


@pytest.mark.parametrize(("status", "patience_s"), [(1, 60.0), (None, 0.05)], ids=["dead", "still"])
def test_a_measurement_of_nothing_ends(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, status: int | None, patience_s: float
) -> None:
    chunk_cost = scripts["chunk_cost"]
    monkeypatch.setattr(chunk_cost, "START_S", patience_s)
    server = SimpleNamespace(process=SimpleNamespace(poll=lambda: status), log=lambda: "oh")
    with pytest.raises(UserError, match="It stands; the server said:\noh"):
        asyncio.run(chunk_cost.until(server, lambda: False, lambda: 1.0, "It stands"))
