"""The place of a model or a draft head: the hub, S3, or a folder here, which `create` uploads."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.bundled import Role, expand_bundled
from peagle.errors import UserError
from peagle.models.gguf_header import CONVERT_HINT, is_gguf

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# Bucket: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip", ".safetensors")
# Pickles can run code when they are read; neither container needs them beside safetensors.
NOT_UPLOADED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".part")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The place of a model.

    Attributes:
        kind: "hub", "s3" or "local".
        name: a hub id, an s3:// prefix that ends with a slash, or an absolute path.
        revision: branch, tag or commit of a hub id; None for its main branch.
    """

    kind: Literal["hub", "s3", "local"]
    name: str
    revision: str | None = None

    @property
    def short_name(self) -> str:
        """Return the last part of the name, "Qwen3-8B"."""
        return self.name.rstrip("/").rpartition("/")[2]


def source_of(text: str, role: Role = "target") -> ModelSource:
    """Return the place of the model that a user names.

    "bundled" is the model that comes with peagle; s3:// is a prefix in S3; a text that begins with
    ".", "/" or "~", or is the path of a folder, is a folder; "owner/name" and "owner/name@revision"
    are hub ids.

    Raises:
        UserError: none of these, an archive, or a folder without config.json or weights.
    """
    what = "The model" if role == "target" else "The draft head"
    text = expand_bundled(text, role)
    if text.startswith("s3://"):
        return ModelSource("s3", s3_prefix(text, what))
    path = Path(text).expanduser()
    if text.startswith((".", "/", "~")) or (text and path.exists()):
        if is_gguf(path):
            raise UserError(f"{what} {text!r} is a GGUF file; {CONVERT_HINT} and name the folder.")
        if not path.is_dir():
            raise UserError(f"{what} {text!r} is not a folder here; check the path.")
        if not (path / "config.json").is_file():
            raise UserError(f"{what} {text!r} has no config.json; expected the folder of a model.")
        if not any(file.suffix == ".safetensors" for file in folder_files(path)):
            raise UserError(
                f"{what} {text!r} has no safetensors file; expected weights in that format."
            )
        return ModelSource("local", str(path.resolve()))
    name, at, revision = text.partition("@")
    if _HUB_ID.fullmatch(name) is None or (at and not revision):
        raise UserError(
            f"{what} is {text!r}; expected a hub id (owner/name or owner/name@revision), a prefix "
            "in S3 (s3://bucket/folder/) or a folder here."
        )
    return ModelSource("hub", name, revision or None)


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix/."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def s3_prefix(text: str, what: str) -> str:
    """Return an s3:// prefix with a slash at its end; `what` names it in messages.

    Raises:
        UserError: it names no bucket, or a file.
    """
    bucket, key = split_uri(text)
    if not text.startswith("s3://") or _BUCKET.fullmatch(bucket) is None:
        raise UserError(f"{what} is {text!r}; expected a prefix in S3, like s3://bucket/folder/.")
    if key.endswith(_ARCHIVES):
        raise UserError(
            f"{what} is {text!r}, a file; expected the prefix under which config.json and the "
            "safetensors files lie, unpacked, like s3://bucket/folder/."
        )
    return text if text.endswith("/") else text + "/"


def folder_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder, and of its folders, that `create` uploads, sorted.

    Hidden files and pickles stay here. Links count as files if they lead into the folder or, in a
    snapshot of the hub's cache, to the blobs of its repository.

    Raises:
        UserError: a link leads elsewhere or nowhere, or something is neither a file nor a folder.
    """
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix not in NOT_UPLOADED
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for path in found:
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
            raise UserError(
                f"{str(path)!r} is a link to {os.readlink(path)!r}, which leads nowhere; expected "
                "a file. Remove it, or copy the model again."
            ) from None
        if not any(real.is_relative_to(one) for one in inside):
            raise UserError(
                f"{str(path)!r} is a link to {str(real)!r}, outside the model's folder; only files "
                "of the folder are uploaded. Copy the file into the folder, or remove the link."
            )
        if not (real.is_file() or real.is_dir()):
            raise UserError(
                f"{str(path)!r} is neither a file nor a folder; expected a model's files. Remove "
                "it."
            )
    return [path for path in found if path.is_file()]
