"""Tensors that the host sends to the device without waiting for it.

A copy from ordinary memory waits until the device has done all that was launched before. These
copies go through pinned memory, which torch keeps until they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on the device."""
    if torch.device(device).type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_ints(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """Return integers as int64 on the device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload_floats(values: Sequence[float], device: torch.device | str) -> Tensor:
    """Return numbers as float64 on the device."""
    return upload(torch.tensor(values, dtype=torch.float64), device)
