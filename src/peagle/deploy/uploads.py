"""Model files into S3 and away again; only what was put there from here is ever deleted.

Files go under an empty prefix, and every object carries its prefix as user metadata ("peagle"):
by that it is known again when the endpoint is deleted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.deploy.aws import Clients
from peagle.deploy.aws_errors import explain
from peagle.deploy.deployment import Transfer
from peagle.deploy.models import folder_files
from peagle.errors import UserError

MARK = "peagle"
# S3 takes so many keys in one DeleteObjects.
_MAX_KEYS = 1000
_PROGRESS_S = 10.0
# Objects from this size on go in parts, several at a time.
MULTIPART_BYTES = 64 << 20

Report = Callable[[str], None]


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix/."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def put(transfers: Sequence[Transfer], clients: Clients, report: Report) -> None:
    """Upload folders and copy prefixes; if one fails, or on Ctrl-C, all are removed again.

    Raises:
        UserError: there is something under a prefix already, a file cannot be read, or S3 refused;
            for a copy, with the command that makes it.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    begun: list[str] = []
    for transfer in transfers:
        try:
            _require_empty(transfer.uri, clients)
            begun.append(transfer.uri)
            (_upload if transfer.source.kind == "local" else _copy)(transfer, clients, report)
        except (BotoCoreError, ClientError) as error:
            remove(begun, clients, report)
            raise _refused(transfer, error) from None
        except BaseException:
            remove(begun, clients, report)
            raise


def _refused(transfer: Transfer, error: Exception) -> UserError:
    said = explain(error)
    if transfer.source.kind == "local":
        return said
    source, uri = transfer.source.name, transfer.uri
    target = uri.partition("peagle/")[0]
    command = shlex.join(["aws", "s3", "cp", "--recursive", source, f"{target}draft/"])
    return UserError(
        f"{said} The head {source!r} must lie below its target's prefix, since a container mounts "
        f"one prefix of S3, and it could not be copied there. Have it copied ({command}), and name "
        f"the copy with --draft {target}draft/."
    )


def _require_empty(uri: str, clients: Clients) -> None:
    bucket, prefix = split_uri(uri)
    there = clients.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    if there.get("KeyCount"):
        raise UserError(
            f"There is something under {uri} already, and nothing there is overwritten. Move it "
            "away, or run this again: every deployment has a prefix of its own."
        )


def put_parameters(transfer: Transfer, name: str) -> dict[str, Any]:
    """Parameters of PutObject or CopyObject for one file; without its content."""
    bucket, prefix = split_uri(transfer.uri)
    key = {"Bucket": bucket, "Key": prefix + name}
    if not transfer.kms_key:
        return key
    return {**key, "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": transfer.kms_key}


def _upload(transfer: Transfer, clients: Clients, report: Report) -> None:
    """Send a folder's files, one after another, large ones in parts."""
    folder = Path(transfer.source.name)
    files = folder_files(folder)
    size = sum(file.stat().st_size for file in files)
    sent, start = 0, clients.clock.now()
    told = start

    def count(more: int) -> None:
        nonlocal sent, told
        sent += more
        now = clients.clock.now()
        if now - told >= _PROGRESS_S:
            told = now
            rate = f"{_size(sent / (now - start))}/s"
            report(f"uploading to {transfer.uri}: {_size(sent)} of {_size(size)}, {rate}")

    for file in files:
        given = put_parameters(transfer, file.relative_to(folder).as_posix())
        bucket, key = given.pop("Bucket"), given.pop("Key")
        extra = given | {"Metadata": {MARK: split_uri(transfer.uri)[1]}}
        _Transferred(clients).upload(str(file), bucket, key, extra, count)
    report(f"uploaded {len(files)} files ({_size(size)}) to {transfer.uri}")


class _Transferred:
    """boto3's managed transfers."""

    def __init__(self, clients: Clients) -> None:
        from boto3.s3.transfer import TransferConfig

        self.client = clients.client("s3")
        self.config = TransferConfig(
            multipart_threshold=MULTIPART_BYTES,
            multipart_chunksize=MULTIPART_BYTES,
            preferred_transfer_client="classic",
        )

    def upload(
        self, path: str, bucket: str, key: str, extra: dict[str, Any], count: Callable[[int], None]
    ) -> None:
        """Send a file."""
        from boto3.exceptions import S3UploadFailedError

        try:
            self.client.upload_file(path, bucket, key, extra, count, self.config)
        except S3UploadFailedError as error:
            # boto3 wraps what S3 answered.
            raise error.__context__ or error from None
        except OSError as error:
            raise UserError(f"{path!r} cannot be read: {error.strerror}.") from None


def _copy(transfer: Transfer, clients: Clients, report: Report) -> None:
    """Copy the objects of a prefix inside S3."""
    made = _Transferred(clients)
    bucket, prefix = split_uri(transfer.source.name)
    keys = list(_keys(made.client, bucket, prefix))
    if not keys:
        raise UserError(f"There is nothing under {transfer.source.name}; check the prefix.")
    for key in keys:
        given = put_parameters(transfer, key.removeprefix(prefix))
        to = given.pop("Bucket"), given.pop("Key")
        mark = {"Metadata": {MARK: split_uri(transfer.uri)[1]}, "MetadataDirective": "REPLACE"}
        source = {"Bucket": bucket, "Key": key}
        made.client.copy(source, *to, given | mark, Config=made.config)
    report(f"copied {len(keys)} files from {transfer.source.name} to {transfer.uri}")


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


# ---- removal --------------------------------------------------------------------------------


def remove(uris: Sequence[str], clients: Clients, report: Report) -> dict[str, str]:
    """Delete what `put` put under prefixes.

    Returns:
        Why objects of a prefix stayed, by prefix.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    stayed: dict[str, str] = {}
    for uri in uris:
        try:
            count, others = _remove(uri, clients)
        except (BotoCoreError, ClientError) as error:
            stayed[uri] = str(explain(error))
            continue
        if count:
            report(f"deleted {count} uploaded files under {uri}")
        if others:
            report(f"left {others} files under {uri} that peagle did not put there")
    return stayed


def _remove(uri: str, clients: Clients) -> tuple[int, int]:
    """Delete marked objects below a prefix; returns how many went and how many others stay."""
    client = clients.client("s3")
    bucket, prefix = split_uri(uri)
    _abort(client, bucket, prefix)
    ours, others = [], 0
    for key in _keys(client, bucket, prefix):
        mark = client.head_object(Bucket=bucket, Key=key).get("Metadata", {}).get(MARK)
        if mark and key.startswith(mark):
            ours.append(key)
        else:
            others += 1
    _delete(client, bucket, ours)
    return len(ours), others


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


def _delete(client: Any, bucket: str, keys: Sequence[str]) -> None:
    from botocore.exceptions import ClientError

    for start in range(0, len(keys), _MAX_KEYS):
        objects = [{"Key": key} for key in keys[start : start + _MAX_KEYS]]
        answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        for refused in answer.get("Errors", ()):
            said = {"Code": refused.get("Code", ""), "Message": refused.get("Message", "")}
            raise ClientError({"Error": said}, "DeleteObjects")
