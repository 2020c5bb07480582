"""The tensors of a model folder by name, each read out of its safetensors file when wanted."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.model_folder import read_weight_map

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensors:
    """The safetensors files of a folder, with the tensors that each holds.

    Attributes:
        folder: as given.
        names: of all tensors.

    Raises:
        CheckpointError: there are no files of weights, or one that is not readable.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self._device = device
        self._readers: dict[Path, Any] = {}
        if (folder / _WEIGHTS).is_file():
            self._files = dict.fromkeys(self._open(folder / _WEIGHTS).keys(), _WEIGHTS)
        elif (folder / _INDEX).is_file():
            self._files = read_weight_map(folder / _INDEX)
        else:
            raise CheckpointError(
                f"The target model {str(folder)!r} has neither {_WEIGHTS} nor {_INDEX}."
            )
        self.names = set(self._files)

    def file(self, name: str) -> Path:
        """Return the file of a tensor that is among `names`."""
        return self.folder / self._files[name]

    def find(self, name: str) -> str | None:
        """Return the name of a model's tensor in these files, which may use another prefix."""
        end = ".".join(name.split(".")[-2:])
        found = [key for key in self.names if key == end or key.endswith(f".{end}")]
        return name if name in found else found[0] if len(found) == 1 else None

    def read(self, name: str) -> Tensor | None:
        """Return a tensor on the device; None if there is none.

        Raises:
            CheckpointError: its file does not give it.
        """
        if name not in self.names:
            return None
        file = self.file(name)
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{str(file)!r} gives no tensor {name!r}: {error}. Copy or fetch the model again."
            ) from None

    def _open(self, file: Path) -> Any:
        if file not in self._readers:
            try:
                reader = safe_open(file, framework="pt", device=str(self._device))
            except (SafetensorError, OSError) as error:
                text = f"{str(file)!r} is not readable as safetensors: {error}."
                raise CheckpointError(text) from None
            self._readers[file] = reader
        return self._readers[file]
