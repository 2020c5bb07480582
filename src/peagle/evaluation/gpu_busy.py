"""The share of time in which a GPU computes, as its driver counts it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType

import torch

_INTERVAL_S = 0.1
Read = Callable[[], float | None]


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuBusy:
    """Looks at a GPU ten times a second, within `with`.

    NVML, the driver's own library, is read: the share of its last interval (about 0.1 to 1 s) in
    which at least one kernel ran, by whichever process. It cannot be read on a CPU, without the
    library, and in a part of a GPU (MIG).

    Args:
        device: of the engine; None for none.
        read: the share at this moment (0 to 1), in place of NVML's; None where there is none.
    """

    def __init__(self, device: torch.device | None, read: Read | None = None) -> None:
        self._read = read or _reader(device)
        self._values: list[float] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuBusy:
        if self._read() is not None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def share(self) -> float | None:
        """The mean of what was seen; None where it cannot be read or there was no time to."""
        return sum(self._values) / len(self._values) if self._values else None

    def _look(self) -> None:
        # The first value would tell of the time before.
        while not self._ended.wait(_INTERVAL_S):
            if (value := self._read()) is not None:
                self._values.append(value)


def _reader(device: torch.device | None) -> Read:
    """What reads NVML for a device; what always gives None where it cannot."""
    if device is None or device.type != "cuda":
        return lambda: None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        failed = library.nvmlInit_v2()
        failed = failed or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    except (OSError, AttributeError):
        return lambda: None
    found = _Utilization()

    def read() -> float | None:
        status = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found))
        return None if status else found.gpu / 100

    return (lambda: None) if failed else read
