"""Capture and replay of the kernels that a function launches, as CUDA graphs."""

from collections.abc import Callable

import torch

_WARM_UPS = 2

# Turns a function into one that replays its kernels.
Capturer = Callable[[Callable[[], None]], Callable[[], None]]


class _Capture:
    """Captures CUDA graphs that share one memory pool, because only one of them runs at a time.

    The caller holds the tensors that outlive a run.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of `run`, which first runs a few times to compile and warm up."""
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
    """Return the capturer of a GPU; on a CPU, for tests, functions replay themselves."""
    return _Capture() if device.type == "cuda" else lambda run: run
