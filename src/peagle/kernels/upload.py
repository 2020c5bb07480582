"""Tensors that the host sends to the device without waiting for it.

A copy from ordinary memory waits until the device has done all that was launched before. These
copies go through pinned memory, which torch keeps until they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Kernels read the start of a tensor in words of so many bytes.
_ALIGNMENT = 16


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on the device."""
    if torch.device(device).type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_together(values: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return tensors of the host on the device, in one copy: a copy costs the host time, however
    small it is. The tensors share its memory.
    """
    starts = [0]
    for one in values:
        starts.append(starts[-1] + -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT)
    packed = torch.empty(
        starts[-1], dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda"
    )

    def part(of: Tensor, start: int, like: Tensor) -> Tensor:
        return of[start : start + like.nbytes].view(like.dtype).view(like.shape)

    for start, one in zip(starts, values, strict=False):
        part(packed, start, one).copy_(one)
    there = packed.to(device, non_blocking=True)
    return tuple(part(there, start, one) for start, one in zip(starts, values, strict=False))


def upload_ints(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """Return integers as int64 on the device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload_floats(values: Sequence[float], device: torch.device | str) -> Tensor:
    """Return numbers as float64 on the device."""
    return upload(torch.tensor(values, dtype=torch.float64), device)
