"""The guard inside vLLM's process: its own parts, beside the checks of peagle's server.

Those checks are the same code; tests/serving/test_security*.py test them before both.
"""

import ast
import json
import os
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.backends.vllm.command import MIDDLEWARE, MODULE_FOLDER, vllm_command
from peagle.backends.vllm.facts import ENGINE_PATH, vllm_facts
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.serving.keys import ApiKeys
from peagle.serving.vllm_guard import Guard, _is_alive
from serving.asgi import JSON, LIMIT, AsgiClient, Reply, echo

KEY = "0123456789abcdef0123456789abcdef"
RULES: dict[str, Any] = {
    "allowed_hosts": ["localhost", "127.0.0.1", "[::1]"],
    "allowed_origins": [],
    "max_body_bytes": LIMIT,
    "keys": [],
    "greedy_only": False,
}
PEAGLE = Path(__file__).resolve().parents[2] / "src" / "peagle"


def ask(body: Any, path: str = "/v1/completions", **rules: Any) -> Reply:
    """Return the reply to a client that sends `body`, as JSON or as bytes."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return AsgiClient(Guard(echo, {**RULES, **rules}))("POST", path, JSON, sent)


# ---- greedy decoding only ----

GREEDY = [
    {"temperature": 0},
    {"temperature": 0.0, "prompt": "x"},
    {"temperature": -0.0},
    {"prompt": "x"},
    {"temperature": None},
    {"sampling_params": None},
    {"sampling_params": {"temperature": 0}},
    # A tool that has a temperature is no request for one.
    {"tools": [{"function": {"parameters": {"properties": {"temperature": {"type": "number"}}}}}]},
    {"messages": [{"role": "user", "content": '{"temperature": 1}'}]},
]
SAMPLING = [
    {"temperature": 0.7},
    {"temperature": 1},
    {"temperature": -1},
    {"temperature": 1e-9},
    {"temperature": "0.7"},
    {"temperature": "0"},
    {"temperature": True},
    {"temperature": False},
    {"temperature": [0]},
    {"temperature": float("nan")},
    {"sampling_params": {"temperature": 2}},
    {"sampling_params": {"temperature": "2"}},
    {"sampling_params": '{"temperature": 2}'},
    {"sampling_params": [{"temperature": 2}]},
    {"extra_body": {"temperature": 2}},
]


@pytest.mark.parametrize("body", GREEDY, ids=str)
def test_greedy_requests_pass(body: dict[str, Any]) -> None:
    answer = ask(body, greedy_only=True)
    assert answer.status == 200 and answer.body == b"got " + json.dumps(body).encode()


@pytest.mark.parametrize("body", SAMPLING, ids=str)
def test_sampling_is_refused_where_it_is_wrong(body: dict[str, Any]) -> None:
    """vLLM turns "0.7" and True into numbers."""
    answer = ask(body, greedy_only=True)
    assert answer.status == 400 and ask(body).status == 200
    assert answer.error["param"].split(".")[0] == next(iter(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": 0.7, "temperature": 0}',
        b'{"temperature": 0, "temperature": 0.7}',
        b'{"temperature": 0.7, "\\u0074emperature": 0}',
        b'{"sampling_params": {"temperature": 1, "temperature": 0}}',
        b'{"sampling_params": {}, "sampling_params": {"temperature": 0}}',
        b"not json",
        b"",
        b"[]",
        b'"temperature"',
        '{"temperature": 0.7}'.encode("utf-16"),
        b'{"a": ' * 300 + b"1" + b"}" * 100,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_could_be_read_in_two_ways_is_refused(body: bytes) -> None:
    answer = ask(body, greedy_only=True, max_body_bytes=5000)
    assert answer.status == 400 and "expected" in answer.error["message"]


def test_a_body_nested_deeper_than_python_reads_is_refused() -> None:
    body = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    assert ask(body, greedy_only=True, max_body_bytes=len(body)).status == 400


@pytest.mark.parametrize("root", ["", "/api"])
def test_routes_of_a_greedy_server(root: str) -> None:
    def status(path: str, body: Any, method: str = "POST") -> int:
        server = AsgiClient(Guard(echo, {**RULES, "greedy_only": True}))
        server.app = under(server.app, root)
        return server(method, root + path, JSON, json.dumps(body).encode()).status

    sampling = {"temperature": 1}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations"):
        assert status(path, {}) == 200 and status(path, sampling) == 400
    for path in ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/resp_1/cancel"):
        assert status(path, sampling) == 200
    for path in ("/v1/audio/transcriptions", "/generative_scoring", "/v1/completions/", "/new"):
        assert status(path, {}) == 403 and status(path, {}, "GET") == 200
    # vLLM's own parameters: without a temperature, it is 1.
    bare = "/inference/v1/generate"
    assert status(bare, {"token_ids": [1], "sampling_params": {"temperature": 0}}) == 200
    for params in ({}, None, {"max_tokens": 5}, {"temperature": None}, {"temperature": 1}):
        assert status(bare, {"token_ids": [1], "sampling_params": params}) == 400
    assert status(bare, {"token_ids": [1], "temperature": 0}) == 400


def under(app: Any, root: str) -> Any:
    """Return an application whose paths begin with `root`, as with vLLM's --root-path."""

    async def told(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": root}, receive, send)

    return told


# ---- its own route, and the end of who started it ----


def test_engine_facts() -> None:
    config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=4, parallel_drafting=True
        ),
    )
    told = vllm_facts(config)
    assert told["speculative"] == vars(config.speculative_config)
    assert told["has_config"] is True and told["model_runner_v2"] is False
    assert vllm_facts(None) == {"has_config": False, "speculative": None, "model_runner_v2": None}
    answer = AsgiClient(Guard(echo, RULES))(path=ENGINE_PATH)
    assert answer.status == 200 and json.loads(answer.body)["has_config"] is False
    locked = AsgiClient(Guard(echo, {**RULES, "keys": [sha256(KEY.encode()).hexdigest()]}))
    assert locked(path=ENGINE_PATH).status == 401


def test_rules_come_from_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = VllmLaunch("m", keys=(KEY,), max_body_bytes=7, allowed_origins=("https://a.b/",))
    command = vllm_command(launch, VllmInstallation(MODULE_FOLDER, "0.32.0"))
    assert KEY not in str(command.environment.values())
    monkeypatch.setenv("PEAGLE_VLLM_GUARD", command.environment["PEAGLE_VLLM_GUARD"])
    guard = Guard(echo)
    assert guard.guarded.keys.digests == ApiKeys([KEY]).digests and not guard.greedy_only
    server, key = AsgiClient(guard), {"authorization": f"Bearer {KEY}"}
    assert server().status == 401 and server(headers=key).status == 200
    assert server(headers={**key, "host": "evil.example"}).status == 403
    assert server(headers={**key, "origin": "https://a.b"}).status == 200
    assert server(headers={**key, "origin": "https://c.d"}).status == 403
    assert server("POST", headers={**key, **JSON}, body=b"x" * 8).status == 413


def test_whose_end_is_waited_for() -> None:
    assert _is_alive(os.getpid()) and _is_alive(1)
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # it has ended, and nobody has asked how
    for _ in range(6000):
        if not _is_alive(child.pid):
            break
        time.sleep(0.01)
    assert not _is_alive(child.pid)
    child.wait()
    child.stdout.close()
    assert not _is_alive(child.pid)


# ---- in an environment without peagle and its packages ----

ALONE = """
import asyncio, importlib, json, os, sys
sys.path.insert(0, sys.argv[1])
module, _, name = sys.argv[2].rpartition(".")
Guard = getattr(importlib.import_module(module), name)

async def app(scope, receive, send):
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def status(guard, headers, parts):
    sent = []
    async def receive():
        while parts:
            part = parts.pop(0)
            if isinstance(part, str):
                return {"type": "http.request", "body": part.encode(), "more_body": bool(parts)}
            await asyncio.sleep(part)
        return {"type": "http.disconnect"}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
             "headers": [(n.encode(), v.encode()) for n, v in headers.items()]}
    await guard(scope, receive, send)
    return sent[0]["status"]

rules, cases = json.loads(sys.argv[3])
told = [asyncio.run(status(Guard(app, rules), headers, parts)) for headers, parts in cases]
files = {n: getattr(m, "__file__", None) for n, m in sys.modules.items()}
outside = sorted(n for n in files if n.partition(".")[0] not in sys.stdlib_module_names)
print(json.dumps({"told": told, "outside": {name: files[name] for name in outside}}))
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Results of the guard in an interpreter without site-packages and without our variables."""
    rules = {**RULES, "keys": [sha256(KEY.encode()).hexdigest()], "greedy_only": True}
    rules["body_timeout_s"] = 0.2
    good = {"host": "localhost:8000", "authorization": f"Bearer {KEY}", **JSON}
    body = '{"temperature": 0}'
    cases = [
        (good, [body]),
        ({**good, "host": "localhost:evil.com"}, [body]),
        ({**good, "host": "evil.com"}, [body]),
        ({**good, "origin": "http://localhost:9000"}, [body]),
        ({**good, "authorization": "Bearer x"}, [body]),
        ({**good, "content-type": "text/plain"}, [body]),
        ({**good, "content-length": str(LIMIT + 1)}, [body]),
        (good, ["x" * LIMIT, "x" * LIMIT]),
        (good, ["{", 60.0, "}"]),
        (good, ['{"temperature": "0.7"}']),
    ]
    argv = [sys.executable, "-I", "-S", "-c", ALONE, str(MODULE_FOLDER), MIDDLEWARE]
    ran = subprocess.run(
        [*argv, json.dumps([rules, cases])], capture_output=True, text=True, timeout=300, env={}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_it_guards_without_any_package(alone: dict[str, Any]) -> None:
    assert alone["told"] == [200, 400, 403, 403, 401, 415, 413, 413, 408, 400]


def test_all_that_it_imports_is_this_peagle(alone: dict[str, Any]) -> None:
    files = {name: file for name, file in alone["outside"].items() if name != "__main__"}
    assert {"peagle", "peagle.serving.security"} <= set(files)
    assert {name.partition(".")[0] for name in files} == {"peagle"}
    assert all(Path(file).is_relative_to(PEAGLE) for file in files.values())


def test_python_3_10_reads_it(alone: dict[str, Any]) -> None:
    """vLLM runs on Python 3.10 to 3.13, peagle on 3.11 and newer."""
    files = [Path(file) for name, file in alone["outside"].items() if name != "__main__"]
    newer = {"asyncio.timeout", "asyncio.TaskGroup", "asyncio.Runner", "datetime.UTC"}
    newer |= {"typing.Self", "typing.assert_never", "enum.StrEnum", "hashlib.file_digest"}
    for file in [*files, *MODULE_FOLDER.glob("*.py")]:
        tree = ast.parse(file.read_text(), feature_version=(3, 10))
        for node in ast.walk(tree):
            used = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom):
                used = {f"{node.module}.{alias.name}" for alias in node.names}
            assert not used & newer, (file, used & newer)


def test_an_older_peagle_of_vllms_environment_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "peagle").mkdir()
    (tmp_path / "peagle" / "__init__.py").write_text("raise RuntimeError('an older one')")
    code = "import peagle.serving.security as s, peagle; print(s.__file__, peagle.__version__)"
    path = os.pathsep.join([str(MODULE_FOLDER), str(tmp_path)])
    environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True
    )
    assert ran.stdout.startswith(str(PEAGLE)), ran.stderr
