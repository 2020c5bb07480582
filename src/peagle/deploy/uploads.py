"""Local folders to S3 and away again; only what was uploaded from here is ever deleted.

An upload begins under an empty prefix, and every object carries its prefix as user metadata
("peagle"): by that it is known again when the endpoint is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peagle.deploy.models import folder_files
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.aws import Clients
    from peagle.deploy.plan import Upload

MARK = "peagle"
# S3 takes so many keys in one DeleteObjects.
_MAX_KEYS = 1000
_PROGRESS_S = 10.0
# Objects from this size on go in parts, several at a time.
MULTIPART_BYTES = 64 << 20

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Removal:
    """Delete what an earlier upload put under a prefix.

    Attributes:
        uri: s3://bucket/prefix/.
    """

    uri: str

    @property
    def place(self) -> tuple[str, str]:
        """Bucket and prefix."""
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        return bucket, prefix


def default_bucket(region: str, account: str) -> str:
    """The bucket that SageMaker's own tools use by default in a region of an account."""
    return f"sagemaker-{region}-{account}"


def require_empty(step: Upload, clients: Clients) -> None:
    """Refuse a prefix under which something is.

    Raises:
        UserError: there is something.
        botocore's errors: S3 refused or gave no answer.
    """
    client = clients.client("s3")
    there = client.list_objects_v2(Bucket=step.bucket, Prefix=step.prefix, MaxKeys=1)
    if there.get("KeyCount"):
        raise UserError(
            f"There is something under {step.uri} already, and nothing there is overwritten. Move "
            "it away, or run this again: every deployment has a prefix of its own."
        )


def upload(step: Upload, clients: Clients, report: Report) -> None:
    """Send a folder's files, one after another, large ones in parts.

    Raises:
        UserError: a file cannot be read.
        botocore's errors: S3 refused or gave no answer; what was sent stays, see `take_back`.
    """
    client = clients.client("s3")
    progress = _Progress(step, clients, report)
    with _transfer_manager(client) as manager:
        for path in folder_files(step.folder):
            name = path.relative_to(step.folder).as_posix()
            given = step.parameters(name)
            bucket, key = given.pop("Bucket"), given.pop("Key")
            extra = given | {"Metadata": {MARK: step.prefix}}
            try:
                manager.upload(str(path), bucket, key, extra, [progress.subscriber()]).result()
            except OSError as error:
                raise UserError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    report(f"uploaded {step.files} files ({_size(step.size)}) to {step.uri}")


def _transfer_manager(client: Any) -> Any:
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    config = TransferConfig(
        multipart_threshold=MULTIPART_BYTES,
        multipart_chunksize=MULTIPART_BYTES,
        preferred_transfer_client="classic",
    )
    return create_transfer_manager(client, config)


class _Progress:
    """Bytes sent so far, told from time to time; called from the threads that send."""

    def __init__(self, step: Upload, clients: Clients, report: Report) -> None:
        self._step, self._clock, self._report = step, clients.clock, report
        self._sent = 0
        self._start = self._told = clients.clock.now()

    def subscriber(self) -> Any:
        """What s3transfer tells."""
        from s3transfer.subscribers import BaseSubscriber

        count = self._count

        class Subscriber(BaseSubscriber):
            def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
                count(bytes_transferred)

        return Subscriber()

    def _count(self, sent: int) -> None:
        self._sent += sent
        now = self._clock.now()
        if now - self._told >= _PROGRESS_S:
            self._told = now
            rate = _size(self._sent / (now - self._start))
            done, whole = _size(self._sent), _size(self._step.size)
            self._report(f"uploading to {self._step.uri}: {done} of {whole}, {rate}/s")


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


# ---- away again -------------------------------------------------------------------------------


def take_back(step: Upload, clients: Clients) -> int:
    """Delete what `upload` sent, whole or in part; the number of objects that it asked to delete.

    Raises:
        botocore's errors: S3 refused or gave no answer.
    """
    client = clients.client("s3")
    _abort(client, step.bucket, step.prefix)
    there = set(_keys(client, step.bucket, step.prefix))
    sent = [
        step.prefix + path.relative_to(step.folder).as_posix() for path in folder_files(step.folder)
    ]
    return _delete(client, step.bucket, [key for key in sent if key in there])


def remove(removal: Removal, clients: Clients) -> tuple[int, list[str]]:
    """Delete the objects below a prefix that carry the mark of an upload.

    Returns:
        How many were deleted, and the keys of others, which stay.

    Raises:
        botocore's errors: S3 refused or gave no answer.
    """
    client = clients.client("s3")
    bucket, prefix = removal.place
    _abort(client, bucket, prefix)
    ours, others = [], []
    for key in _keys(client, bucket, prefix):
        mark = client.head_object(Bucket=bucket, Key=key).get("Metadata", {}).get(MARK)
        (ours if mark and key.startswith(mark) else others).append(key)
    return _delete(client, bucket, ours), others


def _keys(client: Any, bucket: str, prefix: str) -> Iterator[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        yield from (item["Key"] for item in page.get("Contents", ()))


def _abort(client: Any, bucket: str, prefix: str) -> None:
    """Give up uploads in parts that were not finished: their parts cost as objects do."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        for item in page.get("Uploads", ()):
            # Prefixes are not passed on by every stand-in of S3.
            if item["Key"].startswith(prefix):
                client.abort_multipart_upload(
                    Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"]
                )


def _delete(client: Any, bucket: str, keys: Sequence[str]) -> int:
    from botocore.exceptions import ClientError

    for start in range(0, len(keys), _MAX_KEYS):
        objects = [{"Key": key} for key in keys[start : start + _MAX_KEYS]]
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        for refused in answer.get("Errors", ()):
            said = {"Code": refused.get("Code", ""), "Message": refused.get("Message", "")}
            raise ClientError({"Error": said}, "DeleteObjects")
    return len(keys)
