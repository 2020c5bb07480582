"""Where models are: hub ids, prefixes in S3, folders here; and what of a folder is uploaded."""

import os
from pathlib import Path

import pytest

from peagle.deploy.models import ModelSource, folder_files, source_of
from peagle.errors import UserError


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("owner/name", ModelSource("hub", "owner/name")),
        ("owner/name@v1", ModelSource("hub", "owner/name", "v1")),
        ("Qwen/Qwen3-0.6B", ModelSource("hub", "Qwen/Qwen3-0.6B")),
        ("s3://bucket/a/b", ModelSource("s3", "s3://bucket/a/b/")),
        ("s3://bucket/a/b/", ModelSource("s3", "s3://bucket/a/b/")),
        ("s3://bucket", ModelSource("s3", "s3://bucket/")),
    ],
)
def test_source(text: str, source: ModelSource) -> None:
    assert source_of(text) == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a hub id"),
        ("name", "expected a hub id"),
        ("owner/name@", "expected a hub id"),
        ("a/b/c", "expected a hub id"),
        ("--help", "expected a hub id"),
        ("s3://", "expected a prefix in S3"),
        ("s3://Bucket/a", "expected a prefix in S3"),
        ("s3://bucket/model.tar.gz", "unpacked"),
        ("s3://bucket/model.safetensors", "unpacked"),
        ("./nowhere", "not a folder here"),
        ("/nowhere/at/all", "not a folder here"),
    ],
)
def test_no_source(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source_of(text)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is one by its path, or because it is there, also where it reads like a hub id."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no config\.json"):
        source_of(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="no safetensors file"):
        source_of(str(folder))
    (folder / "model.safetensors").write_bytes(b"x")
    expected = ModelSource("local", str(folder.resolve()))
    assert source_of(str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert source_of("owner/name") == source_of("./owner/name") == expected
    with pytest.raises(UserError, match="not a folder"):
        source_of(str(folder / "config.json"))


def test_what_is_uploaded(tmp_path: Path) -> None:
    """All files but hidden ones and pickles; links, as in the hub's cache, count as files."""
    blob = tmp_path / "models--org--name" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"weights")
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    for name in (
        *("config.json", "sub/tokenizer.json", "x.safetensors.part", "pytorch_model.bin"),
        *(".git/config", ".hidden", "sub/.hidden", "optimizer.pt"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "model.safetensors").symlink_to("../../blobs/0123")
    (folder / "same.json").symlink_to("config.json")
    (folder / ".link").symlink_to("/etc/hostname")
    names = [file.relative_to(folder).as_posix() for file in folder_files(folder)]
    assert names == ["config.json", "model.safetensors", "same.json", "sub/tokenizer.json"]


def test_nothing_outside_the_folder_is_uploaded(tmp_path: Path) -> None:
    secret, folder = tmp_path / "id_rsa", tmp_path / "model"
    secret.write_text("secret")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text("of another repository")
    links = {
        "a.json": secret,
        "a.txt": Path("../id_rsa"),
        "sub": tmp_path,
        "b.json": Path("../blobs/0123"),
        "gone.json": Path("nothing-here"),
        "loop.json": Path("loop.json"),
    }
    for name, target in links.items():
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / name).symlink_to(target)
        with pytest.raises(UserError, match=name) as caught:
            folder_files(folder)
        said = str(caught.value)
        assert "nowhere" in said if name in ("gone.json", "loop.json") else "outside" in said
        assert target.name in said
        (folder / name).unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        folder_files(folder)


def test_a_snapshot_reaches_its_own_blobs_only(tmp_path: Path) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_text("{}")
    snapshot = tmp_path / "models--c--d" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blob)
    with pytest.raises(UserError, match="outside the model's folder"):
        folder_files(snapshot)
