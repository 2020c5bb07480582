"""The processes of a run: one alone, or those that torchrun started.

`joined_processes` reads what torchrun put into the environment, gives each process its GPU and
makes one process group: NCCL between GPUs, gloo between the processes themselves.

A process that dies closes its connections, so that the others' next gloo call fails at once; one
that hangs is given up after `SYNC_TIMEOUT`. Both end in one clear line. A process that waits for
its GPU by then cannot report it, because NCCL's kernels wait without an end: torchrun, which sees
the death, or NCCL's own watchdog ends it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.engine.placement import resolve_device
from peagle.errors import UserError

# Longer than any process writes a head or compiles a layer while the others wait for it.
SYNC_TIMEOUT = timedelta(minutes=10)
# Seconds that failing processes wait for each other, so that one of them reports.
_FAREWELL = 2.0
# Seconds until the kernel ends a process that cannot end itself.
_LAST_SECONDS = 30
_FAILURES = "peagle/failures"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes; 1 means no process group.
        local_rank: number of this process on its machine, and of its GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Return whether this process prints and writes records."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return the device of this process, for the configuration's `run.device`.

        Raises:
            UserError: torch does not have it, or there are fewer GPUs than processes.
        """
        device = resolve_device(name)
        if self.world_size == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(
                f"run.device is {name!r} and {self.world_size} processes share the run; "
                'each takes a GPU of its own with "cuda" or "auto".'
            )
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"Process {self.local_rank} of this machine has no GPU of its own; torchrun's "
                f"--nproc-per-node may be {torch.cuda.device_count()} here."
            )
        return torch.device("cuda", self.local_rank)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place; the host does not wait for a GPU."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, value: int) -> int:
        """Return the largest of all processes' values; all processes meet here."""
        if self.world_size == 1:
            return value
        answer = torch.tensor(value)
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return int(answer)

    def first(self, action: Callable[[], object]) -> None:
        """Let the first process do something; the others wait for it.

        Raises:
            UserError: in all processes, the one that the action raised.
        """
        problem = None
        if self.is_first:
            try:
                action()
            except UserError as error:
                if self.world_size == 1:
                    raise
                problem = str(error)
        if self.world_size > 1:
            answer = [problem]
            dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
            problem = answer[0]
        if problem is not None:
            raise UserError(problem)


ONE_PROCESS = Processes()


@contextmanager
def joined_processes(timeout: timedelta = SYNC_TIMEOUT) -> Iterator[Processes]:
    """Join the processes that torchrun started together, or this one alone.

    Args:
        timeout: a process that does not answer for so long is given up.

    Raises:
        UserError: the body's own, where this process is the first to raise one; or another process
            is gone or does not answer.
        SystemExit: with status 2, where another process has reported its error already.
    """
    if any(not os.environ.get(name) for name in _VARIABLES) or os.environ["WORLD_SIZE"] == "1":
        yield ONE_PROCESS
        return
    processes = Processes(*(int(os.environ.get(n, 0)) for n in (*_VARIABLES[:2], "LOCAL_RANK")))
    store, on_gpu = None, False
    try:
        # init_process_group would make the store too, but keep it to itself.
        store, *_ = next(iter(dist.rendezvous("env://", timeout=timeout)))
        on_gpu = torch.cuda.is_available() and processes.local_rank < torch.cuda.device_count()
        if on_gpu:
            torch.cuda.set_device(processes.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("peagle", store),
            rank=processes.rank,
            world_size=processes.world_size,
            timeout=timeout,
        )
        yield processes
        dist.destroy_process_group()
    except UserError:
        _exit_if_reported(store, processes)
        raise
    except RuntimeError as error:
        # gloo's errors have no class of their own.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if on_gpu:
            # NCCL's kernels wait for the lost process, and the driver for them.
            signal.alarm(_LAST_SECONDS)
        _exit_if_reported(store, processes)
        raise UserError(
            "Another process of this run has ended, or has not answered for "
            f"{timeout.total_seconds():g} s ({_gist(error)}). A checkpoint from before is whole: "
            "continue with --resume."
        ) from None


def leave(processes: Processes) -> None:
    """End this process of several, at once and with status 0; a process alone goes on.

    gloo's threads may outlive their group. One that asks for Python's lock while the interpreter
    ends would abort the process, and torchrun would call the run failed.
    """
    if processes.world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _exit_if_reported(store: dist.Store | None, processes: Processes) -> None:
    """Let the first process that fails report why; the others end here."""
    try:
        reported = store is not None and store.add(_FAILURES, 1) > 1
        # The process that holds the store stays until the others have looked.
        holds = processes.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        deadline = time.monotonic() + _FAREWELL
        while store is not None and holds and time.monotonic() < deadline:
            if store.add(_FAILURES, 0) >= processes.world_size:
                break
            time.sleep(0.02)
    except RuntimeError:
        return  # the process that held the store is gone
    if reported:
        # torchrun ends all when it sees one end.
        time.sleep(_FAREWELL / 4)
        raise SystemExit(2) from None


def _gist(error: Exception) -> str:
    """Return the error's first sentence, without the place in gloo's source before it."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". ")[0].rstrip(".") or line
