"""Limits of each API key: requests and tokens a minute, and requests at a time.

A key is identified by its salt (`ApiKeys.salt_of`), so that nothing here can reveal a key. One
`Quotas` belongs to one event loop: it has no locks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from peagle.serving.config import ServerConfig
    from peagle.serving.metrics import Metrics

_CODE = "rate_limit_exceeded"  # OpenAI's


class Bucket:
    """A token bucket: full at first, refilled evenly within a minute, never above its size.

    In any t seconds it gives at most size x (1 + t / 60), less what came back.
    """

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self._level, self._at = float(size), now

    def level(self, now: float) -> float:
        """What it holds at a time in seconds, which never runs backwards."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / 60)
        self._at = now
        return self._level

    def seconds_until(self, level: float, now: float) -> float:
        """Seconds until it holds as much; 0 if it does."""
        # A billionth, so that rounding refuses no client that waited for `Retry-After`.
        return max(0.0, (level - self.level(now)) * 60 / self.size - 1e-9)

    def take(self, amount: float, now: float) -> None:
        """Take what is there, see `seconds_until`; a negative amount gives back."""
        self._level = min(self.size, self.level(now) - amount)


class Account:
    """The use of one key."""

    def __init__(
        self, *, requests: int | None, tokens: int | None, concurrency: int | None, now: float
    ) -> None:
        self.num_open = 0
        self.concurrency = concurrency
        self.requests = None if requests is None else Bucket(requests, now)
        self.tokens = None if tokens is None else Bucket(tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """How much is left, under the names of OpenAI's headers."""
        named: dict[str, str] = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left, wait_s = bucket.level(now), bucket.seconds_until(bucket.size, now)
                named[f"x-ratelimit-limit-{kind}"] = str(bucket.size)
                named[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(left)))
                named[f"x-ratelimit-reset-{kind}"] = f"{wait_s:.3f}s"
        return named


@dataclass(slots=True)
class Lease:
    """The use of one request: its tokens are reserved before they are computed.

    Without an account nothing is limited.
    """

    account: Account | None = None
    clock: Callable[[], float] = time.monotonic
    _reserved: int = 0

    def reserve(self, num_tokens: int) -> None:
        """Take the most tokens that the request can use, before it begins.

        Raises:
            ApiError: its key has not as many left (429), or never has (400).
        """
        bucket = self.account.tokens if self.account is not None else None
        if bucket is None:
            return
        asked = f"The prompt and the most tokens of the outputs are {num_tokens} tokens"
        limit = f"{bucket.size} tokens a minute (--key-tokens-per-minute)"
        if num_tokens > bucket.size:
            raise ApiError(
                400,
                f"{asked}; an API key has {limit}. Set a lower max_tokens, or shorten the prompt.",
                param="max_tokens",
                code=_CODE,
            )
        now = self.clock()
        if wait_s := bucket.seconds_until(num_tokens, now):
            raise _exceeded(
                f"{asked}; {math.floor(bucket.level(now))} are left to this API key, which has "
                f"{limit}. Try again in {wait_s:.1f} s, or set a lower max_tokens.",
                wait_s,
            )
        bucket.take(num_tokens, now)
        self._reserved = num_tokens

    def settle(self, num_tokens: int) -> None:
        """Give back what was reserved beyond the tokens that were used."""
        if self._reserved and self.account is not None and self.account.tokens is not None:
            self.account.tokens.take(num_tokens - self._reserved, self.clock())
        self._reserved = 0

    def close(self) -> None:
        """The answer has ended."""
        if self.account is not None:
            self.account.num_open -= 1


class Quotas:
    """The accounts of all keys, each with the same limits.

    Args:
        requests_per_minute, tokens_per_minute, concurrency: of each key; None sets no limit.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        concurrency: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = requests_per_minute, tokens_per_minute, concurrency
        self.clock = clock
        self._accounts: dict[bytes, Account] = {}

    @classmethod
    def of(cls, config: ServerConfig, *, has_keys: bool) -> Quotas | None:
        """Those that the options ask for; None if they ask for none.

        Raises:
            UserError: there is a limit for each key, and no key.
        """
        asked = [
            (option, value)
            for option, value in (
                ("--key-requests-per-minute", config.key_requests_per_minute),
                ("--key-tokens-per-minute", config.key_tokens_per_minute),
                ("--key-concurrency", config.key_concurrency),
            )
            if value is not None
        ]
        if not asked:
            return None
        if not has_keys:
            option, value = asked[0]
            raise UserError(
                f"{option} is {value}, and the server has no API keys: expected keys in "
                f"PEAGLE_API_KEY or --api-key-file. Set one, or leave {option} out."
            )
        return cls(
            requests_per_minute=config.key_requests_per_minute,
            tokens_per_minute=config.key_tokens_per_minute,
            concurrency=config.key_concurrency,
        )

    def open(self, key: bytes) -> Lease:
        """Admit one request of a key; the lease is to be closed when its answer has ended.

        Raises:
            ApiError: 429, the key has as many requests under way, or had as many in this minute,
                as it may.
        """
        now = self.clock()
        account = self._accounts.get(key)
        if account is None:
            requests, tokens, most = self._limits
            account = Account(requests=requests, tokens=tokens, concurrency=most, now=now)
            self._accounts[key] = account
        most, bucket = account.concurrency, account.requests
        if most is not None and account.num_open >= most:
            raise _exceeded(
                f"{account.num_open} requests of this API key are under way; expected at most "
                f"{most} at a time (--key-concurrency). Wait until one of them has ended.",
                1,
                account.headers(now),
            )
        if bucket is not None:
            if wait_s := bucket.seconds_until(1, now):
                raise _exceeded(
                    f"This API key has sent its {bucket.size} requests a minute "
                    f"(--key-requests-per-minute); try again in {wait_s:.1f} s.",
                    wait_s,
                    account.headers(now),
                )
            bucket.take(1, now)
        account.num_open += 1
        return Lease(account, self.clock)


def _exceeded(text: str, wait_s: float, headers: dict[str, str] | None = None) -> ApiError:
    waits = {"Retry-After": str(math.ceil(wait_s))}
    return ApiError(429, text, code=_CODE, headers={**(headers or {}), **waits})


class QuotaMiddleware:
    """Holds each key to its quota before its request is read; it runs after the check of the key.

    For the application it sets `scope["state"]["lease"]`. What reads only (GET) is free.
    """

    def __init__(self, app: ASGIApp, quotas: Quotas, metrics: Metrics) -> None:
        self._app = app
        self._quotas = quotas
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or raise the ApiError that refuses it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            lease = self._quotas.open(scope["state"]["cache_salt"])
        except ApiError:
            self._metrics.failed("refused")
            raise
        scope["state"]["lease"] = lease
        try:
            await self._app(scope, receive, _with_headers(send, lease))
        finally:
            lease.close()


def _with_headers(send: Send, lease: Lease) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start" and lease.account is not None:
            left = lease.account.headers(lease.clock()).items()
            own = [(name.encode(), value.encode()) for name, value in left]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return add
