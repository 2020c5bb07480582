"""`AsyncLLM`: many clients on one engine, each with its own stream."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from peagle.config import SamplingParams
from peagle.engine import EngineStats
from peagle.engine.loop import Add, EngineLoop
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.requests import Prompt, Requests
from peagle.errors import UserError
from peagle.llm import LLM


@dataclass(slots=True, eq=False)
class _Client:
    """A task that waits for a request in an event loop."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StreamChunk | BaseException] = field(default_factory=asyncio.Queue)

    def deliver(self, item: StreamChunk | BaseException) -> bool:
        """Hand an item over from another thread; return false if the event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # asking before the call would be too early
            return False
        return True


class _ClientLoop(EngineLoop):
    """The loop of one engine; `clients` wait for chunks by the index of their request."""

    def __init__(self, requests: Requests, clients: dict[int, _Client]) -> None:
        super().__init__({"": requests})
        self._clients = clients

    def deliver(self, chunks: list[StreamChunk]) -> None:
        for chunk in chunks:
            self._hand_over(chunk.index, chunk)

    def refuse(self, index: int, error: BaseException) -> None:
        self._hand_over(index, error)

    def _hand_over(self, index: int, item: StreamChunk | BaseException) -> None:
        client = self._clients.get(index)
        if client is not None and not client.deliver(item):
            self._clients.pop(index, None)
            self.cancel(index)


class AsyncLLM:
    """An `LLM` for asyncio: requests join the running batch as they come.

    The engine steps in a thread of its own; event loops of several threads may share it. Use it as
    an async context manager, or call `aclose`. While it is open, use its `llm` for nothing else.

    Args:
        target: see `LLM`.
        **options: as in `LLM`.

    Raises:
        UserError: as in `LLM`.
    """

    def __init__(self, target: str | Path | None = None, **options: Any) -> None:
        self.llm = LLM(target, **options)
        self._lock = threading.Lock()  # guards the next four, which several threads write
        self._clients: dict[int, _Client] = {}
        self._num_requests = 0
        self._has_ended = False
        self._failure: BaseException | None = None
        self._loop = _ClientLoop(self.llm.requests, self._clients)
        self._thread = threading.Thread(target=self._work, name="peagle-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all requests, end their streams, stop the thread. A second call does nothing."""
        self._loop.post(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def stats(self) -> EngineStats:
        """Return the engine's state now, and its counters."""
        return self.llm.stats

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[RequestOutput]:
        """Complete one prompt: its `params.n` outputs. Arguments and errors as `stream`."""
        outputs = [
            chunk.output
            async for chunk in self.stream(prompt, params, priority=priority)
            if chunk.output is not None
        ]
        return sorted(outputs, key=lambda output: output.index)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[StreamChunk, None]:
        """Complete one prompt, yielding each step's tokens as they come.

        The engine does not wait for a slow reader. Leaving the iterator, or cancelling the task,
        cancels the request; close an iterator that is kept in a variable with `aclose`.

        Args:
            prompt: text, token ids, or a mapping of `prompt` or `prompt_token_ids`.
            params: sampling parameters; None takes `LLM.default_params`.
            priority: requests with a lower number go first.

        Raises:
            UserError: the request cannot be served, or this AsyncLLM is closed.
            RuntimeError: the engine failed; the cause is the engine's own error.
        """
        params = self.llm.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"The sampling params are {params!r}; expected SamplingParams.")
        params = replace(params)  # checked as they stand now; later assignments change nothing
        num_left = params.n
        client = _Client(asyncio.get_running_loop())
        index = self._register(client)
        message = Add(index, prompt, params, priority=priority)
        self._loop.post(lambda: self._loop.add(message))
        try:
            while num_left:
                item = await client.items.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= item.output is not None
                yield item
        finally:
            self._clients.pop(index, None)
            if num_left:
                self._loop.post(lambda: self._loop.cancel(index))

    def _register(self, client: _Client) -> int:
        """Note a client before its order is posted, so that it hears of any end of the engine."""
        with self._lock:
            if self._has_ended:
                raise self._end()
            self._num_requests += 1
            self._clients[self._num_requests] = client
            return self._num_requests

    def _end(self) -> Exception:
        """Return why there is nothing more; each task raises a new exception."""
        if self._failure is None:
            return UserError("This AsyncLLM is closed; make another one.")
        error = RuntimeError(f"The engine failed: {self._failure!r}. Make another AsyncLLM.")
        error.__cause__ = self._failure
        return error

    def _work(self) -> None:
        """Serve in the engine's thread until the end, then tell all clients that still wait."""
        try:
            self._loop.run()
            self.llm.requests.cancel_all()
        except BaseException as error:  # all waiting clients must get it
            self._failure = error
        with self._lock:
            self._has_ended = True
        for client in list(self._clients.values()):
            client.deliver(self._end())
        self._clients.clear()
