"""POST /admin/head: who may send it, what it refuses, trials, and streams that run across swaps."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import UserError
from peagle.serving.app import create_app
from peagle.serving.config import ServerConfig
from peagle.serving.engine_pool import EnginePool
from peagle.serving.engine_process import EngineSpec, Failed, HeadDone, HeadOrder
from peagle.serving.errors import ApiError
from peagle.serving.head_swap import HeadSwaps, resolve_folders
from peagle.serving.keys import ApiKeys, load_admin_keys
from peagle.serving.metrics import Metrics, ServedHead
from peagle.serving.server import serve
from peagle.serving.service import Service
from serving.asgi import JSON, AsgiClient, guard
from serving.live import HTTP, LiveServer, running, wait_for
from tests.second_head import make_second_head, permuted

KEY, ADMIN = "a" * 24, "b" * 24
PATH = "/admin/head"
PROPOSERS = {"peagle": SpeculativeConfig(model=str(BUNDLED_PEAGLE)), "plain": None}
SPEC = EngineSpec(str(BUNDLED_TARGET), PROPOSERS, EngineConfig())


# ---- a server ----


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that may come; beside the folder is one that may not."""
    made = tmp_path_factory.mktemp("swaps") / "heads"
    shutil.copytree(BUNDLED_PEAGLE, made / "first")
    outside = make_second_head(BUNDLED_PEAGLE, made.parent / "outside")
    for name in ("second", "broken", "linked"):
        shutil.copytree(outside, made / name)
    make_second_head(BUNDLED_PEAGLE, made / "worse", permuted)
    (made / "broken" / "model.safetensors").write_bytes(b"no tensors")
    (made / "link").symlink_to(outside)
    (made / "linked" / "more").symlink_to(outside / "README.md")
    return made


@pytest.fixture(scope="module")
def live(heads: Path) -> Iterator[LiveServer]:
    key = heads.parent / "admin.key"
    key.write_text(ADMIN)
    options = ("--admin-key-file", key, "--allow-heads", heads, "--data-parallel-size", 2)
    options += ("--device", "cpu", "--dtype", "float32", "--hang-timeout", 120, "--no-playground")
    with running(*options, warm=True) as server:
        wait_for(lambda: len(server.engine_pids()) == 2)
        yield server


AUTHORIZED = {"Authorization": f"Bearer {ADMIN}"}


def swap(live: LiveServer, head: Path | str, **more: Any) -> httpx.Response:
    return HTTP.post(live.url + PATH, json={"head": str(head), **more}, headers=AUTHORIZED)


def told(live: LiveServer) -> dict[str, Any]:
    return HTTP.get(live.url + PATH, headers=AUTHORIZED).json()


def served(live: LiveServer) -> dict[str, Any]:
    return HTTP.get(f"{live.url}/v1/models").json()["data"][0]["head"]


def stream(live: LiveServer, prompt: str, k: int | None = None) -> str:
    """The text of an answer; half of the prompts ask for seeded samples."""
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True, "seed": 3}
    body["temperature"] = 0.8 * (int(prompt[-2]) % 2)
    body["speculation"] = {"num_speculative_tokens": k}
    text = ""
    with HTTP.stream("POST", f"{live.url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in chunk["choices"])
    return text


@pytest.mark.slow
def test_streams_run_across_swaps(live: LiveServer, heads: Path) -> None:
    prompts, names = [f"def f{i}(" for i in range(8)], ["second", "first"] * 4
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(partial(stream, live, k=0), prompts))
        while names:
            streams = [pool.submit(stream, live, prompt) for prompt in prompts]
            while names and not all(one.done() for one in streams):
                answer = swap(live, heads / names.pop(0))
                assert answer.status_code == 200, answer.text
            assert [one.result() for one in streams] == expected
    assert served(live) == answer.json()["head"] == {"name": "first", "version": 9}
    metrics = live.metrics()
    assert metrics["peagle:head_swaps_total{}"] == 8
    assert metrics['peagle:head_info{,name="first",version="9"}'] == 1


@pytest.mark.slow
def test_what_is_refused_changes_nothing(live: LiveServer, heads: Path) -> None:
    before = served(live)
    outside: list[Path | str] = ["https://example.com/head", "org/head", "heads/second", "/\0"]
    outside += [heads / ".." / "outside", heads / "absent", heads / "first" / "config.json"]
    outside += [heads / "link", heads / "linked"]
    for head in outside:
        error = swap(live, head).json()["error"]
        assert error["code"] == "head_not_allowed", head
    refused = swap(live, heads / "broken")
    assert refused.status_code == 400 and "not readable" in refused.json()["error"]["message"]
    assert HTTP.post(live.url + PATH, json={"head": str(heads / "second")}).status_code == 401
    mistakes: dict[str, Any] = {"trial": 3, "trial.requests": {"requests": 0}}
    mistakes |= {"trial.share": {"share": 1}, "trial.days": {"days": 2}}
    for param, trial in mistakes.items():
        error = swap(live, heads / "second", trial=trial).json()["error"]
        assert error["param"] == param and param in error["message"], error
    assert HTTP.get(live.url + PATH).status_code == 401
    assert served(live) == before and told(live) == {"head": before, "trial": None}


@pytest.mark.slow
def test_a_worse_head_is_rolled_back(live: LiveServer, heads: Path) -> None:
    """Outputs stay the same, while the heads take turns."""
    before, rollbacks = served(live), live.metrics()["peagle:head_rollbacks_total{}"]
    prompts = [f"def f{i}(" for i in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(partial(stream, live, k=0), prompts))
        answer = swap(live, heads / "worse", trial={"requests": 200}).json()
        assert answer["head"]["name"] == "worse" and answer["trial"]["state"] == "running"
        assert swap(live, heads / "second").json()["error"]["code"] == "trial_under_way"
        while (trial := told(live)["trial"])["state"] == "running":
            assert list(pool.map(partial(stream, live), prompts)) == expected
    assert trial["state"] == "rolled back" and "It drafts worse" in trial["reason"]
    assert trial["interval"][1] < 0 and 20 <= trial["new"]["requests"] < 200
    assert trial["new"]["acceptance_length"] < trial["old"]["acceptance_length"]
    assert served(live) == told(live)["head"] == before
    assert live.metrics()["peagle:head_rollbacks_total{}"] == rollbacks + 1
    assert "the trial of the head" in live.text


@pytest.mark.slow
def test_an_engine_that_restarts_ends_a_trial(live: LiveServer, heads: Path) -> None:
    before = served(live)
    assert swap(live, heads / "second", trial={}).json()["head"]["name"] == "second"
    os.kill(live.engine_pids()[-1], signal.SIGKILL)
    wait_for(lambda: told(live)["trial"]["state"] == "rolled back")
    assert "ended by a fault during the trial" in told(live)["trial"]["reason"]
    wait_for(lambda: len(live.engine_pids()) == 3)
    assert served(live) == before and stream(live, "def f0(") == stream(live, "def f0(", k=0)


# ---- without a server ----


def status(client: AsgiClient, key: str, path: str = PATH, **more: str) -> int:
    headers = {**JSON, "authorization": f"Bearer {key}", **more}
    return client("POST", path, headers, b'{"head": "/x"}').status


def test_the_route_is_absent_by_default() -> None:
    pool: Any = None
    app = create_app(Service(ServerConfig(), "m", ("peagle",), pool, Metrics("m")))
    for keys in (ApiKeys(), ApiKeys([KEY])):
        assert status(guard(app, keys=keys), KEY) == 404
    assert "head" not in Metrics("m").render()[0].decode()


@pytest.mark.parametrize("keys", [ApiKeys(), ApiKeys([KEY])], ids=len)
def test_keys_part_administration_from_all_else(keys: ApiKeys) -> None:
    client = guard(keys=keys, admin_keys=ApiKeys([ADMIN]), allowed_origins=["*"])
    assert [status(client, key) for key in (ADMIN, KEY, "c" * 24, "")] == [200, 401, 401, 401]
    assert status(client, ADMIN, "/v1/completions") == (401 if keys else 200)
    for more in ({"origin": "http://localhost:8000"}, {"sec-fetch-site": "same-origin"}):
        assert status(client, ADMIN, **more) == 403
    assert status(client, ADMIN, **{"content-type": "text/plain"}) == 415
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert client("OPTIONS", PATH, asked).status == 403


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(ADMIN)
    for given, folders, message in (
        (file, (), "--admin-key-file was given; expected"),
        (None, ("heads",), "--allow-heads was given; expected"),
        (file, ("heads",), "opens the other routes too"),
    ):
        with pytest.raises(UserError, match=message):
            load_admin_keys(given, folders, ApiKeys([ADMIN]))


def test_a_server_that_would_swap_no_head_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnginePool, "start", Mock(side_effect=AssertionError("it starts")))
    config = ServerConfig(port=0, allow_heads=(str(tmp_path),))
    several = SpeculativeConfig(model=str(BUNDLED_PEAGLE), corrections={"sql": "sql.st"})
    for head, message in ((None, "drafts without a head"), (several, "and --correction were")):
        spec = replace(SPEC, proposers={"first": head})
        with pytest.raises(UserError, match=message):
            serve(config, spec, ApiKeys([]), ApiKeys([ADMIN]), name="m")


@pytest.mark.parametrize(
    ("answers", "error", "orders"),
    [
        ({}, None, ["load", "copy", "keep"]),
        ({"load": HeadDone("It does not fit.")}, 400, ["load", "restore"]),
        ({"copy": HeadDone("a fault", False)}, 500, ["load", "copy", "restore"]),
        ({"copy": "ends"}, 500, ["load", "copy", "restore"]),
        ({"copy": "is done and ends"}, 500, ["load", "copy", "restore"]),
        (None, 503, []),
    ],
    ids=str,
)
def test_all_engines_swap_or_none(
    answers: dict[str, Any] | None, error: int | None, orders: list[str]
) -> None:
    given: list[list[str]] = [[], []]

    async def run() -> EnginePool:
        pool = EnginePool([SPEC] * 2, Metrics("m"), max_queue=1, restart=True)

        def send(number: int, order: HeadOrder) -> None:
            given[number].append(order.action)
            engine = engines[number]
            answer = (answers or {}).get(order.action, HeadDone()) if number else HeadDone()
            if answer != "ends":
                done = HeadDone() if answer == "is done and ends" else answer
                pool._handle_message(engine, done)
            if isinstance(answer, str):
                pool._take_out_of_service(engine, "ended by a fault", "engine_died")

        facts = {"end": "", "info": True, "head_order": None, "streams": {}}
        facts["is_ready"] = answers is not None
        engines: list[Any] = [
            SimpleNamespace(number=i, send=partial(send, i), **facts) for i in range(2)
        ]
        vars(pool)["_engines"] = engines
        with nullcontext() if error is None else pytest.raises(ApiError) as refused:
            pool.keep_head(await pool.try_head("/new"), "/new")
        assert refused is None or refused.value.status == error
        return pool

    pool = asyncio.run(run())
    assert given == [orders, orders]
    # An engine that starts later has the head that the others have.
    for spec in pool._specs:
        (_, speculative), plain = spec.proposers.items()
        assert plain == ("plain", None) and speculative is not None
        assert speculative.model == (str(BUNDLED_PEAGLE) if error else "/new")


@pytest.mark.parametrize("loaded", [0, 1])
def test_a_head_gone_at_a_restart_ends_no_other_engine(loaded: int) -> None:
    async def ends() -> bool:
        pool = EnginePool([SPEC] * 2, Metrics("m"), max_queue=1, restart=True)
        pool._loaded.add(loaded)
        engine: Any = SimpleNamespace(number=1)
        pool._handle_message(engine, Failed("gone", True))
        return pool.failure.done()

    assert asyncio.run(ends()) == (loaded == 0)


def test_one_swap_at_a_time_which_no_client_stops(tmp_path: Path) -> None:
    head = tmp_path / "new"
    shutil.copytree(BUNDLED_PEAGLE, head)

    async def run() -> None:
        allowed = asyncio.Event()
        keep = {"keep_head": lambda *_: None}
        pool: Any = SimpleNamespace(try_head=lambda _: allowed.wait(), **keep)
        swaps = HeadSwaps(pool, resolve_folders([str(tmp_path)]), ServedHead("old"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(swaps.swap(str(head)), 0.01)
        with pytest.raises(ApiError, match="Another swap") as refused:
            await swaps.swap(str(head))
        assert refused.value.status == 409 and swaps.head.version == 1
        allowed.set()
        while swaps.head.version == 1:
            await asyncio.sleep(0.01)
        facts = await swaps.swap(str(head))
        assert facts == {"head": {"name": "new", "version": 3}, "trial": None}

    asyncio.run(run())
