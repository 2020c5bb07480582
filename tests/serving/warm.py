"""Processes that begin with torch and transformers imported, for tests that start many servers.

Importing is most of what a server's start costs. Here one process does it once, and forks one more
for each that is asked for (multiprocessing's "forkserver"): each has a session, an environment, an
output and an end of its own, and takes signals like any other. Its engine processes are forked from
the imported state as well. That servers also start from nothing is held by those that are started
without this.
"""

import functools
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

SOURCE = Path(__file__).resolve().parents[2] / "src"
PRELOADED = ["peagle.cli.serve", "peagle.serving.server", "peagle.serving.engine_process"]
# What transformers and torch import when a model is loaded, by its kind.
PRELOADED += ["transformers.models.llama.modeling_llama", "peagle.models.loading"]
# For processes that train together; the first step of an optimizer imports torch._dynamo.
PRELOADED += ["peagle.training.trainer", "torch._dynamo", "torch.distributed.checkpoint"]


class WarmProcess:
    """A forked process: as much of `subprocess.Popen` as the tests use.

    Args:
        words: the command line, the program's name included.
        environment: all of it.
        log: a file that takes what it writes.
        script: a Python file that runs as the main program; None runs `peagle`.
        folder: where it runs, here if not given.
    """

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        script: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.args = words
        self._log = log
        log.touch()
        self._process = forks().Process(
            target=_run, args=(words, dict(environment), log, script, folder or Path.cwd())
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it wrote, once it has ended."""
        self.wait(timeout)
        return self._log.read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def forks() -> Any:
    """The context whose processes are forks of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    # One thread: others would not be there in a fork.
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


def _run(
    words: list[str], environment: dict[str, str], log: Path, script: Path | None, folder: Path
) -> None:
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    take_over(words, environment, folder, [0, written, written])
    if script is not None:
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return
    from peagle.cli.main import main

    main()


def take_over(
    words: list[str], environment: dict[str, str], folder: Path, files: list[int]
) -> None:
    """In a forked process: do what exec and the interpreter's start do otherwise.

    Args:
        words: the command line, the program's name included.
        environment: all of it.
        folder: where the program runs.
        files: what becomes standard input, output and error.
    """
    gc.freeze()  # else each collection visits all that is imported, and copies its pages
    os.setsid()
    threading.Thread(target=_end_with_starter, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.argv[:] = words
    _fork_engines()


def _end_with_starter() -> None:
    """A killed pytest ends no server; the process that the servers come from goes after them."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.killpg(0, signal.SIGKILL)


def _fork_engines() -> None:
    """Let the engine processes of this server come from the same imported state."""
    from peagle.serving import engine_pool

    forks = multiprocessing.get_context("forkserver")
    # Its server is the one that this process came from; it must not start another.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None

    class Contexts:
        @staticmethod
        def get_context(method: str) -> Any:
            assert method == "spawn"
            return forks

    vars(engine_pool)["multiprocessing"] = Contexts
