"""The guard inside vLLM's process: who may ask, and how much."""

import ast
import asyncio
import json
import os
import subprocess
import sys
import time
from hashlib import sha256
from types import SimpleNamespace

import pytest

from peagle.backends.vllm.command import INSIDE, VllmLaunch, vllm_command
from peagle.backends.vllm.installation import VllmInstallation

sys.path.insert(0, str(INSIDE))
from peagle_vllm_guard import ENGINE_PATH, Guard, _is_alive, facts_of

KEY = "0123456789abcdef0123456789abcdef"
JSON = {"Content-Type": "application/json"}
RULES = {
    "hosts": ["localhost", "127.0.0.1", "[::1]"],
    "origins": [],
    "max_body_bytes": 1000,
    "keys": [],
    "greedy_only": False,
}
KEYS = [sha256(key.encode()).hexdigest() for key in ("another-key-of-16-letters", KEY)]


class Echo:
    """An application that answers with the body it got."""

    state = SimpleNamespace(vllm_config=None)

    async def __call__(self, scope, receive, send):
        body = (await receive()).get("body", b"")
        self.disconnected = (await receive())["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def ask(path="/v1/completions", body=None, headers=None, method="POST", parts=1, **rules):
    """Status and body of an answer; the body is sent in so many parts."""
    body = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"Host": "127.0.0.1:8000"} | (JSON if body else {}) | (headers or {})
    if body and parts == 1:
        all_headers.setdefault("Content-Length", str(len(body)))
    elif body:
        all_headers.setdefault("Transfer-Encoding", "chunked")
    step = -(-len(body) // parts) or 1
    chunks = [body[at : at + step] for at in range(0, max(1, len(body)), step)]
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": at < len(chunks) - 1}
        for at, chunk in enumerate(chunks)
    ]
    sent = []

    async def receive():
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers_ = [
        (name.lower().encode(), value.encode()) for name, value in all_headers.items() if value
    ]
    app = Echo()
    scope = {"type": "http", "method": method, "path": path, "headers": headers_, "app": app}
    asyncio.run(Guard(app, {**RULES, **rules})(scope, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def test_passes_bodies_on_whole():
    body = {"prompt": "x" * 200}
    for parts in (1, 2, 7, 200):
        assert ask(body=body, parts=parts) == (200, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("localhost.", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("", 400),
    ],
)
def test_host(host, status):
    """A web page whose name is turned to 127.0.0.1 must not reach it."""
    assert ask(body={}, headers={"Host": host})[0] == status
    if status == 403:
        assert ask(body={}, headers={"Host": host}, hosts=["*"])[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "http://127.0.0.1:9000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_web_pages_of_other_sites(headers, status):
    assert ask(body={"a": 1}, headers=headers)[0] == status


def test_allowed_origin():
    headers = {"Origin": "https://chat.example"}
    assert ask(body={}, headers=headers, origins=["https://chat.example/"])[0] == 200
    assert ask(body={}, headers=headers, origins=["*"])[0] == 200
    assert ask(body={}, headers=headers, origins=["https://other.example"])[0] == 403


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        ("Bearer another-key-of-16-letters", 200),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY}x", 401),
        ("Bearer", 401),
        ("", 401),
    ],
)
def test_keys(authorization, status):
    headers = {"Authorization": authorization}
    for path in ("/v1/models", "/metrics", "/invocations", "/tokenize", ENGINE_PATH):
        assert ask(path, headers=headers, method="GET", keys=KEYS)[0] == status
    for path in ("/health", "/ping"):
        assert ask(path, method="GET", keys=KEYS)[0] == 200


def test_sizes_of_bodies():
    body = b"[" + b"1" * 998 + b"]"
    assert ask(body=body)[0] == 200
    for parts in (1, 3):
        status, answer = ask(body=body + b" ", parts=parts)
        assert status == 413 and b"expected at most 1000" in answer
    assert ask(body=b"1", headers={"Content-Length": "1e3"})[0] == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"temperature": 0}, 200),
        ({"temperature": 0.0, "prompt": "x"}, 200),
        ({"prompt": "x"}, 200),
        ({"temperature": None}, 200),
        ({"temperature": 0.7}, 400),
        ({"temperature": 1}, 400),
        ({"sampling_params": {"temperature": 2}}, 400),
        ([1, 2], 200),
        (b"not json", 200),
    ],
)
def test_greedy_only(body, status):
    assert ask(body=body, greedy_only=True)[0] == status
    assert ask(body=body)[0] == 200


def test_websockets_are_closed():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(Guard(Echo(), RULES)(scope, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_engine_facts():
    config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=4, parallel_drafting=True
        ),
    )
    told = facts_of(config)
    assert told["speculative"] == vars(config.speculative_config)
    assert told["has_config"] is True and told["model_runner_v2"] is False
    assert facts_of(None) == {"has_config": False, "speculative": None, "model_runner_v2": None}
    assert json.loads(ask(ENGINE_PATH, method="GET")[1])["has_config"] is False


def test_rules_come_from_the_launch(monkeypatch):
    launch = VllmLaunch("m", keys=(KEY,), max_body_bytes=7)
    command = vllm_command(launch, VllmInstallation(INSIDE, "0.32.0"))
    monkeypatch.setenv("PEAGLE_VLLM_GUARD", command.environment["PEAGLE_VLLM_GUARD"])
    guard = Guard(Echo())
    assert guard.max_body_bytes == 7 and "localhost" in guard.hosts and "*" not in guard.hosts
    assert guard.keys == [sha256(KEY.encode()).digest()]


def test_whose_end_is_waited_for():
    assert _is_alive(os.getpid()) and _is_alive(1)
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()  # it has ended, and nobody has asked how
    for _ in range(100):
        if not _is_alive(child.pid):
            break
        time.sleep(0.05)
    assert not _is_alive(child.pid)
    child.wait()
    child.stdout.close()
    assert not _is_alive(child.pid)


def test_standard_library_only():
    """vLLM may live in an environment without peagle."""
    allowed = {*sys.stdlib_module_names, "vllm", "peagle_vllm_guard"}
    for file in INSIDE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif not isinstance(node, ast.Import):
                continue
            assert {name.partition(".")[0] for name in names} <= allowed, (file, names)
