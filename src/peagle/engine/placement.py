"""Where a model runs and in which type."""

from __future__ import annotations

import os

import torch

from peagle.errors import UserError


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type of an EngineConfig dtype; "auto" is float32 on a CPU, bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    """The device of an EngineConfig.

    Raises:
        UserError: it is not one that torch has here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"device is {name!r}, which torch does not have here ({os.uname().sysname}); "
            'expected "auto", "cpu" or "cuda".'
        ) from None
    return device
