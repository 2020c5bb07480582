"""`AsyncLLM`: many clients on one engine, each with its own stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from peagle.config import SamplingParams
from peagle.engine import EngineStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.requests import Prompt
from peagle.errors import UserError
from peagle.llm import LLM

_Client = Callable[[StreamChunk | BaseException], None]


class AsyncLLM:
    """An `LLM` for asyncio: requests join the running batch as they come.

    The engine steps in a thread of its own. Use it as an async context manager, or call `aclose`.

    Args:
        target: as in `LLM`.
        **options: as in `LLM`.

    Raises:
        UserError: as in `LLM`.
    """

    def __init__(self, target: str | Path | None = None, **options: Any) -> None:
        self.llm = LLM(target, **options)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._clients: dict[int, _Client] = {}
        self._num_requests = 0
        self._lock = threading.Lock()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="peagle-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what runs, end its streams, stop the thread. Calling it again does nothing."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def stats(self) -> EngineStats:
        """How the engine stands, and what it did so far."""
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
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt, yielding each step's tokens as they come.

        Leaving the iterator, or cancelling the task, cancels the request.

        Args:
            prompt: text or token ids.
            params: how it is sampled; None takes `LLM.default_params`.
            priority: lower goes first.

        Raises:
            UserError: the request cannot be served, or this AsyncLLM is closed.
        """
        params = params or self.llm.default_params()
        chunks: asyncio.Queue[StreamChunk | BaseException] = asyncio.Queue()
        deliver = _deliver_to(asyncio.get_running_loop(), chunks)
        self._num_requests += 1
        index = self._num_requests
        added: list[int] = []

        def add() -> None:
            try:
                added.extend(self.llm.requests.add(index, prompt, params, priority=priority))
                self._clients[index] = deliver
            except UserError as error:
                deliver(error)

        def cancel() -> None:
            self._clients.pop(index, None)
            self.llm.requests.cancel(added)

        self._order(add)
        num_left = params.n
        try:
            while num_left:
                chunk = await chunks.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                num_left -= chunk.output is not None
                yield chunk
        finally:
            if num_left:
                self._orders.put(cancel)

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is not None:
                raise UserError("This AsyncLLM is closed; make another one.") from self._ended
            self._orders.put(order)

    def _work(self) -> None:
        """The engine's thread: orders between steps, chunks to their clients."""
        ended: BaseException = UserError("This AsyncLLM was closed; make another one.")
        try:
            self._serve()
        except BaseException as error:  # whoever waits must hear of it
            ended = error
        with self._lock:
            self._ended = ended
        while not self._orders.empty():
            if order := self._orders.get():
                order()
        self.llm.requests.cancel_all()
        for client in self._clients.values():
            client(ended)
        self._clients.clear()

    def _serve(self) -> None:
        requests = self.llm.requests
        while True:
            while not requests.has_unfinished or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            for chunk in requests.step():
                self._clients[chunk.index](chunk)
                self._forget_finished(chunk)

    def _forget_finished(self, chunk: StreamChunk) -> None:
        if chunk.output is not None and not self.llm.requests.is_running(chunk.index):
            del self._clients[chunk.index]


def _deliver_to(
    loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[StreamChunk | BaseException]
) -> _Client:
    def deliver(chunk: StreamChunk | BaseException) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    return deliver
