"""What of a model's files is looked at before it is deployed: config.json and names of tensors.

In a folder here, on the hub of models, or in S3; of weights only the headers are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peagle.deploy.models import ModelSource
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import MAX_JSON_BYTES, Readable, parse_json, read_header

CONFIG = "config.json"
_WEIGHTS = ".safetensors"


def _place(source: ModelSource) -> tuple[str, str]:
    bucket, _, prefix = source.name.removeprefix("s3://").partition("/")
    return bucket, prefix


def files_of(source: ModelSource, s3: Any = None) -> LocalFiles | HubFiles | S3Files | None:
    """The files of a model; None in S3 without boto3's client to read them with."""
    if source.kind == "local":
        return LocalFiles(Path(source.name))
    if source.kind == "hub":
        return HubFiles(source)
    return None if s3 is None else S3Files(source, s3)


@contextmanager
def unseen_is_told(source: ModelSource, what: str) -> Iterator[None]:
    """Within, what cannot be read becomes a warning: the container may well be able to.

    Mistakes in what can be read stay errors.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warn_unseen(source, what, f" ({reason})")


def warn_unseen(source: ModelSource, what: str, reason: str = "") -> None:
    """Say that a model was not looked at."""
    where = {"hub": "on the hub", "s3": "in S3", "local": "here"}[source.kind]
    warnings.warn(
        f"{what} {source.name!r} could not be looked at {where}{reason}; whether it fits shows "
        "when the container starts.",
        stacklevel=5,
    )


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """In a folder."""

    folder: Path

    def config(self) -> dict[str, Any]:
        """config.json."""
        from peagle.models.checkpoint.files import read_object

        return read_object(self.folder / CONFIG)

    def tensor_names(self) -> Collection[str]:
        """Of all its safetensors files, which are whole."""
        from peagle.models.loading import check_weights

        check_weights(self.folder)
        names: set[str] = set()
        for file in self.folder.glob(f"*{_WEIGHTS}"):
            with file.open("rb") as data:
                names |= _names(data, str(file), file.stat().st_size)
        return names


@dataclass(frozen=True, slots=True)
class HubFiles:
    """On the hub; nothing goes into its cache, where half a model would pass for one."""

    source: ModelSource

    def config(self) -> dict[str, Any]:
        """config.json."""
        from huggingface_hub import hf_hub_download

        from peagle.models.hub import no_telemetry
        from peagle.models.hub_upload import hub_url

        options: dict[str, Any] = {"revision": self.source.revision, "endpoint": hub_url()}
        with no_telemetry(), TemporaryDirectory() as folder:
            hf_hub_download(self.source.name, CONFIG, local_dir=folder, **options)
            return LocalFiles(Path(folder)).config()

    def tensor_names(self) -> Collection[str]:
        """Of all its safetensors files."""
        return self._metadata().weight_map

    def tensors(self) -> Iterator[tuple[str, str, int]]:
        """Name, type and bytes of every tensor."""
        for file in self._metadata().files_metadata.values():
            for name, tensor in file.tensors.items():
                begin, end = tensor.data_offsets
                yield name, tensor.dtype, end - begin

    def _metadata(self) -> Any:
        from huggingface_hub import HfApi

        from peagle.models.hub import no_telemetry
        from peagle.models.hub_upload import hub_url

        name, revision = self.source.name, self.source.revision
        with no_telemetry():
            return HfApi(endpoint=hub_url()).get_safetensors_metadata(name, revision=revision)


@dataclass(frozen=True, slots=True)
class S3Files:
    """Below a prefix in S3, read with the user's own credentials."""

    source: ModelSource
    client: Any

    def config(self) -> dict[str, Any]:
        """config.json."""
        bucket, prefix = _place(self.source)
        answer = self.client.get_object(Bucket=bucket, Key=prefix + CONFIG)
        body = answer["Body"].read(MAX_JSON_BYTES)  # what is longer is cut, and then no JSON
        try:
            data = parse_json(body)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.source.name}{CONFIG} is not a JSON object.")
        return data

    def tensor_names(self) -> Collection[str]:
        """Of all its safetensors files."""
        bucket, prefix = _place(self.source)
        pages = self.client.get_paginator("list_objects_v2")
        names: set[str] = set()
        for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
            for key in (item["Key"] for item in page.get("Contents", ())):
                if key.endswith(_WEIGHTS):
                    names |= _names(_Object(self.client, bucket, key), f"s3://{bucket}/{key}")
        return names


@dataclass(slots=True)
class _Object:
    """An object in S3, of which only what is asked for is sent."""

    client: Any
    bucket: str
    key: str
    position: int = 0

    def read(self, size: int, /) -> bytes:
        """The next bytes."""
        first, self.position = self.position, self.position + size
        span = f"bytes={first}-{self.position - 1}"
        answer = self.client.get_object(Bucket=self.bucket, Key=self.key, Range=span)
        return answer["Body"].read()


def _names(data: Readable, name: str, size: int | None = None) -> set[str]:
    try:
        return set(read_header(data, size))
    except ValueError:
        raise CheckpointError(
            f"{name} is not readable as safetensors: its header is broken."
        ) from None
