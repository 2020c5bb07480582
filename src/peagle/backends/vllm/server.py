"""vLLM's server as a child process: started, awaited, checked, ended."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Self

from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.command import vllm_command
from peagle.backends.vllm.evidence import PROBE_TEXTS, PROBE_TOKENS, SEQUENTIAL_LOG_WORDS, judge
from peagle.backends.vllm.facts import ENGINE_PATH, GUARD_VARIABLE
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.client.api import ApiClient, ApiReply, NoAnswer
from peagle.client.counters import DraftCounts, read_counters
from peagle.errors import UserError

READY_S, END_S = 1800.0, 10.0
_POLL_S, _SETTLE_S, _SETTLE_LOOKS = 0.25, 0.1, 20
_KEPT_LINES, _SHOWN_LINES = 400, 12
_ERROR = re.compile(r"[Ee]rror(:|$)")  # "raise RuntimeError(" is no message

Say = Callable[[str], None]


class VllmServer:
    """vLLM's server, ready and drafting as asked while the context lasts.

    Its process leads a session of its own, so that a Ctrl-C comes to peagle alone.

    Args:
        launch: the model and its options; without keys the server makes one.
        installation: vLLM's.
        progress: gets a line about each wait.
        log: gets every line that vLLM prints.
        probe: ask it a few prompts when it is ready, and refuse a server that does not draft.

    Attributes:
        url: like http://127.0.0.1:8000.
        model: the clients' name for the model.
        api_key: its key, "" if none is needed.
        command: the process to start.
        notes: notes for the user; each is a warning too.
        process: vLLM's process while it runs.

    Raises:
        UserError: a known fault, before anything is started.
    """

    def __init__(
        self,
        launch: VllmLaunch,
        installation: VllmInstallation,
        *,
        progress: Say = lambda text: None,
        log: Say = lambda line: None,
        probe: bool = True,
    ) -> None:
        self.installation = installation
        launch = with_head(launch)
        self.notes = list(check_launch(launch, installation))
        keys = (secrets.token_urlsafe(32),) if launch.keys is None else launch.keys
        self.launch = replace(launch, port=launch.port or _free_port(launch.host), keys=keys)
        self.command = vllm_command(self.launch, installation)
        self.model = self.launch.name
        self.api_key = keys[0] if keys else ""
        self.url = f"http://{_reachable(launch.host)}:{self.launch.port}"
        hosts = launch.allowed_hosts
        headers = {"Host": hosts[0]} if hosts and "*" not in hosts else {}
        self._client = ApiClient(self.url, self.api_key, headers=headers)
        self._probe, self._progress, self._log = probe, progress, log
        self._skips_mask_hidden = self._is_serving = False
        self._num_signals = 0
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it is ready and has been checked.

        Raises:
            UserError: the port is taken, vLLM ends or is not ready in time, or it does not draft
                as asked. Nothing runs then.
        """
        _bound(self.launch.host, self.launch.port).close()  # another server would answer for vLLM
        for note in self.notes:
            warnings.warn(note, stacklevel=2)
        variables = self.command.variables()
        guard = json.loads(variables[GUARD_VARIABLE]) | {"parent": os.getpid()}
        self.process = subprocess.Popen(
            self.command.argv,
            env=variables | {GUARD_VARIABLE: json.dumps(guard)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader.start()
        try:
            self._await_ready(self.process)
            if self._probe and self.launch.speculative is not None:
                self._progress("asking vLLM a few prompts, to see that it drafts as asked")
                for note in self.check():
                    self.notes.append(note)
                    warnings.warn(note, stacklevel=2)
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self.process is not None
        for line in self.process.stdout or ():
            self._lines.append(line.rstrip("\n"))
            self._skips_mask_hidden = self._skips_mask_hidden or SEQUENTIAL_LOG_WORDS in line
            self._log(self._lines[-1])

    def _await_ready(self, process: subprocess.Popen[str]) -> None:
        started = reported = time.monotonic()
        self._progress(f"starting {self.installation}")
        while not self._is_healthy():
            now = time.monotonic()
            if (status := process.poll()) is not None:
                raise UserError(
                    f"vLLM ended with status {status} before it was ready. {self.tail()}"
                )
            if now - started > READY_S:
                raise UserError(
                    f"vLLM was not ready after {READY_S:.0f} s and was stopped; expected "
                    f"{self.url}/health to answer. {self.tail()}"
                )
            if now - reported > 10:
                reported = now
                self._progress(f"vLLM has been loading for {now - started:.0f} s")
            time.sleep(_POLL_S)
        self._progress(f"vLLM is ready after {time.monotonic() - started:.0f} s")

    def _is_healthy(self) -> bool:
        try:
            return self._client.call("GET", "/health", timeout_s=5).status == 200
        except NoAnswer:
            return False

    def tail(self) -> str:
        """Return the end of vLLM's output, up to the last error, for a message."""
        if self.process is not None:
            self._reader.join(0.5 if self.process.poll() is None else 5)
        lines = list(self._lines)
        if not lines:
            return "It printed nothing."
        errors = [at for at, line in enumerate(lines) if _names_error(line)]
        last = errors[-1] + 1 if errors else len(lines)
        return "It printed:\n  " + "\n  ".join(lines[max(0, last - _SHOWN_LINES) : last])

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> tuple[str, ...]:
        """Ask it a few prompts, refuse it unless it drafts as asked, and return notes on doubts.

        Raises:
            UserError: it does not draft, or not in parallel; or it refuses the prompts.
        """
        assert self.launch.speculative is not None
        before = self.counts() or DraftCounts()
        num_requests = self._send_probes()
        counts = self.counts()
        for _ in range(_SETTLE_LOOKS):  # until they stand still: they are written after the tokens
            time.sleep(_SETTLE_S)
            last, counts = counts, self.counts()
            if counts == last and counts != before:
                break
        return judge(
            self.launch.speculative,
            counts and counts.since(before),
            self.engine_facts(),
            is_parallel=bool(self.launch.is_parallel),
            skipped=self._skips_mask_hidden,
            num_requests=num_requests,
        )

    def counts(self) -> DraftCounts | None:
        """Return its counters of drafts; None if it has none."""
        reply = self._client.call("GET", "/metrics")
        return read_counters(reply.text, self.model).drafts if reply.status == 200 else None

    def engine_facts(self) -> dict[str, Any] | None:
        """Return the guard's facts of the engine; None if the guard does not answer."""
        reply = self._client.call("GET", ENGINE_PATH)
        return json.loads(reply.body) if reply.status == 200 else None

    def _send_probes(self) -> int:
        """Let it complete the probes, or shorter ones where the context is short."""
        reply = ApiReply(0, {}, b"")
        for prompts, length in ((PROBE_TEXTS, PROBE_TOKENS), (("1 2 3 4", "a a a a"), 16)):
            request = {
                "model": self.model,
                "prompt": prompts,
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
            }
            reply = self._client.call("POST", "/v1/completions", request, timeout_s=READY_S)
            if reply.status == 200:
                return len(prompts)
        raise UserError(
            f"vLLM runs, but refuses to complete a prompt (status {reply.status}: "
            f"{reply.text[:300]}); it was stopped. {self.tail()}"
        )

    # ---- end --------------------------------------------------------------------------------

    def run(self) -> int:
        """Start it, wait for its end and return its exit status, 128 + n where signal n ended it.

        The first SIGTERM or Ctrl-C lets it finish running requests, the second ends it at once;
        while it loads, the first one does.

        Raises:
            UserError: as `start`.
            KeyboardInterrupt: a signal came while it loaded.
        """
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            assert self.process is not None
            drafting, config = ", without drafts", self.launch.speculative
            if config is not None:
                how = "in parallel" if self.launch.is_parallel else f"by {config.method}"
                drafting = f", K = {config.k} drafted {how}"
            self._is_serving = True
            self._progress(f"{self.model} is served at {self.url}{drafting}")
            status = _wait(self.process)
            return status if status >= 0 else 128 - status
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if not self._is_serving:
            if self._num_signals == 1:
                raise KeyboardInterrupt
        elif self.process is not None and self._num_signals == 1:
            self._progress("finishing running requests; a second signal ends vLLM at once")
            with suppress(ProcessLookupError):
                self.process.terminate()
        elif self.process is not None:
            _kill(self.process)

    def stop(self) -> None:
        """End it and everything it started; calling it again does nothing."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        _kill(process)  # workers may outlive a parent that was killed
        process.wait()
        self._reader.join(5)
        if process.stdout is not None and not self._reader.is_alive():
            process.stdout.close()


def _names_error(line: str) -> bool:
    """Return whether a line says what went wrong, not only that its cause stands above."""
    return bool(_ERROR.search(line)) and "See root cause above" not in line


def _wait(process: subprocess.Popen[str]) -> int:
    """Wait for the end of a process; its return code.

    Not by one wait without a limit: a signal that comes just before that begins would be handled
    when it ends.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and everything of its session at once."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reachable(host: str) -> str:
    """Return the address under which this machine reaches a server bound to `host`."""
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another "
            "--host or --port."
        ) from None
    return bound


def _free_port(host: str) -> int:
    with _bound(host, 0) as bound:
        return bound.getsockname()[1]
