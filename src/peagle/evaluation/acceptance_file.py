"""acceptance.json: what `peagle eval` found, entry by entry, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.evaluation.journal import require_same
from peagle.models.checkpoint.files import write_json

FORMAT_VERSION = 1
NAME = "acceptance.json"


@dataclass(frozen=True, slots=True)
class Key:
    """What tells one entry from another.

    Attributes:
        method: its name in tables.
        source: folder or hub id of the head, "" without one.
        k: draft tokens per step; 0 where a server does not tell.
        temperature: of the target's sampling.
        draft_sampling: "argmax" or "probabilistic".
        engine: "peagle", or the URL of a server.
    """

    method: str
    source: str
    k: int
    temperature: float
    draft_sampling: str = "argmax"
    engine: str = "peagle"

    def to_json(self) -> dict[str, Any]:
        """As the first keys of an entry."""
        return asdict(self)

    def __str__(self) -> str:
        at = f" on {self.engine}" if self.engine != "peagle" else ""
        return f"{self.method}{at}, K={self.k or 'unknown'}, temperature {self.temperature:g}"


class AcceptanceFile:
    """The file in an output folder; with no folder, what would stand in it.

    Args:
        folder: made if it is not there; None keeps nothing.
        provenance: who measures, with what: "target" and "dtype" among it.
        settings: that all entries share.

    Raises:
        UserError: the file there is not readable or newer, or was made with other settings.
    """

    def __init__(
        self, folder: Path | None, provenance: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._path = None if folder is None else folder / NAME
        self.data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "provenance": dict(provenance),
            "settings": dict(settings),
            "entries": [],
        }
        if self._path is None:
            return
        make_folder(self._path.parent)
        if self._path.exists():
            self.data["entries"] = self._kept(read_acceptance(self._path))

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Those finished, in the order in which they were measured."""
        return self.data["entries"]

    def find(self, key: Key, weights_sha256: str) -> dict[str, Any] | None:
        """A finished entry; None if it is not there.

        Raises:
            UserError: the head has changed since it was measured.
        """
        wanted = key.to_json()
        for entry in self.entries:
            if {name: entry.get(name) for name in wanted} != wanted:
                continue
            if entry.get("weights_sha256", weights_sha256) != weights_sha256:
                raise UserError(
                    f"The head {key.source!r} has changed since {str(self._path)!r} was made. "
                    "Name another --output, or remove that file to measure anew."
                )
            return entry
        return None

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a finished entry: the file has it when this returns."""
        self.entries.append(entry)
        if self._path is not None:
            write_json(self._path, self.data)

    def conclude(self, **conclusions: Any) -> None:
        """Keep what follows from all entries, beside them."""
        self.data |= conclusions
        if self._path is not None:
            write_json(self._path, self.data)

    def _kept(self, before: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The entries of an earlier run with the same settings."""

        def shared(data: Mapping[str, Any]) -> dict[str, Any]:
            who = {name: data["provenance"].get(name) for name in ("target", "dtype")}
            return {**who, **data["settings"]}

        assert self._path is not None
        require_same(self._path, shared(before), shared(self.data))
        return list(before["entries"])


def read_acceptance(path: Path) -> dict[str, Any]:
    """What an acceptance.json holds.

    Raises:
        UserError: it is not readable, not one, or of a newer format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{str(path)!r} is not readable: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not JSON: {error}. Remove it, or restore it.") from None
    if not isinstance(data, dict) or not isinstance(data.get("format_version"), int):
        raise UserError(f"{str(path)!r} is no acceptance.json: format_version is missing.")
    if data["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"{str(path)!r} has format_version {data['format_version']}; this peagle reads up to "
            f"{FORMAT_VERSION}. Use a newer one."
        )
    for name, kind in (("provenance", dict), ("settings", dict), ("entries", list)):
        if not isinstance(data.get(name), kind):
            raise UserError(f"{str(path)!r} is no acceptance.json: {name} is missing.")
    if not all(isinstance(entry, dict) for entry in data["entries"]):
        raise UserError(f"{str(path)!r} is no acceptance.json: an entry is not an object.")
    return data


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 of texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """SHA-256 of a model's configuration and weights; "" for no folder."""
    if not folder:
        return ""
    digest = hashlib.sha256()
    for pattern in ("config.json", "*.safetensors"):
        for file in sorted(Path(folder).glob(pattern)):
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Make an output folder, unless it is there.

    Raises:
        UserError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {str(folder)!r} cannot be made: {error.strerror}. Name a folder that can."
        ) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {str(folder)!r} is not writable. Name a folder that is.")
