"""A Hugging Face hub on a loopback port, with the faults that a real one and its network have.

It answers what `huggingface_hub` asks for a snapshot: the model's description (with sizes and
checksums), its tree, and its files. Weights live in "large storage": their address redirects to
another host name, as on the real hub, where no token must be sent.

It also takes commits: repositories and branches are made, large files go to "large storage" first.
"""

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from peagle.errors import UserError
from peagle.models.loading import resolve_model

TINY = "org/tiny"
WEIGHTS = "model.safetensors"
LARGE = (".safetensors", ".bin")


@dataclass
class Model:
    """A repository.

    Attributes:
        revisions: files by name, by commit.
        names: commits by branch or tag.
        gated, private: who may read it.
        faults: by file name: "cut" breaks the connection, "short" sends a shorter file, "damaged"
            changes a byte, "gone" answers 404, "broken" answers 500.
    """

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    faults: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Add a revision under `names` and "main"; returns its commit."""
        contents = b"".join(name.encode() + data for name, data in sorted(files.items()))
        commit = hashlib.sha1(contents).hexdigest()
        self.revisions[commit] = dict(files)
        self.names |= dict.fromkeys(("main", *names), commit)
        return commit

    def change(self, branch: str, changes: dict[str, bytes | None]) -> str:
        """A commit on a branch that adds, replaces or (None) removes files; returns it."""
        files: dict[str, bytes | None] = {**self.revisions[self.names[branch]], **changes}
        names = dict(self.names)
        commit = self.commit({name: data for name, data in files.items() if data is not None})
        self.names = names | {branch: commit}
        return commit


@dataclass(frozen=True)
class HubRequest:
    """One request that the hub received."""

    method: str
    path: str
    token: str
    user_agent: str


class FakeHub:
    """The hub: its models, who may enter, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.models: dict[str, Model] = {}
        self.token = "hf_right"
        self.status = 0  # not 0: all requests are answered with it
        self.delay_s = 0.0  # before each answer
        self.requests: list[HubRequest] = []
        # For uploads: owners whose repositories the token may write, repositories hidden from it,
        # files that a .gitignore leaves out, large files by SHA-256, and by the last part of a
        # path that is written to: the status to answer with, or "cut" to break the connection.
        self.writable = {"org"}
        self.hidden: set[str] = set()
        self.ignored: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.write_faults: dict[str, int | str] = {}
        self.before_commit: Callable[[], object] = lambda: None

    def add(self, repo: str, folder: Path | None = None, **attributes: bool) -> Model:
        """Publish a folder."""
        model = self.models[repo] = Model(**attributes)
        if folder is not None:
            model.commit(read_folder(folder))
        return model

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        gets = (request.path for request in self.requests if request.method == "GET")
        return {path.rpartition("/")[2] for path in gets if "/resolve/" in path or "/cdn/" in path}


def read_folder(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A running hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent_hub() -> Iterator[tuple[str, int]]:
    """An address on this machine that gives no connection: its queue is full."""
    with socket.socket() as server, ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield server.getsockname()


@contextmanager
def used(hub_url: str, home: Path) -> Iterator[pytest.MonkeyPatch]:
    """Point this process at the hub, with an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(hub_url, home).items():
            patch.setenv(name, value)
        patch.delenv("HF_TOKEN", raising=False)
        # These the library reads once, when it is imported.
        for name, value in {
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_PROGRESS_BARS": None,
        }.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        # Seconds between the attempts of a download.
        patch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        yield patch


def environment(hub_url: str, home: Path) -> dict[str, str]:
    """Environment of a process that uses the hub."""
    local = {"NO_PROXY": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "0"}
    return {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), **local}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.requests.append(
            HubRequest(self.command, path, token, self.headers.get("User-Agent", ""))
        )
        fault = next((f for part, f in self.hub.write_faults.items() if f"/{part}" in path), None)
        if fault == "cut":
            self.close_connection = True
            return
        if isinstance(fault, int):
            return self._send(fault, b'{"error": "no, says the hub"}')
        if path.startswith("/storage/"):
            self.hub.large[path.rpartition("/")[2]] = body
            return self._send(200, b"")
        if token != self.hub.token:
            message = "Invalid credentials in Authorization header"
            return self._send(401, b"", {"X-Error-Message": message})
        status, answer = self._write(path, body)
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _write(self, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        """Status and answer of a request that changes a repository, or prepares to."""
        if path == "/api/validate-yaml":
            whole = json.loads(body)["content"].startswith("---\n")
            problem = {"message": "the metadata is missing"}
            return (200, {"warnings": []}) if whole else (400, {"errors": [problem]})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"objects": [self._place(entry) for entry in json.loads(body)["objects"]]}
        _, _, _, owner, name, action, revision = path.split("/")
        repo = f"{owner}/{name}"
        if owner not in self.hub.writable or repo in self.hub.hidden:
            return 403, {"error": "You do not have write access"}
        model = self.hub.models[repo]
        if action == "branch":
            model.names[revision] = model.names["main"]
            return 200, {}
        if action == "preupload":
            files = model.revisions[model.names[revision]]
            modes = [self._mode(entry["path"], files) for entry in json.loads(body)["files"]]
            return 200, {"files": modes}
        self.hub.before_commit()
        return self._commit(repo, model, revision, [json.loads(x) for x in body.splitlines()])

    def _create(self, wanted: dict[str, str]) -> tuple[int, dict[str, object]]:
        repo = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] not in self.hub.writable:
            return 403, {"error": "You do not have the rights to create a model there"}
        if repo in self.hub.models or repo in self.hub.hidden:
            return 409, {"error": "You already created this model repo", "url": repo}
        model = self.hub.add(repo, private=wanted.get("visibility") == "private")
        model.commit({".gitattributes": b"*.safetensors filter=lfs"})
        return 200, {"url": f"{self.hub.url}/{repo}"}

    def _place(self, entry: dict[str, object]) -> dict[str, object]:
        if entry["oid"] in self.hub.large:
            return entry
        return {**entry, "actions": {"upload": {"href": f"{self.hub.url}/storage/{entry['oid']}"}}}

    def _mode(self, name: str, files: dict[str, bytes]) -> dict[str, object]:
        ignored = name in self.hub.ignored
        mode = "lfs" if name.endswith(LARGE) else "regular"
        entry = {"path": name, "uploadMode": mode, "shouldIgnore": ignored}
        return {**entry, "oid": _blob_id(files[name])} if name in files else entry

    def _commit(
        self, repo: str, model: Model, branch: str, lines: list[dict[str, dict[str, str]]]
    ) -> tuple[int, dict[str, object]]:
        if lines[0]["value"].get("parentCommit") != model.names[branch]:
            return 412, {"error": "The branch has moved on"}
        changes: dict[str, bytes | None] = {}
        for line in lines[1:]:
            value = line["value"]
            if "content" in value:
                changes[value["path"]] = base64.b64decode(value["content"])
            else:  # a file in large storage, or none: one that is deleted
                changes[value["path"]] = self.hub.large[value["oid"]] if "oid" in value else None
        commit = model.change(branch, changes)
        url = f"{self.hub.url}/{repo}/commit/{commit}"
        return 200, {"commitUrl": url, "commitOid": commit}

    def _answer(self) -> None:
        time.sleep(self.hub.delay_s)
        path = unquote(urlsplit(self.path).path)
        # Data sets are answered as models are; no test has one of each under one name.
        path = path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        agent = self.headers.get("User-Agent", "")
        self.hub.requests.append(HubRequest(self.command, path, token, agent))
        if self.hub.status:
            return self._send(self.hub.status, b"no")
        if path.startswith("/cdn/"):
            _, _, owner, name, commit, *file = path.split("/")
            model = self.hub.models[f"{owner}/{name}"]
            return self._content(model, commit, "/".join(file))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        # owner, name, then "revision", "tree" or "resolve", then the revision, then the file
        repo, action, rest = "/".join(parts[:2]), "".join(parts[2:3]), parts[3:]
        model = self.hub.models.get(repo)
        if token and token != self.hub.token:
            message = "Invalid credentials in Authorization header"
            return self._send(401, b"", {"X-Error-Message": message})
        if model is None or repo in self.hub.hidden or (model.private and not token):
            # The real hub, too, tells strangers 401 whether a model exists or not.
            return self._send(404 if token else 401, b"", {"X-Error-Code": "RepoNotFound"})
        revision = "/".join(rest[:1]) or "main"
        commit = model.names.get(revision, revision)
        if commit not in model.revisions:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/"):
            describe = self._tree if action == "tree" else self._describe
            body = json.dumps(describe(repo, model.revisions[commit], commit)).encode()
            return self._send(200, body, {"Content-Type": "application/json"})
        return self._resolve(repo, model, commit, "/".join(rest[1:]), token)

    def _describe(self, repo: str, files: dict[str, bytes], commit: str) -> object:
        siblings = [
            {"rfilename": entry.pop("path"), "blobId": entry.pop("oid"), **entry}
            for entry in map(_entry, *zip(*files.items(), strict=True))
        ]
        private = self.hub.models[repo].private
        return {"id": repo, "sha": commit, "private": private, "siblings": siblings}

    def _tree(self, repo: str, files: dict[str, bytes], commit: str) -> object:
        return list(map(_entry, *zip(*files.items(), strict=True)))

    def _resolve(self, repo: str, model: Model, commit: str, name: str, token: str) -> None:
        data = model.revisions[commit].get(name)
        if model.gated and not token:
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        if model.faults.get(name) == "broken":
            return self._send(500, b"")
        if data is None or model.faults.get(name) == "gone":
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if not name.endswith(LARGE):
            return self._content(model, commit, name)
        storage = self.hub.url.replace("127.0.0.1", "localhost")
        headers = {
            "Location": f"{storage}/cdn/{repo}/{commit}/{name}",
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
        }
        return self._send(302, b"", headers)

    def _content(self, model: Model, commit: str, name: str) -> None:
        data, fault = model.revisions[commit][name], model.faults.get(name)
        headers = {"ETag": f'"{_blob_id(data)}"', "X-Repo-Commit": commit}
        if fault == "damaged":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "short":
            data = data[:-5]
        if self.command == "GET" and fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if "Range" not in self.headers:
                self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self._send(200, data, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def message_of(call: Callable[[], object], error: type[UserError] = UserError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def refused(name: str = TINY, revision: str | None = None) -> str:
    return message_of(lambda: resolve_model(name, revision))


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"path": name, "type": "file", "size": len(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "oid": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 134,
        }
    return {**entry, "oid": _blob_id(data)}
