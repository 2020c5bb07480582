"""POST /admin/head: who may send it, what it refuses, and streams that run across swaps."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import UserError
from peagle.serving.app import create_app
from peagle.serving.config import ServerConfig
from peagle.serving.engine_pool import EnginePool
from peagle.serving.engine_process import EngineSpec, HeadDone, HeadOrder
from peagle.serving.errors import ApiError
from peagle.serving.head_swap import HeadSwaps, resolve_folders
from peagle.serving.keys import ApiKeys, load_admin_keys
from peagle.serving.metrics import Metrics, ServedHead
from peagle.serving.service import Service
from serving.asgi import JSON, AsgiClient, guard
from serving.live import LiveServer, running, wait_for
from tests.second_head import edit_config, make_second_head

KEY, ADMIN = "a" * 24, "b" * 24
PATH = "/admin/head"
PROMPTS = [f"def f{i}(" for i in range(8)]
SPECULATIVE = SpeculativeConfig(model=str(BUNDLED_PEAGLE))
SPEC = EngineSpec(str(BUNDLED_TARGET), {"peagle": SPECULATIVE, "plain": None}, EngineConfig())


# ---- a server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that may come, and `outside`, from which none may."""
    made = tmp_path_factory.mktemp("swaps")
    shutil.copytree(BUNDLED_PEAGLE, made / "heads" / "first")
    second = make_second_head(BUNDLED_PEAGLE, made / "heads" / "second")
    for name in ("shape", "heads/shape", "heads/broken", "heads/linked"):
        shutil.copytree(second, made / name)
    (made / "shape").rename(made / "outside")
    edit_config(made / "heads" / "shape", intermediate_size=320)
    (made / "heads" / "broken" / "model.safetensors").write_bytes(b"no tensors")
    (made / "heads" / "link").symlink_to(made / "outside")
    weights = made / "heads" / "linked" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(made / "outside" / "model.safetensors")
    (made / "admin.key").write_text(ADMIN)
    (made / "admin.key").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    options = ("--admin-key-file", folder / "admin.key", "--allow-heads", folder / "heads")
    options += ("--data-parallel-size", 2, "--device", "cpu", "--dtype", "float32")
    options += ("--allowed-origin", "*", "--hang-timeout", 120, "--no-playground")
    with running(*options, warm=True, PEAGLE_API_KEY=KEY) as server:
        wait_for(lambda: len(server.engine_pids()) == 2)
        yield server


def swap(live: LiveServer, head: Path | str, key: str = ADMIN, **headers: str) -> httpx.Response:
    with live.as_holder(key) as client:
        return client.post(PATH, json={"head": str(head)}, headers=headers)


def served(live: LiveServer) -> dict[str, Any]:
    with live.as_holder(KEY) as client:
        return client.get("/v1/models").json()["data"][0]["head"]


def stream(
    live: LiveServer, prompt: str, k: int | None = None, **more: Any
) -> tuple[str, dict[str, Any]]:
    """The text of an answer and how it was drafted, from its stream."""
    body = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True, **more}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body["speculation"] = {"report": True, "num_speculative_tokens": k}
    text, usage = "", {}
    with (
        live.as_holder(KEY) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return text, usage["speculation"]


@pytest.mark.slow
def test_streams_run_across_swaps(live: LiveServer, folder: Path) -> None:
    seeded = {"temperature": 0.8, "seed": 3}
    bodies = [(prompt, {} if i % 2 else seeded) for i, prompt in enumerate(PROMPTS)]
    before = served(live)["version"]
    names = ["second", "first"] * 4
    with ThreadPoolExecutor(len(bodies)) as pool:

        def start(k: int | None) -> list[Future[Any]]:
            return [pool.submit(stream, live, prompt, k, **more) for prompt, more in bodies]

        expected = [one.result()[0] for one in start(k=0)]
        while names:
            streams = start(k=None)
            while names and not all(one.done() for one in streams):
                answer = swap(live, folder / "heads" / names[0])
                assert answer.status_code == 200, answer.text
                assert answer.json()["head"]["name"] == names.pop(0)
            assert [one.result()[0] for one in streams] == expected
    assert served(live) == {"name": "first", "version": before + 8}
    metrics = _metrics(live)
    assert metrics[f'head_info{{name="first",version="{before + 8}"}}'] == 1
    assert metrics["head_swaps_total"] == before + 7
    assert [metrics[f'engine_restarts_total{{engine="{i}"}}'] for i in (0, 1)] == [0, 0]


def _metrics(live: LiveServer) -> dict[str, float]:
    with live.as_holder(KEY) as client:
        text = client.get("/metrics").text
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.removeprefix("peagle:").rpartition(" ")
            name = re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}")
            found[name.removesuffix("{}")] = float(value)
    return found


@pytest.mark.slow
def test_both_engines_draft_with_the_new_head(live: LiveServer, folder: Path) -> None:
    """Two streams at a time run in two engines."""

    def drafts() -> list[dict[str, Any]]:
        salt = str(served(live)["version"])
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(stream, live, PROMPTS[0], cache_salt=salt) for _ in range(2)]
            return [one.result()[1] for one in both]

    assert swap(live, folder / "heads" / "first").status_code == 200
    first = drafts()
    assert swap(live, folder / "heads" / "second").status_code == 200
    second = drafts()
    assert first[0] == first[1] != second[0] == second[1]


@pytest.mark.slow
def test_what_is_refused_changes_nothing(live: LiveServer, folder: Path) -> None:
    heads, before = folder / "heads", served(live)
    for head, status, code in (
        (folder / "outside", 403, "head_not_allowed"),
        (heads / ".." / "outside", 403, "head_not_allowed"),
        (heads / "link", 403, "head_not_allowed"),
        (heads / "linked", 403, "head_not_allowed"),
        (heads / "absent", 403, "head_not_allowed"),
        (heads / "first" / "config.json", 403, "head_not_allowed"),
        ("https://example.com/head", 403, "head_not_allowed"),
        ("org/head", 403, "head_not_allowed"),
        ("heads/second", 403, "head_not_allowed"),
        ("/\0", 403, "head_not_allowed"),
        (heads / "shape", 400, "head_refused"),
        (heads / "broken", 400, "head_refused"),
    ):
        answer = swap(live, head)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), head
    assert "has intermediate_size 320" in swap(live, heads / "shape").json()["error"]["message"]
    with live.as_holder(ADMIN) as client:
        for body in ({}, {"head": 3}, {"head": str(heads / "first"), "force": True}):
            assert client.post(PATH, json=body).status_code == 400
    second = heads / "second"
    assert swap(live, second, KEY).status_code == swap(live, second, "c" * 24).status_code == 401
    assert httpx.post(live.url + PATH, json={"head": str(second)}).status_code == 401
    for headers in ({"Origin": live.url}, {"Origin": "null"}, {"Sec-Fetch-Site": "none"}):
        assert swap(live, second, **headers).json()["error"]["code"] == "origin_not_allowed"
    with live.as_holder(ADMIN) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get(PATH).status_code == 405
    assert served(live) == before


@pytest.mark.slow
def test_one_swap_at_a_time(live: LiveServer, folder: Path) -> None:
    version = served(live)["version"]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(swap, live, folder / "heads" / name) for name in ("first", "second")]
        answers = [one.result() for one in both]
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    won = next(answer.json()["head"] for answer in answers if answer.status_code == 200)
    assert served(live) == won and won["version"] == version + 1


# ---- without a server ---------------------------------------------------------------------------


def test_the_route_is_absent_by_default() -> None:
    pool: Any = None
    service = Service(ServerConfig(), "m", ("peagle",), pool, Metrics("m"))
    for keys in (ApiKeys(), ApiKeys([KEY])):
        client = guard(create_app(service), keys=keys)
        headers = {**JSON, "authorization": f"Bearer {KEY}"}
        assert client("POST", PATH, headers, b'{"head": "/x"}').status == 404
    assert "head" not in Metrics("m").render()[0].decode()


def _status(client: AsgiClient, key: str, path: str = PATH, **more: str) -> int:
    return client("POST", path, {**JSON, "authorization": f"Bearer {key}", **more}).status


def test_keys_part_administration_from_all_else() -> None:
    for keys in (ApiKeys(), ApiKeys([KEY])):
        client = guard(keys=keys, admin_keys=ApiKeys([ADMIN]), allowed_origins=["*"])

        status = partial(_status, client)
        assert (status(ADMIN), status(KEY), status("")) == (200, 401, 401)
        assert status(ADMIN, "/v1/completions") == (401 if keys else 200)
        assert status(KEY, "/v1/completions") == 200
        for more in ({"origin": "http://localhost:8000"}, {"sec-fetch-site": "same-origin"}):
            assert status(ADMIN, **more) == 403
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert client("OPTIONS", PATH, asked).status == 403
        assert status(ADMIN, **{"content-type": "text/plain"}) == 415


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    file, keys = tmp_path / "keys", ApiKeys([KEY])
    file.write_text(ADMIN)
    file.chmod(0o600)
    assert not load_admin_keys(None, (), keys)
    assert load_admin_keys(file, ("heads",), keys).salt_of(ADMIN.encode())
    for given, heads, message in (
        (file, (), "--admin-key-file was given without --allow-heads"),
        (None, ("heads",), "--allow-heads was given without --admin-key-file"),
    ):
        with pytest.raises(UserError, match=message):
            load_admin_keys(given, heads, keys)
    with pytest.raises(UserError, match="opens the other routes too"):
        load_admin_keys(file, ("heads",), ApiKeys([ADMIN]))
    with pytest.raises(UserError, match="which is no folder"):
        resolve_folders([str(file)])


@dataclass
class Engine:
    """An engine process that answers orders as told: by an error, by its end, or by success."""

    pool: EnginePool
    number: int
    answers: dict[str, str] = field(default_factory=dict)
    orders: list[str] = field(default_factory=list)
    is_ready: bool = True
    end: str = ""
    head_order: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    info: Any = True

    def send(self, order: HeadOrder) -> None:
        self.orders.append(order.action)
        answer = self.answers.get(order.action, "")
        me: Any = self
        loop = asyncio.get_running_loop()
        if answer != "ends" and order.action in ("load", "copy"):
            text = answer.removeprefix("done, then ends").removeprefix("fault ")
            done = HeadDone(text, not answer.startswith("fault"))
            loop.call_soon(self.pool._handle_message, me, done)
        if answer.endswith("ends"):
            loop.call_soon(self.pool._take_out_of_service, me, "ended by a fault", "engine_died")


@pytest.mark.parametrize(
    ("answers", "status", "orders"),
    [
        ({}, 200, ["load", "copy", "keep"]),
        ({"load": "It does not fit."}, 400, ["load", "restore"]),
        ({"copy": "fault of the copy"}, 500, ["load", "copy", "restore"]),
        ({"load": "ends"}, 500, ["load", "restore"]),
        ({"copy": "ends"}, 500, ["load", "copy", "restore"]),
        ({"copy": "done, then ends"}, 500, ["load", "copy", "restore"]),
        (None, 503, []),
    ],
    ids=str,
)
def test_all_engines_swap_or_none(
    answers: dict[str, str] | None, status: int, orders: list[str]
) -> None:
    async def run() -> tuple[int, EnginePool, list[Engine]]:
        pool = EnginePool([SPEC] * 2, Metrics("m"), max_queue=1, restart=True)
        engines = [Engine(pool, 0), Engine(pool, 1, answers or {}, is_ready=answers is not None)]
        vars(pool)["_engines"] = engines
        try:
            await pool.swap_head("/new")
        except ApiError as error:
            return error.status, pool, engines
        return 200, pool, engines

    found, pool, engines = asyncio.run(run())
    assert found == status
    assert [engine.orders for engine in engines] == [orders, orders]
    # An engine that starts later has the head that the others have.
    heads = [spec.proposers["peagle"].model for spec in pool._specs]  # type: ignore[union-attr]
    assert heads == ["/new" if status == 200 else str(BUNDLED_PEAGLE)] * 2
    assert [list(spec.proposers) for spec in pool._specs] == [["peagle", "plain"]] * 2


def test_a_client_that_leaves_stops_no_swap(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_PEAGLE, tmp_path / "heads" / "new")

    class Pool:
        async def swap_head(self, folder: str) -> None:
            await asyncio.sleep(0.05)

    async def run() -> dict[str, Any]:
        pool: Any = Pool()
        swaps = HeadSwaps(pool, resolve_folders([str(tmp_path / "heads")]), ServedHead("old"))
        path = str(tmp_path / "heads" / "new")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(swaps.swap(path), 0.01)
        with pytest.raises(ApiError, match="Another swap") as refused:
            await swaps.swap(path)
        assert refused.value.status == 409
        await asyncio.sleep(0.2)
        assert swaps.head.version == 2
        return (await swaps.swap(path))["head"]

    assert asyncio.run(run()) == {"name": "new", "version": 3}
