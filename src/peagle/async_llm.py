"""`AsyncLLM`: many clients on one engine, each with its own stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from peagle.config import SamplingParams
from peagle.engine import EngineStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.requests import Prompt
from peagle.errors import UserError
from peagle.llm import LLM


@dataclass(slots=True, eq=False)
class _Client:
    """Who waits for a request, in which event loop; `num_left` outputs are yet to come."""

    loop: asyncio.AbstractEventLoop
    num_left: int
    seq_ids: list[int] = field(default_factory=list)
    items: asyncio.Queue[StreamChunk | BaseException] = field(default_factory=asyncio.Queue)

    def deliver(self, item: StreamChunk | BaseException) -> bool:
        """Hand something over from another thread; false if nobody waits any more."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the loop is closed; asking first would be too early
            return False
        return True


class AsyncLLM:
    """An `LLM` for asyncio: requests join the running batch as they come.

    The engine steps in a thread of its own; event loops of several threads may share it. Use it as
    an async context manager, or call `aclose`. Its `llm` is not for others while it is open.

    Args:
        target: as in `LLM`.
        **options: as in `LLM`.

    Raises:
        UserError: as in `LLM`.
    """

    def __init__(self, target: str | Path | None = None, **options: Any) -> None:
        self.llm = LLM(target, **options)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # of the next three, which all threads write
        self._clients: dict[int, _Client] = {}
        self._num_requests = 0
        self._has_ended = False
        self._failure: BaseException | None = None
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
    ) -> AsyncGenerator[StreamChunk, None]:
        """Complete one prompt, yielding each step's tokens as they come.

        The engine does not wait for a slow reader. Leaving the iterator, or cancelling the task,
        cancels the request; where the iterator is kept in a variable, close it with `aclose`.

        Args:
            prompt: text, token ids, or a mapping of `prompt` or `prompt_token_ids`.
            params: how it is sampled; None takes `LLM.default_params`.
            priority: lower goes first.

        Raises:
            UserError: the request cannot be served, or this AsyncLLM is closed.
            RuntimeError: the engine failed; the cause is what it raised.
        """
        params = self.llm.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"The sampling params are {params!r}; expected SamplingParams.")
        params = replace(params)  # checked as it stands now, and safe from what its owner assigns
        num_left = params.n
        client = _Client(asyncio.get_running_loop(), num_left)
        index = self._register(client)
        self._orders.put(lambda: self._add(index, prompt, params, priority))
        try:
            while num_left:
                item = await client.items.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= item.output is not None
                yield item
        finally:
            if num_left:
                self._orders.put(lambda: self._cancel(index))

    def _register(self, client: _Client) -> int:
        """Note who waits, before the order is given: whatever ends the engine, it will be told."""
        with self._lock:
            if self._has_ended:
                raise self._end()
            self._num_requests += 1
            self._clients[self._num_requests] = client
            return self._num_requests

    def _end(self) -> Exception:
        """Why there is nothing more; a new one each time, as each is raised in another task."""
        if self._failure is None:
            return UserError("This AsyncLLM is closed; make another one.")
        error = RuntimeError(f"The engine failed: {self._failure!r}. Make another AsyncLLM.")
        error.__cause__ = self._failure
        return error

    # ---- in the engine's thread -------------------------------------------------------------

    def _work(self) -> None:
        """Serve until the end, then tell everybody who still waits."""
        try:
            self._serve()
            self.llm.requests.cancel_all()
        except BaseException as error:  # whoever waits must hear of it
            self._failure = error
        with self._lock:
            self._has_ended = True
        for client in self._clients.values():
            client.deliver(self._end())
        self._clients.clear()

    def _serve(self) -> None:
        """Orders between steps, chunks to their clients."""
        requests = self.llm.requests
        while True:
            while not requests.has_unfinished or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            for chunk in requests.step():
                self._deliver(chunk)

    def _add(self, index: int, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        requests, client = self.llm.requests, self._clients[index]
        try:
            client.seq_ids = requests.add(index, prompt, params, priority=priority)
        except Exception as error:  # its own affair: nothing was queued
            self._forget(index)
            client.deliver(error)

    def _cancel(self, index: int) -> None:
        client = self._forget(index)
        if client is not None:
            self.llm.requests.cancel(client.seq_ids)

    def _deliver(self, chunk: StreamChunk) -> None:
        client = self._clients.get(chunk.index)
        if client is None:
            return  # another output of this step found that nobody waits
        client.num_left -= chunk.output is not None
        if not client.deliver(chunk):
            self._cancel(chunk.index)
        elif client.num_left == 0:
            self._forget(chunk.index)

    def _forget(self, index: int) -> _Client | None:
        with self._lock:
            return self._clients.pop(index, None)
