"""The files of an output folder: read and checked, written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import UserError
from peagle.models.checkpoint.files import replace_file
from peagle.results import (
    ACCEPTANCE,
    THROUGHPUT,
    TUNE,
    AcceptanceResults,
    AnyDocument,
    Document,
    ThroughputResults,
    TuneResults,
    read_document,
)


@dataclass(frozen=True, slots=True)
class Results:
    """The results in an output folder: those of eval, bench and tune that are there."""

    acceptance: AcceptanceResults | None = None
    throughput: ThroughputResults | None = None
    tune: TuneResults | None = None

    @property
    def documents(self) -> list[Document]:
        """Those that are there: eval's, bench's, tune's."""
        return [d for d in (self.acceptance, self.throughput, self.tune) if d is not None]


def read_results(folder: Path) -> Results:
    """Read whichever of acceptance.json, throughput.json and tune.json a folder holds.

    Raises:
        UserError: there is none of them, or one is not what its command writes (file and key), or
            a newer peagle wrote it.
    """
    results = Results(
        _read(folder / ACCEPTANCE, AcceptanceResults),
        _read(folder / THROUGHPUT, ThroughputResults),
        _read(folder / TUNE, TuneResults),
    )
    if not results.documents:
        raise UserError(
            f"Nothing to report on in {str(folder)!r}: it has none of {ACCEPTANCE}, {THROUGHPUT} "
            f"and {TUNE}. Write them with peagle eval, bench or tune, each with --output."
        )
    return results


def _read(path: Path, model: type[AnyDocument]) -> AnyDocument | None:
    return read_document(path, model) if path.exists() else None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, as `replace_file`.

    Raises:
        UserError: it cannot be written.
    """
    try:
        replace_file(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror}.") from None


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV; None is an empty field."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    # Half of a character, which JSON can hold and UTF-8 cannot.
    return buffer.getvalue().encode("utf-8", "replace").decode()
