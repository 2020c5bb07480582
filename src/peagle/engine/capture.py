"""CUDA graphs that share their memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 2
# Turns something that runs on the device into what runs it again.
Capturer = Callable[[Callable[[], None]], Callable[[], None]]


class Capture:
    """Makes CUDA graphs in one pool of memory: only one runs at a time, and what outlives a run is
    held by whoever made it.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """The replay of `run` as a graph; it runs a few times first, to compile and to warm up."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph.replay


def make_capturer(device: torch.device) -> Capturer:
    """Graphs on a card; elsewhere, for tests, the thing itself."""
    return Capture() if device.type == "cuda" else _as_it_is


def _as_it_is(run: Callable[[], None]) -> Callable[[], None]:
    return run
