"""Values of the host on a device, without a wait for the work that the device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of (nested) numbers on a device.

    The copy to a GPU starts from pinned memory, so that the host goes on at once. Torch keeps that
    memory until the copy is done.
    """
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
