"""Where a trained thing comes from: commit, versions, command, hardware."""

from __future__ import annotations

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
