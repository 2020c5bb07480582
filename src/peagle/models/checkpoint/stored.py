"""The one reader of a head's folder: its config.json, and its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from peagle.config import require_folder
from peagle.errors import CheckpointError
from peagle.kernels.linear.packed_weights import PackedWeight
from peagle.models.checkpoint import formats
from peagle.models.checkpoint.ends import FROM_TARGET_KEY, ends_from_target
from peagle.models.checkpoint.files import read_object
from peagle.models.checkpoint.packed import quantization_in, unpack_tensors
from peagle.models.checkpoint.weights import check_tensors, read_tensors
from peagle.models.drafter import DrafterConfig
from peagle.models.fingerprint import TargetFingerprint

CONFIG_NAME = "config.json"
ANY_DEPTH = 32  # layers of a target that is not at hand, where its aux layers do not matter


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head as its config.json describes it, in either style.

    Attributes:
        source: name of the file, for messages.
        data: its content.
        config: shape of the head.
        facts: the "peagle" object, and under "verifier" the target's name where the style has one.
    """

    source: str
    data: Mapping[str, Any]
    config: DrafterConfig
    facts: Mapping[str, Any]

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], source: str, *, num_target_layers: int | None = None
    ) -> Self:
        """Read the content of a config.json.

        Args:
            data: the content.
            source: name of the file, for messages.
            num_target_layers: layers of its target, for heads that leave their aux layers to vLLM.

        Raises:
            UserError: it is the file of a whole model.
            CheckpointError: it is not a head's.
        """
        config = formats.config_from_json(data, source, num_target_layers=num_target_layers)
        try:
            return cls(source, data, config, formats.facts_from_json(data))
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None

    @property
    def format(self) -> formats.HeadFormat:
        """Return the style of the checkpoint."""
        return formats.format_of(self.data)

    @property
    def is_quantised(self) -> bool:
        """Return whether weights of linear layers are stored quantised."""
        return bool(quantization_in(self.data))

    @property
    def is_compact(self) -> bool:
        """Return whether only peagle loads it: it names the ends that are its target's, or none."""
        return FROM_TARGET_KEY in self.facts

    @property
    def from_target(self) -> tuple[str, ...]:
        """Return the names of the tensors that it takes from its target.

        Raises the errors of `ends_from_target`.
        """
        return ends_from_target(self.facts, self.config)

    @property
    def trained_length(self) -> int | None:
        """Return the longest sequence of its training in tokens, see `formats.trained_length`."""
        return formats.trained_length(self.facts)

    @property
    def target_name(self) -> str | None:
        """Name of its target, None where it has none."""
        return formats.verifier_of(self.facts).get("name_or_path")

    @property
    def fingerprint(self) -> TargetFingerprint | None:
        """Return the fingerprint of its target, None where it has none.

        Raises:
            CheckpointError: a field is missing or unknown.
        """
        found = self.facts.get("target")
        return None if found is None else TargetFingerprint.from_json(found)

    def read_tensors(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, PackedWeight]]:
        """Return the tensors, and the packed weights of the quantised ones.

        Raises:
            CheckpointError: a tensor is missing, unknown or misshapen; a pickle.
        """
        tensors, source = read_tensors(folder)
        packed = unpack_tensors(tensors, self.config, self.data, source)
        check_tensors(tensors, self.config, source, self.from_target)
        return tensors, packed


def read_head_json(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of the head in `folder`.

    Raises:
        UserError: no such folder.
        CheckpointError: it has no config.json, or one that is no object.
    """
    path = require_folder(folder, "The draft head") / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"The draft head {str(folder)!r} has no {CONFIG_NAME}.")
    return read_object(path)


def read_head(folder: str | Path, *, num_target_layers: int | None = None) -> StoredHead:
    """Read the head in `folder`, without its tensors.

    Args:
        folder: the head, in either style.
        num_target_layers: layers of its target, for heads that leave their aux layers to vLLM.

    Raises:
        UserError: no such folder.
        CheckpointError: config.json is missing or not a head's.
    """
    data, source = read_head_json(folder), str(Path(folder) / CONFIG_NAME)
    return StoredHead.from_json(data, source, num_target_layers=num_target_layers)
