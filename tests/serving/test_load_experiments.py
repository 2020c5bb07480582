"""What the load tests conclude, and the broken bodies that they send."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from serving.load_scripts import (
    CHUNKED,
    DONE,
    FOLDER,
    LAST,
    ROOT,
    USAGE,
    chunked,
    event,
    load,
    scripts,
    serving,
)

__all__ = ["load", "scripts"]


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


def test_half_of_the_clients_leave(scripts: dict[str, ModuleType], load: Any) -> None:
    left = 0

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        if not json.loads(request.partition(b"\r\n\r\n")[2])["stream"]:
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(CHUNKED + chunked(event("a")))
        try:
            left += await asyncio.wait_for(reader.read(1), 0.1) == b""
        except TimeoutError:
            writer.write(chunked(event("b", "stop"), DONE) + LAST)

    leave = scripts["cancel"].leave_at_random
    args = Namespace(seed=0, clients=8)
    counts, failed = asyncio.run(serving(load, answer, lambda client: leave(client, 1.0, args)))
    assert counts["whole"] > 20 and counts["dropped"] > 10 and left > 0
    assert failed and all(text.startswith("status 503") for text in failed)


def test_arrivals_do_not_wait_for_answers(scripts: dict[str, ModuleType], load: Any) -> None:
    now = most = 0

    async def answer(request: bytes, reader: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.3)
        writer.write(CHUNKED + chunked(event("a", "stop"), USAGE, DONE) + LAST)
        now -= 1

    args = Namespace(seed=0, requests=60, max_tokens=4)
    poisson = scripts["latency"].poisson
    answers = asyncio.run(serving(load, answer, lambda client: poisson(client, args, 100, {})))
    assert len(answers) == 60 and all(answer.is_complete for answer in answers)
    assert most > 15, "30 are on their way on average"
    cell = scripts["latency"]._cell(answers)
    assert 300 <= cell["first_token_ms_p50"] <= cell["first_token_ms_p95"] <= 2000


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
