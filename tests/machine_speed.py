"""Limits in seconds that hold on any machine, a slow or a busy one too.

Processor time does not measure the neighbours as the clock does, but they empty the caches and slow
the processor, and machines differ threefold. So each measurement stands beside one of a fixed job
of the same kind: an interpreter that starts and imports modules of the standard library.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable

REFERENCE = (
    "import asyncio, concurrent.futures, decimal, email.mime.multipart, http.server, inspect, "
    "logging.config, multiprocessing.pool, sqlite3, ssl, tarfile, unittest.mock, urllib.request, "
    "xml.dom.minidom, zipfile"
)
# An environment where Python keeps the bytecode of what it imports, as pip does when it installs.
# Without it a start is spent on compiling, but not the reference's: Python brings that bytecode.
KEEPS_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
# The processor seconds it takes on the machine that the limits were written for.
REFERENCE_S = 0.2


def processor_seconds(action: Callable[[], object]) -> float:
    """Return the processor time of the processes that `action` starts and waits for."""
    before = os.times()
    action()
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def run_reference() -> None:
    # -I: neither this checkout's modules nor the environment's settings.
    subprocess.run([sys.executable, "-I", "-c", REFERENCE], check=True)


def usual_seconds(measure: Callable[[], float], repeats: int = 5) -> float:
    """The median of what `measure` gives, in seconds of the usual machine; a faster one stays."""
    return statistics.median(
        measure() / max(1.0, processor_seconds(run_reference) / REFERENCE_S) for _ in range(repeats)
    )
