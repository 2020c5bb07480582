"""The environment in which a number was measured: versions, processor, threads, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle import __version__

if TYPE_CHECKING:
    import torch


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return the facts that belong beside every number.

    Args:
        device: the one measured on; None is the CPU.
    """
    import torch
    import transformers

    on_gpu = device is not None and device.type == "cuda"
    return {
        "peagle": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of this checkout, "-dirty" if changed; None outside of one."""
    # A copy without its history gets the commit by this variable.
    if commit := os.environ.get("PEAGLE_COMMIT"):
        return commit
    source = Path(__file__).resolve().parents[2]
    # An installed package may lie below another checkout, for example in a virtual environment.
    if not (source / "src" / "peagle").is_dir():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
