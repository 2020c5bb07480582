"""A shell in which the commands of a page run as they are printed, in a fresh folder.

bash reads each block. `peagle` is found on PATH: a small program that hands its arguments, folder,
environment and open files to a process forked from one that has imported torch already
(`tests.serving.warm`). So does `python` with a script of benchmarks/. `peagle serve` returns when
the server answers, as a reader goes on in a second terminal; the next `peagle serve` ends the one
before, unless it asks for the same server. `limited` keeps the work small.
"""

import gzip
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from itertools import islice
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.disk import cache_folder
from serving.warm import PRELOADED, forks, take_over
from tests.docs.pages import ROOT

# The commands of pages import these, if no test has started the forking process before.
PRELOADED += [
    *("peagle.cli.bench", "peagle.cli.data", "peagle.cli.doctor", "peagle.cli.eval"),
    *("peagle.doctor.examiner", "peagle.evaluation.report", "peagle.training.trainer"),
    *("matplotlib.backends.backend_agg", "matplotlib.pyplot", "rich.live"),
]
LIMITS = {
    "adapt": ["--steps", "10", "--set", "data.batch_tokens=1024"],
    "bench": [
        *("--limit", "2", "--max-new-tokens", "2"),
        *("--concurrency", "1", "--warm-up", "0", "--repeats", "1"),
    ],
    "data regenerate": ["--limit", "8", "--max-new-tokens", "16"],
    "demo": ["--limit", "1", "--max-new-tokens", "8"],
    "doctor": ["--prompts", "few.jsonl"],
    "eval": ["--limit", "1", "--max-new-tokens", "4"],
    "train": [
        *("--set", "optimizer.steps=2"),
        *("--set", "correction.steps=2"),
        *("--set", "run.validate_every=1"),
        *("--set", "data.batch_tokens=1024"),
        *("--set", "data.max_length=512"),
        *("--set", "data.length_multiple=64"),
    ],
    "tune": [
        *("--batch-sizes", "1,2", "--steps", "2", "--rounds", "1"),
        *("--limit", "2", "--max-new-tokens", "4"),
    ],
    "watch": ["--every", "1s", "--count", "1"],
}
_NUM_FEW = 4  # prompts of few.jsonl
_PAIR2 = ROOT / "tests" / "fixtures" / "pair2"  # it has a chat template with a thinking mode
# Stand-ins for the models, heads and prompts of the reader's own that pages name.
_STAND_INS = {
    "MODEL": _PAIR2 / "target",
    "HEAD": _PAIR2 / "peagle",
    "Qwen3-0.6B": BUNDLED_TARGET,
    "head": BUNDLED_PEAGLE,
    "head-v1": BUNDLED_PEAGLE,
    "eagle3-head": BUNDLED_EAGLE3,
    "prompts.jsonl": _PAIR2 / "prompts.jsonl",
}
_COPIED = ("examples", "recipes")
_LINKED = ("benchmarks", "src")
_READY_SECONDS = 120.0
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    said = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(said).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(said)
    sys.exit(int(connection.makefile().read()))
"""
_PYTHON = """#!/bin/sh
case "$1" in benchmarks/*) exec script "$@" ;; esac
exec {python} "$@"
"""


class Servers:
    """The server that the pages of a session have started last, on a port of theirs."""

    def __init__(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port: int = one.getsockname()[1]
        self._process: Any = None
        self._arguments: list[str] = []

    def start(self, arguments: list[str], folder: Path, process: Any) -> int:
        """Start a process that serves, unless it would be the server that runs.

        Returns:
            0 once the server answers, else the process's exit status.
        """
        is_same = arguments == self._arguments and not any(
            (folder / word).exists()
            for word in arguments  # of this page's folder alone
        )
        if not (is_same and self._process is not None and self._process.is_alive()):
            self.end()
            self._process, self._arguments = process, arguments
            process.start()
        end = time.monotonic() + _READY_SECONDS
        while time.monotonic() < end and self._process.is_alive():
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
                continue
            return 0
        return self._process.exitcode or 1

    def end(self) -> None:
        """End the server, if one runs."""
        if self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGTERM)
            self._process.join()
        self._process = None


class Shell:
    """A fresh folder with a shell.

    Args:
        folder: an empty folder.
        servers: of the session.
    """

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.folder = folder / "clone"
        self._servers = servers
        programs = folder / "bin"
        for one in (self.folder, programs):
            one.mkdir()
        for name in _COPIED:
            shutil.copytree(ROOT / name, self.folder / name)
        for name in _LINKED:
            (self.folder / name).symlink_to(ROOT / name)
        for example in (self.folder / "examples").glob("*.py"):
            example.write_text(self.on_its_port(example.read_text()))
        for name, stand_in in _STAND_INS.items():
            (self.folder / name).symlink_to(stand_in)
        packed = BUNDLED_TARGET.parent / "prompts" / "heldout_code.jsonl.gz"
        with gzip.open(packed) as held_out, (self.folder / "few.jsonl").open("wb") as few:
            few.writelines(islice(held_out, _NUM_FEW))
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / "socket")
        self._listener.bind(address)
        self._listener.listen()
        for program in ("peagle", "script"):
            client = _CLIENT.format(python=sys.executable, address=address, program=program)
            _write_program(programs / program, client)
        _write_program(programs / "python", _PYTHON.format(python=sys.executable))
        activate = self.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{programs}:$PATH"\n')
        self._environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(cache_folder().parent),  # a chat model is fetched once
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
            "PEAGLE_SERVER": json.dumps({"port": servers.port}),
        }
        threading.Thread(target=self._serve_commands, daemon=True).start()

    def run(self, text: str, timeout: float = 300.0) -> str:
        """Run a block and return what it printed, both streams together.

        Args:
            text: the block.
            timeout: seconds.

        Raises:
            AssertionError: a command's exit status is not 0.
        """
        # A file: of a pipe the server, which goes on, would hold the other end.
        with tempfile.TemporaryFile("w+") as written:
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", self.on_its_port(text)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
            written.seek(0)
            output = written.read()
        assert result.returncode == 0, f"exit status {result.returncode} of\n{text}\n{output}"
        return output

    def close(self) -> None:
        """Take no more commands."""
        self._listener.close()

    def on_its_port(self, text: str) -> str:
        """The text with the port of this shell's servers."""
        return text.replace("8000", str(self._servers.port))

    def _serve_commands(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            head, files, _, _ = socket.recv_fds(connection, 8, 3)
            said = bytearray()
            while len(said) < int.from_bytes(head, "big"):
                said += connection.recv(1 << 16)
            program, arguments, folder, environment = json.loads(said)
            target = _run_script if program == "script" else _run_peagle
            process = forks().Process(
                target=target, args=(limited(arguments), folder, environment, _Files(files))
            )
            if arguments[:1] == ["serve"] and not {"--help", "--print-command"} & set(arguments):
                status = self._servers.start(arguments, self.folder, process)
            else:
                process.start()
                process.join()
                status = process.exitcode
            for file in files:
                os.close(file)
            connection.sendall(str(status).encode())


class _Files:
    """Open files that go along to a forked process."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _detach, tuple(DupFd(number) for number in self._numbers)


def _detach(*files: Any) -> list[int]:
    return [file.detach() for file in files]


def _run_peagle(
    arguments: list[str], folder: str, environment: dict[str, str], files: list[int]
) -> None:
    take_over(["peagle", *arguments], environment, Path(folder), files)
    from peagle.cli.main import main

    main()


def _run_script(
    arguments: list[str], folder: str, environment: dict[str, str], files: list[int]
) -> None:
    take_over(arguments, environment, Path(folder), files)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def limited(arguments: list[str]) -> list[str]:
    """Return the arguments with the limits of their command, and with two values of K at most.

    Limits stand before the arguments that are passed on.
    """
    names = (name for name in LIMITS if arguments[: len(name.split())] == name.split())
    limits = LIMITS[name] if (name := next(names, None)) else []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = list(arguments[:end])
    if limits and "-k" in own:
        at = own.index("-k") + 1
        first, *others = re.split("([,-])", own[at])
        last = int(first) + 1 if others[:1] == ["-"] else others[1:2] and others[1]
        own[at] = f"{first}{others[0]}{last}" if others else first
    return [*own, *limits, *arguments[end:]]


def _write_program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)
