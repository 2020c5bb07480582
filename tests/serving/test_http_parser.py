"""Requests that two readers could understand differently, and bodies in chunks."""

import random
from typing import Any

import h11
import pytest

from peagle.serving.http_parser import MAX_CHUNK_EXTRA_BYTES, MAX_HEADERS, HttpParser

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
EXTRA = MAX_CHUNK_EXTRA_BYTES


def requests_in(parts: list[bytes], parser: h11.Connection | None = None) -> list[Any]:
    """The requests in what came, part by part: (target, body), and the refusal that ended them."""
    parser = parser or HttpParser(lambda request: None)
    found: list[Any] = []
    for part in parts:
        parser.receive_data(part)
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                return [*found, error]
            if event is h11.NEED_DATA or event is h11.PAUSED:
                break
            if isinstance(event, h11.Request):
                found.append((event.target, b""))
            elif isinstance(event, h11.Data):
                found[-1] = (found[-1][0], found[-1][1] + bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                parser.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                parser.send(h11.EndOfMessage())
                if parser.our_state is h11.DONE:  # not in HTTP/1.0
                    parser.start_next_cycle()
    return found


def refusal(data: bytes) -> str:
    """Why a request is refused; it must be."""
    *before, error = requests_in([data])
    assert isinstance(error, h11.RemoteProtocolError), (before, error)
    return str(error)


# ---- heads ----


@pytest.mark.parametrize("encoding", [b"chunked", b"Chunked", b"xchunked", b"identity"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_ends_of_one_body_are_refused(encoding: bytes, is_reversed: bool) -> None:
    lines = [b"Content-Length: 6\r\n", b"Transfer-Encoding: " + encoding + b"\r\n"]
    head = POST + b"".join(reversed(lines) if is_reversed else lines)
    refusal(head + b"\r\n0\r\n\r\n" + NEXT)


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 6\r\nContent-Length: 7\r\n",
        b"Content-Length: 6, 7\r\n",
        b"Content-Length: +6\r\n",
        b"Content-Length: 0x6\r\n",
        b"Content-Length: 6_0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length : 6\r\n",
        b"Content-Length\t: 6\r\n",
        b" Content-Length: 6\r\n",
        b"Content-Length:\r\n 6\r\n",
        b"X-A: b\r\n Content-Length: 6\r\n",
        b"X-A: b\n\tc\n",
        b"X-A: b\n",
        b"X-A: b\nContent-Length: 27\r\n",
        b"X-A: b\n\nGET /nowhere HTTP/1.1\r\nHost: localhost\r\n",
        b"X-A: b\rContent-Length: 6\r\n",
        b"X-A\r: b\r\n",
        b"X-A: b\0c\r\n",
        b"X\0: b\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked;a=b\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    ],
)
def test_ambiguous_headers_are_refused(lines: bytes) -> None:
    refusal(POST + lines + b"\r\n0\r\n\r\n" + NEXT)


@pytest.mark.parametrize(
    "target",
    [
        b"http://elsewhere/v1/models",
        b"http://user:secret@localhost/v1/models",
        b"localhost/v1/models",
        b"*",
        b"elsewhere:443",
        b"?api_key=secret",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"OPTIONS", b"CONNECT"])
def test_targets_that_are_no_paths_are_refused(method: bytes, target: bytes) -> None:
    text = refusal(method + b" " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "no path" in text and "secret" not in text


def test_what_is_not_ambiguous_passes() -> None:
    same = POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi"
    assert requests_in([same + NEXT]) == [(b"/v1/completions", b"hi"), (b"/live", b"")]
    text = b"GET /live?a=b HTTP/1.0\r\nX-A: b c\td\xff\r\n\r\n"
    assert requests_in([text])[0] == (b"/live?a=b", b"")


# ---- chunks ----


def chunked(draw: random.Random) -> tuple[bytes, bytes]:
    """A body, and the same in chunks of any size, with extensions and trailers."""
    body, data = b"", b""
    for _ in range(draw.randrange(6)):
        part = draw.randbytes(draw.choice([1, 2, 9, 17, 300, 70_000]))
        size = draw.choice([b"%x", b"%X", b"000%x"]) % len(part)
        data += size + draw.choice([b"", b"", b" ", b";a", b';a="b;c" ; d']) + b"\r\n" + part
        data += b"\r\n"
        body += part
    trailers = draw.choice([b"", b"", b"X-A: b\r\n", b"X-A:\r\nX-B: c\r\n"])
    return body, data + draw.choice([b"0", b"00;a=b"]) + b"\r\n" + trailers + b"\r\n"


@pytest.mark.parametrize("seed", range(40))
def test_chunks_are_read_as_h11_reads_them(seed: int) -> None:
    draw = random.Random(seed)
    body, data = chunked(draw)
    data = CHUNKED + data + NEXT
    most = draw.choice([1, 3, 100, 8192])
    if len(data) > 20_000 * most:
        most = 8192
    parts = []
    while data:
        size = draw.randint(1, most)
        parts.append(data[:size])
        data = data[size:]
    expected = [(b"/v1/completions", body), (b"/live", b"")]
    assert requests_in(parts) == expected
    assert requests_in(parts, h11.Connection(h11.SERVER)) == expected


def test_many_small_chunks_are_one_event() -> None:
    """h11's own reader makes an event of each, which takes 2 ms for a KiB."""
    parser = HttpParser(lambda request: None)
    parser.receive_data(CHUNKED + b"1\r\na\r\n" * 1000)
    events = []
    while (event := parser.next_event()) is not h11.NEED_DATA:
        events.append(event)
    assert [type(event) for event in events] == [h11.Request, h11.Data]
    assert events[1].data == b"a" * 1000


@pytest.mark.parametrize(
    "data",
    [
        b"1;" + b"x" * EXTRA + b"\r\na\r\n",
        b"1;" + b"x" * EXTRA,  # that has not ended
        b"1;xx\r\na\r\n" * (EXTRA // 3 + 1),
        b"1 " + b" " * EXTRA + b"\r\n",
        b"0\r\nX-A: " + b"a" * EXTRA + b"\r\n\r\n",
        b"0\r\nX-A: " + b"a" * EXTRA,
        b"1;" + b"x" * (EXTRA // 2) + b"\r\na\r\n0\r\nX-A: " + b"a" * (EXTRA // 2) + b"\r\n\r\n",
    ],
)
def test_extensions_and_trailers_are_bounded_together(data: bytes) -> None:
    assert f"{EXTRA} bytes of extensions" in refusal(CHUNKED + data)
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    assert isinstance(requests_in([CHUNKED, *pieces])[-1], h11.RemoteProtocolError)


def test_extensions_and_trailers_at_the_limit_pass() -> None:
    half = EXTRA // 2
    data = b"1;" + b"x" * (half - 1) + b"\r\na\r\n0\r\nX-A: " + b"a" * (half - 5) + b"\r\n\r\n"
    assert requests_in([CHUNKED + data]) == [(b"/v1/completions", b"a")]


@pytest.mark.parametrize(
    "data",
    [
        b"\r\na\r\n",
        b"g\r\na\r\n",
        b"-1\r\na\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b" 1\r\na\r\n",
        b"1 1\r\na\r\n",
        b"1 ;a\r\na\r\n",
        b"1\na\n0\n\n",
        b"1\ra\r\n",
        b"1;a\nb\r\na\r\n",
        b"1;a\rb\r\na\r\n",
        b"1;a\0b\r\na\r\n",
        b"00000000000000001\r\na\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"1\r\na\n1\r\nb\r\n",
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\nX-A : b\r\n\r\n",
        b"0\r\nX-A: b\nX-B: c\r\n\r\n",
        b"0\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    ],
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    assert "not in chunks" in refusal(CHUNKED + data)
