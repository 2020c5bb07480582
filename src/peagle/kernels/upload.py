"""Tensors that the host sends to the device without waiting for it.

A copy from ordinary memory waits until the device has done all that was launched before. These
copies go through pinned memory, which torch keeps until they are done.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
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
    small it is. There they share its memory.
    """
    if torch.device(device).type != "cuda":
        return tuple(value.to(device) for value in values)
    packed, starts = pack_all(values, pin_memory=True)
    return unpack_all(packed.to(device, non_blocking=True), starts, values)


def pack_all(values: Sequence[Tensor], *, pin_memory: bool = False) -> tuple[Tensor, list[int]]:
    """Return the bytes of tensors, one behind the other, and where each begins.

    All begin at multiples of 16 bytes.
    """
    sizes = (-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values)
    *starts, end = accumulate(sizes, initial=0)
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=pin_memory)
    into = memoryview(packed.numpy().data)
    for start, value in zip(starts, values, strict=True):
        into[start : start + value.nbytes] = value.numpy().tobytes()
    return packed, starts


def unpack_all(packed: Tensor, starts: Sequence[int], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors of the types and shapes of `like` over bytes that `pack_all` put together."""
    places = zip(starts, like, strict=True)
    return tuple(packed[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in places)


def host_ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Return integers as int64 on the host, in a sixth of the time that `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def upload_ints(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """Return integers as int64 on the device."""
    return upload(host_ints(values), device)


def upload_floats(values: Sequence[float], device: torch.device | str) -> Tensor:
    """Return numbers as float64 on the device."""
    return upload(torch.tensor(values, dtype=torch.float64), device)
