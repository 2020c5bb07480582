"""acceptance.json, written entry by entry, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.evaluation.journal import require_same
from peagle.models.checkpoint.files import write_json
from peagle.results import (
    ACCEPTANCE,
    AcceptanceResults,
    Comparison,
    Entry,
    EntryKey,
    Provenance,
    read_document,
)


class AcceptanceFile:
    """The acceptance.json of an output folder, or its content alone where there is no folder.

    Args:
        folder: made if it is not there; None writes nothing.
        provenance: of the measurements, "target" and "dtype" among it.
        settings: that all entries share.

    Raises:
        UserError: the file there is not readable or newer, or was made with other settings.
    """

    def __init__(
        self, folder: Path | None, provenance: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._path = None if folder is None else folder / ACCEPTANCE
        entries: list[Entry] = []
        if self._path is not None:
            make_folder(self._path.parent)
            if self._path.exists():
                before = read_document(self._path, AcceptanceResults)
                who = before.provenance.to_json()
                require_same(
                    self._path,
                    _shared(who, before.settings),
                    _shared(provenance, settings),
                )
                entries = before.entries
        self.results = AcceptanceResults(
            provenance=Provenance(**provenance), settings=dict(settings), entries=entries
        )

    @property
    def entries(self) -> list[Entry]:
        """Finished entries, in the order in which they were measured."""
        return self.results.entries

    def find(self, key: EntryKey, weights_sha256: str) -> Entry | None:
        """Return a finished entry; None if it is not there.

        Raises:
            UserError: the head has changed since it was measured.
        """
        wanted = key.to_json()
        for entry in self.entries:
            if entry.model_dump(include=set(wanted)) != wanted:
                continue
            if entry.weights_sha256 and entry.weights_sha256 != weights_sha256:
                raise UserError(
                    f"The head {key.source!r} has changed since {str(self._path)!r} was made. "
                    "Name another --output, or remove that file to measure anew."
                )
            return entry
        return None

    def add(self, entry: Entry) -> None:
        """Add a finished entry and write the file."""
        self.entries.append(entry)
        self._write()

    def conclude(self, comparisons: list[Comparison], advice: str) -> None:
        """Set what follows from all entries and write the file."""
        self.results = self.results.model_copy(
            update={"comparisons": comparisons, "advice": advice}
        )
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self.results.to_json())


def _shared(provenance: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What every entry of a file has to share."""
    return {**{name: provenance.get(name) for name in ("target", "dtype")}, **settings}


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
