"""Facts that a model's files tell before it is deployed: config.json and the headers of weights.

The files are in a folder here, on the hub, or in S3. If peagle cannot read them, it warns; the
container refuses a head that does not fit when it starts.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peagle.deploy.memory import ModelFacts, model_facts
from peagle.deploy.models import ModelSource, split_uri
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import MAX_JSON_BYTES, Readable, parse_json, read_header
from peagle.model_shape import ModelShape

_CONFIG = "config.json"
_WEIGHTS = ".safetensors"
# The auxiliary layers of a head that does not name them depend on the number of the target's
# layers; nothing here uses them.
_SIZES = ("vocab_size", "hidden_size", "num_layers")
_COMPARED_FIELDS = (*_SIZES, "tokenizer_sha256")


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a model in a folder."""

    folder: Path

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        from peagle.models.checkpoint.files import read_object

        return read_object(self.folder / _CONFIG)

    def tensor_names(self) -> Collection[str]:
        """Return the names of the tensors of all safetensors files; refuses files that are cut."""
        from peagle.models.loading import check_weights

        check_weights(self.folder)
        names: set[str] = set()
        for file in self.folder.glob(f"*{_WEIGHTS}"):
            with file.open("rb") as data:
                names |= _names_in_header(data, str(file), file.stat().st_size)
        return names


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files of a model on the hub; the hub's cache gets none, since half a model would stay."""

    source: ModelSource

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        from huggingface_hub import hf_hub_download

        name, revision = self.source.name, self.source.revision
        with _connected_hub() as hub, TemporaryDirectory() as folder:
            hf_hub_download(name, _CONFIG, revision=revision, endpoint=hub, local_dir=folder)
            return LocalFiles(Path(folder)).config()

    def tensor_names(self) -> Collection[str]:
        """Return the names of the tensors of all safetensors files."""
        return self._metadata().weight_map

    def tensors(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name, type and bytes of every tensor."""
        for file in self._metadata().files_metadata.values():
            for name, tensor in file.tensors.items():
                begin, end = tensor.data_offsets
                yield name, tensor.dtype, end - begin

    def _metadata(self) -> Any:
        from huggingface_hub import HfApi

        name, revision = self.source.name, self.source.revision
        with _connected_hub() as hub:
            return HfApi(endpoint=hub).get_safetensors_metadata(name, revision=revision)


@contextmanager
def _connected_hub() -> Iterator[str]:
    """Give the address of a hub that takes connections; no telemetry is sent meanwhile."""
    from peagle.models.hub import hub_url, no_telemetry, require_connection

    hub = hub_url()
    require_connection(hub)
    with no_telemetry():
        yield hub


@dataclass(frozen=True, slots=True)
class S3Files:
    """The files of a model below a prefix in S3, read with the user's own credentials."""

    source: ModelSource
    client: Any

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        bucket, prefix = split_uri(self.source.name)
        answer = self.client.get_object(Bucket=bucket, Key=prefix + _CONFIG)
        try:
            data = parse_json(answer["Body"].read(MAX_JSON_BYTES))  # a longer file is cut: no JSON
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.source.name}{_CONFIG} is not a JSON object.")
        return data

    def tensor_names(self) -> Collection[str]:
        """Return the names of the tensors of all safetensors files."""
        bucket, prefix = split_uri(self.source.name)
        pages = self.client.get_paginator("list_objects_v2")
        names: set[str] = set()
        for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
            for key in (item["Key"] for item in page.get("Contents", ())):
                if key.endswith(_WEIGHTS):
                    data = _S3Object(self.client, bucket, key)
                    names |= _names_in_header(data, f"s3://{bucket}/{key}")
        return names


@dataclass(slots=True)
class _S3Object:
    """An object in S3 that sends only the bytes that are read."""

    client: Any
    bucket: str
    key: str
    position: int = 0

    def read(self, size: int, /) -> bytes:
        first, self.position = self.position, self.position + size
        span = f"bytes={first}-{self.position - 1}"
        return self.client.get_object(Bucket=self.bucket, Key=self.key, Range=span)["Body"].read()


def _names_in_header(data: Readable, name: str, size: int | None = None) -> set[str]:
    try:
        return set(read_header(data, size))
    except ValueError:
        raise CheckpointError(
            f"{name} is not readable as safetensors: its header is broken."
        ) from None


def _files_of(source: ModelSource, s3: Any) -> LocalFiles | HubFiles | S3Files | None:
    """Return the files of a model; None for S3 without boto3's client."""
    if source.kind == "local":
        return LocalFiles(Path(source.name))
    if source.kind == "hub":
        return HubFiles(source)
    return None if s3 is None else S3Files(source, s3)


@contextmanager
def _unreadable_warned(source: ModelSource, what: str) -> Iterator[None]:
    """Turn failures of reading into a warning; mistakes in files that were read stay errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _warn_unreadable(source, what, f" ({reason})")


def _warn_unreadable(source: ModelSource, what: str, reason: str = "") -> None:
    where = {"hub": "on the hub", "s3": "in S3", "local": "here"}[source.kind]
    warnings.warn(
        f"peagle could not read {what} {source.name!r} {where}{reason}; whether it fits shows when "
        "the container starts.",
        stacklevel=5,
    )


# ---- facts ----


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """The facts about a draft head.

    Attributes:
        is_parallel: P-EAGLE, which drafts all K tokens in one pass; else EAGLE-3.
        trained_depth: K that it was trained for; None if unknown.
        trained_length: tokens of the longest text that it was trained on; None if unknown.
        has_windows: config.json gives its layers windows, which vLLM reads.
        target: facts about the target that it was trained for: name, vocab_size, hidden_size,
            num_layers, tokenizer_sha256, as far as the head's files have them.
    """

    is_parallel: bool
    trained_depth: int | None = None
    trained_length: int | None = None
    has_windows: bool = False
    target: Mapping[str, Any] = field(default_factory=dict)


def head_facts(source: ModelSource, s3: Any = None) -> HeadFacts | None:
    """Return facts about a head from its files; None, with a warning, if they are not readable.

    Args:
        source: the head.
        s3: boto3's client, for heads in S3.

    Raises:
        CheckpointError: it is no head, or a P-EAGLE head without mask_hidden.
    """
    files = _files_of(source, s3)
    if files is None:
        _warn_unreadable(source, "the head")
        return None
    with _unreadable_warned(source, "the head"):
        return parse_head_facts(files.config(), files.tensor_names(), source.name)
    return None


def parse_head_facts(data: Mapping[str, Any], tensors: Collection[str], name: str) -> HeadFacts:
    """Return the facts in a head's config.json and in the names of its tensors.

    Raises:
        CheckpointError: not a head's configuration, or a P-EAGLE head without mask_hidden.
    """
    from peagle.models.checkpoint import ANY_DEPTH, StoredHead

    head = StoredHead.from_json(data, f"{name}/{_CONFIG}", num_target_layers=ANY_DEPTH)
    config = head.config
    if config.is_parallel and "mask_hidden" not in tensors:
        raise CheckpointError(
            f"The head {name!r} has a mask token but no tensor mask_hidden: a P-EAGLE head cannot "
            "draft in parallel without it, and vLLM refuses it. Export the head anew from its "
            "training run, or name another one with --draft."
        )
    written = head.facts.get("target")
    target = dict(written) if isinstance(written, Mapping) else {}
    target |= {"vocab_size": config.vocab_size, "hidden_size": config.target_hidden_size}
    return HeadFacts(
        config.is_parallel, config.trained_depth, head.trained_length, bool(config.windows), target
    )


def check_target(facts: HeadFacts, draft: ModelSource, target: ModelSource, s3: Any = None) -> None:
    """Refuse a head of another target, as far as config.json and tokenizer.json tell.

    Raises:
        CheckpointError: names the difference.
    """
    found = _target_facts(target, s3)
    for key in _COMPARED_FIELDS:
        expected, given = facts.target.get(key), found.get(key)
        if None in (expected, given) or expected == given:
            continue
        if key == "tokenizer_sha256" and _is_saved_anew(facts, given, Path(target.name)):
            continue
        trained = facts.target.get("name")
        raise CheckpointError(
            f"The head {draft.name!r} is of another target"
            f"{f', {trained!r}' if trained else ''}: its {key} is {expected}, that of "
            f"{target.name!r} is {given}. Every draft would be rejected. Name the head of "
            "this target with --draft, or take --no-speculation."
        )


def _is_saved_anew(facts: HeadFacts, given: str | None, folder: Path) -> bool:
    """Return whether another tokenizer.json has the tokens of the head's."""
    from peagle.models.fingerprint import same_tokenizer

    digests = facts.target["tokenizer_sha256"], given, facts.target.get("tokens_sha256")
    return same_tokenizer(*digests, folder) is True


def _target_facts(target: ModelSource, s3: Any) -> dict[str, Any]:
    """Return the sizes of a target that `check_target` compares; {} if no file is readable."""
    files = _files_of(target, s3)
    if files is None:
        return {}
    facts: dict[str, Any] = {}
    data: dict[str, Any] = {}
    with _unreadable_warned(target, "the model"):
        data = files.config()
    if target.kind == "local":
        from peagle.models.fingerprint import tokenizer_digest

        facts["tokenizer_sha256"] = tokenizer_digest(Path(target.name))
    shape = ModelShape.from_json(data)
    return facts | {name: getattr(shape, name) for name in _SIZES}


def facts_of_hub(source: ModelSource) -> ModelFacts | None:
    """Return the memory facts of a model on the hub; None for models elsewhere.

    None, too, with a warning, if the hub does not answer or has no safetensors files of the model.
    """
    if source.kind == "hub":
        with _unreadable_warned(source, "the model"):
            files = HubFiles(source)
            return model_facts(files.config(), files.tensors())
    return None
