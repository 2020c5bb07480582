"""Where a trained thing comes from: commit, versions, command, hardware, data."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from peagle import __version__


def provenance(data: Path | None = None) -> dict[str, Any]:
    """Facts of this process, for train.json and the model card.

    Args:
        data: file whose SHA-256 is recorded.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "peagle": __version__,
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device or platform.machine(),
        "data_sha256": _sha256(data) if data else None,
    }


def _commit() -> str | None:
    # A copy without its history (a machine that only computes) is told the commit.
    if told := os.environ.get("PEAGLE_COMMIT"):
        return told
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
