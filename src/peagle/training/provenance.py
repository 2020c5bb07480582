"""Where a trained thing comes from: commit, versions, command, hardware, data."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.environment import environment

if TYPE_CHECKING:
    import torch

    from peagle.training.data import ResponseDataset


def provenance(device: torch.device) -> dict[str, Any]:
    """Facts of this process, for train.json and the model card. `device` is the one trained on."""
    return {
        **environment(device),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def data_facts(path: Path, dataset: ResponseDataset) -> dict[str, Any]:
    """What identifies a file of responses, and how much of it is trained on (or validated).

    Args:
        path: the file; its name is recorded, not where it lay.
        dataset: what was read of it: sequences cut at the longest length, short ones left out.
    """
    responses = dataset.start_loc.diff() - dataset.prompt_lens
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "sequences": len(dataset),
        "tokens": len(dataset.tokens),
        "response_tokens": int(responses.sum()),
    }


def sha256_of(path: Path) -> str:
    """Of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
