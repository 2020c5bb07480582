"""The backend of an evaluation that starts vLLM and stops it at the end."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.backends.vllm.server import VllmServer
from peagle.errors import UserError
from peagle.evaluation.decoding import Request, Run
from peagle.evaluation.endpoint import EndpointBackend, Watch

ENGINE = "vllm"


@contextmanager
def vllm_backend(
    launch: VllmLaunch,
    installation: VllmInstallation,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
    extra_body: Mapping[str, Any] | None = None,
    as_asked: bool = True,
) -> Iterator[EndpointBackend]:
    """Run a server of vLLM on a free port of this machine, with its own key.

    `say` gets a line at the beginning of each wait, `note` the notes on the server, and
    `extra_body` has further fields of every request. With `as_asked` a server that does not draft
    as asked is refused.

    Raises:
        UserError: a known fault; vLLM does not start, or does not draft as asked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `server.notes` has the warnings
        server = VllmServer(launch, installation, progress=say, probe=as_asked)
        server.start()
    try:
        backend = EndpointBackend(
            server.url, server.model, api_key=server.api_key, extra_body=extra_body, report=False
        )
        backend.name = ENGINE  # its URL is another one each time
        backend.is_plain = launch.speculative is None
        backend.notes += server.notes  # they belong to the results
        for text in server.notes:
            note(text)
        yield backend
    except UserError as error:
        if as_asked:
            raise
        # Without the probe, the first request may have ended the server.
        raise UserError(f"{error} {server.tail()}") from None
    finally:
        server.stop()


class VllmOnDemand:
    """The backend that starts vLLM with its first run and stops it with `close`.

    `start` opens the server. `notes` collects the notes of all servers that ran.
    """

    name = ENGINE
    tells_steps = False

    def __init__(self, start: Callable[[], AbstractContextManager[EndpointBackend]]) -> None:
        self.notes: list[str] = []
        self._start = start
        self._running = ExitStack()
        self._server: EndpointBackend | None = None

    def run(self, requests: Sequence[Request], concurrency: int, watch: Watch | None = None) -> Run:
        """Answer requests, as `Backend.run`.

        Raises:
            UserError: vLLM does not start or does not draft as asked; the server refuses.
        """
        if self._server is None:
            self._server = self._running.enter_context(self._start())
        return self._server.run(requests, concurrency, watch)

    def close(self) -> None:
        """Stop the server; another run starts it again."""
        if self._server is not None:
            self.notes += self._server.notes
        self._server = None
        self._running.close()
