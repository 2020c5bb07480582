"""Tables as rows: Parquet files, folders of them, and folders that Hugging Face datasets wrote.

A folder is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, or it holds .parquet
files, which are read in the order of their names. FOLDER/SPLIT names one split of a folder: a
subfolder, or the files that are named as the hub names them (train-00000-of-00002.parquet).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.model_folder import sha256_of

if TYPE_CHECKING:
    import pyarrow

_STATE = "state.json"  # beside the .arrow files of a saved dataset
_ROWS_AT_ONCE = 1024
_SHARD = re.compile(r"(.+)-\d+-of-\d+(-[0-9a-f]+)?\.parquet")
# What pyarrow and datasets raise on damaged files; ArrowInvalid is a ValueError.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)


def is_folder(path: Path) -> bool:
    """Whether a path names a folder of data, or a split of one."""
    return path.is_dir() or bool(_split_files(path))


def split_of(path: Path, split: str | None) -> Path:
    """Return the place of a split of a folder, or the path itself without a split.

    Raises:
        UserError: the path is a file, is not there, or has no such split.
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
        if not splits:
            parts_of(folder)  # refuses a folder without any data
        if len(splits) != 1 or not _splits(folder / splits[0]):
            names = ", ".join(splits) or "none; leave --split out"
            raise UserError(f"{str(folder)!r} has no split {split!r}: it has {names}.")
        folder /= splits[0]
    return folder / split


def parts_of(path: Path) -> list[Path]:
    """Return the files that hold a table, or the one folder of a saved dataset.

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
    names = [one.name for one in _visible(path)]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    text = (
        f"The folder {str(path)!r} is no data: expected one that Dataset.save_to_disk or "
        "DatasetDict.save_to_disk (of Hugging Face datasets) wrote, or one of .parquet files; it "
        f"holds {shown}."
    )
    if any(name.endswith(".arrow") for name in names):
        text += f" Without {_STATE} it is a cache, or its writing was cut off: save it again."
    raise UserError(text)


def sha256_of_table(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or that of the names and hashes of a folder's files.

    Raises:
        UserError: as `parts_of` does.
    """
    files = parts_of(path)
    if files == [path] and path.is_file():
        return sha256_of(path)
    if files[0].is_dir():
        files = _saved_files(files[0])
    hashes = [[file.name, sha256_of(file)] for file in files]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def table_rows(part: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a file or of a saved dataset, each with its place for messages.

    Values are what JSON has: times and the like become text. Columns with bytes (images) and nulls
    are left out.

    Raises:
        UserError: the data is damaged, or Hugging Face datasets is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Reading {str(part)!r} needs datasets, which cannot be imported ({_brief(error)}): "
            f"{install_extra('train')}"
        ) from None
    if part.is_dir():
        kind = "dataset"
        remedy = (
            f"Save it again, with this version of datasets ({datasets.__version__}) or an older one"
        )
    else:
        kind, remedy = "Parquet file", "Write or copy it again"
    # datasets keeps a lock file of its own beside what it reads.
    with TemporaryDirectory() as cache:
        try:
            if not part.is_dir():
                datasets.logging.set_verbosity(datasets.logging.CRITICAL)
                options: dict[str, Any] = {"split": "train", "streaming": True, "cache_dir": cache}
                # Without a size, datasets takes that of the first group of rows, which may be 0.
                options["batch_size"] = _ROWS_AT_ONCE
                table = datasets.load_dataset("parquet", data_files=[str(part)], **options)
            elif _saved_files(part):
                table = datasets.Dataset.load_from_disk(str(part), keep_in_memory=False)
            else:  # datasets cannot load a dataset without rows
                return
            # A saved dataset keeps the format that it was last read in, such as tensors.
            table = table.with_format(None)
            schema = table.features.arrow_schema
            table = table.select_columns([f.name for f in schema if not _has_bytes(f.type)])
            for number, row in enumerate(table, start=1):
                assert isinstance(row, dict)
                present = {key: value for key, value in row.items() if value is not None}
                plain = json.loads(json.dumps(present, default=str))
                yield plain, f"{part}, row {number}"
        except _DAMAGED as error:
            raise UserError(
                f"{str(part)!r} is not a whole {kind} ({_brief(error)}). {remedy}."
            ) from None


def _has_bytes(kind: pyarrow.DataType) -> bool:
    if kind.num_fields:
        return any(_has_bytes(kind.field(index).type) for index in range(kind.num_fields))
    return "binary" in str(kind)


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _saved_files(folder: Path) -> list[Path]:
    """The .arrow files of a saved dataset; cached files may lie beside them."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return [folder / one["filename"] for one in state["_data_files"]]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if not one.name.startswith("."))


def _parquet_files(folder: Path) -> list[Path]:
    return [one for one in _visible(folder) if one.suffix == ".parquet" and one.is_file()]


def _split_files(path: Path) -> list[Path]:
    """The files in FOLDER that belong to the split of FOLDER/SPLIT."""
    return [one for one in _parquet_files(path.parent) if _split_name(one) == path.name]


def _split_name(file: Path) -> str | None:
    found = _SHARD.fullmatch(file.name)
    return found and found[1]


def _splits(folder: Path) -> list[str]:
    """The splits by names of files, or by subfolders where the folder itself has no data."""
    if files := _parquet_files(folder):
        return sorted({name for file in files if (name := _split_name(file)) is not None})
    if (folder / _STATE).is_file():
        return []
    inner = [one for one in _visible(folder) if one.is_dir()]
    return [one.name for one in inner if (one / _STATE).is_file() or _parquet_files(one)]
