"""Recording of traffic: options and the writer by themselves, then real servers."""

import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from peagle.bundled import BUNDLED_TARGET
from peagle.data.recorded import RecordFolder, began_s, read_cipher, record_files, recorded_lines
from peagle.disk import locked
from peagle.engine import SpeculationStats
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.models.target import load_tokenizer
from peagle.serving.config import ServerConfig
from peagle.serving.keys import ApiKeys
from peagle.serving.recording import Recorder
from serving.live import CHAT_TEMPLATE, HTTP, LiveServer, running, wait_for

HEADER = "x-peagle-recorded"
NAMES = {"tokenizer_sha256": "a" * 64, "lm_head_sha256": "b" * 64}
DAY = 86_400
KEYS = [letter * 24 for letter in "rst"]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def rows_of(folder: Path, cipher: Any = None) -> list[dict[str, Any]]:
    lines = (line for file in record_files(folder) for line in recorded_lines(file, cipher))
    return [record for _, record in lines if record]


def modes_of(folder: Path) -> set[int]:
    return {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}


def output(*ids: int, num_prompt: int = 3) -> RequestOutput:
    prompt = list(range(num_prompt))
    return RequestOutput("text", list(ids), prompt, "stop", SpeculationStats(), 0.1)


@dataclass
class Made:
    recorder: Recorder
    clock: SimpleNamespace
    folder: Path

    def add(self, *ids: int, salt: bytes = b"", num_prompt: int = 3) -> None:
        counts = self.recorder.counts
        before = counts.written + counts.dropped
        self.recorder.add("id", salt, 0.0, [output(*ids, num_prompt=num_prompt)])
        wait_for(lambda: counts.written + counts.dropped > before, timeout_s=20)

    def ids(self) -> list[list[int]]:
        return [row["response_token_ids"] for row in rows_of(self.folder)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Made] = []

    def new(*, begin: bool = True, **options: Any) -> Made:
        folder, clock = tmp_path / "records", SimpleNamespace(now=1_700_000_000.0)
        defaults: dict[str, Any] = {"key_ids": {}, "salts": None, "share": 1.0}
        defaults |= {"max_bytes": 2**30, "days": 30.0, "clock": lambda: clock.now}
        one = Made(Recorder(RecordFolder.create(folder), **defaults | options), clock, folder)
        made.append(one)
        if begin:
            one.recorder.begin("m", NAMES)
        return one

    yield new
    for one in made:
        one.recorder.close(5)


NEEDED = "needs one of --record-for SHA256"
FOR = (sha256(KEYS[0]),)


@pytest.mark.parametrize(
    ("options", "keys", "text"),
    [
        ({"record": "DIR"}, [], "the server has no keys, so --record-all is required"),
        ({"record": "DIR"}, KEYS, NEEDED),
        ({"record": "DIR", "record_for": FOR, "record_all": True}, KEYS, "; both were given."),
        ({"record": "DIR", "record_for": FOR, "record_all": True}, [], "; both were given."),
        ({"record": "DIR", "record_for": (KEYS[0],)}, KEYS, "none of the server's keys"),
        ({"record_all": True}, [], "--record-all has no effect without --record; add --record DIR"),
        ({"record_share": 0.5}, [], "or leave --record-share out"),
    ],
)
def test_options_that_say_too_little(
    options: dict[str, Any], keys: list[str], text: str, tmp_path: Path
) -> None:
    if "record" in options:
        options = {**options, "record": str(tmp_path / "records")}
    with pytest.raises(UserError) as caught:
        Recorder.of(ServerConfig(**options), ApiKeys(keys))
    assert text in str(caught.value) and KEYS[0] not in str(caught.value)
    assert not (tmp_path / "records").exists()


def test_folders_that_are_no_place_for_records(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match=r"others can enter it \(mode 755; chmod 700 it\)"):
        RecordFolder.create(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.txt").touch()
    for mode in (0o755, 0o700):  # nobody is to close a folder that is none for records
        tmp_path.chmod(mode)
        with pytest.raises(UserError, match=r"holds 'thesis.txt'"):
            RecordFolder.create(tmp_path)
    with pytest.raises(UserError, match=r"thesis.txt': it is no folder"):
        RecordFolder.create(tmp_path / "thesis.txt")


# ---- the writer ----


def test_a_record_and_its_permissions(make: Any) -> None:
    before = os.umask(0)
    try:
        made = make(key_ids={b"salt": "0" * 32})
        made.add(7, 8, salt=b"salt")
    finally:
        os.umask(before)
    (row,) = rows_of(made.folder)
    assert row == {
        **{"key_id": "0" * 32, "time": "2023-11-14T22:13:20Z", "request_id": "id", "model": "m"},
        **NAMES,
        **{"temperature": 0.0, "finish_reason": "stop"},
        "prompt_token_ids": [0, 1, 2],
        "response_token_ids": [7, 8],
    }
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    assert modes_of(made.folder) == {0o600}
    (file,) = record_files(made.folder)
    assert file.name.startswith("20231114T221320.000000Z-") and began_s(file) == made.clock.now


def test_oldest_files_go_where_the_size_is_exceeded(make: Any) -> None:
    limit = 40_000
    made = make(max_bytes=limit)
    for number in range(100):
        made.clock.now += 1
        made.add(number, num_prompt=300)  # 1.7 KB each
        sizes = [file.stat().st_size for file in record_files(made.folder)]
        assert sum(sizes) <= limit and all(size <= limit / 8 for size in sizes)
    kept = [ids[0] for ids in made.ids()]
    assert kept == list(range(kept[0], 100)) and 15 < len(kept) < 25


def test_files_go_when_their_first_record_is_too_old(make: Any) -> None:
    made = make(days=2.0)
    start = made.clock.now
    for hours in range(0, 72, 6):
        made.clock.now = start + hours * 3600
        made.add(hours)
        assert all(made.clock.now - began_s(f) <= 2 * DAY for f in record_files(made.folder))
    # A file holds two hours, so that each of these has its own.
    assert [ids[0] for ids in made.ids()] == list(range(66 - 48, 72, 6))
    made.clock.now += 3 * DAY
    wait_for(lambda: not record_files(made.folder), timeout_s=20)  # without any traffic


def test_a_clock_that_goes_back_makes_a_new_file(make: Any) -> None:
    made = make(days=2.0)
    start = made.clock.now
    made.clock.now += 3650 * DAY
    made.add(1)
    made.clock.now = start
    made.add(2)
    made.clock.now += 3 * DAY
    wait_for(lambda: made.ids() == [[1]], timeout_s=20)


def test_ids_that_cannot_be_read_stop_recording(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    (made.folder / "refused").write_bytes(b"\xff")
    wait_for(lambda: not made.recorder.wants("id", b"", None), timeout_s=20)
    (line,) = [record.message for record in caplog.records]
    assert "refused' is damaged; expected ids of keys" in line


def test_full_disk_stops_recording_with_one_line(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    made.add(1)
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name != "peagle-records":
            return write(descriptor, data)
        if len(data) > 40:
            return write(descriptor, data[:-40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    made.add(2)
    wait_for(lambda: not made.recorder.wants("id", b"", None), timeout_s=20)
    made.recorder.add("id", b"", 0.0, [output(3)])
    assert (made.recorder.counts.written, made.recorder.counts.dropped) == (1, 2)
    (file,) = record_files(made.folder)
    assert made.ids() == [[1]] and file.read_bytes().endswith(b"}\n")
    made.clock.now += 31 * DAY
    wait_for(lambda: not record_files(made.folder), timeout_s=20)
    (line,) = [record.message for record in caplog.records]
    assert f"into {made.folder} has stopped: No space left on device; restart the server" in line


def test_another_folder_at_the_path_gets_no_records(make: Any, tmp_path: Path) -> None:
    """Its ids of keys are others: what they refuse, an older server would not know."""
    made = make()
    made.add(1)
    other = RecordFolder.create(tmp_path / "other")
    made.folder.rename(tmp_path / "old")
    other.path.rename(made.folder)
    made.add(2)
    assert (made.recorder.counts.written, made.recorder.counts.dropped) == (1, 1)
    assert made.ids() == [] and not made.recorder.wants("id", b"", None)


def test_a_full_queue_drops_and_never_waits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.serving.recording._MOST_WAITING_TOKENS", 50)
    made = make()
    made.add(0)
    with locked(made.folder):  # so long the writer waits
        start = time.monotonic()
        for number in range(1000):
            made.recorder.add("id", b"", 0.0, [output(number)])
        assert time.monotonic() - start < 5
    counts = made.recorder.counts
    wait_for(lambda: counts.written + counts.dropped == 1001, timeout_s=20)
    # Each has 4 tokens: 12 fit, and up to 12 that the writer had taken before.
    assert 13 <= len(made.ids()) == counts.written <= 25


def test_deletion_while_a_server_writes(make: Any) -> None:
    """Whatever comes before, during or after: nothing of the key is left, nothing else is lost."""
    ids = {b"mine": "1" * 32, b"other": "2" * 32}
    made = make(key_ids=ids, max_bytes=400_000)
    done = threading.Event()
    count = 0

    def serve() -> None:
        nonlocal count
        while not done.is_set():
            for salt in ids:
                made.recorder.add("id", salt, 0.0, [output(count)])
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    wait_for(lambda: made.recorder.counts.written > 50, timeout_s=20)
    assert RecordFolder(made.folder).delete({"1" * 32}) > 0
    assert {row["key_id"] for row in rows_of(made.folder)} == {"2" * 32}
    reached = count
    wait_for(lambda: count > reached + 50, timeout_s=20)
    done.set()
    thread.join()
    made.recorder.close(20)
    rows = rows_of(made.folder)
    assert {row["key_id"] for row in rows} == {"2" * 32}
    assert sorted(row["response_token_ids"][0] for row in rows) == list(range(count))
    assert modes_of(made.folder) == {0o600}


def test_key_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("c2hvcnQ=")
    with pytest.raises(UserError, match="holds no key: expected 32 random bytes") as caught:
        read_cipher(tmp_path / "short")
    assert "c2hvcnQ" not in str(caught.value)


# ---- real servers ----


@dataclass
class Recording:
    server: LiveServer
    folder: Path

    def post(self, path: str, body: dict[str, Any], key: str = KEYS[0]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return HTTP.post(f"{self.server.url}{path}", json=body, headers=headers)

    def key_id(self, key: str) -> str:
        return RecordFolder(self.folder).key_id(hashlib.sha256(key.encode()).digest())

    def rows(self, *answers: httpx.Response) -> list[dict[str, Any]]:
        wanted = [answer.headers["x-request-id"] for answer in answers]

        def found() -> list[dict[str, Any]]:
            return [row for row in rows_of(self.folder) if row["request_id"] in wanted]

        wait_for(lambda: {row["request_id"] for row in found()} == set(wanted), timeout_s=20)
        return sorted(found(), key=lambda row: wanted.index(row["request_id"]))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """A server with three keys, of which the first two are recorded."""
    place = tmp_path_factory.mktemp("recording")
    (place / "chat.jinja").write_text(CHAT_TEMPLATE)
    options: list[object] = ["--chat-template", place / "chat.jinja", "--hang-timeout", 120]
    options += ["--record", place / "records", "--log-format", "json"]
    options += [word for key in KEYS[:2] for word in ("--record-for", sha256(key))]
    with running(*options, warm=True, PEAGLE_API_KEY=",".join(KEYS)) as live:
        yield Recording(live, place / "records")


TEXT = "def secretive_walrus(n):"
TOOL = {"type": "function", "function": {"name": "zebra_tool", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "You are a walrus."},
    {"role": "user", "content": "Write a loop."},
]


@pytest.mark.parametrize("stream", [False, True])
def test_records_are_what_was_asked_and_answered(recording: Recording, stream: bool) -> None:
    tokenizer = load_tokenizer(str(BUNDLED_TARGET))
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "stream": stream}
    answer = recording.post("/v1/completions", body)
    assert answer.headers[HEADER] == "true"
    if stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    else:
        text = answer.json()["choices"][0]["text"]
    (row,) = recording.rows(answer)
    assert row["prompt_token_ids"] == tokenizer.encode(TEXT)
    assert tokenizer.decode(row["response_token_ids"], skip_special_tokens=True) == text
    assert len(row["response_token_ids"]) == 12 and row["model"] == "peagle-code"
    assert row["key_id"] == recording.key_id(KEYS[0]) and KEYS[0] not in json.dumps(row)


def test_chats_have_system_prompt_and_tools_as_ids(recording: Recording) -> None:
    chat = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 6, "n": 2, "temperature": 0.7}
    answer = recording.post("/v1/chat/completions", chat)
    rows = recording.rows(answer)
    asked = {"messages": MESSAGES, "tools": [TOOL]}
    wanted = recording.post("/tokenize", asked).json()["tokens"]
    assert [row["prompt_token_ids"] for row in rows] == [wanted] * 2
    text = load_tokenizer(str(BUNDLED_TARGET)).decode(wanted)
    assert "You are a walrus." in text and "zebra_tool" in text
    used = answer.json()["usage"]["completion_tokens"]
    assert sum(len(row["response_token_ids"]) for row in rows) == used


def test_other_routes_are_recorded_too(recording: Recording) -> None:
    response = recording.post("/v1/responses", {"input": "Write.", "max_output_tokens": 4})
    answers = response, recording.post("/invocations", {"prompt": TEXT, "max_tokens": 4})
    assert [answer.headers[HEADER] for answer in answers] == ["true"] * 2
    assert [len(row["response_token_ids"]) for row in recording.rows(*answers)] == [4, 4]


def test_who_says_no_is_not_recorded(recording: Recording) -> None:
    completion = {"prompt": TEXT, "max_tokens": 4}
    silent = [
        recording.post("/v1/completions", {**completion, "store": False}),
        recording.post("/v1/completions", {**completion, "store": False, "stream": True}),
        recording.post("/v1/chat/completions", {"messages": MESSAGES, "store": False}),
        recording.post("/v1/responses", {"input": "x", "max_output_tokens": 4, "store": False}),
        recording.post("/v1/completions", completion, KEYS[2]),  # not opted in
        recording.post("/v1/completions", {**completion, "store": True}, KEYS[2]),
        recording.post("/v1/completions", {**completion, "max_tokens": 0, "echo": True}),
    ]
    assert [answer.status_code for answer in silent] == [200] * len(silent)
    silent.append(recording.post("/v1/completions", {**completion, "temperature": -1}))
    recording.rows(recording.post("/v1/completions", completion))  # written behind all others
    known = {row["request_id"] for row in rows_of(recording.folder)}
    for answer in silent:
        assert HEADER not in answer.headers
        assert answer.headers["x-request-id"] not in known


def test_counters_and_a_log_without_text(recording: Recording) -> None:
    recording.rows(recording.post("/v1/completions", {"prompt": TEXT, "max_tokens": 4}))
    headers = {"Authorization": f"Bearer {KEYS[2]}"}
    text = HTTP.get(f"{recording.server.url}/metrics", headers=headers).text
    written, label = float(len(rows_of(recording.folder))), '{model_name="peagle-code"}'
    assert f"peagle:recorded_answers_total{label} {written}\n" in text
    assert f"peagle:unrecorded_answers_total{label} 0.0\n" in text
    assert not [word for word in ("walrus", "zebra_tool", *KEYS) if word in recording.server.text]


def test_a_key_has_its_records_deleted_while_the_server_runs(recording: Recording) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    recording.rows(*(recording.post("/v1/completions", body, key) for key in KEYS[:2]))
    folder = RecordFolder(recording.folder)
    kept = [row for row in rows_of(recording.folder) if row["key_id"] != recording.key_id(KEYS[1])]
    assert folder.delete(folder.ids_named(KEYS[1])) >= 1
    assert rows_of(recording.folder) == kept
    again = "/v1/completions", body, KEYS[1]
    wait_for(lambda: HEADER not in recording.post(*again).headers, timeout_s=20)
    assert len(recording.rows(recording.post("/v1/completions", body))) == 1
    assert recording.key_id(KEYS[1]) not in {row["key_id"] for row in rows_of(recording.folder)}


def test_off_by_default(server: LiveServer) -> None:
    for stream in (False, True):
        body = {"prompt": TEXT, "max_tokens": 2, "stream": stream, "store": True}
        answer = HTTP.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200 and HEADER not in answer.headers
    assert not [name for name in server.metrics() if "recorded" in name]


def test_a_share_of_all_requests_encrypted(tmp_path: Path) -> None:
    """The header, the records and the share say the same; all is written when the server ends."""
    key, other, folder = tmp_path / "key", tmp_path / "other", tmp_path / "records"
    key.write_text("+" * 42 + "8=\n")
    other.write_text("/" * 42 + "8=\n")
    options = ("--record", folder, "--record-all", "--record-share", 0.5, "--record-key-file", key)
    meant = set()
    with running(*options, warm=True) as live:
        for number in range(24):
            body = {"prompt": TEXT, "max_tokens": 2, "stream": number % 2 == 0}
            name = {"X-Request-ID": f"r-{number}"}
            answer = HTTP.post(f"{live.url}/v1/completions", json=body, headers=name)
            if HEADER in answer.headers:
                meant.add(f"r-{number}")
        live.terminate()
        live.process.wait()
    rows = rows_of(folder, read_cipher(key))
    assert meant == {f"r-{n}" for n in range(24) if sha256(f"r-{n}")[0] < "8"}
    assert meant == {row["request_id"] for row in rows} and len(rows) == len(meant)
    assert {row["key_id"] for row in rows} == {None}
    assert not any("token_ids" in file.read_text() for file in record_files(folder))
    with pytest.raises(UserError, match="another key"):
        rows_of(folder, read_cipher(other))
