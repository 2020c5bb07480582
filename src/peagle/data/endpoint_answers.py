"""Questions answered by an endpoint with OpenAI's interface, by the standard library alone."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from peagle.data.regenerate import Ask, Failure, RegeneratedAnswer
from peagle.errors import UserError

KEY_VARIABLE = "PEAGLE_API_KEY"
_MAX_BYTES = 64 << 20
_MAX_MESSAGE = 300  # characters of a server's words
_MAX_WAIT_S = 60.0
_POLL_S = 0.2  # between two looks at whether the user wants to stop
_WORTH_A_RETRY = (408, 409, 425, 429)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on with a question.

    Attributes:
        retries: after the first try.
        first_wait_s: before the first of them; every further wait is twice as long, up to a
            minute. A server's Retry-After goes over it.
        timeout_s: of one try.
    """

    retries: int = 6
    first_wait_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.retries < 0 or self.timeout_s <= 0:
            raise UserError(
                f"retries is {self.retries}, the timeout {self.timeout_s:g} s; expected at least 0 "
                "and more than 0."
            )

    def wait_s(self, tries: int, retry_after: str | None) -> float:
        """Seconds before the next of `tries` tries."""
        wait = self.first_wait_s * 2 ** (tries - 1)
        if retry_after is not None and retry_after.strip().isdigit():
            wait = float(retry_after)
        return min(wait, _MAX_WAIT_S)


class _Temporary(Exception):
    """Another try may do better."""

    def __init__(self, reason: str, *, is_connection: bool, retry_after: str | None = None) -> None:
        super().__init__(reason)
        self.is_connection, self.retry_after = is_connection, retry_after


class _Refused(Exception):
    """This question will never be answered."""


class EndpointAnswerer:
    """A server that answers questions (an `Answerer`).

    Args:
        url: like https://host:8000, with or without /v1 at its end.
        model: its name there; None takes the first that the server lists.
        fields: of every request: sampling, and options of the chat template.
        key: None if it wants none.
        concurrency: questions under way at a time.
        is_chat: ask for chat completions; else for completions.
        patience: with failing tries.

    Raises:
        UserError: the URL, the key or the concurrency is not usable, or no model was named and the
            server lists none.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        fields: Mapping[str, Any],
        *,
        key: str | None = None,
        concurrency: int = 16,
        is_chat: bool = True,
        patience: Patience | None = None,
    ) -> None:
        if concurrency < 1:
            raise UserError(f"--concurrency is {concurrency}; expected at least 1.")
        self.url, self.is_chat = url, is_chat
        self._address = _address(url)
        self._patience = patience or Patience()
        self._concurrency = concurrency
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            if not key.isascii() or not key.isprintable():
                raise UserError(f"{KEY_VARIABLE} has characters that no key has; expected ASCII.")
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self._stopped = threading.Event()
        self.model = model or self._first_model()
        self._fields = {**fields, "model": self.model}

    def answers(
        self, take: Callable[[], Ask | None]
    ) -> Iterator[tuple[Ask, RegeneratedAnswer | Failure]]:
        """Answers in the order in which they come, `concurrency` questions at a time.

        Raises:
            UserError: the server cannot be reached, refuses the key, or is none of this kind.
        """
        asks: queue.Queue[Ask | None] = queue.Queue()
        results: queue.Queue[tuple[Ask, RegeneratedAnswer | Failure | UserError]] = queue.Queue()
        self._stopped.clear()
        # Daemons: an interrupted run does not wait for a server that may take minutes.
        for _ in range(self._concurrency):
            threading.Thread(target=self._work, args=(asks, results), daemon=True).start()
        under_way = 0
        try:
            while True:
                while under_way < self._concurrency and (ask := take()) is not None:
                    asks.put(ask)
                    under_way += 1
                if not under_way:
                    return
                try:
                    ask, result = results.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                under_way -= 1
                if isinstance(result, UserError):
                    raise result
                yield ask, result
        finally:
            self._stopped.set()
            for _ in range(self._concurrency):
                asks.put(None)

    def _work(self, asks: queue.Queue, results: queue.Queue) -> None:
        while (ask := asks.get()) is not None and not self._stopped.is_set():
            try:
                results.put((ask, self._answer(ask)))
            except UserError as error:
                results.put((ask, error))
            except Exception as error:  # a fault of ours must not leave the user waiting
                results.put((ask, Failure(f"{type(error).__name__}: {error}")))

    def _answer(self, ask: Ask) -> RegeneratedAnswer | Failure:
        body: dict[str, Any] = {**self._fields, "seed": ask.seed}
        if self.is_chat:
            path, body["messages"] = "/v1/chat/completions", [dict(m) for m in ask.messages]
        else:
            path, body["prompt"] = "/v1/completions", ask.messages[-1]["content"]
        try:
            reply = self._patiently("POST", path, json.dumps(body).encode())
        except _Refused as error:
            return Failure(str(error))
        try:
            return _read_answer(reply, self.is_chat)
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._foreign(json.dumps(reply)[:_MAX_MESSAGE]) from None

    def _first_model(self) -> str:
        try:
            listed = self._patiently("GET", "/v1/models", None)
            return str(listed["data"][0]["id"])
        except (_Refused, KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url} lists no models; name the one to ask with --target."
            ) from None

    # ---- one exchange -----------------------------------------------------------------------

    def _patiently(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """The server's answer, after as many tries as it takes.

        Raises:
            _Refused: the request is wrong, or the server failed at every try.
            UserError: all requests would fare likewise.
        """
        tries = 0
        while True:
            tries += 1
            try:
                return self._exchange(method, path, body)
            except _Temporary as error:
                if tries > self._patience.retries or self._stopped.is_set():
                    if error.is_connection:
                        raise UserError(
                            f"{self.url} cannot be reached: {error} ({tries} tries). The answers "
                            "so far are kept: run the same command again to go on."
                        ) from None
                    raise _Refused(f"{error} ({tries} tries)") from None
                self._stopped.wait(self._patience.wait_s(tries, error.retry_after))

    def _exchange(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        kind, host, port, base = self._address
        try:
            with closing(kind(host, port, timeout=self._patience.timeout_s)) as connection:
                connection.request(method, base + path, body, self._headers)
                response = connection.getresponse()
                raw = response.read(_MAX_BYTES)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise _Temporary(reason, is_connection=True) from None
        status = response.status
        if status == 200:
            return self._json(raw)
        said = f"{status}: {_message(raw)}"
        if status in _WORTH_A_RETRY or status >= 500:
            retry_after = response.headers.get("Retry-After")
            raise _Temporary(said, is_connection=False, retry_after=retry_after)
        if status in (401, 403):
            raise UserError(
                f"{self.url} refused the key ({said}). Set the variable {KEY_VARIABLE} to one that "
                "it takes."
            )
        if status == 404 or status < 400:
            raise UserError(
                f"{self.url} has no {path} for the model ({said}). Correct --endpoint or --target."
            )
        raise _Refused(said)

    def _json(self, raw: bytes) -> dict[str, Any]:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._foreign(raw[:60].decode(errors="replace"))
        return value

    def _foreign(self, what: str) -> UserError:
        return UserError(
            f"{self.url} answered {what!r}, which is no completion. Correct --endpoint; it takes "
            "the URL up to /v1."
        )


def _address(url: str) -> tuple[type[HTTPConnection], str, int | None, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UserError(f"--endpoint is {url!r}; expected a URL like http://127.0.0.1:8000.")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind, host, port, parts.path.rstrip("/").removesuffix("/v1")


def _message(raw: bytes) -> str:
    try:
        error = json.loads(raw)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = raw.decode(errors="replace").strip()
    shown = str(text)[:_MAX_MESSAGE] or "it gave no reason"
    return "".join(c if c.isprintable() else " " for c in shown)


def _read_answer(reply: Mapping[str, Any], is_chat: bool) -> RegeneratedAnswer | Failure:
    choice = reply["choices"][0]
    reason = choice.get("finish_reason") or "stop"
    usage = reply.get("usage") or {}
    num_tokens = usage.get("completion_tokens") or 0
    if not is_chat:
        return RegeneratedAnswer(_text(choice["text"]), reason, num_tokens=num_tokens)
    message = choice["message"]
    if message.get("tool_calls"):
        return Failure("the answer is a tool call")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return RegeneratedAnswer(
        _text(message.get("content") or ""), reason, _text(reasoning), num_tokens
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
