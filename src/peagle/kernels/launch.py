"""Launching Triton kernels from typed code, and what launches share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_ARRIVALS = 1 << 16


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The facts of a device that configure a launch.

    Attributes:
        num_sms: number of multiprocessors.
        shared_bytes: shared memory of one program.
        overlaps_launches: whether a launch may begin before the one before it is done.
    """

    num_sms: int
    shared_bytes: int
    overlaps_launches: bool = False

    @staticmethod
    @cache
    def of(device: torch.device) -> DeviceLimits:
        """Return the limits of a device; a CPU gets the limits of a small imaginary card."""
        if device.type != "cuda":
            return DeviceLimits(num_sms=8, shared_bytes=100_000)
        found = torch.cuda.get_device_properties(device)
        shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
        return DeviceLimits(found.multi_processor_count, shared, found.major >= 9)


def overlapping(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch that may begin before the launch before it is done.

    Its kernel takes `OVERLAPS` and calls `overlap_triton.wait_for_inputs`. It brings nothing unless
    the kernels of compiled layers take part, so Inductor's option for them decides.
    """
    if DeviceLimits.of(device).overlaps_launches and compiled_kernels_overlap():
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@cache
def compiled_kernels_overlap() -> bool:
    """Return whether Inductor's `triton.enable_pdl` is set, as by TORCHINDUCTOR_ENABLE_PDL=1."""
    from torch._inductor import config

    return bool(getattr(config.triton, "enable_pdl", False))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](...): type checkers take a jitted function for a plain one."""
    kernel[grid](*arguments, **options)


@cache
def arrivals(device: torch.device) -> Tensor:
    """Return counters of arrived programs, int32 [MAX_ARRIVALS]; zero outside of launches.

    Of several programs that share one result, the last to arrive puts it together and sets its
    counter back. All launches of a device share them, so they must run one after the other. Never
    freed: CUDA graphs hold their address.

    Raises:
        RuntimeError: first asked for while a CUDA graph is captured: they would be that graph's.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel that counts arrivals is first launched while a CUDA graph is captured; "
            "launch it once before"
        )
    with torch.inference_mode(False):  # whoever asks first, all may change them
        return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and 1."""
    return 1 << max(number - 1, 0).bit_length()
