"""A real `peagle serve` as a process, for the tests that need one."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serving.warm import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
# Of a machine that does much else meanwhile.
START_S = 400
# Room for 16 requests of 2,048 tokens with either head. The default would take 2 GiB of each of the
# servers that live side by side.
SMALL_CACHE = ("--kv-cache-gib", 0.5)
# For all requests that share nothing else: each new client reads the certificates of the system.
HTTP = httpx.Client(timeout=60, verify=False)
CHAT_TEMPLATE = """\
{# answers may begin with <think> #}\
{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}\
{% for message in messages %}# {{ message.role }}: {{ message.content }}
{% for call in message.tool_calls %}# calls: {{ call.function.name }}
{% endfor %}{% endfor %}{% if add_generation_prompt %}# assistant:{% endif %}"""

# Of the server `strict`: each test takes keys of its own, as each key has limits of its own.
KEYS = [letter * 24 for letter in "abcdefghij"]
LOOPING_TEMPLATE = """\
{% for message in messages %}{{ message.content }}{% endfor %}\
{% if forever %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}\
{% endif %}"""


@dataclass(slots=True)
class LiveServer:
    """A server that runs.

    Attributes:
        url: of its root.
        process: of the front end.
        log: what it wrote to standard error, a file.
    """

    url: str
    process: subprocess.Popen[bytes] | WarmProcess
    log: Path

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, verify=False, **options)

    def as_holder(self, key: str) -> httpx.Client:
        """A client with an API key."""
        return self.client(headers={"Authorization": f"Bearer {key}"})

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by their name and labels, the model's name left out."""
        samples = {}
        for line in HTTP.get(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.replace('model_name="peagle-code"', "")
                samples[name.replace(",,", ",").replace(",}", "}")] = float(value)
        return samples

    def engine_pids(self) -> list[int]:
        """Of the engine processes, as the log names them."""
        return [int(pid) for pid in re.findall(r"engine \d+ is ready .*?pid=(\d+)", self.text)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def serve_command(*arguments: object) -> list[str]:
    main = "from peagle.cli.main import main; main()"
    return [sys.executable, "-c", main, "serve", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PEAGLE_", "SM_VLLM_"))}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def warm_serve(log: Path, *arguments: object, **variables: str) -> WarmProcess:
    """`peagle serve`, forked from a process that has imported everything; it writes to `log`."""
    words = ["peagle", "serve", *map(str, SMALL_CACHE + arguments)]
    return WarmProcess(words, environment(**variables), log)


@contextmanager
def running(*arguments: object, warm: bool = False, **variables: str) -> Iterator[LiveServer]:
    """`peagle serve` on a free port, ready; it is ended afterwards.

    `warm` forks it from a process that has imported everything, see `serving.warm`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process: subprocess.Popen[bytes] | WarmProcess
        if warm:
            process = warm_serve(log, "--port", 0, *arguments, **variables)
        else:
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    serve_command("--port", 0, *SMALL_CACHE, *arguments),
                    stderr=stream,
                    stdout=stream,
                    env=environment(**variables),
                    start_new_session=True,
                )
        server = LiveServer("", process, log)
        try:
            server.url = wait_until_ready(server)
            yield server
        finally:
            if isinstance(process, WarmProcess):
                process.kill()  # its engines end without it
            elif process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(server: LiveServer, *, timeout_s: float = START_S) -> str:
    """The root's URL, once requests are taken."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended: {server.text}")
        if found := re.search(r"listening on (http://\S+);", server.text):
            url = found[1].replace("0.0.0.0", "127.0.0.1")
            try:
                if HTTP.get(f"{url}/ping", timeout=5).status_code == 200:
                    return url
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready in time: {server.text}")


def wait_for(condition: Any, *, timeout_s: float = 120) -> None:
    """Until a function says true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.05)
