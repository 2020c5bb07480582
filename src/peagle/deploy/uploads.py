"""Model files into S3 and away again; peagle deletes only objects that it put there.

Files go under an empty prefix, and every object carries its prefix as user metadata ("peagle"),
which marks it as peagle's when the endpoint is deleted.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.deploy.aws import Clients, call_errors, explain
from peagle.deploy.deployment import Transfer
from peagle.deploy.models import folder_files, split_uri
from peagle.disk import size_text
from peagle.errors import UserError

MARK = "peagle"
_MAX_KEYS = 1000  # of one DeleteObjects
_PROGRESS_S = 10.0
# Larger objects go in parts, several at a time.
MULTIPART_BYTES = 64 << 20

Report = Callable[[str], None]


def put(transfers: Sequence[Transfer], clients: Clients, report: Report) -> None:
    """Upload folders and copy prefixes; if one fails, or on Ctrl-C, remove all of them again.

    Raises:
        UserError: a prefix is not empty, a file cannot be read, or S3 refused; for a copy, the
            error names the command that makes it.
    """
    begun: list[str] = []
    for transfer in transfers:
        try:
            _require_empty(transfer.uri, clients)
            begun.append(transfer.uri)
            (_upload if transfer.source.kind == "local" else _copy)(transfer, clients, report)
        except call_errors() as error:
            remove(begun, clients, report)
            raise _explain_refusal(transfer, error) from None
        except BaseException:
            remove(begun, clients, report)
            raise


def _explain_refusal(transfer: Transfer, error: Exception) -> UserError:
    refusal = explain(error)
    if transfer.source.kind == "local":
        return refusal
    source, target = transfer.source.name, transfer.uri.partition("peagle/")[0]
    command = shlex.join(["aws", "s3", "cp", "--recursive", source, f"{target}draft/"])
    return UserError(
        f"{refusal} The head {source!r} must lie below its target's prefix, since a container "
        f"mounts one prefix of S3, and peagle could not copy it there. Make the copy ({command}), "
        f"and name it with --draft {target}draft/."
    )


def _require_empty(uri: str, clients: Clients) -> None:
    bucket, prefix = split_uri(uri)
    found = clients.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    if found.get("KeyCount"):
        raise UserError(
            f"There is something under {uri} already, and peagle overwrites nothing. Move it away, "
            "or run this again: every deployment has a prefix of its own."
        )


def put_parameters(transfer: Transfer, name: str) -> dict[str, Any]:
    """Return the parameters of PutObject or CopyObject for one file, without its content."""
    bucket, prefix = split_uri(transfer.uri)
    key = {"Bucket": bucket, "Key": prefix + name}
    if not transfer.kms_key:
        return key
    return {**key, "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": transfer.kms_key}


class Progress:
    """A callback that reports the bytes of a transfer now and then.

    Args:
        what: "uploading to s3://...", for the report.
        size: bytes of all files.
    """

    def __init__(self, what: str, size: int, clients: Clients, report: Report) -> None:
        self._what, self._size, self._clock, self._report = what, size, clients.clock, report
        self._sent, self._start = 0, clients.clock.now()
        self._reported = self._start

    def __call__(self, more: int) -> None:
        """Add bytes that were sent."""
        self._sent += more
        now = self._clock.now()
        if now - self._reported >= _PROGRESS_S:
            self._reported = now
            rate = size_text(self._sent / (now - self._start))
            sent = f"{size_text(self._sent)} of {size_text(self._size)}"
            self._report(f"{self._what}: {sent}, {rate}/s")


def transfer_config() -> Any:
    """Return boto3's configuration of a transfer of files."""
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=MULTIPART_BYTES,
        multipart_chunksize=MULTIPART_BYTES,
        preferred_transfer_client="classic",
    )


def _upload(transfer: Transfer, clients: Clients, report: Report) -> None:
    from boto3.exceptions import S3UploadFailedError

    folder = Path(transfer.source.name)
    files = folder_files(folder)
    size = sum(file.stat().st_size for file in files)
    progress = Progress(f"uploading to {transfer.uri}", size, clients, report)
    for file in files:
        extra = put_parameters(transfer, file.relative_to(folder).as_posix())
        to = extra.pop("Bucket"), extra.pop("Key")
        extra["Metadata"] = {MARK: split_uri(transfer.uri)[1]}
        try:
            clients.client("s3").upload_file(str(file), *to, extra, progress, transfer_config())
        except S3UploadFailedError as error:
            raise error.__context__ or error from None  # boto3 wraps S3's answer
        except OSError as error:
            raise UserError(f"{str(file)!r} cannot be read: {error.strerror}.") from None
    report(f"uploaded {len(files)} files ({size_text(size)}) to {transfer.uri}")


def _copy(transfer: Transfer, clients: Clients, report: Report) -> None:
    client = clients.client("s3")
    bucket, prefix = split_uri(transfer.source.name)
    keys = [item["Key"] for item in objects_under(client, bucket, prefix)]
    if not keys:
        raise UserError(f"There is nothing under {transfer.source.name}; check the prefix.")
    for key in keys:
        extra = put_parameters(transfer, key.removeprefix(prefix))
        to = extra.pop("Bucket"), extra.pop("Key")
        extra |= {"Metadata": {MARK: split_uri(transfer.uri)[1]}, "MetadataDirective": "REPLACE"}
        source = {"Bucket": bucket, "Key": key}
        client.copy(source, *to, extra, Config=transfer_config())
    report(f"copied {len(keys)} files from {transfer.source.name} to {transfer.uri}")


# ---- removal ----


def remove(uris: Sequence[str], clients: Clients, report: Report) -> dict[str, str]:
    """Delete the objects that `put` put under prefixes; return why objects stayed, by prefix."""
    stayed: dict[str, str] = {}
    for uri in uris:
        try:
            count, others = _remove(uri, clients.client("s3"))
        except call_errors() as error:
            stayed[uri] = str(explain(error))
            continue
        if count:
            report(f"deleted {count} uploaded files under {uri}")
        if others:
            report(f"left {others} files under {uri} that peagle did not put there")
    return stayed


def _remove(uri: str, client: Any) -> tuple[int, int]:
    """Delete marked objects below a prefix; return their number and the number of others."""
    bucket, prefix = split_uri(uri)
    # The parts of an upload that did not finish cost money as objects do.
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    for item in (item for page in pages for item in page.get("Uploads", ())):
        if item["Key"].startswith(prefix):  # some stand-ins for S3 ignore the prefix
            client.abort_multipart_upload(Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"])
    ours, others = [], 0
    for key in (item["Key"] for item in objects_under(client, bucket, prefix)):
        mark = client.head_object(Bucket=bucket, Key=key).get("Metadata", {}).get(MARK)
        if mark and key.startswith(mark):
            ours.append(key)
        else:
            others += 1
    _delete(client, bucket, ours)
    return len(ours), others


def objects_under(client: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield what S3 lists of each object under a prefix: Key, Size, LastModified and more."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        yield from page.get("Contents", ())


def _delete(client: Any, bucket: str, keys: Sequence[str]) -> None:
    from botocore.exceptions import ClientError

    for start in range(0, len(keys), _MAX_KEYS):
        objects = [{"Key": key} for key in keys[start : start + _MAX_KEYS]]
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        for refused in answer.get("Errors", ()):  # S3 answers 200 and lists them
            error = {"Code": refused.get("Code", ""), "Message": refused.get("Message", "")}
            raise ClientError({"Error": error}, "DeleteObjects")
