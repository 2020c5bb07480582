"""Memory that large requests leave behind, given back to the system.

The C library keeps what was freed for the next allocation. After a few bodies of megabytes that is
several times what the server needs.
"""

import asyncio
import ctypes
import gc
import os
from pathlib import Path
from typing import Any

_EVERY_S = 15.0
# Memory is given back where it grew beyond this share of the memory at rest.
_GROWTH = 0.05
_STATM = Path("/proc/self/statm")
# Gives freed memory back to the system; None where the C library is not glibc.
trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if _STATM.exists() else None


async def return_memory(loading: asyncio.Future[None]) -> None:
    """Give freed memory back every 15 s while there is more than at rest, until cancelled.

    It does so with glibc on Linux; elsewhere it returns at once. Objects loaded by the end of
    `loading` are kept.
    """
    if trim is None:
        return
    await asyncio.wait([loading])
    leave_to_itself()
    await asyncio.to_thread(trim, 0)
    rest = resident_bytes()
    while True:
        await asyncio.sleep(_EVERY_S)
        if resident_bytes() > rest * (1 + _GROWTH):
            gc.collect()
            await asyncio.to_thread(trim, 0)
        rest = min(rest, resident_bytes())


def leave_to_itself() -> None:
    """Exempt all loaded objects from later garbage collections: each would take 0.2 s."""
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes; needs Linux."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
