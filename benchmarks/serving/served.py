"""A server under test: a `peagle serve` of its own on a free port, and what /proc says of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from load import Client

SRC = Path(__file__).resolve().parents[2] / "src"
START_S = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)$", re.MULTILINE)


class ServerError(Exception):
    """The server did not start, or said too little; the message has the end of its log."""


class Served:
    """`peagle serve` with the bundled pair, for `async with`; it is stopped at the end.

    Args:
        options: of the command line.
        threads: CPU threads of the engine.
        key: that opens it, if the options name keys.
        open_files: at most in each of its processes; None leaves the limit of this process.
        program: what Python runs; the options follow.

    Attributes:
        client, port: for it.
        process: the front end.
        started_s: when it was started, by `time.perf_counter`.
    """

    def __init__(
        self,
        *options: str,
        threads: int = 1,
        key: str | None = None,
        open_files: int | None = None,
        program: Sequence[str] = ("-m", "peagle", "serve"),
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.client, self.port = Client(port, key=key), port
        self._program = program
        self._options = ["--port", str(port), "--threads", str(threads), *options]
        self._prefix = [] if open_files is None else ["prlimit", f"--nofile={open_files}"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __aexit__)
        self.process: subprocess.Popen[bytes]
        self.started_s = 0.0

    async def __aenter__(self) -> Served:
        paths = [str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Keys and settings of the user's own would make it another server.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PEAGLE_")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(
            [*self._prefix, sys.executable, *self._program, *self._options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            await self.wait_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.process.poll() is None:
            engines = self.engine_pids()
            self.process.terminate()
            if await self.exit_status(20) is None:
                self.process.kill()
                for pid in engines:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()

    async def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until models are loaded.

        Raises:
            ServerError: it ended, or the time did.
        """
        end = time.monotonic() + timeout_s
        while (await self.client.get("/ready")).status != 200:
            if self.process.poll() is not None or time.monotonic() > end:
                raise ServerError(f"peagle serve is not ready; it said:\n{self.log()}")
            await asyncio.sleep(0.1)

    async def exit_status(self, timeout_s: float) -> int | None:
        """The exit status of the front end; None if it still runs after this time."""
        end = time.monotonic() + timeout_s
        while (status := self.process.poll()) is None and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return status

    def log(self, most: int = 4000) -> str:
        """The last characters of what the server said; 0 gives all of it."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-most:]

    # ---- processes ----

    def engine_pids(self) -> list[int]:
        """Its engine processes: children that are not multiprocessing's resource tracker."""
        return [
            pid for pid in children(self.process.pid) if b"resource_tracker" not in _command(pid)
        ]

    def resident_mb(self) -> dict[str, float]:
        """Resident memory of the front end and of all engines."""
        engines = sum(resident_mb(pid) for pid in self.engine_pids())
        return {"frontend": resident_mb(self.process.pid), "engines": engines}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the start of front end and engines."""
        engines = sum(cpu_s(pid) for pid in self.engine_pids())
        return {"frontend": cpu_s(self.process.pid), "engines": engines}

    # ---- what it says of itself ----

    async def metrics(self) -> dict[str, float]:
        """The values of GET /metrics by their bare name, summed over labels."""
        answer = await self.client.get("/metrics")
        if answer.status != 200:
            raise ServerError(f"GET /metrics has status {answer.status}: {answer.body[:200]!r}")
        return parse_metrics(answer.body.decode())

    async def load(self) -> dict[str, float]:
        """Requests that run and wait, and the share of KV blocks in use."""
        found = await self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if missing := [name for name in names if name not in found]:
            raise ServerError(f"GET /metrics has no {missing[0]}; it has {', '.join(found)}.")
        return {name: found[name] for name in names}

    async def wait_idle(self, timeout_s: float) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a block; returns what there is at the end."""
        end = time.monotonic() + timeout_s
        while any((load := await self.load()).values()) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return load


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus's text format: values by name without its prefix, summed over labels."""
    values: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        name = match["name"].rpartition(":")[2]
        values[name] = values.get(name, 0.0) + float(match["value"])
    return values


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_stat(int(path.name))[1]) == pid:
                found.append(int(path.name))
    return sorted(found)


def resident_mb(pid: int) -> float:
    """Resident memory in MB; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6
    except OSError:
        return 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system; 0 for a process that is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
