"""The share of time in which a GPU computes, as its driver counts it."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_INTERVAL_S = 0.1


@contextmanager
def gpu_utilization(device: torch.device | None) -> Iterator[list[float]]:
    """Yield a list that grows by the GPU's utilization (0 to 1) ten times a second.

    NVML, the driver's own library, counts the share of its last interval (about 0.1 to 1 s) in
    which at least one kernel of any process ran. The list stays empty on a CPU (or None), without
    the library, and in a part of a GPU (MIG).
    """
    values: list[float] = []
    read = _reader(device)
    if read is None or read() is None:
        yield values
        return
    ended = threading.Event()

    def watch() -> None:
        # A value read at once would cover the time before the block.
        while not ended.wait(_INTERVAL_S):
            if (value := read()) is not None:
                values.append(value)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        ended.set()
        thread.join()


def _reader(device: torch.device | None) -> Callable[[], float | None] | None:
    """Return the function that reads NVML for a device; None where there is no NVML."""
    if device is None or device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        failed = library.nvmlInit_v2()
        failed = failed or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    except (OSError, AttributeError):
        return None
    shares = (ctypes.c_uint * 2)()  # percent of time with kernels, with memory traffic

    def read() -> float | None:
        status = library.nvmlDeviceGetUtilizationRates(handle, shares)
        return None if status else shares[0] / 100

    return None if failed else read
