"""Tables as rows: Parquet files, folders of them, and folders that Hugging Face datasets wrote.

A folder is what `Dataset.save_to_disk` wrote, or what `DatasetDict.save_to_disk` did, or one of
.parquet files, taken in the order of their names. FOLDER/SPLIT is one split of it: a subfolder, or
the files that are named as the hub names them (train-00000-of-00002.parquet).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.model_folder import sha256_of

if TYPE_CHECKING:
    import pyarrow

_STATE = "state.json"  # beside the .arrow files of a dataset
_SHARD = re.compile(r"(.+)-\d+-of-\d+(-[0-9a-f]+)?\.parquet")
_BATCH_ROWS = 256  # so many are in memory at a time
# What datasets raises where the JSON beside the data has another form.
_DAMAGED = (LookupError, TypeError, AttributeError)

Row = dict[str, Any]


# ---- places ---------------------------------------------------------------------------------


def is_folder(path: Path) -> bool:
    """Whether this names a folder, or a split of one."""
    return path.is_dir() or bool(_split_files(path))


def split_of(path: Path, split: str | None) -> Path:
    """The place of a split of a folder; None leaves the place as it is.

    Raises:
        UserError: it is a file, or has no such split.
    """
    if split is None:
        return path
    if path.is_file():
        raise UserError(
            f"{str(path)!r} is a file and has no split {split!r}. Leave --split out, or write it "
            "behind the folder that has it: FOLDER/SPLIT."
        )
    if not path.is_dir():
        raise UserError(f"The data folder {str(path)!r} is not there.")
    folder = path
    while not is_folder(folder / split):
        splits = _splits(folder)
        if len(splits) != 1 or not _splits(folder / splits[0]):
            told = ", ".join(splits)
            if not splits:
                parts_of(folder)  # says so where there is no data at all
                told = "none; leave --split out"
            raise UserError(f"{str(folder)!r} has no split {split!r}: it has {told}.")
        folder /= splits[0]
    return folder / split


def parts_of(path: Path) -> list[Path]:
    """The files that hold a table, or the one folder of a saved dataset.

    Raises:
        UserError: nothing is there, nothing that can be read, or several splits.
    """
    if path.is_file() or (path / _STATE).is_file():
        return [path]
    if not path.is_dir():
        if files := _split_files(path):
            return files
        raise UserError(f"The data file or folder {str(path)!r} is not there.")
    splits = _splits(path)
    if len(splits) > 1:
        choices = " or ".join(repr(str(path / split)) for split in splits)
        raise UserError(f"{str(path)!r} has several splits: name {choices}, or add --split.")
    if files := _parquet_files(path):
        return files
    if splits:
        return parts_of(path / splits[0])
    raise UserError(_no_data(path))


def sha256_of_table(path: Path) -> str:
    """What identifies a file or folder: SHA-256 of its bytes, or of its files' names and hashes.

    Raises:
        UserError: as `parts_of` does.
    """
    files = parts_of(path)
    if files[0].is_dir():
        files = _saved_files(files[0])
    elif files == [path]:
        return sha256_of(path)
    hashes = [[file.name, sha256_of(file)] for file in files]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _saved_files(folder: Path) -> list[Path]:
    """The .arrow files of a dataset; its caches may lie beside them."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return [folder / one["filename"] for one in state["_data_files"]]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if not one.name.startswith("."))


def _parquet_files(folder: Path) -> list[Path]:
    return [one for one in _visible(folder) if one.suffix == ".parquet" and one.is_file()]


def _split_files(path: Path) -> list[Path]:
    """The files of FOLDER/SPLIT that lie in FOLDER."""
    return [one for one in _parquet_files(path.parent) if _split_name(one) == path.name]


def _split_name(file: Path) -> str | None:
    found = _SHARD.fullmatch(file.name)
    return found and found[1]


def _splits(folder: Path) -> list[str]:
    """By the names of the files in a folder; where it has no files of data, by its subfolders."""
    if files := _parquet_files(folder):
        return sorted({name for file in files if (name := _split_name(file)) is not None})
    if (folder / _STATE).is_file():
        return []
    inner = [one for one in _visible(folder) if one.is_dir()]
    return [one.name for one in inner if (one / _STATE).is_file() or _parquet_files(one)]


def _no_data(folder: Path) -> str:
    names = [one.name for one in _visible(folder)]
    held = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    text = (
        f"The folder {str(folder)!r} is no data: expected one that Dataset.save_to_disk or "
        "DatasetDict.save_to_disk (of Hugging Face datasets) wrote, or one of .parquet files; it "
        f"holds {held}."
    )
    if any(name.endswith(".arrow") for name in names):
        text += f" Without {_STATE} it is a cache, or its writing was cut off: save it again."
    return text


# ---- rows -----------------------------------------------------------------------------------


def table_rows(part: Path) -> Iterator[tuple[Row, str]]:
    """The rows of a part, one after the other, each with where it stands.

    Values are what JSON has: times and the like become text, and columns with bytes (images) are
    left out, as is what is null.

    Raises:
        UserError: it is damaged, or the package that reads it is missing.
    """
    rows = _saved_rows(part) if part.is_dir() else _parquet_rows(part)
    for number, row in enumerate(rows, start=1):
        yield row, f"{part}, row {number}"


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(_missing(path, "pyarrow", error)) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            kept, odd = _columns(file.schema_arrow)
            for batch in file.iter_batches(_BATCH_ROWS, columns=kept):
                for row in batch.to_pylist():
                    yield _plain(row, odd)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{str(path)!r} is not a whole Parquet file: {_brief(error)}") from None


def _saved_rows(folder: Path) -> Iterator[Row]:
    try:
        import datasets
        import pyarrow
    except ImportError as error:
        raise UserError(_missing(folder, "datasets", error)) from None
    try:
        if not _saved_files(folder):  # datasets stumbles over no rows
            return
        saved = datasets.Dataset.load_from_disk(str(folder), keep_in_memory=False)
        # A dataset keeps the format it was last shown in, which may be tensors of some columns.
        saved = saved.with_format(None)
        kept, odd = _columns(saved.data.schema)
        for row in saved.select_columns(kept):
            assert isinstance(row, dict)
            yield _plain(row, odd)
    except (pyarrow.ArrowException, OSError, ValueError, *_DAMAGED) as error:
        raise UserError(
            f"{str(folder)!r} is not a whole dataset ({_brief(error)}). Save it again, with this "
            f"version of datasets ({datasets.__version__}) or an older one."
        ) from None


def _missing(path: Path, package: str, error: ImportError) -> str:
    return (
        f"Reading {str(path)!r} needs {package}, which cannot be imported ({_brief(error)}): "
        f"{install_extra('train')}"
    )


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _columns(schema: pyarrow.Schema) -> tuple[list[str], list[str]]:
    """The columns without bytes, and those among them whose values JSON may lack."""
    from pyarrow import types

    kept, odd = [], []
    for field in schema:
        leaves = list(_leaves(field.type))
        if any(map(types.is_binary, leaves)) or any(map(types.is_large_binary, leaves)):
            continue
        kept.append(field.name)
        if not all(_is_plain(leaf) for leaf in leaves):
            odd.append(field.name)
    return kept, odd


def _leaves(kind: pyarrow.DataType) -> Iterator[pyarrow.DataType]:
    if not kind.num_fields:
        yield kind
    for index in range(kind.num_fields):
        yield from _leaves(kind.field(index).type)


def _is_plain(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    tests = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    return any(test(kind) for test in (*tests, types.is_string, types.is_large_string))


def _plain(row: Row, odd: list[str]) -> Row:
    given = {key: value for key, value in row.items() if value is not None}
    for key in odd:
        if key in given:
            given[key] = json.loads(json.dumps(given[key], default=str))
    return given
