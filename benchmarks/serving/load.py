"""The client of the load tests, and what they work out of many answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from peagle.evaluation.http_client import HttpClient, at_most
from peagle.evaluation.http_client import Reply as Answer

__all__ = ["Answer", "Client", "at_most", "percentile", "slope"]


class Client(HttpClient):
    """Sends requests to a server on this machine, on a connection each.

    Args:
        port: where it listens.
        host: and on which address.
        timeout_s: of a request.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", timeout_s: float = 300.0) -> None:
        super().__init__(f"http://{host}:{port}", timeout_s=timeout_s, keep_alive=False)

    async def complete(
        self, prompt: str, *, drop_after_s: float | None = None, **fields: Any
    ) -> Answer:
        """A completion, streamed and greedy unless `fields` say otherwise."""
        usage = {"stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
        body = {"prompt": prompt, "temperature": 0, "stream": True, **usage, **fields}
        return await self.send("POST", "/v1/completions", body, drop_after_s=drop_after_s)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values (0 to 1) does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line that fits (x, y) best by least squares; 0 where all x are the same."""
    n = len(points)
    mean_x, mean_y = (sum(axis) / n for axis in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
