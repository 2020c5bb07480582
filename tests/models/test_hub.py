"""Fetching from a hub: what is fetched, and every way in which that fails."""

import errno
import io
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from peagle.errors import CheckpointError
from peagle.models.hub import require_connection
from peagle.models.loading import check_weights, resolve_model
from tests.fake_hub import TINY, WEIGHTS, FakeHub, message_of, read_folder, refused, silent_hub


def cached(tmp_path: Path) -> set[str]:
    """Names of the files in the snapshots of the cache."""
    return {path.name for path in tmp_path.glob("home/hub/*/snapshots/**/*") if path.is_file()}


# ---- what is fetched ----


def test_weights_tokenizer_and_configuration_are_fetched_and_nothing_else(
    hub: FakeHub, target_folder: Path, tmp_path: Path
) -> None:
    wanted = {
        **read_folder(target_folder),
        "chat_template.jinja": b"{{ messages }}",
        "special_tokens_map.json": b"{}",
        "vocab.json": b'{"a": 0}',
        "merges.txt": b"#version",
        "tokenizer.model": b"x",
    }
    others = {
        "pytorch_model.bin": b"\x80\x04.",
        "training_args.bin": b"\x80\x04.",
        "modeling_tiny.py": b"raise SystemExit",
        "README.md": b"# tiny",
        ".gitattributes": b"",
        "consolidated.safetensors": b"other layout",
        "original/model.safetensors": b"other layout",
        "original/config.json": b"{}",
        "onnx/model.onnx": b"x",
    }
    hub.models[TINY].commit({**wanted, **others})
    folder = resolve_model(TINY)
    assert cached(tmp_path) == hub.fetched() == set(wanted)
    assert read_folder(folder) == wanted
    assert folder.is_relative_to(tmp_path / "home" / "hub")


def test_a_second_start_fetches_nothing(hub: FakeHub, tmp_path: Path) -> None:
    folder = resolve_model(TINY)
    hub.requests.clear()
    assert resolve_model(TINY) == folder
    assert hub.fetched() == set()
    assert {request.path for request in hub.requests} == {f"/api/models/{TINY}/revision/main"}
    assert not list(tmp_path.rglob(".peagle-unchecked"))


def test_nothing_is_told_about_this_process(hub: FakeHub) -> None:
    resolve_model(TINY)
    assert {request.path.split("/")[1] for request in hub.requests} == {"api", "org", "cdn"}
    assert not any("harness" in request.path for request in hub.requests)
    assert not any("torch" in request.user_agent for request in hub.requests)
    assert constants.HF_HUB_DISABLE_TELEMETRY is False


def test_revisions(hub: FakeHub, target_folder: Path) -> None:
    model, files = hub.models[TINY], read_folder(target_folder)
    commits = {
        name: model.commit({**files, "merges.txt": name.encode()}, name) for name in ("v1", "v2")
    }
    model.names["main"] = commits["v2"]

    def found(name: str, revision: str | None = None) -> str:
        return (resolve_model(name, revision) / "merges.txt").read_text()

    assert found(TINY) == found(TINY, "main") == "v2"
    assert found(TINY, "v1") == found(f"{TINY}@v1") == found(f"{TINY}@v1", "v1") == "v1"
    assert found(f"{TINY}@{commits['v1']}") == "v1"
    message = refused(f"{TINY}@v1", "v2")
    assert "The revision of 'org/tiny' is given twice, as 'v1' and as 'v2'" in message
    for name, revision in ((f"{TINY}@v9", None), (TINY, "v9"), (TINY, "f" * 40)):
        message = refused(name, revision)
        expected = revision or "v9"
        assert f"The target model 'org/tiny' has no revision {expected!r} on {hub.url}" in message
        assert "a branch, a tag or a commit" in message


def test_a_branch_that_moved_is_followed(hub: FakeHub, target_folder: Path) -> None:
    first = resolve_model(TINY)
    hub.models[TINY].commit({**read_folder(target_folder), "merges.txt": b"new"})
    second = resolve_model(TINY)
    assert first != second
    assert (second / "merges.txt").read_text() == "new"
    assert "merges.txt" in hub.fetched()


def test_the_token_goes_to_the_hub_only(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models[TINY].gated = hub.models[TINY].private = True
    monkeypatch.setenv("HF_TOKEN", hub.token)
    resolve_model(TINY)
    tokens = {(r.path.startswith("/cdn/"), r.token) for r in hub.requests}
    assert tokens == {(False, hub.token), (True, "")}


def test_offline_the_cache_is_used(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model(TINY)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(TINY) == folder
    assert resolve_model(f"{TINY}@{folder.name}") == folder
    assert hub.requests == [] and caplog.records == []


def test_without_the_hub_the_cache_is_used_and_that_is_said(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model(TINY)
    hub.status = 503
    assert resolve_model(TINY) == folder
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(TINY) == folder
    first, second = (record.getMessage() for record in caplog.records)
    assert f"no access to {hub.url} (HfHubHTTPError), using the copy in the cache" in first
    assert "no access to http://127.0.0.1:9 (ConnectionRefusedError)" in second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("hidden", [False, True])
def test_progress_is_for_terminals(
    hub: FakeHub,
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    hidden: bool,
) -> None:
    hub.add("org/other", target_folder)
    resolve_model(TINY)
    assert capfd.readouterr() == ("", "")
    if hidden:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        module = sys.modules["huggingface_hub.utils.tqdm"]
        monkeypatch.setattr(module, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    resolve_model("org/other")
    assert ("Fetching" in terminal.getvalue()) is not hidden
    shown = terminal.getvalue()
    resolve_model("org/other")
    assert terminal.getvalue() == shown, "nothing to fetch, nothing to show"
    assert capfd.readouterr().out == ""


# ---- access ----


def test_a_private_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models[TINY].private = True
    for name in (TINY, "org/ghost"):
        message = refused(name)
        assert (
            f"The target model {name!r} is neither a folder here nor a model that {hub.url} shows "
            "to those without a token."
        ) in message
        assert f"Check the spelling (./{name} is always a folder)" in message
        assert "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refused()
    assert f"{hub.url} refuses the token in use (status 401). Set HF_TOKEN to a valid" in message
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert resolve_model(TINY).is_dir()
    assert "shows to the token in use" in refused("org/ghost")


def test_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.models[TINY].gated = True
    message = refused()
    assert f"is gated on {hub.url} and closed to those without a token" in message
    assert f"Ask for access at {hub.url}/org/tiny, then set HF_TOKEN" in message
    assert cached(tmp_path) == set()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert resolve_model(TINY).is_dir()


def test_a_hub_out_of_order(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 503
    assert f"{hub.url} answers with status 503" in refused()
    hub.status = 429
    assert f"{hub.url} answers with status 429" in refused()
    hub.status = 403
    assert f"{hub.url} refuses those without a token (status 403)" in refused()
    hub.status = 200  # as a login page of a network does
    assert f"{hub.url} does not answer as a hub does" in refused()
    for endpoint, problem in (
        ("http://127.0.0.1:9", "cannot be reached: "),
        ("127.0.0.1:9", "cannot be reached: Request URL is missing"),
    ):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        message = refused()
        assert "'org/tiny' is neither a folder here nor complete in the cache" in message
        assert f"{endpoint} {problem}" in message
        assert "Check the network and HF_ENDPOINT, or name a folder." in message
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused()
    assert "'org/tiny' is neither a folder here nor complete in the cache" in message
    assert "HF_HUB_OFFLINE forbids fetching it" in message
    assert hub.requests == []


# ---- no connection ----


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address on this machine that gives no connection."""
    with silent_hub() as address:
        yield address


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time for a connection, made short."""
    monkeypatch.setattr("peagle.models.hub.CONNECT_S", 0.3)
    monkeypatch.setattr("peagle.models.hub._unreachable", {})
    return 0.3


def test_a_hub_that_gives_no_connection(
    hub: FakeHub, silent: tuple[str, int], soon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent[1]}")
    begun = time.monotonic()
    message = refused()
    assert "cannot be reached: it gave no connection within 0.3 s" in message
    assert "Check the network and HF_ENDPOINT" in message
    # The library alone waits for 10 s, once for each address.
    assert soon <= time.monotonic() - begun < 8
    begun = time.monotonic()
    monkeypatch.setattr("peagle.models.hub.CONNECT_S", 60.0)
    assert "gave no connection" in refused("org/other"), "known for the next models"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refused()
    assert time.monotonic() - begun < 8


def test_a_silent_hub_leaves_the_cache(
    hub: FakeHub, silent: tuple[str, int], soon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(TINY)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent[1]}")
    assert resolve_model(TINY) == folder


def test_a_silent_name_server(hub: FakeHub, soon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(
        "peagle.models.hub.socket.getaddrinfo", lambda *_, **__: asked.wait(20) and []
    )
    begun = time.monotonic()
    assert "gave no connection within 0.3 s" in refused()
    assert time.monotonic() - begun < 8
    asked.set()


def test_one_address_of_several_is_enough(
    hub: FakeHub, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(hub.url.rpartition(":")[2])
    found = [(0, 0, 0, "", place) for place in (silent, ("127.0.0.1", port))]
    monkeypatch.setattr("peagle.models.hub.CONNECT_S", 5.0)
    # What connects asks for the addresses of each again.
    real = socket.getaddrinfo
    monkeypatch.setattr(
        "peagle.models.hub.socket.getaddrinfo",
        lambda host, *rest, **more: found if host == "hub.invalid" else real(host, *rest, **more),
    )
    begun = time.monotonic()
    require_connection("http://hub.invalid")
    assert time.monotonic() - begun < 4


def test_a_slow_hub_is_not_cut(hub: FakeHub, soon: float) -> None:
    hub.delay_s = 2 * soon
    assert resolve_model(TINY).is_dir()


def test_the_proxy_is_what_has_to_answer(
    hub: FakeHub, silent: tuple[str, int], soon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{silent[1]}")
    with pytest.raises(OSError, match="no connection"):
        require_connection(hub.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("peagle.models.hub._unreachable", {})
    require_connection(hub.url)


# ---- what a repository may lack ----


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."}, "'pytorch_model.bin'"),
        ({"config.json": b"{}", "model.pt": b"\x80\x04.", "a.ckpt": b"x"}, "'a.ckpt'"),
        ({"config.json": b"{}", "original/model.safetensors": b"x"}, ""),
        ({"README.md": b"empty"}, ""),
    ],
)
def test_a_model_without_safetensors(
    hub: FakeHub, tmp_path: Path, files: dict[str, bytes], found: str
) -> None:
    hub.add("org/old").commit(files)
    message = message_of(lambda: resolve_model("org/old"), CheckpointError)
    assert "The target model 'org/old' has no *.safetensors weights at revision 'main'" in message
    assert (f"only the pickle {found}, which can run code" in message) is bool(found)
    assert "save_pretrained" in message
    assert hub.fetched() == set() and cached(tmp_path) == set()


def test_a_repository_of_gguf_files(hub: FakeHub) -> None:
    hub.add("org/packed").commit({"b.Q8_0.gguf": b"GGUF", "b.Q4_K.gguf": b"GGUF"})
    message = message_of(lambda: resolve_model("org/packed"), CheckpointError)
    assert "or download one GGUF file, like 'b.Q4_K.gguf', and name that file as" in message
    assert hub.fetched() == set()


def test_a_shard_that_the_hub_does_not_have(hub: FakeHub, sharded_folder: Path) -> None:
    files = read_folder(sharded_folder)
    shard = sorted(name for name in files if name.endswith(".safetensors"))[1]
    del files[shard]
    hub.add("org/sharded").commit(files)
    message = message_of(lambda: resolve_model("org/sharded"), CheckpointError)
    assert f"{shard}' is missing; 'model.safetensors.index.json' names" in message


@pytest.mark.parametrize("fault", ["cut", "short", "gone", "broken"])
def test_a_shard_that_does_not_arrive(
    hub: FakeHub, sharded_folder: Path, tmp_path: Path, fault: str
) -> None:
    model = hub.add("org/sharded", sharded_folder)
    shard = sorted(n for n in read_folder(sharded_folder) if n.endswith(".safetensors"))[1]
    model.faults[shard] = fault
    message = message_of(lambda: resolve_model("org/sharded"), CheckpointError)
    assert f"The target model 'org/sharded': {shard!r}" in message
    assert f" did not arrive whole from {hub.url} (" in message
    assert message.endswith(". Run the command again; what has arrived is kept.")
    kept = cached(tmp_path)
    assert shard not in kept
    model.faults.clear()
    hub.requests.clear()
    check_weights(resolve_model("org/sharded"))
    assert hub.fetched() == set(read_folder(sharded_folder)) - kept


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_damaged_file_is_named_and_removed(hub: FakeHub, tmp_path: Path, name: str) -> None:
    model = hub.models[TINY]
    model.faults[name] = "damaged"
    for _ in range(2):
        message = message_of(lambda: resolve_model(TINY), CheckpointError)
        assert f"{name!r} was damaged on its way from {hub.url}: its " in message
        assert ("sha256" if name == WEIGHTS else "git blob id") in message
        assert "It was removed from the cache; run the command again" in message
        assert name not in cached(tmp_path)
    model.faults.clear()
    hub.requests.clear()
    resolve_model(TINY)
    assert hub.fetched() == {name}


def test_files_of_an_interrupted_download_are_checked_later(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[TINY].faults = {WEIGHTS: "damaged"}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("peagle.models.hub._check_sum", interrupt)
        resolve_model(TINY)
    message = message_of(lambda: resolve_model(TINY), CheckpointError)
    assert "'model.safetensors' was damaged on its way" in message


# ---- the disk ----


def test_a_model_larger_than_the_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    message = refused()
    assert "The target model 'org/tiny' takes 0.00 GB more, but " in message
    assert "Make room, or set HF_HOME to a folder on a larger disk." in message
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "does not fit on the disk of the cache {cache}: No space left on device."),
        (errno.EDQUOT, "does not fit on the disk of the cache {cache}: Disk quota exceeded."),
        (errno.EROFS, "cannot be stored in the cache {cache}: Read-only file system."),
        (errno.EACCES, "cannot be stored in the cache {cache}: Permission denied."),
    ],
)
def test_a_cache_that_cannot_be_written(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, expected: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    message = refused()
    assert expected.format(cache=repr(str(tmp_path / "home" / "hub"))) in message
    assert "HF_HOME" in message


def test_a_read_only_cache_that_is_complete_serves(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(TINY)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("touch", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, fail)
    assert resolve_model(TINY) == folder
