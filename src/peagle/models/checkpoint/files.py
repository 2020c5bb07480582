"""The files of a checkpoint: JSON, written whole or not at all, and tensors."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peagle.disk import put_in_place
from peagle.errors import CheckpointError
from peagle.model_folder import read_json


def write_json(path: Path, data: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    replace_file(path, (json.dumps(data, indent=2) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of which readers, and a crash, see the old one or the new one, never half."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_bytes(data)
        put_in_place(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the mode that any new file gets here (0666 less the umask).

    safetensors by itself lets only the owner read the file (0600).

    Raises:
        OSError: the disk did not take it; safetensors has the number of that error in a text.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    path.chmod(mode)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it does not.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} holds {type(data).__name__}; expected an object.")
    return data


def object_at(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object under `key`, empty where there is none.

    Raises:
        CheckpointError: something else is there.
    """
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} is {value!r}; expected an object.")
    return dict(value)
