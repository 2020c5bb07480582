"""Folders to S3 and away again; only what was uploaded is ever deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from deploy.fake_aws import BUCKET, FakeAws
from deploy.fault_matrix import NoSleep
from peagle.deploy import uploads
from peagle.deploy.apply import apply
from peagle.deploy.plan import Upload
from peagle.deploy.uploads import Removal
from peagle.errors import UserError

PREFIX = "peagle/chat/s1/target/"


@pytest.fixture
def aws(monkeypatch) -> FakeAws:
    monkeypatch.setattr("botocore.endpoint.time", NoSleep)
    aws = FakeAws()
    aws.make_bucket()
    yield aws
    assert not aws.violations


def model(folder: Path, size: int = 100) -> Upload:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "more").mkdir()
    (folder / "more" / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin", "old.pt", ".hidden"):
        (folder / name).write_bytes(b"pickle")
    return Upload(folder, BUCKET, PREFIX, 3, size + 4)


def clients(aws: FakeAws):
    return aws.clients(direct=True, retries={"mode": "standard", "total_max_attempts": 2})


def keys(aws: FakeAws) -> set[str]:
    return set(aws.objects(f"s3://{BUCKET}/"))


def quiet(line: str) -> None:
    pass


def test_files_arrive(aws, tmp_path):
    said: list[str] = []
    uploads.upload(model(tmp_path), clients(aws), said.append)
    found = aws.objects(f"s3://{BUCKET}/{PREFIX}")
    assert found == {
        "config.json": b"{}",
        "model.safetensors": bytes(100),
        "more/tokenizer.json": b"{}",
    }
    assert said == [f"uploaded 3 files (104 bytes) to s3://{BUCKET}/{PREFIX}"]


def test_key_encrypts_them(aws, tmp_path):
    step = model(tmp_path)
    step = Upload(step.folder, step.bucket, step.prefix, step.files, step.size, "alias/mine")
    uploads.upload(step, clients(aws), quiet)
    puts = [r.parameters for r in aws.calls if r.operation == "PutObject"]
    assert len(puts) == 3
    assert {put["ServerSideEncryption"] for put in puts} == {"aws:kms"}
    assert {put["SSEKMSKeyId"] for put in puts} == {"alias/mine"}


def test_nothing_is_overwritten(aws, tmp_path):
    """Nor deleted, when what failed is undone."""
    client = aws.clients(direct=True).client("s3")
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}config.json", Body=b"mine")
    with pytest.raises(UserError, match=r"something under s3://.* already"):
        apply([model(tmp_path)], clients(aws), report=quiet)
    assert aws.objects(f"s3://{BUCKET}/{PREFIX}") == {"config.json": b"mine"}


def test_large_files_go_in_parts_and_tell_how_far_they_are(aws, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "MULTIPART_BYTES", 5 << 20)
    monkeypatch.setattr(uploads, "_PROGRESS_S", 0.0)
    said: list[str] = []
    made = clients(aws)
    monkeypatch.setattr(aws.clock.__class__, "now", _ticking())
    uploads.upload(model(tmp_path, 12 << 20), made, said.append)
    assert len(aws.objects(f"s3://{BUCKET}/{PREFIX}")["model.safetensors"]) == 12 << 20
    assert [r.operation for r in aws.calls].count("UploadPart") == 3
    assert any("of 12.0 MiB" in line and line.endswith("/s") for line in said[:-1])
    assert not any(name.startswith("multipart") for name in aws.holdings())


def _ticking():
    seconds = iter(range(1_000_000))
    return lambda self: float(next(seconds))


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize("abort_fails", [False, True])
def test_parts_of_failed_uploads_go(aws, tmp_path, monkeypatch, operation, abort_fails):
    monkeypatch.setattr(uploads, "MULTIPART_BYTES", 5 << 20)
    aws.fail("access denied", operation, calls=10)
    if abort_fails:  # boto3's own; peagle asks once more
        aws.fail("access denied", "AbortMultipartUpload", calls=1)
    with pytest.raises(UserError, match=f"(?s){operation} was denied.*nothing stayed"):
        apply([model(tmp_path, 12 << 20)], clients(aws), report=quiet)
    assert aws.holdings() == set()


def test_bucket_that_is_not_there(aws, tmp_path):
    step = model(tmp_path)
    missing = Upload(step.folder, "no-such-bucket", PREFIX, 3, 104)
    with pytest.raises(UserError, match=r"NoSuchBucket.*aws s3 mb s3://no-such-bucket"):
        apply([missing], clients(aws), report=quiet)


def test_only_uploaded_objects_are_deleted(aws, tmp_path):
    made = clients(aws)
    uploads.upload(model(tmp_path), made, quiet)
    client = made.client("s3")
    foreign = {
        PREFIX + "notes.txt": {},
        PREFIX + "copy.json": {"peagle": "peagle/other/s1/target/"},
        "elsewhere/model.safetensors": {"peagle": "elsewhere/"},
    }
    for key, metadata in foreign.items():
        client.put_object(Bucket=BUCKET, Key=key, Body=b"mine", Metadata=metadata)
    said: list[str] = []
    done = apply([Removal(f"s3://{BUCKET}/peagle/chat/s1/")], made, report=said.append)
    assert keys(aws) == set(foreign)
    assert done.deleted == (f"uploads under s3://{BUCKET}/peagle/chat/s1/",)
    assert said[0].startswith("2 objects under") and "they stay" in said[0]


def test_undo_leaves_objects_of_others(aws, tmp_path):
    """Somebody writes below the prefix meanwhile."""
    made = clients(aws)
    step = model(tmp_path)
    uploads.upload(step, made, quiet)
    made.client("s3").put_object(Bucket=BUCKET, Key=PREFIX + "notes.txt", Body=b"mine")
    assert uploads.take_back(step, made) == 3
    assert keys(aws) == {PREFIX + "notes.txt"}


def test_more_objects_than_s3_deletes_at_once(aws, monkeypatch):
    monkeypatch.setattr(uploads, "_MAX_KEYS", 2)
    made = clients(aws)
    for number in range(5):
        made.client("s3").put_object(
            Bucket=BUCKET, Key=f"{PREFIX}{number}", Body=b"", Metadata={"peagle": PREFIX}
        )
    assert uploads.remove(Removal(f"s3://{BUCKET}/{PREFIX}"), made) == (5, [])
    assert keys(aws) == set()


def test_objects_that_s3_does_not_delete(monkeypatch):
    """S3 answers 200 and names what it refused."""

    class Client:
        def delete_objects(self, **_):
            return {"Errors": [{"Key": "k", "Code": "AccessDenied", "Message": "no"}]}

    with pytest.raises(ClientError, match="AccessDenied"):
        uploads._delete(Client(), BUCKET, ["k"])


def test_default_bucket():
    assert uploads.default_bucket("eu-west-1", "123456789012") == "sagemaker-eu-west-1-123456789012"
