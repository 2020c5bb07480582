"""Where a trained thing comes from: commit, versions, command, hardware, hashes of files."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.environment import environment

if TYPE_CHECKING:
    import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """Facts of this process, for train.json and the model card. `device` is the one trained on."""
    return {
        **environment(device),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def sha256_of(path: Path) -> str:
    """Of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
