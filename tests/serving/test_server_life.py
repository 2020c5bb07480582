"""Starting, cancelling, losing an engine, draining and ending."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from peagle.cli import main
from peagle.config import EngineConfig
from peagle.serving import server as served
from peagle.serving.engine_process import EngineInfo, EngineSpec
from serving.live import (
    HTTP,
    KEYS,
    LiveServer,
    running,
    wait_for,
    warm_serve,
)

LONG = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
COMPLETIONS = "/v1/completions"


@contextlib.contextmanager
def streaming(server: LiveServer, **body: Any) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    with (
        httpx.Client(timeout=120, verify=False) as client,
        client.stream("POST", server.url + COMPLETIONS, json={**LONG, **body}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def is_idle(server: LiveServer) -> bool:
    found = server.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(found[f'peagle:{name}{{engine="0"}}'] == 0 for name in names)


def test_leaving_frees_everything(server: LiveServer) -> None:
    with streaming(server), streaming(server, n=3):
        wait_for(lambda: server.metrics()['peagle:num_requests_running{engine="0"}'] >= 4)
    wait_for(lambda: is_idle(server))
    with httpx.Client(timeout=0.5, verify=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post(server.url + COMPLETIONS, json={**LONG, "stream": False})
    wait_for(lambda: is_idle(server))


@pytest.mark.slow
def test_two_engines_share_the_work_and_a_lost_one_ends_the_server() -> None:
    options = ("--data-parallel-size", 2, "--device", "cpu", "--on-engine-failure", "exit")
    with running(*options, "--no-speculation", "--no-playground", warm=True) as server:
        wait_for(lambda: len(server.engine_pids()) == 2, timeout_s=120)

        def loads() -> list[float]:
            found = server.metrics()
            return [found[f'peagle:num_requests_running{{engine="{i}"}}'] for i in (0, 1)]

        with streaming(server), streaming(server):
            wait_for(lambda: loads() == [1, 1])
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "the server ends" in server.text


@pytest.mark.slow
def test_a_full_queue_says_so_and_sigterm_lets_requests_finish() -> None:
    with running("--max-num-seqs", 1, "--max-queue", 1, "--no-playground", warm=True) as server:
        with streaming(server), httpx.Client(timeout=1, verify=False) as waiting:
            with pytest.raises(httpx.ReadTimeout):
                waiting.post(server.url + COMPLETIONS, json={**LONG, "stream": False})
            two = {**SHORT, "n": 2, "temperature": 1}
            response = HTTP.post(server.url + COMPLETIONS, json=two)
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) > 0
            assert response.json()["error"]["type"] == "rate_limit_error"
        with streaming(server, max_tokens=200) as lines:
            server.terminate()
            wait_for(lambda: HTTP.get(f"{server.url}/ready").status_code == 503)
            refused = HTTP.post(server.url + COMPLETIONS, json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert HTTP.get(f"{server.url}/health").json() == {"status": "draining"}
            assert HTTP.get(f"{server.url}/live").status_code == 200
            assert server.process.poll() is None
            *events, done = lines
        assert done == "data: [DONE]"
        assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert server.process.wait(60) == 0


def test_keys_guard_all_but_probes_and_part_the_prefix_cache(strict: LiveServer) -> None:
    server, (key, other) = strict, KEYS[6:8]
    opened = [(path, 200) for path in ("/live", "/health", "/ping")]
    for path, status in (*opened, ("/v1/models", 401), ("/", 401)):
        assert HTTP.get(server.url + path).status_code == status, path
    headers = {"Authorization": f"Bearer {key}"}
    assert HTTP.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    bad = {"Authorization": "Bearer x"}
    assert HTTP.post(server.url + COMPLETIONS, json=SHORT, headers=bad).status_code == 401
    assert HTTP.get(server.url + "/", auth=("any", key)).status_code == 200

    def num_cached(used: str, **extra: str) -> int:
        body = {**SHORT, "prompt": "def function(argument):\n" * 20, **extra}
        answer = HTTP.post(
            server.url + COMPLETIONS, json=body, headers={"Authorization": f"Bearer {used}"}
        )
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(key) == 0
    assert num_cached(key) > 50
    assert num_cached(other) == 0
    assert num_cached(other, cache_salt="a") == 0
    assert num_cached(other, cache_salt="a") > 50
    assert key not in server.text


def test_a_mistake_in_a_json_log_is_json(tmp_path: Path) -> None:
    arguments = ("--log-format", "json", "--port", 0, "/no/such/model")
    process = warm_serve(tmp_path / "log", *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    last = [json.loads(line) for line in output.splitlines()][-1]
    assert last["level"] == "error" and "/no/such/model" in last["message"]


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs `peagle serve` in this process: the status, and what it printed."""
    monkeypatch.delenv("PEAGLE_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    names = (None, "peagle.serving", "uvicorn", "opentelemetry", "asyncio")
    kept = [(log, log.handlers, log.level) for log in map(logging.getLogger, names)]

    def call(*arguments: object) -> tuple[int, str]:
        status = main.run(["serve", "--port", "0", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    yield call
    for log, handlers, level in kept:
        log.handlers, log.level = handlers, level


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("--port", 70000), "--port: port is 70000"),
        (("--on-engine-failure", "panic"), "panic"),
        (("--log-format", "xml"), "xml"),
        (("--api-key-file", "/no/such/file"), "/no/such/file"),
        (("a", "--target", "b"), "leave one of them out"),
        (("--no-speculation", "--compare-draft", "bundled-eagle3"), "--compare-draft"),
        (("--key-concurrency", 2), "--key-concurrency is 2"),
    ],
)
def test_mistakes_end_with_status_2(serve: Any, arguments: tuple[object, ...], words: str) -> None:
    status, output = serve(*arguments)
    assert status == 2, output
    assert words in output and "Traceback" not in output


def test_what_the_engine_refuses_ends_with_status_2(tmp_path: Path) -> None:
    process = warm_serve(tmp_path / "log", "--port", 0, "--max-model-len", 99999)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "max_model_len is 99999" in output and "Traceback" not in output


def test_the_configuration_is_shown(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peagle.toml"
    file.write_text("[server]\nmax_queue = 3\nallowed_hosts = ['a.example']\n")
    monkeypatch.setenv("PEAGLE_SERVER", '{"drain_timeout_s": 5}')
    status, output = serve("--config", file, "--port", 9000, "--show-config")
    shown = json.loads(output)["server"]
    assert status == 0
    assert (shown["max_queue"], shown["port"], shown["drain_timeout_s"]) == (3, 9000, 5)
    assert (shown["host"], shown["allowed_hosts"]) == ("127.0.0.1", ["a.example"])


def test_the_memory_plan_of_each_engine_is_logged_when_it_is_asked_for(server: LiveServer) -> None:
    """On a CPU too; a line is a record, so that the log keeps its form."""
    assert "memory on" not in server.text
    options = ("--show-memory", "--max-model-len", 64, "--device", "cpu", "--no-playground")
    with running(*options, "--log-format", "json", warm=True) as asked:
        records = [json.loads(line) for line in asked.text.splitlines()]
    told = [record["message"] for record in records if record["logger"] == "peagle.serving"]
    for name in ("peagle", "eagle3"):
        begin = told.index(f"{name}: memory on cpu")
        rows = [line.removeprefix(f"{name}:   ").split("  ")[0] for line in told[begin + 1 :]]
        assert rows[:2] == ["target weights", "drafter weights"]
        assert rows[2:6] == ["KV cache", "reserved ahead", "longest context", "requests at once"]
        assert f"{name}:   longest context   64 tokens" in told


@pytest.mark.parametrize(
    ("device", "is_asked", "is_logged"),
    [("cuda:0", False, True), ("cpu", True, True), ("cpu", False, False)],
)
def test_on_a_gpu_the_memory_plan_needs_no_flag(
    device: str,
    is_asked: bool,
    is_logged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = EngineInfo(64, 320, 4, {"peagle": 7}, {}, device, {"peagle": "memory on it\n  KV cache"})
    config = SimpleNamespace(chat_template=None, parse_special_tokens=False)
    service: Any = SimpleNamespace(name="a model", config=config, recorder=None)
    spec = EngineSpec("target", {"peagle": None}, EngineConfig(), show_memory=is_asked)
    monkeypatch.setattr(served, "Tokenizer", lambda *_, **__: None)
    lines: list[str] = []
    monkeypatch.setattr(served.logger, "info", lambda text, *values: lines.append(text % values))

    async def load() -> None:
        service.pool = SimpleNamespace(became_ready=asyncio.Event(), info=info)
        service.pool.became_ready.set()
        await served._load(service, spec, "http://here", 0.0)

    asyncio.run(load())
    plan = ["peagle: memory on it", "peagle:   KV cache"]
    assert lines[:-1] == (plan if is_logged else [])
    assert lines[-1].startswith("ready on http://here")
