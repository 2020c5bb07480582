"""The client of the load tests, and what they work out of many answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from peagle.client.events import DONE
from peagle.evaluation.http_client import HttpClient, Reply, run_clients

__all__ = ["Answer", "Client", "fault_in", "is_openai_error", "percentile", "run_clients", "slope"]


class Answer(Reply):
    """A reply, read as a completion, streamed or not."""

    @property
    def json(self) -> Any:
        """The body, read.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream, as the server sent them."""
        return [json.loads(data) for _, data in self.events if data != DONE]

    @property
    def text(self) -> str:
        """Of the first choice of a completion, streamed or not."""
        parts = self.chunks if self.events else [self.json]
        choices = (choice for part in parts for choice in part.get("choices", ())[:1])
        return "".join(choice.get("text") or "" for choice in choices)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        found = None
        for part in self.chunks if self.events else [self.json]:
            for choice in part.get("choices", ())[:1]:
                found = choice.get("finish_reason") or found
        return found

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as the body or the last chunk has them; {} where there are none."""
        return self._last.get("usage") or {}

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of the body or of the last event, None if there is none."""
        return self._last.get("error")

    @property
    def _last(self) -> dict[str, Any]:
        """The body or the last chunk; {} for what is no JSON object."""
        try:
            last = self.chunks[-1] if self.events else self.json
        except (ValueError, IndexError):
            return {}
        return last if isinstance(last, dict) else {}

    @property
    def is_complete(self) -> bool:
        """A whole answer of status 200 that ends as it should."""
        ended = not self.events or self.events[-1][1] == DONE
        return self.status == 200 and not self.problem and ended and self.error is None

    @property
    def first_token_s(self) -> float:
        """Seconds to the first event."""
        return self.events[0][0] - self.sent_s


class Client(HttpClient):
    """Sends requests to a server on this machine, on a connection each.

    Args:
        port: where it listens.
        host: and on which address.
        timeout_s: of a request.
        key: that opens the server, if it has keys.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        key: str | None = None,
    ) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        super().__init__(f"http://{host}:{port}", headers, timeout_s=timeout_s, keep_alive=False)

    async def send(self, *request: Any, **options: Any) -> Answer:
        """Send as `HttpClient.send`."""
        reply = await super().send(*request, **options)
        return Answer(*(getattr(reply, field.name) for field in fields(reply)))

    async def get(self, path: str) -> Answer:
        """GET a route."""
        return await self.send("GET", path)

    async def complete(
        self, prompt: str, *, drop_after_s: float | None = None, **fields: Any
    ) -> Answer:
        """A completion, streamed and greedy unless `fields` say otherwise."""
        usage = {"stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
        body = {"prompt": prompt, "temperature": 0, "stream": True, **usage, **fields}
        return await self.send("POST", "/v1/completions", body, drop_after_s=drop_after_s)


def fault_in(answer: Answer) -> str:
    """What is wrong with an answer to a body that may be wrong; "" if nothing is."""
    if answer.problem:
        return f"no whole answer: {answer.problem}, status {answer.status}"
    if answer.status >= 500 or answer.status < 200:
        return f"status {answer.status}: {answer.body[:200]!r}"
    if answer.events and (error := answer.error):
        if error.get("type") == "server_error":
            return f"server error in a stream: {error}"
    elif answer.status >= 400 and not is_openai_error(answer.body):
        return f"another form of error: {answer.status} {answer.body[:200]!r}"
    return ""


def is_openai_error(body: bytes) -> bool:
    """Whether this is {"error": {"message", "type", "param", "code"}}, and nothing beside."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or set(value) != {"error"}:
        return False
    texts = isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
    rest = all(isinstance(error.get(key, 0), str | None) for key in ("param", "code"))
    return texts and rest and bool(error["message"])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values (0 to 1) does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line that fits (x, y) best by least squares; 0 where all x are the same."""
    n = len(points)
    mean_x, mean_y = (sum(axis) / n for axis in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
