"""Where a model or a draft head is: on the hub, in S3, or in a folder here that is uploaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.bundled import Role, expand_bundled
from peagle.errors import UserError

Kind = Literal["hub", "s3", "local"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# Bucket: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip", ".safetensors")
# Pickles can run code when they are read; neither container needs them beside safetensors.
_NOT_UPLOADED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".part")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is.

    Attributes:
        kind: "hub", "s3" or "local".
        name: a hub id, an s3:// prefix that ends with a slash, or an absolute path.
        revision: branch, tag or commit of a hub id; None for its main branch.
    """

    kind: Kind
    name: str
    revision: str | None = None

    @property
    def short_name(self) -> str:
        """The last part of the name, "Qwen3-8B"."""
        return self.name.rstrip("/").rpartition("/")[2]


def source_of(text: str, role: Role = "target") -> ModelSource:
    """Where the model that a user names is.

    "bundled" is the model that ships; s3:// is a prefix in S3; what begins with ".", "/" or "~", or
    is there, is a folder; "owner/name" and "owner/name@revision" are hub ids.

    Args:
        text: as it was typed.
        role: what the model is for.

    Raises:
        UserError: none of these, an archive, or a folder without config.json or weights.
    """
    what = "The model" if role == "target" else "The draft head"
    text = expand_bundled(text, role)
    if text.startswith("s3://"):
        return ModelSource("s3", s3_prefix(text, what))
    path = Path(text).expanduser()
    if text.startswith((".", "/", "~")) or (text and path.exists()):
        return _local(path, text, what)
    name, at, revision = text.partition("@")
    if _HUB_ID.fullmatch(name) is None or (at and not revision):
        raise UserError(
            f"{what} is {text!r}; expected a hub id (owner/name or owner/name@revision), a prefix "
            "in S3 (s3://bucket/folder/) or a folder here."
        )
    return ModelSource("hub", name, revision or None)


def s3_prefix(text: str, what: str) -> str:
    """An s3:// prefix, with a slash at its end.

    Raises:
        UserError: it names no bucket, or a file.
    """
    bucket, _, key = text.removeprefix("s3://").partition("/")
    if not text.startswith("s3://") or _BUCKET.fullmatch(bucket) is None:
        raise UserError(f"{what} is {text!r}; expected a prefix in S3, like s3://bucket/folder/.")
    if key.endswith(_ARCHIVES):
        raise UserError(
            f"{what} is {text!r}, a file; expected the prefix under which config.json and the "
            "safetensors files lie, unpacked, like s3://bucket/folder/."
        )
    return text if text.endswith("/") else text + "/"


def _local(path: Path, text: str, what: str) -> ModelSource:
    if not path.is_dir():
        raise UserError(f"{what} {text!r} is not a folder here; check the path.")
    if not (path / "config.json").is_file():
        raise UserError(f"{what} {text!r} has no config.json; expected the folder of a model.")
    if not any(file.suffix == ".safetensors" for file in folder_files(path)):
        raise UserError(
            f"{what} {text!r} has no safetensors file; expected weights in that format."
        )
    return ModelSource("local", str(path.resolve()))


def folder_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are uploaded, sorted; those of its folders too.

    Hidden ones and pickles stay here. Links to files count as files, if they stay in the folder or,
    in a snapshot of the hub's cache, lead to the blobs of its repository.

    Raises:
        UserError: a link leads elsewhere or nowhere, or something is neither a file nor a folder.
    """
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix not in _NOT_UPLOADED
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for path in found:
        _check_uploaded(path, inside)
    return [path for path in found if path.is_file()]


def _check_uploaded(path: Path, inside: list[Path]) -> None:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop is the second, before Python 3.13
        raise UserError(
            f"{str(path)!r} is a link to {os.readlink(path)!r}, which leads nowhere; expected a "
            "file. Remove it, or copy the model again."
        ) from None
    if not any(real.is_relative_to(one) for one in inside):
        raise UserError(
            f"{str(path)!r} is a link to {str(real)!r}, outside the model's folder; only files of "
            "the folder are uploaded. Copy the file into the folder, or remove the link."
        )
    if not (real.is_file() or real.is_dir()):
        raise UserError(
            f"{str(path)!r} is neither a file nor a folder; expected a model's files. Remove it."
        )
