"""The files of an output folder: read and checked, written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from peagle.errors import UserError
from peagle.evaluation.report.schema import (
    FORMAT_VERSION,
    AcceptanceRecord,
    Document,
    ThroughputFile,
    TuneFile,
)
from peagle.models.checkpoint.files import replace_file

ACCEPTANCE, THROUGHPUT, TUNE = "acceptance.json", "throughput.json", "tune.json"

AnyDocument = TypeVar("AnyDocument", bound=Document)


@dataclass(frozen=True, slots=True)
class Results:
    """What an output folder holds.

    Attributes:
        acceptance, throughput, tune: of eval, bench and tune, those that are there.
        raw: the same as they were read, by file name.
    """

    acceptance: AcceptanceRecord | None
    throughput: ThroughputFile | None
    tune: TuneFile | None
    raw: dict[str, dict[str, Any]]

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
    raw: dict[str, dict[str, Any]] = {}
    acceptance = _read(folder / ACCEPTANCE, AcceptanceRecord, raw)
    throughput = _read(folder / THROUGHPUT, ThroughputFile, raw)
    tune = _read(folder / TUNE, TuneFile, raw)
    if not raw:
        raise UserError(
            f"Nothing to report on in {str(folder)!r}: it has none of {ACCEPTANCE}, {THROUGHPUT} "
            f"and {TUNE}. Write them with peagle eval, bench or tune, each with --output."
        )
    return Results(acceptance, throughput, tune, raw)


def _read(
    path: Path, model: type[AnyDocument], raw: dict[str, dict[str, Any]]
) -> AnyDocument | None:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{str(path)!r} is not readable: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{str(path)!r} is not UTF-8 text; expected JSON.") from None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not JSON: {error}. Run its command again.") from None
    except RecursionError:
        raise UserError(f"{str(path)!r} is nested too deeply to be a result.") from None
    if not isinstance(data, dict):
        raise UserError(f"{str(path)!r} holds {type(data).__name__}; expected a JSON object.")
    _check_version(data.get("format_version"), path)
    try:
        document = model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole file"
        given = repr(first["input"])
        given = given if len(given) <= 60 else given[:57] + "..."
        raise UserError(
            f"{str(path)!r} is malformed at {key}: {first['msg']} (it holds {given}). "
            "Run its command again."
        ) from None
    raw[path.name] = data
    return document


def _check_version(version: object, path: Path) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(
            f"{str(path)!r} is malformed at format_version: it is {version!r}; expected a whole "
            "number from 1."
        )
    if version > FORMAT_VERSION:
        raise UserError(
            f"{str(path)!r} has format_version {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Update peagle."
        )


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
