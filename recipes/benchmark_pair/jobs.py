"""Commands in processes of their own: one on each GPU at a time, with its cores and a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.engine.placement import gpu_names

POLL_S, SAY_S = 0.2, 20.0
# What an interrupted command has to write down what it has.
FAREWELL_S = 20.0


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        name: of its log.
        command: program and arguments.
        least_s: not begun where fewer seconds are left.
        most_s: interrupted after so many seconds.
    """

    name: str
    command: tuple[str, ...]
    least_s: float = 0.0
    most_s: float = float("inf")


@dataclass
class _Running:
    job: Job
    slot: int
    gpu: str
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float

    @property
    def is_over(self) -> bool:
        """Whether the command had all its seconds."""
        return time.monotonic() - self.began_s > self.job.most_s


def gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; "" stands for a machine without one."""
    return gpu_names() or [""]


def run_jobs(
    jobs: Sequence[Job],
    places: Sequence[str],
    logs: Path,
    seconds: float,
    say: Callable[[str], None] = print,
) -> dict[str, int | None]:
    """Run commands in their order, the next one where a place is free.

    At the deadline those that run are interrupted (Ctrl-C, then killed), and no other begins. One
    that had all its seconds is interrupted before. SIGTERM interrupts them too, and then ends this
    process.

    Args:
        jobs: each name once.
        places: values of CUDA_VISIBLE_DEVICES, each for one command at a time. Each has its share
            of the cores, so that the commands beside it do not change what it measures.
        logs: folder of NAME.log, which is appended to.
        seconds: until the deadline.
        say: gets a line for each begin and end, and what the logs end with meanwhile.

    Returns:
        exit codes by name; None for one that was not begun or was interrupted.
    """
    logs.mkdir(parents=True, exist_ok=True)
    started, said = time.monotonic(), time.monotonic()
    codes: dict[str, int | None] = {job.name: None for job in jobs}
    waiting, free, running = list(jobs), list(range(len(places))), []
    cores = shares(available_cores(), len(places))
    terminated: list[bool] = []  # an exception could come before a command that began is noted
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    try:
        while (waiting or running) and not terminated:
            left = seconds - (time.monotonic() - started)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.slot)
                codes[one.job.name] = one.process.returncode
                say(f"{one.job.name} ended with {one.process.returncode}")
                if one.process.returncode:
                    say(_end(one.log, 15))
            if left <= 0 and running:
                say(f"time is up: {', '.join(one.job.name for one in running)} interrupted")
                break
            for one in [one for one in running if one.is_over]:
                running.remove(one)
                say(f"{one.job.name} had its {one.job.most_s:g} seconds: interrupted")
                _interrupt([one])
                free.append(one.slot)
            waiting = [job for job in waiting if job.least_s < left]
            while waiting and free:
                job, slot = waiting.pop(0), free.pop(0)
                running.append(_start(job, slot, places[slot], logs, cores[slot]))
                say(f"{job.name} begins on GPU {running[-1].gpu or 'none'}")
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                for one in running:
                    say(f"{one.job.name}: {_end(one.log, 1)[:110]}")
            time.sleep(POLL_S)
    finally:
        _interrupt(running)
        signal.signal(signal.SIGTERM, before)
    if terminated:
        sys.exit(128 + signal.SIGTERM)
    return codes


def available_cores() -> list[int]:
    """The cores that this process may run on; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """Cut the cores into equal shares of neighbours; all of them for each where they are fewer."""
    size = len(cores) // max(count, 1)
    if size == 0:
        return [list(cores)] * count
    return [list(cores[i * size : (i + 1) * size]) for i in range(count)]


def _start(job: Job, slot: int, gpu: str, logs: Path, cores: Sequence[int]) -> _Running:
    log = logs / f"{job.name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            job.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
            # A group of its own: an interrupt reaches what it started too.
            start_new_session=True,
        )
    if cores:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)
    return _Running(job, slot, gpu, process, log, time.monotonic())


def _interrupt(running: Sequence[_Running]) -> None:
    for kind, seconds in ((signal.SIGINT, FAREWELL_S), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        for one in running:
            if one.process.poll() is None:
                os.killpg(one.process.pid, kind)
        for one in running:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _end(log: Path, count: int) -> str:
    """The last lines of a log; of a line that was written over, what stands there now."""
    text = log.read_bytes()[-8000:].decode("utf-8", "replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-count:])
