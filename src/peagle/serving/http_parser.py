"""HTTP/1.1 as the server takes it: h11's parser, stricter and within limits.

A proxy and a server that read one request differently let a client smuggle a second one past the
proxy's checks (RFC 9112, 11.2). So what the standard calls ambiguous is refused.
"""

import re
from collections.abc import Callable
from typing import Any

import h11

from peagle.serving.errors import ApiError

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
# Of the extensions of all chunks of a body, and of its trailers.
MAX_CHUNK_EXTRA_BYTES = 16 << 10
_BLANK_LINE = re.compile(rb"\n\r?\n")
_FOLDED_LINE = re.compile(rb"\n[ \t]")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t\x20-\x7e\x80-\xff]*|[ \t]*)\r\n")
_CHUNK_END = re.compile(rb"\r\n([0-9A-Fa-f]{1,4})\r\n")
_TRAILER = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+:[^\x00\r\n]*")


class RefusedRequest(h11.RemoteProtocolError):
    """A request that is not taken; `answer` is the error for its client."""

    def __init__(self, status: int, message: str, code: str, **headers: str) -> None:
        super().__init__(message, error_status_hint=status)
        self.answer = ApiError(status, message, code=code, headers=headers)


class HttpParser(h11.Connection):
    """h11 with bounds for the head of a request, and streams that cost little.

    Args:
        check: called with each request; may raise a RefusedRequest.

    Attributes:
        refusal: the error for a request that is not taken; None where h11 found the fault.
        is_last: the connection ends after the next answer.
    """

    def __init__(self, check: Callable[[h11.Request], None]) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._check = check
        self.refusal: ApiError | None = None
        self.is_last = False
        self._is_chunked = False

    def send(self, event: Any) -> bytes | None:
        """Return h11's bytes of an event; chunks of a body are framed here, in less of its time."""
        if type(event) is h11.Data and self._is_chunked and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if type(event) is h11.Response and self.is_last:
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(
                status_code=event.status_code, headers=headers, reason=event.reason
            )
        data = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"transfer-encoding: chunked\r\n" in (data or b"").lower()
        elif type(event) is h11.EndOfMessage:
            self._is_chunked = False
        return data

    def next_event(self) -> Any:
        """Return h11's next event; refuse a head that is too large before h11 parses it."""
        try:
            if self.their_state is h11.IDLE and (data := self.trailing_data[0]):
                _check_head(data)
            event: Any = super().next_event()
            if type(event) is h11.Request:
                _check_framing(event)
                self._check(event)
                if any(name == b"transfer-encoding" for name, _ in event.headers):
                    self._reader = ChunkedBody()
            return event
        except RefusedRequest as error:
            self.refusal = error.answer
            raise


def _check_head(data: bytes) -> None:
    """Refuse the head at the beginning of `data`, whole or not, if it is too large or ambiguous."""
    end = _BLANK_LINE.search(data)
    num_bytes = end.end() if end else len(data)
    num_headers = data.count(b"\n", 0, num_bytes) - (2 if end else 1)
    for found, most, unit in (
        (num_bytes, MAX_HEAD_BYTES, "bytes"),
        (num_headers, MAX_HEADERS, "headers"),
    ):
        if found > most:
            text = (
                f"The head of the request has at least {found} {unit}: expected at most {most} "
                f"{unit}."
            )
            raise RefusedRequest(431, text, "head_too_large")
    if _BARE_LINE_FEED.search(data, 0, num_bytes):
        text = (
            "A line of the request's head ends in a line feed alone: expected a carriage return "
            "before each line feed."
        )
        raise RefusedRequest(400, text, "invalid_http")
    if _FOLDED_LINE.search(data, 0, num_bytes):
        text = "A header of the request goes on in a second line: expected one line for each."
        raise RefusedRequest(400, text, "invalid_http")


def _check_framing(request: h11.Request) -> None:
    """Refuse a request whose end, or whose server, two readers could see differently."""
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        text = "The request has Content-Length and Transfer-Encoding: expected one of the two."
        raise RefusedRequest(400, text, "invalid_http")
    if not request.target.startswith(b"/"):
        text = (
            "The target of the request is no path: expected one that begins with /, such as "
            "/v1/models, and the server's name in the Host header."
        )
        raise RefusedRequest(400, text, "invalid_http")


class ChunkedBody:
    """Reads a body in chunks (RFC 9112, 7.1) in place of h11's reader.

    It returns the data of all chunks that have come at once, where h11 makes an event of each: a
    body in chunks of one byte would take 15 ms for 8 KiB. Extensions and trailers are dropped.
    """

    def __init__(self) -> None:
        self._num_left = 0  # bytes of a chunk that are still to come
        self._num_extra = 0
        self._is_first = True
        self._is_at_trailers = False

    def __call__(self, buffer: Any) -> h11.Data | h11.EndOfMessage | None:
        """Take complete chunks from h11's buffer; return an event, or None without one.

        Raises:
            RefusedRequest: these are no chunks, or their extensions or trailers are too large.
        """
        data = bytes(buffer.maybe_extract_at_most(len(buffer)) or b"")
        parts, at = [], 0
        while not self._is_at_trailers:
            if self._num_left:
                part = data[at : at + self._num_left]
                at += len(part)
                self._num_left -= len(part)
                parts.append(part)
                if self._num_left:
                    break
            if self._is_first or not (match := _CHUNK_END.match(data, at)):
                match = self._match_size(data, at)
            if match is None:
                break
            at, self._num_left = match.end(), int(match[1], 16)
            self._is_first = False
            self._is_at_trailers = not self._num_left
        if any(parts):
            buffer += data[at:]
            return h11.Data(data=b"".join(parts))
        if self._is_at_trailers and (num_bytes := self._trailers(data, at)) is not None:
            buffer += data[at + num_bytes :]
            return h11.EndOfMessage()
        buffer += data[at:]
        return None

    def _match_size(self, data: bytes, at: int) -> re.Match[bytes] | None:
        """Match the end of a chunk, if there was one, and the line with the size of the next.

        Returns:
            None if they have not come.
        """
        start = at if self._is_first else at + 2
        if not b"\r\n".startswith(data[at:start]):
            raise _no_chunk()
        if match := _CHUNK_SIZE.match(data, start):
            self._num_extra += len(match[2])
            self._check_extra()
            return match
        line = data[start : start + MAX_CHUNK_EXTRA_BYTES + 1]
        if b"\n" in line:
            raise _no_chunk()
        self._check_extra(len(line))
        return None

    def _trailers(self, data: bytes, at: int) -> int | None:
        """Read the trailers; return their bytes, or None if they have not ended."""
        if data.startswith(b"\r\n", at):
            return 2
        end = data.find(b"\r\n\r\n", at)
        self._check_extra((end if end >= 0 else len(data)) - at)
        if end < 0:
            return None
        lines = data[at:end].split(b"\r\n")
        if len(lines) > MAX_HEADERS or not all(map(_TRAILER.fullmatch, lines)):
            raise _no_chunk()
        return end + 4 - at

    def _check_extra(self, num_more: int = 0) -> None:
        if self._num_extra + num_more > MAX_CHUNK_EXTRA_BYTES:
            text = (
                f"The chunks of the body have more than {MAX_CHUNK_EXTRA_BYTES} bytes of "
                "extensions and trailers: send the body without them."
            )
            raise RefusedRequest(400, text, "invalid_http")


def _no_chunk() -> RefusedRequest:
    text = "The body is not in chunks as HTTP/1.1 has them, as its Transfer-Encoding says."
    return RefusedRequest(400, text, "invalid_http")
