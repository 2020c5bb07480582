"""API keys: where they come from, whether a request carries one, and how much each may use.

A salt isolates the prefix cache of a key from other keys', and names the key's account, so that
nothing here can reveal a key. Standard library only, as of Python 3.10: see `vllm_guard`.
"""

from __future__ import annotations

import binascii
import logging
import math
import os
import secrets
import stat
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import UserError
from peagle.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from peagle.serving.config import ServerConfig
    from peagle.serving.metrics import Metrics

ENVIRONMENT_VARIABLE = "PEAGLE_API_KEY"
MIN_LENGTH = 16

_logger = logging.getLogger(__name__)
# Drawn for each process, so that a salt reveals nothing about its key.
_PROCESS_SECRET = secrets.token_bytes(32)


class ApiKeys:
    """The keys that open the server. Only their SHA-256 digests are kept; false if there are none.

    Args:
        keys: keys that clients send; repetitions count once.
        digests: SHA-256 of further keys.
    """

    def __init__(self, keys: Iterable[str] = (), *, digests: Iterable[bytes] = ()) -> None:
        own = (sha256(key.encode()).digest() for key in keys)
        self.digests = tuple(dict.fromkeys([*own, *digests]))
        self._salts = tuple(
            blake2b(digest, key=_PROCESS_SECRET, digest_size=16).digest() for digest in self.digests
        )

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def salts(self) -> dict[bytes, bytes]:
        """Return the salt of each key, by the key's digest."""
        return dict(zip(self.digests, self._salts))

    def __repr__(self) -> str:
        return f"ApiKeys(<{len(self)}>)"

    def salt_of(self, candidate: bytes) -> bytes | None:
        """Return the 16 bytes of this key's salt; None if `candidate` is no key.

        The salt is the same for all requests with one key while the process lives. Every key is
        compared, in constant time, so that the time reveals nothing.
        """
        digest = sha256(candidate).digest()
        found = None
        for known, salt in zip(self.digests, self._salts):
            if compare_digest(digest, known):
                found = salt
        return found


def load_keys(environ: Mapping[str, str], file: str | Path | None = None) -> ApiKeys:
    """Return the keys that `read_keys` finds."""
    return ApiKeys(read_keys(environ, file))


def load_admin_keys(
    file: str | Path | None, allowed_heads: tuple[str, ...], keys: ApiKeys
) -> ApiKeys:
    """Return the keys in `file` of an administrator, who may swap the head.

    Raises:
        UserError: there are keys without folders, folders without keys, or a client's key is among
            them; or as `read_keys`.
    """
    if (file is None) != (not allowed_heads):
        given = "--allow-heads" if file is None else "--admin-key-file"
        raise UserError(f"{given} was given; expected --admin-key-file and --allow-heads.")
    found = ApiKeys(read_keys({}, file))
    if set(found.digests) & set(keys.digests):
        raise UserError(
            f"A key in {str(file)!r} opens the other routes too; expected an administrator's own."
        )
    return found


def read_keys(environ: Mapping[str, str], file: str | Path | None = None) -> tuple[str, ...]:
    """Return the keys of `file`, or else of PEAGLE_API_KEY in `environ`.

    Args:
        environ: the variable holds one key, or several separated by commas.
        file: one key per line; blank lines and lines that begin with # are skipped.

    Raises:
        UserError: a file that cannot be read, a source without any key, or a key with characters
            that a header cannot carry. No message contains a key.
    """
    variable = environ.get(ENVIRONMENT_VARIABLE)
    if file is not None:
        if variable is not None:
            _logger.warning("%s is ignored: keys come from the key file.", ENVIRONMENT_VARIABLE)
        # Not splitlines, nor a plain strip: those would hide control characters from the check.
        lines = enumerate(_read(Path(file)).split("\n"), start=1)
        named = [(f"line {n} of {str(file)!r}", line.strip(" \t")) for n, line in lines]
        named = [(name, key) for name, key in named if key and not key.startswith("#")]
        source, remedy = f"the key file {str(file)!r}", "leave the option out"
    elif variable is not None:
        parts = enumerate(variable.split(","), start=1)
        named = [(f"key {n} in {ENVIRONMENT_VARIABLE}", part.strip()) for n, part in parts]
        named = [(name, key) for name, key in named if key]
        source, remedy = f"the variable {ENVIRONMENT_VARIABLE}", "unset it"
    else:
        return ()
    if not named:
        # An empty secret must not open a server that was meant to be locked.
        raise UserError(
            f"No API key in {source}: expected at least one. Put a key there, or {remedy} to serve "
            "without keys."
        )
    for name, key in named:
        if not all("!" <= character <= "~" for character in key):
            raise UserError(
                f"An API key contains a space, a control character or a character outside ASCII "
                f"({name}): expected visible ASCII only, for example the output of openssl rand "
                "-hex 32."
            )
        if len(key) < MIN_LENGTH:
            text = "An API key is short (%s: %d characters): use at least %d random ones."
            _logger.warning(text, name, len(key), MIN_LENGTH)
    return tuple(key for _, key in named)


def _read(file: Path) -> str:
    expected = "expected a text file with one API key per line."
    try:
        with file.open(encoding="utf-8-sig") as lines:
            mode = os.fstat(lines.fileno()).st_mode
            if os.name == "posix" and mode & stat.S_IROTH:
                text = "The key file %r can be read by every user of this machine: chmod 600 it."
                _logger.warning(text, str(file))
            return lines.read()
    except OSError as error:
        text = f"The key file {str(file)!r} cannot be read ({error.strerror}): {expected}"
        raise UserError(text) from None
    except UnicodeDecodeError:  # from None: this error carries the file's content
        raise UserError(f"The key file {str(file)!r} is not UTF-8: {expected}") from None


def bearer_key(authorization: bytes) -> bytes | None:
    """Return the key in an Authorization header: a Bearer token, or HTTP Basic's password."""
    scheme, _, value = authorization.partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            _, colon, password = b64decode(value, validate=True).partition(b":")
        except binascii.Error:
            return None
        return password if colon else None
    return None


# ---- quotas ----

_CODE = "rate_limit_exceeded"  # OpenAI's


class Bucket:
    """A token bucket: full at first, refilled evenly within a minute, never above its size.

    In any t seconds it gives at most size x (1 + t / 60), less what came back.
    """

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self._level, self._at = float(size), now

    def level(self, now: float) -> float:
        """Return the content at a time in seconds, which never runs backwards."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / 60)
        self._at = now
        return self._level

    def seconds_until(self, level: float, now: float) -> float:
        """Return the seconds until the bucket holds `level`."""
        # A billionth, so that rounding refuses no client that waited for `Retry-After`.
        return max(0.0, (level - self.level(now)) * 60 / self.size - 1e-9)

    def consume(self, amount: float, now: float) -> None:
        """Take from the bucket; a negative amount gives back."""
        self._level = min(self.size, self.level(now) - amount)


@dataclass(slots=True)
class Account:
    """The use of one key; None sets no limit."""

    requests: Bucket | None
    tokens: Bucket | None
    num_open: int = 0

    def headers(self, now: float) -> dict[str, str]:
        """Return how much is left, under the names of OpenAI's headers."""
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
    """The use of one request, whose tokens are reserved before they are computed.

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
        bucket.consume(num_tokens, now)
        self._reserved = num_tokens

    def settle(self, num_tokens: int) -> None:
        """Give back the tokens that were reserved and not used."""
        if self._reserved and self.account is not None and self.account.tokens is not None:
            self.account.tokens.consume(num_tokens - self._reserved, self.clock())
        self._reserved = 0

    def close(self) -> None:
        """Note that the answer has ended."""
        if self.account is not None:
            self.account.num_open -= 1


class Quotas:
    """The accounts of all keys, each with the same limits; one event loop uses them.

    Args:
        requests_per_minute, tokens_per_minute, concurrency: limits of each key; None: no limit.
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
        self._requests, self._tokens = requests_per_minute, tokens_per_minute
        self._concurrency = concurrency
        self.clock = clock
        self._accounts: dict[bytes, Account] = {}

    @classmethod
    def of(cls, config: ServerConfig, *, has_keys: bool) -> Quotas | None:
        """Return the quotas that the options ask for; None if they ask for none.

        Raises:
            UserError: there is a limit for each key, and no key.
        """
        limits = {
            "--key-requests-per-minute": config.key_requests_per_minute,
            "--key-tokens-per-minute": config.key_tokens_per_minute,
            "--key-concurrency": config.key_concurrency,
        }
        option = next((option for option, limit in limits.items() if limit is not None), None)
        if option is None:
            return None
        if not has_keys:
            raise UserError(
                f"{option} is {limits[option]}, and the server has no API keys: expected keys in "
                f"PEAGLE_API_KEY or --api-key-file. Set one, or leave {option} out."
            )
        requests, tokens, concurrency = limits.values()
        return cls(requests_per_minute=requests, tokens_per_minute=tokens, concurrency=concurrency)

    def open(self, key: bytes) -> Lease:
        """Admit one request of a key, whose account counts it as open from now on.

        Raises:
            ApiError: 429, the key has as many requests under way, or had as many in this minute,
                as it may.
        """
        now = self.clock()
        account = self._accounts.get(key)
        if account is None:
            requests = None if self._requests is None else Bucket(self._requests, now)
            tokens = None if self._tokens is None else Bucket(self._tokens, now)
            account = self._accounts[key] = Account(requests, tokens)
        most, bucket = self._concurrency, account.requests
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
            bucket.consume(1, now)
        account.num_open += 1
        return Lease(account, self.clock)


def _exceeded(text: str, wait_s: float, headers: Mapping[str, str] = {}) -> ApiError:
    waits = {"Retry-After": str(math.ceil(wait_s))}
    return ApiError(429, text, code=_CODE, headers={**headers, **waits})


class QuotaMiddleware:
    """Holds each key to its quota before its request is read; it runs after the check of the key.

    It sets `scope["state"]["lease"]` for the application. Requests that only read (GET) are free.
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

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and lease.account is not None:
                left = lease.account.headers(lease.clock()).items()
                own = [(name.encode(), value.encode()) for name, value in left]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            lease.close()
