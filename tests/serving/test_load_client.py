"""The load tests of benchmarks/serving: their client against a small server, and their judges."""

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

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "serving"
if not FOLDER.is_dir():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)

Answering = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, by name."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert not names & set(sys.modules), "another module has the name of a script"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {name: __import__(name) for name in sorted(names)}
    for name in names & set(sys.modules):
        del sys.modules[name]


@pytest.fixture
def load(scripts: dict[str, ModuleType]) -> Any:
    return scripts["load"]


async def serving(load: Any, answer: Answering, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `work` gives with a client of a server that answers so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if b"content-length" in line
                ),
                0,
            )
            await answer(head + await reader.readexactly(length), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await work(load.Client(server.sockets[0].getsockname()[1], timeout_s=10))


def play(*parts: bytes | float) -> Answering:
    """An answer in these parts; a number is a pause in seconds."""

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(part if isinstance(part, float) else 0)

    return answer


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def ask(load: Any, answer: Answering, **fields: Any) -> Any:
    return asyncio.run(serving(load, answer, lambda client: client.complete("x", **fields)))


# ---- the client -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_stream_in_pieces_of_any_size(load: Any, size: int) -> None:
    text = event("hé") + b": a comment\n\n" + event("llo", "stop") + USAGE + DONE
    # Chunks of HTTP and events need not end together.
    raw = CHUNKED + chunked(text[:10], text[10:90], text[90:]) + LAST
    answer = ask(load, play(*(raw[i : i + size] for i in range(0, len(raw), size))))
    assert answer.is_complete and (answer.status, answer.problem) == (200, "")
    assert (answer.text, answer.finish_reason) == ("héllo", "stop")
    assert answer.usage == {"completion_tokens": 3}


def test_a_body_and_headers(load: Any) -> None:
    body = b'{"choices": [{"text": "hi", "finish_reason": "length"}], "usage": {"a": 1}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nRetry-After: 2\r\n\r\n" % len(body)
    answer = ask(load, play(head + body), stream=False)
    assert answer.is_complete and (answer.text, answer.finish_reason) == ("hi", "length")
    assert answer.headers["retry-after"] == "2" and answer.usage == {"a": 1}


def test_what_is_sent(load: Any) -> None:
    seen: list[bytes] = []

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    ask(load, answer, max_tokens=3, speculation={"report": True})
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert json.loads(body) == {
        "prompt": "x",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "speculation": {"report": True},
    }


def test_times_are_those_of_the_chunks(load: Any) -> None:
    first = CHUNKED + chunked(event("a"))
    answer = ask(load, play(0.1, first, 0.2, chunked(event("b", "stop"), DONE) + LAST))
    assert 0.09 < answer.first_token_s < answer.seconds - 0.15


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((), "unanswered"),
        ((b"HTTP/1.1 200",), "unanswered"),
        ((CHUNKED + chunked(event("a")),), "cut"),
        ((CHUNKED + chunked(event("a"))[:-4],), "cut"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",), "cut"),
    ],
)
def test_answers_that_end_too_soon(load: Any, parts: tuple[bytes, ...], problem: str) -> None:
    answer = ask(load, play(*parts))
    assert answer.problem == problem and not answer.is_complete


def test_an_answer_up_to_the_end_of_the_connection(load: Any) -> None:
    answer = ask(load, play(HEAD + b"\r\n" + event("a", "stop") + DONE))
    assert answer.is_complete and answer.text == "a"


def test_an_error_in_a_stream(load: Any) -> None:
    error = b'data: {"error": {"message": "died", "type": "server_error"}}\n\n'
    answer = ask(load, play(CHUNKED + chunked(event("a"), error) + LAST))
    assert answer.problem == "" and not answer.is_complete
    assert answer.error["message"] == "died"


def test_a_stream_without_its_end(load: Any) -> None:
    assert not ask(load, play(CHUNKED + chunked(event("a", "stop")) + LAST)).is_complete


def test_dropping_closes_the_connection(load: Any) -> None:
    closed = asyncio.Event()

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunked(event("a")))
        assert await reader.read(1) == b""
        closed.set()

    async def work(client: Any) -> Any:
        dropped = await client.complete("x", drop_after_s=0.1)
        await asyncio.wait_for(closed.wait(), 5)
        return dropped

    dropped = asyncio.run(serving(load, answer, work))
    assert dropped.problem == "dropped" and dropped.text == "a"


def test_nobody_there(load: Any) -> None:
    async def work(client: Any) -> Any:
        return client

    client = asyncio.run(serving(load, play(), work))
    answer = asyncio.run(client.get("/ready"))
    assert (answer.status, answer.problem) == (0, "refused")


def test_so_many_at_a_time(load: Any) -> None:
    now = most = 0

    async def work(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001 * (number % 3))
        now -= 1
        return 2 * number

    assert asyncio.run(load.at_most(4, range(20), work)) == [2 * i for i in range(20)]
    assert most == 4


def test_percentiles_and_slopes(load: Any) -> None:
    values = [float(i) for i in range(1, 101)]
    assert [load.percentile(values, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert load.percentile([3.0], 0.95) == 3
    assert load.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert load.slope([(0, 1), (1, 3), (2, 1)]) == pytest.approx(0)
    assert load.slope([(5, 1), (5, 3)]) == 0


# ---- what is read of the server -------------------------------------------------------------


def test_metrics(scripts: dict[str, ModuleType]) -> None:
    text = (
        "# HELP peagle:num_requests_running Outputs.\n# TYPE peagle:num_requests_running gauge\n"
        'peagle:num_requests_running{engine="0",model_name="a b"} 2.0\n'
        'peagle:num_requests_running{engine="1",model_name="a b"} 1.0\n'
        "peagle:kv_cache_usage_perc 2.5e-01\nup 1\n"
    )
    expected = {"num_requests_running": 3, "kv_cache_usage_perc": 0.25, "up": 1}
    assert scripts["served"].parse_metrics(text) == expected


def test_processes(scripts: dict[str, ModuleType]) -> None:
    served = scripts["served"]
    code = "x = bytearray(50_000_000); print('made', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"made\n"
        assert child.pid in served.children(os.getpid())
        assert 50 < served.resident_mb(child.pid) < 200
        child.kill()
    assert served.resident_mb(child.pid) == served.cpu_s(child.pid) == 0
    before, end = served.cpu_s(os.getpid()), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0.05 < served.cpu_s(os.getpid()) - before < 5


# ---- what the experiments conclude ----------------------------------------------------------


def whole(load: Any, text: str = "a", tokens: int = 1, **more: Any) -> Any:
    data = [event(text, "stop"), b'data: {"usage": {"completion_tokens": %d}}' % tokens, DONE]
    events = [(0.0, raw.removeprefix(b"data: ").strip()) for raw in data]
    return load.Answer(status=200, events=events, **more)


def test_the_soak_finds_losses_differences_and_growth(
    scripts: dict[str, ModuleType], load: Any
) -> None:
    soak, offline = scripts["soak"], scripts["offline"]
    job = offline.Job("1/8", "x", 8)
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
    figures, missed = soak.judge(args, judge, good, growing, 2.0)
    assert figures["growth_mb_per_100_requests"]["engines"] == pytest.approx(2)
    assert missed == ["memory grows by 2.00 MB per 100 requests; bound 1.0"]
    # Memory that grows while all is warmed up is no growth.
    warming = [{**s, "engines": 500 + min(s["requests"], 30)} for s in flat]
    assert soak.judge(args, judge, good, warming, 2.0)[1] == []
    bad = [*good[:97], (job, whole(load, "b")), (job, load.Answer(problem="cut", status=200))]
    _, missed = soak.judge(args, judge, bad, flat, 2.0)
    assert "1 requests were lost" in missed[0] and "1 texts differ" in missed[1]


def test_a_killed_engine_must_be_told_of_in_time(scripts: dict[str, ModuleType], load: Any) -> None:
    told, body = scripts["kill"].told, b'{"error": {"message": "gone"}}'
    by_status = load.Answer(status=500, body=body, ended_s=10.5)
    by_event = load.Answer(status=200, events=[(10.4, body)], ended_s=10.6)
    figures, missed = told([by_status, by_event], 10.0, 2.0, "restart")
    assert missed == [] and figures == {"by_event": 1, "by_status": 1, "latest_s": 0.6}
    assert (
        "after 2.50 s" in told([load.Answer(status=503, body=body, ended_s=12.5)], 10, 2, "x")[1][0]
    )
    silent = load.Answer(status=200, events=[(10.4, b'{"choices": []}')], problem="cut")
    assert "was not told" in told([silent], 10.0, 2.0, "x")[1][0]
    assert "was not told" in told([load.Answer(status=400, body=body)], 10.0, 2.0, "x")[1][0]


def test_a_drained_server_must_finish_and_refuse(scripts: dict[str, ModuleType], load: Any) -> None:
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


# ---- broken bodies --------------------------------------------------------------------------


def test_cases_are_those_of_their_seed(scripts: dict[str, ModuleType]) -> None:
    make_case, names = scripts["mutations"].make_case, dict(scripts["mutations"].MUTATIONS)
    cases = [make_case(0, number) for number in range(600)]
    assert cases == [make_case(0, number) for number in range(600)]
    assert cases[:50] != [make_case(1, number) for number in range(50)]
    assert {case.mutation for case in cases} == set(names)
    assert {case.path for case in cases} == {path for path, _ in scripts["mutations"].VALID}
    assert len({case.body for case in cases}) > 450
    assert any(not _is_utf8(case.body) for case in cases)
    assert any(b"\\ud800" in case.body for case in cases)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


GOOD_ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"status": 400, "body": GOOD_ERROR}, ""),
        ({"status": 200, "body": b"{}"}, ""),
        ({"status": 200, "events": [(0.0, b'{"error": {"type": "invalid_request_error"}}')]}, ""),
        (
            {"status": 200, "events": [(0.0, b'{"error": {"type": "server_error"}}')]},
            "server error",
        ),
        ({"status": 500, "body": GOOD_ERROR}, "status 500"),
        ({"status": 0, "problem": "unanswered"}, "no whole answer"),
        ({"status": 400, "body": b'{"detail": "no"}'}, "another form"),
        ({"status": 422, "body": b'{"error": "no"}'}, "another form"),
        ({"status": 400, "body": b'{"error": {"message": "", "type": "x"}}'}, "another form"),
        ({"status": 400, "body": b'{"error": {"message": "a", "type": 5}}'}, "another form"),
        ({"status": 404, "body": b"Not Found"}, "another form"),
    ],
)
def test_bad_answers_are_found(
    scripts: dict[str, ModuleType], load: Any, answer: dict[str, Any], problem: str
) -> None:
    fuzz, mutations = scripts["fuzz"], scripts["mutations"]
    case = mutations.Case(1, "/tokenize", b"{}", {}, "value")
    found = fuzz.problem_of(case, load.Answer(**answer))
    assert found.startswith(problem) and bool(found) == bool(problem)
    untouched = mutations.Case(1, "/tokenize", b"{}", {}, "untouched")
    is_fine = fuzz.problem_of(untouched, load.Answer(**answer)) == ""
    assert is_fine == (answer == {"status": 200, "body": b"{}"})


def test_an_attack_counts_and_names_what_went_wrong(
    scripts: dict[str, ModuleType], load: Any
) -> None:
    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"POST /detokenize"):
            return
        status = b"500 Oh" if request.startswith(b"POST /tokenize") else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n{}" % status)

    numbers = range(60)
    cases = [scripts["mutations"].make_case(7, number) for number in numbers]
    attack = scripts["fuzz"].attack
    figures, missed = asyncio.run(serving(load, answer, lambda client: attack(client, 7, numbers)))
    counts = {
        path: sum(case.path == path for case in cases) for path in ("/tokenize", "/detokenize")
    }
    fine = len(cases) - sum(counts.values())
    assert min(counts.values()) > 0 and fine > 0
    statuses = {0: counts["/detokenize"], 200: fine, 500: counts["/tokenize"]}
    assert figures["statuses"] == statuses and figures["bodies"] == 60
    assert len(figures["bad"]) == min(20, len(cases) - fine)
    assert sum(int(text.split()[0]) for text in missed) == len(cases) - fine


# ---- near-ties ------------------------------------------------------------------------------


class _Logits:
    """A reference model whose logits are told."""

    def __init__(self, logits_TV: Any) -> None:
        self.logits_TV = logits_TV

    def __call__(self, prompt_1T: Any) -> Any:
        assert prompt_1T.shape[1] == len(self.logits_TV)
        return SimpleNamespace(logits=self.logits_TV[None])


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
def test_verdicts(scripts: dict[str, ModuleType], text: str, gap: float, verdict: str) -> None:
    import torch

    offline = scripts["offline"]
    decode = lambda ids, **_: "".join(map(chr, ids))  # noqa: E731
    judge = offline.Offline(SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)))
    job = offline.Job("1/3", "p", 3)
    output = SimpleNamespace(
        text="abc", finish_reason="length", token_ids=[97, 98, 99], prompt_token_ids=[112, 113]
    )
    judge._outputs[job] = output
    logits_TV = torch.zeros(5, 128)
    for position, token in ((1, 97), (2, 98), (3, 99)):
        logits_TV[position, token] = 5.0
    logits_TV[2, ord("X")] = 5.0 - gap
    judge.__dict__["_reference"] = _Logits(logits_TV)
    assert judge.verdict(job, text, "length") == verdict


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(("missed", "status"), [([], 0), (["too slow"], 1)], ids=["kept", "missed"])
def test_a_missed_bound_is_status_1(
    scripts: dict[str, ModuleType],
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


def test_numbers_that_measure_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "bench_serving.py"), "soak", "--requests", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --requests is 0; expected more than 0.\n"
