"""Runs a function in several processes, joined as torchrun would have them."""

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from serving.warm import forks


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        status: its exit status, negative where a signal killed it.
        value: what the function returned.
        error: class and text of what it raised.
        seconds: how long it ran.
    """

    status: int | None
    value: Any
    error: str
    seconds: float


def run_together(
    function: Callable[..., Any],
    count: int,
    *arguments: Any,
    timeout: float = 300,
    patience: float = 120,
    joins: bool = True,
    fresh: bool = False,
) -> list[Ending]:
    """Call function(processes, *arguments) in `count` processes; all have ended at return.

    Args:
        function, count, arguments: which, where, with what.
        timeout: seconds that it may take.
        patience: seconds that the processes wait for each other.
        joins: join them first; otherwise the function does, and gets None.
        fresh: import everything anew, as CUDA wants it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("spawn") if fresh else forks()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    children = [
        context.Process(
            target=_child,
            args=(sender, rank, count, port, patience if joins else None, function, arguments),
            daemon=True,
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    started = time.monotonic()
    for child, (_, sender) in zip(children, pipes, strict=True):
        child.start()
        sender.close()
    endings = []
    for child, (receiver, _) in zip(children, pipes, strict=True):
        try:
            left = max(0.0, timeout - (time.monotonic() - started))
            told = receiver.recv_bytes() if receiver.poll(left) else None
            value, error, seconds = pickle.loads(told) if told else (None, "hung", left)
        except EOFError:
            value, error, seconds = None, "", time.monotonic() - started
        child.join(max(0.1, timeout - (time.monotonic() - started)))
        child.kill()
        child.join()
        endings.append(Ending(child.exitcode, value, error, seconds))
    return endings


def values(endings: list[Ending]) -> list[Any]:
    """What each process returned; all of them did."""
    for ending in endings:
        assert ending.status == 0 and not ending.error, ending.error or ending
    return [ending.value for ending in endings]


def _child(
    sender: Connection,
    rank: int,
    count: int,
    port: int,
    patience: float | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    from peagle.errors import UserError
    from peagle.training.distributed import joined_processes

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    value, error, started = None, "", time.monotonic()
    try:
        if patience is None:
            value = function(None, *arguments)
        else:
            with joined_processes(timedelta(seconds=patience)) as processes:
                value = function(processes, *arguments)
    except (UserError, SystemExit) as problem:
        error = f"{type(problem).__name__}: {problem}"
    except BaseException:
        error = traceback.format_exc()
    # Bytes: torch would share a tensor's memory, which ends with this process.
    sender.send_bytes(pickle.dumps((value, error, time.monotonic() - started)))
