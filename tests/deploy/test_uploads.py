"""Model files into S3 and away again; only what was put there is ever deleted."""

import dataclasses
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from deploy.fake_aws import BUCKET, FakeAws
from peagle.deploy import uploads
from peagle.deploy.aws import Clients
from peagle.deploy.deployment import Transfer
from peagle.deploy.models import ModelSource
from peagle.errors import UserError

PREFIX = "peagle/chat/s1/target/"
URI = f"s3://{BUCKET}/{PREFIX}"


def model(folder: Path, size: int = 100, **fields: str) -> Transfer:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "more").mkdir()
    (folder / "more" / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin", "old.pt", ".hidden"):
        (folder / name).write_bytes(b"pickle")
    return Transfer(ModelSource("local", str(folder)), URI, **fields)


def keys(aws: FakeAws) -> set[str]:
    return set(aws.objects(f"s3://{BUCKET}/"))


def quiet(line: str) -> None:
    pass


def test_files_arrive(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    told: list[str] = []
    uploads.put([model(tmp_path)], clients, told.append)
    assert aws.objects(URI) == {
        "config.json": b"{}",
        "model.safetensors": bytes(100),
        "more/tokenizer.json": b"{}",
    }
    assert told == [f"uploaded 3 files (104 B) to {URI}"]


def test_key_encrypts_them(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    uploads.put([model(tmp_path, kms_key="alias/mine")], clients, quiet)
    puts = [r.parameters for r in aws.calls if r.operation == "PutObject"]
    assert len(puts) == 3
    assert {put["ServerSideEncryption"] for put in puts} == {"aws:kms"}
    assert {put["SSEKMSKeyId"] for put in puts} == {"alias/mine"}


def head_in_s3(aws: FakeAws) -> Transfer:
    client = aws.clients(direct=True).client("s3")
    for name in ("config.json", "more/model.safetensors"):
        client.put_object(Bucket=BUCKET, Key=f"heads/mine/{name}", Body=name.encode())
    return Transfer(ModelSource("s3", f"s3://{BUCKET}/heads/mine/"), f"s3://{BUCKET}/t/peagle/x/")


def test_a_head_in_s3_is_copied_below_its_target(aws: FakeAws, clients: Clients) -> None:
    transfer = head_in_s3(aws)
    before = keys(aws)
    told: list[str] = []
    uploads.put([transfer], clients, told.append)
    assert aws.objects(transfer.uri) == {
        "config.json": b"config.json",
        "more/model.safetensors": b"more/model.safetensors",
    }
    assert told[0].startswith("copied 2 files from")
    assert uploads.remove([transfer.uri], clients, quiet) == {}
    assert keys(aws) == before


def test_a_prefix_that_cannot_be_written_names_the_copy_to_make(
    aws: FakeAws, clients: Clients
) -> None:
    transfer = head_in_s3(aws)
    before = keys(aws)
    aws.fail("access denied", "CopyObject", calls=9)
    with pytest.raises(UserError) as caught:
        uploads.put([transfer], clients, quiet)
    copy = f"aws s3 cp --recursive s3://{BUCKET}/heads/mine/ s3://{BUCKET}/t/draft/"
    assert copy in str(caught.value) and f"--draft s3://{BUCKET}/t/draft/" in str(caught.value)
    assert keys(aws) == before
    empty = dataclasses.replace(transfer, source=ModelSource("s3", f"s3://{BUCKET}/none/"))
    with pytest.raises(UserError, match="There is nothing under"):
        uploads.put([empty], clients, quiet)


def test_nothing_is_overwritten(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    """Nor deleted, when what failed is taken back."""
    client = aws.clients(direct=True).client("s3")
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}config.json", Body=b"mine")
    with pytest.raises(UserError, match=r"something under s3://.* already"):
        uploads.put([model(tmp_path)], clients, quiet)
    assert aws.objects(URI) == {"config.json": b"mine"}


def test_large_files_go_in_parts_and_tell_how_far_they_are(
    aws: FakeAws, clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MULTIPART_BYTES", 5 << 20)
    monkeypatch.setattr(uploads, "_PROGRESS_S", 0.0)
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(aws.clock.__class__, "now", lambda self: float(next(seconds)))
    told: list[str] = []
    uploads.put([model(tmp_path, 12 << 20)], clients, told.append)
    assert len(aws.objects(URI)["model.safetensors"]) == 12 << 20
    assert [r.operation for r in aws.calls].count("UploadPart") == 3
    assert any("of 12.0 MiB" in line and line.endswith("/s") for line in told[:-1])
    assert not any(name.startswith("multipart") for name in aws.holdings())


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize("abort_fails", [False, True])
def test_parts_of_failed_uploads_go(
    aws: FakeAws,
    clients: Clients,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    abort_fails: bool,
) -> None:
    monkeypatch.setattr(uploads, "MULTIPART_BYTES", 5 << 20)
    aws.fail("access denied", operation, calls=10)
    if abort_fails:  # boto3's own; peagle asks once more
        aws.fail("access denied", "AbortMultipartUpload", calls=1)
    with pytest.raises(UserError, match=f"AWS denied {operation}"):
        uploads.put([model(tmp_path, 12 << 20)], clients, quiet)
    assert aws.holdings() == set()


def test_bucket_that_is_not_there(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    missing = dataclasses.replace(model(tmp_path), uri=f"s3://no-such-bucket/{PREFIX}")
    with pytest.raises(UserError, match=r"NoSuchBucket.*aws s3 mb s3://no-such-bucket"):
        uploads.put([missing], clients, quiet)


def test_only_uploaded_objects_are_deleted(aws: FakeAws, clients: Clients, tmp_path: Path) -> None:
    made = clients
    uploads.put([model(tmp_path)], made, quiet)
    foreign = {
        PREFIX + "notes.txt": {},
        PREFIX + "copy.json": {"peagle": "peagle/other/s1/target/"},
        "elsewhere/model.safetensors": {"peagle": "elsewhere/"},
    }
    for key, metadata in foreign.items():
        made.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"mine", Metadata=metadata)
    told: list[str] = []
    assert uploads.remove([f"s3://{BUCKET}/peagle/chat/s1/"], made, told.append) == {}
    assert keys(aws) == set(foreign)
    assert "deleted 3 uploaded files" in told[0] and "left 2 files" in told[1]


def test_more_objects_than_s3_deletes_at_once(
    aws: FakeAws, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_MAX_KEYS", 2)
    made = clients
    for number in range(5):
        made.client("s3").put_object(
            Bucket=BUCKET, Key=f"{PREFIX}{number}", Body=b"", Metadata={"peagle": PREFIX}
        )
    assert uploads.remove([URI], made, quiet) == {}
    assert keys(aws) == set()


def test_objects_that_s3_does_not_delete() -> None:
    """S3 answers 200 and names what it refused."""

    class Client:
        def delete_objects(self, **_: object) -> dict[str, object]:
            return {"Errors": [{"Key": "k", "Code": "AccessDenied", "Message": "no"}]}

    with pytest.raises(ClientError, match="AccessDenied"):
        uploads._delete(Client(), BUCKET, ["k"])
