"""Where a trained thing comes from: commit, versions, command, hardware, data."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from peagle.environment import environment


def provenance(data: Path, device: torch.device) -> dict[str, Any]:
    """Facts of this process, for train.json and the model card.

    Args:
        data: file whose SHA-256 is recorded.
        device: the one trained on.
    """
    return {
        **environment(device),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "data_sha256": sha256_of(data),
    }


def sha256_of(path: Path) -> str:
    """Of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
