"""vLLM's server as a child: ready, checked, ended; on a stand-in for vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from backends.conftest import HEAD, TARGET
from peagle.backends.vllm.launch import VllmLaunch
from peagle.backends.vllm.server import VllmServer
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.client.api import ApiClient, ApiReply, NoAnswer
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

LAUNCH = VllmLaunch(TARGET, SpeculativeConfig(model=HEAD, num_speculative_tokens=4), port=0)
SRC = Path(__file__).resolve().parents[2] / "src"
LONG_S = 200.0  # a process that takes so long hangs


def is_gone(pid: int) -> bool:
    """Whether a process has ended, a zombie's remains included."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, however slow the machine is."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to be")


def post(server: VllmServer, body: dict, key: str | None = None) -> ApiReply:
    client = ApiClient(server.url, server.api_key if key is None else key)
    return client.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, **body})


def test_a_sound_server(gpu):
    said, logged = [], []
    with VllmServer(LAUNCH, gpu, progress=said.append, log=logged.append) as server:
        assert server.url.startswith("http://127.0.0.1:") and server.model == TARGET
        counts = server.counts()
        assert counts is not None and counts.num_draft_tokens == 4 * counts.num_drafts > 0
        told = json.loads(post(server, {}).body)["environment"]
        # A key of its own, which no command line has.
        assert len(server.api_key) >= 32 and server.api_key not in str(told)
        assert not any(server.api_key in word for word in server.command.argv)
        assert post(server, {}, "wrong").status == 401
        pid = server.process.pid
    assert is_gone(pid)
    assert "INFO ready" in logged and any("ready after" in text for text in said)
    server.stop()  # again does nothing


def test_without_a_key_if_none_is_wanted(gpu):
    with VllmServer(replace(LAUNCH, keys=(), speculative=None), gpu) as server:
        assert server.api_key == ""
        assert json.loads(post(server, {}, "").body)["environment"]["VLLM_API_KEY"] == ""
        assert server.counts() is None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("not told", "Skipping loading mask_hidden"),
        ("silent", "drafts after the first are not accepted"),
        ("no counters", "no counters"),
        ("no drafts", "no drafts at all"),
        ("short", "another length than K = 4"),
        ("refuses", "refuses to complete a prompt"),
        ("crash", "(?s)ended with status 3 before it was ready.*no such architecture"),
    ],
)
def test_a_server_that_does_not_draft_as_asked(gpu, monkeypatch, mode, message):
    monkeypatch.setenv("FAKE_VLLM", mode)
    server = VllmServer(LAUNCH, gpu)
    children, await_ready = [], server._await_ready
    monkeypatch.setattr(
        server, "_await_ready", lambda child: (children.append(child.pid), await_ready(child))
    )
    with pytest.raises(UserError, match=message) as error, server:
        pass
    assert "bye" not in str(error.value)  # up to the error, not what came after it
    assert all(map(is_gone, children)) and children


def test_a_start_without_parallel_drafting_is_refused(gpu):
    """The command line tampered with: head, K and all else the same."""
    server = VllmServer(LAUNCH, gpu)
    words = (word.replace(', "parallel_drafting": true', "") for word in server.command.argv)
    server.command = replace(server.command, argv=tuple(words))
    with pytest.raises(UserError, match="one token after another"), server:
        pass


def test_a_vllm_that_tells_nothing_of_its_configuration(gpu, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "no facts")
    with VllmServer(LAUNCH, gpu) as server:
        assert server.engine_facts()["has_config"] is False


def test_not_ready_in_time(gpu, monkeypatch):
    monkeypatch.setattr("peagle.backends.vllm.server.READY_S", 0)
    monkeypatch.setenv("FAKE_VLLM_LOAD_S", "60")
    with (
        pytest.raises(UserError, match="not ready after 0 s and was stopped"),
        VllmServer(LAUNCH, gpu),
    ):
        pass


def test_port_of_somebody_else(gpu):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        launch = replace(LAUNCH, port=other.getsockname()[1])
        with pytest.raises(UserError, match=r"Cannot listen on 127\.0\.0\.1 port"):
            VllmServer(launch, gpu).start()


def test_notes_are_warnings(cpu):
    drafted = SpeculativeConfig(model=str(BUNDLED_PEAGLE), num_speculative_tokens=4)
    launch = replace(LAUNCH, target=str(BUNDLED_TARGET), speculative=drafted)
    with pytest.warns(UserWarning, match="samples wrongly"), VllmServer(launch, cpu) as server:
        assert [post(server, {"temperature": t}).status for t in (1, 0)] == [400, 200]


def test_workers_of_a_server_that_does_not_end(gpu, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "stubborn")
    monkeypatch.setattr("peagle.backends.vllm.server.END_S", 0.3)
    logged = []
    with VllmServer(LAUNCH, gpu, log=logged.append) as server:
        pids = [server.process.pid, *(int(s.split()[1]) for s in logged if s.startswith("worker"))]
        assert len(pids) == 2 and not any(map(is_gone, pids))
    wait_for(lambda: all(map(is_gone, pids)))


# ---- signals ----

SCRIPT = """
import sys
from peagle.backends.vllm.launch import VllmLaunch
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.server import VllmServer
from pathlib import Path
log = lambda line: print(line, flush=True)
server = VllmServer(VllmLaunch("m", port=int(sys.argv[2]), keys=()),
                    VllmInstallation(Path(sys.argv[1]), "0.32.0"), log=log, progress=log)
sys.exit(server.run())
"""


@pytest.fixture
def process(gpu_python):
    """A process that runs a server; its URL, and what it says once it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(gpu_python), str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield started, f"http://127.0.0.1:{port}"
    started.kill()
    started.wait()
    started.stdout.close()


def until(process: subprocess.Popen, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


def ask(process: subprocess.Popen, url: str, holds: str) -> Future:
    """Send a request that vLLM holds, and wait until it does; its status, or the error."""
    body, answer = {"prompt": "x", "max_tokens": 1, "holds": holds}, Future()

    def send() -> None:
        try:
            answer.set_result(ApiClient(url).call("POST", "/v1/completions", body).status)
        except NoAnswer as error:
            answer.set_exception(error)

    threading.Thread(target=send, daemon=True).start()
    until(process, "held")
    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains(process, number):
    started, url = process
    until(started, "is served at")
    answer = ask(started, url, "until the end")
    started.send_signal(number)
    assert answer.result(LONG_S) == 200
    assert started.wait(LONG_S) == 0
    assert "ended in order" in started.stdout.read()


def test_second_signal_ends_at_once(process):
    started, url = process
    until(started, "is served at")
    answer = ask(started, url, "forever")
    started.send_signal(signal.SIGTERM)
    until(started, "asked to end")
    started.send_signal(signal.SIGTERM)
    assert isinstance(answer.exception(LONG_S), NoAnswer)
    assert started.wait(LONG_S) == 128 + signal.SIGKILL


def test_signal_while_it_loads(process):
    started, _ = process
    until(started, "starting vLLM")
    started.send_signal(signal.SIGTERM)
    assert started.wait(LONG_S) != 0
    assert "KeyboardInterrupt" not in started.stdout.read()


def test_vllm_does_not_outlive_a_killed_parent(process):
    started, url = process
    until(started, "is served at")
    started.kill()
    started.wait()

    def is_silent() -> bool:
        try:
            ApiClient(url).call("GET", "/health")
        except NoAnswer:
            return True
        return False

    wait_for(is_silent)
