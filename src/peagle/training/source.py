"""Batches with what the target says about them, made while the last one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.training.tensor_maps import moved, owned_by, pinned

# Batches made ahead, whose states lie on the device where a store has them.
AHEAD = 2


class Source:
    """Batches on the device, with the target's states.

    A thread makes the next batches, reads their states where a store has them, and copies both to
    the GPU on a stream of its own.

    Args:
        batch_at: makes the batch of a step, on the host.
        device: where they go.
        compute: states of a batch on the device, from the target in this process; or
        read: states of a batch from a store, on the host.
    """

    def __init__(
        self,
        batch_at: Callable[[int], Batch],
        device: torch.device,
        *,
        compute: Callable[[Batch], TargetStates] | None = None,
        read: Callable[[Batch], TargetStates] | None = None,
    ) -> None:
        assert (compute is None) != (read is None)
        self._batch_at, self._device = batch_at, device
        self._compute, self._read = compute, read
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def range(self, start: int, stop: int) -> Iterator[tuple[Batch, TargetStates]]:
        """Batches and states of the steps from `start` to before `stop`."""
        with ThreadPoolExecutor(1, "peagle-data", initializer=self._choose_gpu) as thread:
            waiting: list[Future[tuple[Batch, TargetStates | None, torch.cuda.Event | None]]] = []
            step = start
            try:
                while step < stop or waiting:
                    while step < stop and len(waiting) < AHEAD:
                        waiting.append(thread.submit(self._make, step))
                        step += 1
                    batch, states, ready = waiting.pop(0).result()
                    if ready is not None:
                        self._wait(ready, batch, states)
                    if states is None:
                        assert self._compute is not None
                        states = self._compute(batch)
                    yield batch, states
            finally:
                for future in waiting:
                    future.cancel()

    def _choose_gpu(self) -> None:
        """A new thread would pin memory for the first GPU, whichever this process has."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def _make(self, step: int) -> tuple[Batch, TargetStates | None, torch.cuda.Event | None]:
        batch = self._batch_at(step)
        states = self._read(batch) if self._read is not None else None
        if self._stream is None:
            return batch, states, None
        with torch.cuda.stream(self._stream):
            batch, states = moved(pinned((batch, states)), self._device)
            ready = torch.cuda.Event()
            ready.record(self._stream)
            return batch, states, ready

    def _wait(self, ready: torch.cuda.Event, batch: Batch, states: TargetStates | None) -> None:
        """Let the computing stream wait for the copies, and own their memory."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        owned_by((batch, states), current)
