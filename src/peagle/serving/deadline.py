"""The time by which a request must be answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from peagle.serving.errors import ApiError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request's time.

    Attributes:
        timeout_s: seconds from `start_s`; 0 sets no limit.
        start_s: when the request came, by `time.monotonic`.
    """

    timeout_s: float
    start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Number of seconds left; None without a limit."""
        if not self.timeout_s:
            return None
        return max(self.start_s + self.timeout_s - time.monotonic(), 0.0)

    @property
    def error(self) -> ApiError:
        """The error that the client gets."""
        return ApiError(
            504,
            f"The request took longer than {self.timeout_s:g} s. Ask for fewer tokens or try again "
            "later; the operator raises the limit with --request-timeout.",
            code="request_timeout",
        )

    async def hold(self, work: Awaitable[T]) -> T:
        """Wait for work within the time.

        Raises:
            ApiError: 504, the time is over and the work is cancelled.
        """
        timeout = asyncio.timeout(self.left_s)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.error from None

    def call(self, end: Callable[[ApiError], None]) -> asyncio.TimerHandle | None:
        """Have the event loop call a function with the error when the time is over."""
        left_s = self.left_s
        if left_s is None:
            return None
        return asyncio.get_running_loop().call_later(left_s, end, self.error)
