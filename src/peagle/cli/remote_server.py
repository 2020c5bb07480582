"""A server with OpenAI's interface, reached over HTTP by the standard library alone."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from peagle.cli.terminal import printable
from peagle.errors import UserError

API_KEY_VARIABLE = "PEAGLE_API_KEY"
_CONNECT_S = 10.0
_POLL_S = 0.1  # between two looks at whether the user wants to stop
_MAX_BYTES = 16 << 20  # of a line or of a body
_MAX_MESSAGE = 600  # characters of a server's words


class RemoteServer:
    """A server with OpenAI's interface.

    Args:
        url: like http://127.0.0.1:8000, with or without /v1 at its end.
        key: for servers that want one.

    Raises:
        UserError: the URL is none of HTTP.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, self._port = parts.hostname, parts.port
        except ValueError:
            parts, host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise UserError(
                f"--server is {url!r}; expected a URL like http://127.0.0.1:8000, where `peagle "
                "serve` listens."
            )
        self.url = url
        self._host, self._is_https = host, parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {_header_value(key)}"

    def models(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists.

        Raises:
            UserError: the server cannot be reached, wants another key, or is none of this kind.
        """
        with closing(self._connect()) as connection:
            try:
                connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
                response = connection.getresponse()
                body = response.read(_MAX_BYTES)
            except (OSError, HTTPException) as error:
                raise self._broken(error) from None
        if response.status != 200:
            raise self._refused(response.status, body)
        listed = _json(body).get("data")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise self._foreign("its list of models is none")
        return listed

    def events(self, body: Mapping[str, Any]) -> Generator[dict[str, Any] | None]:
        """The chunks of a streamed chat completion; None whenever nothing came for a moment.

        Closing this closes the connection, whereupon the server drops the request.

        Raises:
            UserError: the request was refused, or the answer ended in an error or in the middle.
        """
        # No SimpleQueue: in CPython 3.11 an interrupt as its timeout ends lets it wait forever.
        connection, lines = self._connect(), queue.Queue()
        sock = connection.sock  # the connection forgets it while the answer is still read
        arguments = (connection, json.dumps(body).encode(), lines)
        # A thread reads, so that the user is heard while the server is silent.
        threading.Thread(target=self._read, args=arguments, daemon=True).start()
        try:
            while True:
                try:
                    line = lines.get(timeout=_POLL_S)
                except queue.Empty:
                    yield None
                    continue
                if isinstance(line, Exception):
                    raise line
                if line == b"[DONE]":
                    return
                event = _json(line)
                if "error" in event:
                    raise UserError(f"The server ended the answer: {_message(event)}")
                yield event
        finally:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _read(self, connection: HTTPConnection, body: bytes, lines: queue.Queue) -> None:
        """Send a request and pass on the data of its events, with an error at the end."""
        path = f"{self._base}/v1/chat/completions"
        with closing(connection):
            try:
                connection.request("POST", path, body, self._headers)
                with closing(connection.getresponse()) as response:
                    lines.put(self._pass_on(response, lines))
            except UserError as error:
                lines.put(error)
            except (OSError, HTTPException, ValueError, AttributeError) as error:
                lines.put(self._broken(error))

    def _pass_on(self, response: HTTPResponse, lines: queue.Queue) -> Exception:
        if response.status != 200:
            return self._refused(response.status, response.read(_MAX_BYTES))
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            return self._foreign(f"it answers with {kind!r}, not with a stream")
        while line := response.readline(_MAX_BYTES):
            if line.startswith(b"data:"):
                lines.put(line[5:].strip())
        return self._broken(ConnectionError("it ended in the middle of the answer"))

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._is_https else HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"No server answers at {self.url}: {_reason(error)}. Start one with `peagle "
                "serve`, or correct --server."
            ) from None
        # Answers may be long in coming: requests wait for their turn.
        connection.sock.settimeout(None)
        return connection

    def _refused(self, status: int, body: bytes) -> UserError:
        message = _message(_json(body, {}))
        if status in (401, 403):
            return UserError(
                f"The server at {self.url} refused the key ({status}): {message} Set the variable "
                f"{API_KEY_VARIABLE} to one that it takes."
            )
        if status == 404 and not _json(body, {}).get("error"):
            return self._foreign(f"it has no such page ({status})")
        return UserError(f"The server at {self.url} refused ({status}): {message}")

    def _foreign(self, what: str) -> UserError:
        return UserError(
            f"What answers at {self.url} is no server of chat completions: {what}. Correct "
            "--server; it takes the URL up to /v1."
        )

    def _broken(self, error: Exception) -> UserError:
        return UserError(f"The connection to {self.url} broke: {_reason(error)}. Try again.")


def _header_value(key: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{API_KEY_VARIABLE} has characters that no key has; expected ASCII text.")
    return key.strip()


def _json(raw: bytes, otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object of a server.

    Raises:
        UserError: it is none, and there is no `otherwise`.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    if otherwise is None:
        shown = printable(raw[:60].decode(errors="replace"))
        raise UserError(f"The server's answer is no JSON object: {shown!r}. Correct --server.")
    return otherwise


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) and message else "it gave no reason."
    return printable(text[:_MAX_MESSAGE])


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
