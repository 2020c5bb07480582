"""Engines that hang, die again and again or outlive their front end; requests that take long."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from peagle.config import SamplingParams
from peagle.engine.outputs import StreamChunk
from peagle.errors import UserError
from peagle.llm import LLM
from peagle.serving import engine_pool, engine_process
from peagle.serving.config import ServerConfig
from peagle.serving.engine_pool import CrashBudget, EngineFailed, EnginePool, EngineProcess
from peagle.serving.engine_process import Heartbeat
from peagle.serving.errors import ApiError
from peagle.serving.metrics import Metrics
from serving import hung_engines
from serving.hung_engines import SLOW_S, SPEC
from serving.live import HTTP, LiveServer, running, wait_for, wait_until_ready
from serving.warm import forks

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
FEW = SamplingParams(max_tokens=8)
# A busy machine makes a slow step, and 20 times that is the limit of a hang.
PATIENCE_S = 180


# ---- a server ----


class Client(threading.Thread):
    """Sends a long request; keeps the error of its answer."""

    def __init__(self, server: LiveServer, *, stream: bool) -> None:
        super().__init__()
        self.server, self.stream = server, stream
        self.status, self.error = 0, dict[str, Any]()
        self.start()

    def run(self) -> None:
        body = {**LONG, "stream": self.stream}
        with (
            httpx.Client(timeout=120, verify=False) as client,
            client.stream("POST", self.server.url + COMPLETIONS, json=body) as response,
        ):
            self.status = response.status_code
            for line in response.iter_lines():
                if '"error"' in line:
                    self.error = json.loads(line.removeprefix("data: "))["error"]


def status(server: LiveServer, path: str = "/health") -> int:
    return HTTP.get(server.url + path).status_code


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.slow
def test_a_lost_engine_is_replaced() -> None:
    """Stopped in the middle of steps, then while it is idle; then killed: the third crash.

    An engine without requests is not lost.
    """
    with running("--hang-timeout", 1, "--no-playground", warm=True) as server:
        clients = [Client(server, stream=stream) for stream in (True, False)]
        wait_for(lambda: server.metrics()['peagle:num_requests_running{engine="0"}'] == 2)
        assert server.metrics()["peagle:oldest_waiting_request_seconds{}"] >= 0
        pid = server.engine_pids()[-1]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: status(server) == 503, timeout_s=PATIENCE_S)
        assert (status(server, "/ready"), status(server, "/live")) == (503, 200)
        refused = HTTP.post(server.url + COMPLETIONS, json=SHORT)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
        for client in clients:
            client.join(PATIENCE_S)
            assert client.error["code"] == "engine_hung"
            assert "send it again" in client.error["message"]
        assert {client.status for client in clients} == {200, 500}
        pattern = r"working and gave no sign of life for ([\d.]+) s, of ([\d.]+) s"
        ((silent, allowed),) = re.findall(pattern, server.text)
        assert float(silent) >= float(allowed) >= 1
        wait_for(lambda: is_gone(pid))
        wait_until_ready(server)
        assert HTTP.post(server.url + COMPLETIONS, json=SHORT).status_code == 200
        assert _ends(server) == (1, 1) and len(server.engine_pids()) == 2

        wait_for(lambda: server.metrics()['peagle:num_requests_running{engine="0"}'] == 0)
        time.sleep(2.5)
        assert status(server) == 200 and _ends(server) == (1, 1), (
            "an idle engine gives signs of life"
        )
        os.kill(server.engine_pids()[-1], signal.SIGSTOP)
        wait_for(lambda: status(server) == 503, timeout_s=PATIENCE_S)
        wait_until_ready(server)
        assert _ends(server) == (2, 2)

        clients = [Client(server, stream=stream) for stream in (True, False)]
        wait_for(lambda: server.metrics()['peagle:num_requests_running{engine="0"}'] == 2)
        assert server.metrics()['peagle:engine_last_beat_seconds{engine="0"}'] < 10
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        for client in clients:
            client.join(PATIENCE_S)
            assert client.error["code"] == "engine_died"
            assert "stopped 3 times" in client.error["message"]
            assert "send it again." not in client.error["message"]
        assert {client.status for client in clients} == {200, 500}


def _ends(server: LiveServer) -> tuple[float, float]:
    found = server.metrics()
    names = ("engine_hangs_total", "engine_restarts_total")
    hangs, restarts = (found[f'peagle:{name}{{engine="0"}}'] for name in names)
    return hangs, restarts


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_ended() -> None:
    with running("--request-timeout", 0.4, "--no-playground", warm=True) as server:
        clients = [Client(server, stream=stream) for stream in (True, False)]
        for client in clients:
            client.join(PATIENCE_S)
            assert client.error["code"] == "request_timeout"
            assert "0.4 s" in client.error["message"]
            assert "--request-timeout" in client.error["message"]
        assert clients[1].status == 504

        def is_free() -> bool:
            found = server.metrics()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return all(found[f'peagle:{name}{{engine="0"}}'] == 0 for name in names)

        wait_for(is_free)
        assert server.metrics()['peagle:request_failure_total{,reason="timeout"}'] == 2
        assert server.metrics()["peagle:oldest_waiting_request_seconds{}"] == 0


# ---- engines without their front end ----


@pytest.fixture(scope="module")
def cold() -> Iterator[LiveServer]:
    """A server that imports everything itself, as do its engines."""
    with running("--log-format", "json", "--no-playground", "-k", 12) as server:
        yield server


@pytest.mark.slow
def test_every_line_of_a_json_log_is_json(cold: LiveServer) -> None:
    """Warnings of the engine too, here that K is more than the head's trained depth."""
    records = [json.loads(line) for line in cold.text.splitlines()]
    (warning,) = [one for one in records if "deeper drafts seldom pass" in one["message"]]
    assert warning["level"] == "warning" and "is 12" in warning["message"]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, records))


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="the kernel ends it, on Linux")
def test_a_stopped_engine_ends_with_its_front_end(cold: LiveServer) -> None:
    """The last test of the server."""
    records = map(json.loads, cold.text.splitlines())
    (pid,) = [record["pid"] for record in records if "pid" in record]
    os.kill(pid, signal.SIGSTOP)
    os.kill(cold.process.pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid))


def test_an_engine_that_hangs_in_a_step_ends_with_its_front_end() -> None:
    ours, theirs = multiprocessing.Pipe()
    front_end = forks().Process(target=hung_engines.be_front_end, args=(theirs,))
    front_end.start()
    assert ours.poll(120)
    pid = ours.recv()
    assert not is_gone(pid)
    front_end.kill()
    wait_for(lambda: is_gone(pid), timeout_s=20)


# ---- a pool ----


class Pool:
    """A pool of real processes, with what it tells."""

    def __init__(self, metrics: Metrics, pool: EnginePool) -> None:
        self.metrics, self.pool = metrics, pool

    async def complete(self, params: SamplingParams = FEW) -> list[StreamChunk]:
        await asyncio.wait_for(self._until_ready(), 60)
        engine = self.pool.choose(1)
        stream = self.pool.stream(engine, [[1, 2, 3]], params, proposer="peagle")
        return [chunk async for chunks in stream for _, chunk in chunks]

    async def _until_ready(self) -> None:
        while not self.pool.ready:
            assert not self.pool.failure.done(), self.pool.failure.result()
            await asyncio.sleep(0.02)

    @property
    def hangs(self) -> int:
        return self.metrics._at(0).num_hangs


@contextlib.asynccontextmanager
async def pool_of(run: Any, *specs: Any, restart: bool = True) -> AsyncIterator[Pool]:
    """Engines that run that function, forked from a process that has imported everything."""
    metrics = Metrics("m")
    context = SimpleNamespace(get_context=lambda _: forks())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_pool, "multiprocessing", context)
        patched.setattr(engine_pool, "run_engine", run)
        pool = EnginePool(list(specs or [SPEC]), metrics, max_queue=10, restart=restart)
        pool.start()
        try:
            yield Pool(metrics, pool)
        finally:
            await pool.close()


@pytest.mark.slow
def test_a_slow_step_is_no_hang() -> None:
    async def check() -> None:
        async with pool_of(hung_engines.is_slow_once) as pool:
            start = time.monotonic()
            await pool.complete()
            assert time.monotonic() - start > SLOW_S > SPEC.hang_timeout_s
            assert pool.hangs == 0

    asyncio.run(check())


def test_others_serve_while_an_engine_is_lost() -> None:
    async def check() -> None:
        async with pool_of(engine_process.run_engine, SPEC, SPEC) as pool:
            while len(pool.pool.ready) < 2:
                await asyncio.sleep(0.02)
            first = pool.pool.ready[0]
            first.kill()
            while first.is_ready:
                await asyncio.sleep(0.02)
            assert await pool.complete()

    asyncio.run(asyncio.wait_for(check(), 120))


@pytest.mark.slow
def test_what_compiles_is_no_hang_and_what_stands_still_later_is() -> None:
    async def check() -> None:
        async with pool_of(hung_engines.compiles_then_hangs) as pool:
            many = SamplingParams(max_tokens=100, ignore_eos=True)
            start = time.monotonic()
            with pytest.raises(ApiError) as caught:
                await pool.complete(many)
            assert time.monotonic() - start > SLOW_S + SPEC.hang_timeout_s
            assert (caught.value.status, caught.value.code) == (500, "engine_hung")
            assert pool.hangs == 1 and not pool.pool.ready

    asyncio.run(check())


def test_an_engine_that_dies_at_every_request_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pool, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(engine_pool, "MAX_CRASHES", 2)

    async def check() -> None:
        async with pool_of(hung_engines.dies_in_a_step) as pool:
            told = []
            for _ in range(3):
                with pytest.raises(ApiError) as caught:
                    await pool.complete()
                told.append(caught.value)
            assert {error.code for error in told} == {"engine_died"}
            assert "send it again" in told[0].message
            assert "stopped 2 times within 10 minutes" in told[1].message
            assert "do not send it again" in told[1].message
            failure = await asyncio.wait_for(pool.pool.failure, 10)
            assert isinstance(failure, EngineFailed)
            assert "ended by a fault; it ended 3 times within 10 minutes" in str(failure)

    asyncio.run(check())


def test_the_others_go_on_without_an_engine_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_pool, "_FIRST_DELAY_S", 0.01)

    async def check() -> None:
        good = replace(SPEC, log_format="json")
        async with pool_of(hung_engines.loads_in_json_only, SPEC, good) as pool:
            assert await pool.complete()
            while "The others go on" not in caplog.text:
                await asyncio.sleep(0.05)
            assert "3 starts in a row failed" in caplog.text
            assert await pool.complete()
            assert not pool.pool.failure.done()

    asyncio.run(asyncio.wait_for(check(), 60))


def test_a_process_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_FIRST_DELAY_S", 0.01)

    def fails(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    async def check() -> None:
        monkeypatch.setattr(engine_pool, "EngineProcess", fails)
        async with pool_of(None) as pool:
            failure = await asyncio.wait_for(pool.pool.failure, 10)
            assert "could not be started: [Errno 24]" in str(failure)
            assert "3 starts in a row failed" in str(failure)

    asyncio.run(check())


def test_a_pool_with_a_stopped_engine_closes_soon() -> None:
    async def check() -> None:
        async with pool_of(engine_process.run_engine, replace(SPEC, hang_timeout_s=0)) as pool:
            await pool.complete()
            (engine,) = pool.pool.ready
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            # More than any pipe holds: the event loop must not wait for it.
            for _ in range(20):
                engine.send(engine_pool.Add(9, [1] * 200_000, FEW, "peagle"))
        assert is_gone(engine.pid)

    asyncio.run(check())


# ---- parts ----


def test_failed_starts_and_crashes_have_budgets_of_their_own() -> None:
    budget = CrashBudget()
    delays = []
    for _ in range(engine_pool.MAX_CRASHES):
        budget.crashed(while_loading=False)
        delays.append(budget.delay_s)
        budget.num_failed_starts = 0  # to be ready forgives no crash
        assert budget.spent is None
    assert delays == [0.5, 1, 2, 4, 8]
    budget.crashed(while_loading=False)
    assert "ended 6 times within 10 minutes" in str(budget.spent)

    budget = CrashBudget()
    for count in range(engine_pool.MAX_FAILED_STARTS):
        assert budget.spent is None, count
        budget.crashed(while_loading=True)
    assert "3 starts in a row failed" in str(budget.spent)


def test_crashes_of_long_ago_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = CrashBudget()
    for _ in range(9):
        budget.crashed(while_loading=False)
    assert budget.spent
    later = time.monotonic() + engine_pool.WINDOW_S + 1
    monkeypatch.setattr(engine_pool.time, "monotonic", lambda: later)
    assert budget.spent is None and budget.num_recent == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hang_timeout_s", 0.5, "expected a number of seconds of at least"),
        ("hang_timeout_s", True, ""),
        ("request_timeout_s", -1, "expected a number of seconds, or 0"),
    ],
)
def test_bounds_out_of_range_are_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}; {words}"):
        ServerConfig(**{name: value})


def limit_of(heartbeat: Heartbeat) -> float:
    return heartbeat.due_s - heartbeat.last_s


def test_a_larger_pass_than_any_may_take_as_long_as_its_tokens() -> None:
    heartbeat = Heartbeat(multiprocessing, 10)
    assert heartbeat.activity == "loading" and limit_of(heartbeat) > 600
    with heartbeat.step():  # the check at the end of loading
        heartbeat.planned(1)
        assert limit_of(heartbeat) > 600
    heartbeat.loaded(token_s=0.1)
    assert heartbeat.activity == "working" and limit_of(heartbeat) == pytest.approx(10)
    for expected in (200, 10):  # a pass of that size is known then
        with heartbeat.step():
            heartbeat.planned(50)
            assert limit_of(heartbeat) == pytest.approx(10)
            heartbeat.planned(2000)
            assert limit_of(heartbeat) == pytest.approx(expected)


def test_a_limit_is_a_multiple_of_the_slowest_step_that_compiled_nothing() -> None:
    heartbeat = Heartbeat(multiprocessing, 1)
    heartbeat.loaded(token_s=0)
    with heartbeat.step():
        heartbeat.compiling()
        heartbeat.compiling()
        heartbeat.compiled()  # one within the other
        assert heartbeat.activity == "compiling" and limit_of(heartbeat) > 100
        time.sleep(0.2)
        heartbeat.compiled()
        assert heartbeat.activity == "working"
    heartbeat.beat()
    assert limit_of(heartbeat) == pytest.approx(1)
    with heartbeat.step():
        time.sleep(0.2)
    heartbeat.beat()
    assert limit_of(heartbeat) > 20 * 0.2
    heartbeat.beat(60)
    assert limit_of(heartbeat) == pytest.approx(60)


def test_a_machine_that_stood_still_is_forgiven_once() -> None:
    engine = object.__new__(EngineProcess)
    engine.heartbeat = Heartbeat(multiprocessing, 10)
    engine._forgiven_s = engine._forgiven_of = 0.0
    engine.heartbeat.loaded(token_s=0)
    now = engine.heartbeat.last_s
    assert not engine.is_overdue(now + 9, 0)
    assert engine.is_overdue(now + 11, 0)
    assert not engine.is_overdue(now + 70, 60)  # 60 s of which nobody ran
    assert engine.is_overdue(now + 71, 0)
    engine.heartbeat.beat()
    assert engine.is_overdue(engine.heartbeat.last_s + 11, 0)


def test_an_engine_that_may_be_silent_for_ever_is_never_overdue() -> None:
    heartbeat = Heartbeat(multiprocessing, 0)
    heartbeat.loaded(token_s=1)
    with heartbeat.step():
        heartbeat.planned(5)
        assert limit_of(heartbeat) == float("inf")


def test_a_check_leaves_no_rules_to_the_next_request(target_folder: Path) -> None:
    llm = LLM(target_folder)
    allowed = (70, 71, 72)
    params = SamplingParams(allowed_token_ids=allowed, max_tokens=8, temperature=1.0, seed=1)
    for _ in range(2):
        llm.engine.check()
        (output,) = llm.generate("x", params)
        assert set(output.token_ids) <= {*allowed} and len(set(output.token_ids)) > 1


def test_a_check_leaves_no_trace(offline: LLM) -> None:
    engine = offline.engine
    offline.generate(["def f(x):\n" * 20], SamplingParams(max_tokens=8))
    before, free = engine.stats, list(engine.blocks._free)
    published = dict(engine.blocks._published)
    assert published
    engine.check()  # takes the block that was used longest ago
    first = list(engine.blocks._free)
    for _ in range(20):
        engine.check()
    assert engine.stats == before
    assert list(engine.blocks._free) == first == free
    assert engine.blocks._published == published
    drawn = SamplingParams(max_tokens=8, temperature=1)
    number = engine._num_requests
    engine.check()
    assert engine._num_requests == number
    assert offline.generate(["def f("], drawn)
