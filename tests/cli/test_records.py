"""`peagle records`, and `peagle data prepare` on recorded traffic."""

import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from peagle.data.dataset import ResponseDataset
from peagle.data.recorded import (
    RecordFolder,
    _overwrite,
    read_cipher,
    record_files,
    recorded_lines,
)
from peagle.disk import put_in_place
from peagle.engine import SpeculationStats
from peagle.engine.outputs import RequestOutput
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.fingerprint import identity_of
from peagle.models.target_ends import TargetEnds
from peagle.serving.recording import Recorder
from tests.cli.conftest import Pair, Peagle
from tests.conftest import VOCAB_SIZE, byte_tokenizer

KEY = secrets.token_hex(32)  # of the form of a SHA-256, as openssl makes keys
OTHER = "another key of a client"


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def record(folder: Path, target: dict[str, Any], cipher: Any = None) -> RecordFolder:
    """Record two answers of KEY, one of OTHER and one without a key, as a server does."""
    made = RecordFolder.create(folder)
    recorder = Recorder(
        made,
        key_ids={name.encode(): made.key_id(digest(name)) for name in (KEY, OTHER)},
        salts=None,
        share=1.0,
        max_bytes=2**30,
        days=30.0,
        cipher=cipher,
    )
    recorder.begin("m", target)
    for number, name in enumerate((KEY, OTHER, KEY, "")):
        ids = [10 + number] * 6
        output = RequestOutput("", ids, [1, 2, number], "stop", SpeculationStats(), 0.1)
        recorder.add(f"r-{number}", name.encode(), 0.0, [output])
    recorder.close(20)
    return made


@pytest.fixture
def identity(pair: Pair) -> dict[str, Any]:
    return identity_of(TargetEnds.load(pair.target))


def test_list(peagle: Peagle, tmp_path: Path, identity: dict[str, Any]) -> None:
    made = record(tmp_path / "records", identity)
    found = json.loads(peagle("records", "list", made.path, "--format", "json").out)
    ids = {made.key_id(digest(name)): count for name, count in ((KEY, 2), (OTHER, 1))}
    assert found["keys"] == {**ids, "": 1} and found["records"] == 4
    assert sum(found["days"].values()) == 4 and found["refused"] == []
    assert (found["files"], found["cut"]) == (1, 0)
    shown = peagle("records", "list", made.path).out
    assert all(id in shown for id in ids) and KEY not in shown
    assert peagle("records", "list", tmp_path / "missing").status == 2


@pytest.mark.parametrize("how", ["key", "digest", "DIGEST", "id", "stdin"])
def test_delete(
    peagle: Peagle,
    tmp_path: Path,
    identity: dict[str, Any],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = record(tmp_path / "records", identity)
    id = made.key_id(digest(KEY))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{KEY}\n"))
    word = {"key": KEY, "digest": digest(KEY).hex(), "id": id, "stdin": "-"}
    word["DIGEST"] = word["digest"].upper()
    result = peagle("records", "delete", made.path, "--key", word[how], "--format", "json")
    assert result.status == 0 and json.loads(result.out)["deleted"] == 2
    found = json.loads(peagle("records", "list", made.path, "--format", "json").out)
    assert found["records"] == 2 and id not in found["keys"] and id in found["refused"]
    assert not any(id.encode() in file.read_bytes() for file in record_files(made.path))
    assert "there were no records" in peagle("records", "delete", made.path, "--key", KEY).out
    assert peagle("records", "delete", made.path, "--key", " ").status == 2


def test_a_key_of_the_form_of_an_id_is_kept_nowhere(
    peagle: Peagle, tmp_path: Path, identity: dict[str, Any]
) -> None:
    made, key = record(tmp_path / "records", identity), secrets.token_hex(16)
    shown = peagle("records", "delete", made.path, "--key", key, "--format", "json").out
    assert json.loads(shown)["refused"] == [made.key_id(digest(key))]
    assert made.refused() == {made.key_id(digest(key))}


def full_disk(least: int) -> Any:
    """Return a `put_in_place` that has no room for `least` bytes."""

    def put(temporary: Path, path: Path) -> None:
        if temporary.stat().st_size >= least:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put_in_place(temporary, path)

    return put


def test_a_deletion_on_a_full_disk_overwrites_in_place(
    peagle: Peagle, tmp_path: Path, identity: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path / "records", identity)
    (file,) = record_files(made.path)
    with file.open("ab") as lines:  # as a killed server may leave it
        lines.write(file.read_bytes()[:100])
    before = file.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr("peagle.data.recorded.put_in_place", full_disk(100))
    assert "deleted 3 records" in peagle("records", "delete", made.path, "--key", KEY).out
    after = file.read_bytes().splitlines(keepends=True)
    assert after[1::2] == before[1::2] and all(line.isspace() for line in after[::2])
    assert [*map(len, after)] == [*map(len, before)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [line for line, _ in recorded_lines(file)] == [2, 4]
    found = made.summary()
    assert (found["records"], found["cut"]) == (2, 0)
    assert made.key_id(digest(KEY)) in found["refused"]
    assert "there were no records" in peagle("records", "delete", made.path, "--key", KEY).out
    monkeypatch.undo()
    assert "deleted 1 records" in peagle("records", "delete", made.path, "--key", OTHER).out
    assert file.read_bytes() == before[3]


def test_a_deletion_without_any_room_changes_nothing(
    peagle: Peagle, tmp_path: Path, identity: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path / "records", identity)
    (file,) = record_files(made.path)
    before = file.read_bytes()
    monkeypatch.setattr("peagle.data.recorded.put_in_place", full_disk(0))
    result = peagle("records", "delete", made.path, "--key", KEY)
    assert result.status == 2 and f"{str(made.path)!r} cannot be written" in result.err
    assert "Nothing was deleted: free 64 KiB" in result.err
    assert file.read_bytes() == before and not made.refused()


@pytest.mark.parametrize("num_writes", range(4))
def test_a_deletion_that_is_killed_in_place_is_finished_by_the_next(
    tmp_path: Path, identity: dict[str, Any], num_writes: int
) -> None:
    made = record(tmp_path / "records", identity)
    (file,) = record_files(made.path)
    before, ids = file.read_bytes().splitlines(keepends=True), {made.key_id(digest(KEY))}
    left = iter(range(num_writes))

    class Killed(io.FileIO):
        def write(self, data: Any) -> int:
            next(left)  # without another one it raises StopIteration
            return super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.data.recorded.put_in_place", full_disk(100))
        with patch.context() as killed, pytest.raises(StopIteration):
            killed.setattr(Path, "open", lambda path, _: io.BufferedRandom(Killed(path, "r+b")))
            _overwrite(file, before, ids)
        lines = file.read_bytes().splitlines(keepends=True)
        assert lines[1::2] == before[1::2] and sum(map(len, lines)) == sum(map(len, before))
        assert made.delete(ids) == 2 - num_writes // 2
    lines = file.read_bytes().splitlines(keepends=True)
    assert lines[1::2] == before[1::2] and lines[0].isspace() and lines[2].isspace()


def test_links_and_damaged_files(peagle: Peagle, tmp_path: Path, identity: dict[str, Any]) -> None:
    made = record(tmp_path / "records", identity)
    (file,) = record_files(made.path)
    (made.path / f"2025{file.name[4:]}").symlink_to("/nowhere")
    (made.path / f"2024{file.name[4:]}").mkdir()
    assert "deleted 2 records" in peagle("records", "delete", made.path, "--key", KEY).out
    (made.path / "refused").write_bytes(b"\xef\xbb\xbf" + b"1" * 32)
    result = peagle("records", "list", made.path)
    assert result.status == 2 and "is damaged; expected ids of keys" in result.err


def test_encrypted_parts_that_nobody_writes(tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "lines.jsonl"
    key.write_bytes(b64encode(secrets.token_bytes(32)))
    cipher = read_cipher(key)
    for value in (5, "\xfc", cipher.encrypt(b"[1]").decode()):
        file.write_text("[" * 100_000 + "\n" + json.dumps({"encrypted": value}) + "\n")
        lines = recorded_lines(file, cipher)
        assert next(lines) == (1, None)
        with pytest.raises(UserError, match="were encrypted with another key"):
            next(lines)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_prepare_reads_the_folder(
    peagle: Peagle, pair: Pair, tmp_path: Path, identity: dict[str, Any], is_encrypted: bool
) -> None:
    key, train = tmp_path / "key", tmp_path / "train.safetensors"
    key.write_bytes(b64encode(secrets.token_bytes(32)))
    key.chmod(0o600)
    cipher = read_cipher(key) if is_encrypted else None
    made = record(tmp_path / "records", identity, cipher)
    (file,) = record_files(made.path)
    with file.open("ab") as lines:  # as a killed server may leave it
        lines.write(file.read_bytes()[:100])
    command = ["data", "prepare", made.path, "--target", pair.target, "-o", train]
    command += ["--format", "json", *(["--record-key-file", key] if is_encrypted else [])]
    result = peagle(*command)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["records"], told["samples"], told["answers"]) == (5, 4, 4)
    assert told["dropped"] == {"the line was cut off, since its server was killed": 1}
    assert told["unknown_tokenizer"] == []
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 64)
    assert dataset.tokens.tolist()[:9] == [1, 2, 0, *[10] * 6] and len(dataset) == 4
    if is_encrypted:
        result = peagle(*command[:-2], "--overwrite")
        assert result.status == 2 and "name the key file" in result.err
        assert "deleted 3 records" in peagle("records", "delete", made.path, "--key", KEY).out


def test_prepare_goes_on_where_a_server_deletes_its_oldest_records(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    identity: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, train = record(tmp_path / "records", identity), tmp_path / "train.safetensors"
    (file,) = record_files(made.path)
    shutil.copyfile(file, oldest := made.path / f"2025{file.name[4:]}")

    def delete(path: Path) -> str:
        if path == oldest:
            oldest.unlink()
        return sha256_of(path)

    monkeypatch.setattr("peagle.data.readers.sha256_of", delete)
    result = peagle("data", "prepare", made.path, "--target", pair.target, "-o", train)
    assert result.status == 0 and train.exists(), result.err
    assert record_files(made.path) == [file]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_sha256", "was made with another tokenizer (ccc"),
        ("lm_head_sha256", "was recorded from another target (lm_head ccc"),
    ],
)
def test_prepare_refuses_records_of_another_target(
    peagle: Peagle, pair: Pair, tmp_path: Path, identity: dict[str, Any], name: str, text: str
) -> None:
    made = record(tmp_path / "records", {**identity, name: "c" * 64})
    train = tmp_path / "train.safetensors"
    result = peagle("data", "prepare", made.path, "--target", pair.target, "-o", train)
    assert result.status == 2 and text in result.err, result.err
    assert not train.exists()
