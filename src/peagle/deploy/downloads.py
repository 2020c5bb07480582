"""Files from S3 into folders here: models of an endpoint, and what its data capture wrote.

A file that is there with its size is not fetched again, so that a second run goes on.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from peagle.deploy.aws import Clients, explain, explained_errors
from peagle.deploy.models import NOT_UPLOADED, split_uri
from peagle.deploy.uploads import Progress, Report, objects_under, transfer_config
from peagle.disk import needing_room, size_text
from peagle.errors import UserError

_STAYS = "What was fetched stays: make room, then run the same command again."


def fetch_model(uri: str, folder: Path, clients: Clients, report: Report) -> None:
    """Fetch the files under a prefix, but for pickles and the heads that peagle put below it.

    Raises:
        UserError: nothing is there, the disk is full, or AWS refused.
    """
    names = {
        name: size
        for name, size, _ in _objects(uri, clients)
        if not name.startswith("peagle/") and Path(name).suffix not in NOT_UPLOADED
    }
    if not names:
        raise UserError(
            f"There is nothing under {uri}: the endpoint's files were moved or deleted."
        )
    _fetch(uri, names, folder, clients, report)


def fetch_captured(
    uri: str,
    folder: Path,
    clients: Clients,
    report: Report,
    *,
    max_bytes: int,
    since: datetime | None = None,
) -> int:
    """Fetch the newest captured files under a prefix; return their number.

    The folder then holds these files alone: others of its .jsonl files are deleted.

    Args:
        max_bytes: of all files; the newest one is fetched whatever its size.
        since: older files are left out.

    Raises:
        UserError: the disk is full, or AWS refused.
    """
    found = [one for one in _objects(uri, clients) if one[0].endswith(".jsonl")]
    names: dict[str, int] = {}
    for name, size, written in sorted(found, key=lambda one: (one[2], one[0]), reverse=True):
        is_old = since is not None and written < since
        if is_old or (names and sum(names.values()) + size > max_bytes):
            break
        names[name] = size
    if len(names) < len(found):
        report(f"the newest {len(names)} of {len(found)} captured files are taken")
    for file in folder.rglob("*.jsonl"):
        if file.relative_to(folder).as_posix() not in names:
            file.unlink()
    _fetch(uri, names, folder, clients, report)
    return len(names)


def _objects(uri: str, clients: Clients) -> Iterator[tuple[str, int, datetime]]:
    """Yield the name below a prefix, the size and the time of each object that has a name."""
    bucket, prefix = split_uri(uri)
    with explained_errors():
        for item in objects_under(clients.client("s3"), bucket, prefix):
            name = item["Key"].removeprefix(prefix)
            if not name or name.endswith("/"):
                continue  # what consoles make for an empty folder
            if ".." in name.split("/") or name.startswith("/"):
                raise UserError(
                    f"s3://{bucket}/{item['Key']} has a name that leads out of the folder it would "
                    "be fetched to. Delete it, or give it another name."
                )
            yield name, item["Size"], item["LastModified"]


def _fetch(
    uri: str, names: Mapping[str, int], folder: Path, clients: Clients, report: Report
) -> None:
    from boto3.exceptions import RetriesExceededError

    client: Any = clients.client("s3")
    bucket, prefix = split_uri(uri)
    missing = {name: size for name, size in names.items() if _size(folder / name) != size}
    total = sum(missing.values())
    progress = Progress(f"fetching from {uri}", total, clients, report)
    for name in missing:
        path = folder / name
        with needing_room(path, _STAYS), explained_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                client.download_file(
                    bucket, prefix + name, str(path), Callback=progress, Config=transfer_config()
                )
            except RetriesExceededError as error:
                raise explain(error.last_exception or error) from None
    kept = f"; {len(names) - len(missing)} were here" if len(missing) < len(names) else ""
    report(f"fetched {len(missing)} files ({size_text(total)}) from {uri}{kept}")


def _size(path: Path) -> int:
    """Return the bytes of a file; -1 without one."""
    return path.stat().st_size if path.is_file() else -1
