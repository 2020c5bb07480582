"""Files from S3 into folders here."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from moto.s3.models import s3_backends

from deploy.fake_aws import ACCOUNT, BUCKET, FakeAws
from peagle.deploy.aws import Clients
from peagle.deploy.downloads import fetch_captured, fetch_model
from peagle.errors import UserError

NOW = datetime.now(UTC)
URI = f"s3://{BUCKET}/a/"


def quiet(line: str) -> None:
    pass


def put(aws: FakeAws, **files: bytes) -> None:
    """Files below URI; each is an hour newer than the one before."""
    for number, (name, content) in enumerate(files.items()):
        key = f"a/{name}"
        aws.client("s3").put_object(Bucket=BUCKET, Key=key, Body=content)
        stored = s3_backends[ACCOUNT]["aws"].buckets[BUCKET].keys[key]
        stored.last_modified = NOW - timedelta(hours=len(files) - number)


def names(folder: Path) -> list[str]:
    return sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*.*"))


def test_the_newest_captured_files(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    files = {"z/1.jsonl": b"1" * 9, "y/2.jsonl": b"2" * 9, "x/3.jsonl": b"3" * 9, "x/4.txt": b"4"}
    put(aws, **files)
    (tmp_path / "own.txt").write_text("")

    def fetch(max_bytes: int, **options: datetime) -> list[str]:
        count = fetch_captured(URI, tmp_path, clients, quiet, max_bytes=max_bytes, **options)
        found = names(tmp_path)
        assert found.pop(0) == "own.txt" and len(found) == count
        return found

    assert fetch(18) == ["x/3.jsonl", "y/2.jsonl"]
    assert fetch(1) == ["x/3.jsonl"], "the others go"
    assert fetch(99, since=NOW - timedelta(hours=3.5)) == ["x/3.jsonl", "y/2.jsonl"]
    assert fetch(99) == ["x/3.jsonl", "y/2.jsonl", "z/1.jsonl"]
    assert (tmp_path / "z/1.jsonl").read_bytes() == b"1" * 9
    assert fetch(99, since=NOW) == []


def test_a_second_run_goes_on(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    put(aws, **{"1.jsonl": b"1", "2.jsonl": b"2", "3.jsonl": b"3"})
    aws.fail("access denied", "GetObject", number=2)
    told: list[str] = []
    with pytest.raises(UserError, match="AWS denied GetObject"):
        fetch_captured(URI, tmp_path, clients, told.append, max_bytes=99)
    assert names(tmp_path) == ["3.jsonl"] and not told
    fetch_captured(URI, tmp_path, clients, told.append, max_bytes=99)
    assert told == [f"fetched 2 files (2 B) from {URI}; 1 were here"]
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == ["1", "2", "3"]


def test_a_model_without_what_lies_below_it(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "pytorch.bin": b"", "more/x.json": b"1", "more/": b""}
    put(aws, **files, **{"peagle/chat/s1/draft/config.json": b"{}"})
    fetch_model(URI, tmp_path, clients, quiet)
    assert names(tmp_path) == ["config.json", "more/x.json"]
    with pytest.raises(UserError, match="There is nothing under s3://"):
        fetch_model(f"s3://{BUCKET}/b/", tmp_path, clients, quiet)


def test_no_name_leads_out_of_the_folder(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    put(aws, **{"config.json": b"{}", "../x.jsonl": b"x"})
    with pytest.raises(UserError, match="leads out of the folder"):
        fetch_model(URI, inner, clients, quiet)
    with pytest.raises(UserError, match="leads out of the folder"):
        fetch_captured(URI, inner, clients, quiet, max_bytes=99)
    assert list(tmp_path.rglob("*")) == []
