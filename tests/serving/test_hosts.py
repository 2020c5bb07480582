"""Host and Origin headers, and the hosts that a server answers to."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.serving.hosts import (
    Host,
    Origin,
    allowed_host,
    allowed_origin,
    bind_warning,
    default_allowed_hosts,
    parse_host,
    parse_origin,
)
from peagle.serving.keys import ApiKeys

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("localhost", Host("localhost", None)),
        ("LocalHost:8000", Host("localhost", 8000)),
        ("localhost.:8000", Host("localhost", 8000)),
        ("localhost:", Host("localhost", None)),
        ("example.com:0", Host("example.com", 0)),
        ("example.com:65535", Host("example.com", 65535)),
        ("compose_service-1:08000", Host("compose_service-1", 8000)),
        ("127.0.0.1:80", Host("127.0.0.1", 80)),
        ("[::1]", Host("[::1]", None)),
        ("[0:0:0:0:0:0:0:1]:8000", Host("[::1]", 8000)),
        ("[2001:DB8::A]", Host("[2001:db8::a]", None)),
        ("x" * 63 + "." + "y" * 63, Host("x" * 63 + "." + "y" * 63, None)),
    ],
)
def test_hosts(value: str, expected: Host) -> None:
    assert parse_host(value.encode()) == expected


MALFORMED = [
    *("", ".", "..", ":8000", "localhost..", ".localhost", "a..b", "x" * 64, "x." * 127 + "x"),
    *("localhost:65536", "localhost:-1", "localhost:+1", "localhost:8000:1", "localhost:123456"),
    *("localhost:٣", " localhost", "localhost ", "localhost\n", "local host", "localhost\0"),
    *("localhost,evil.example", "user@localhost", "http://localhost", "localhost/", "localhost\\"),
    *("localhost#", "%6cocalhost", "löcalhost", "\u017focalhost", "\u212a"),
    *("::1", "[::1", "::1]", "[]", "[localhost]", "[127.0.0.1]", "[::1%lo]", "[::1]x", "[::1]."),
    *("[:::1]", "[v1.a]"),
]


@pytest.mark.parametrize("value", MALFORMED)
def test_malformed_hosts(value: str) -> None:
    assert parse_host(value.encode()) is None


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_host_or_none(value: bytes) -> None:
    host = parse_host(value)
    if host is not None:
        # What was understood, written down again, is understood in the same way.
        written = host.name if host.port is None else f"{host.name}:{host.port}"
        assert parse_host(written.encode()) == host


@settings(deadline=None)
@given(st.ip_addresses(v=6), st.integers(0, 65535))
def test_ipv6_has_one_spelling(address: ipaddress.IPv6Address, port: int) -> None:
    for spelling in (address.compressed, address.exploded, address.exploded.upper()):
        assert parse_host(f"[{spelling}]:{port}".encode()) == Host(f"[{address}]", port)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://localhost:8000", Origin("http", "localhost", 8000)),
        ("HTTPS://Example.com", Origin("https", "example.com", 443)),
        ("http://[::1]", Origin("http", "[::1]", 80)),
        ("chrome-extension://abcdef", Origin("chrome-extension", "abcdef", None)),
        *[(v, None) for v in ("null", "", "localhost", "http://", "http://a/b", "http://a/")],
        *[(v, None) for v in ("http://a b", "http://u@a", "//a", "http:a", "http://a,http://b")],
    ],
)
def test_origins(value: str, expected: Origin | None) -> None:
    assert parse_origin(value.encode()) == expected


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost.:8000", True),
        ("https://example.com", "example.com", True),
        ("http://example.com", "example.com:80", True),
        ("https://example.com:443", "example.com", True),
        ("http://[::1]:8000", "[0::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://localhost", "localhost:8000", False),
        ("http://localhost:8000", "localhost", False),
        ("https://example.com", "example.com:80", False),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("http://evil.example:8000", "localhost:8000", False),
        ("ftp://localhost:8000", "localhost:8000", False),
    ],
)
def test_same_origin(origin: str, host: str, is_same: bool) -> None:
    page, server = parse_origin(origin.encode()), parse_host(host.encode())
    assert page is not None and server is not None
    assert page.is_same_as(server) is is_same


# ---- options ----


def test_allowed_hosts_are_normalised() -> None:
    given = ["Chat.Example.com.", "::1", "[0::1]", "10.0.0.5"]
    assert [allowed_host(name) for name in given] == [
        "chat.example.com",
        "[::1]",
        "[::1]",
        "10.0.0.5",
    ]


@pytest.mark.parametrize(
    "name",
    ["", "localhost:8000", "[::1]:8000", "*.example.com", "::1%lo", "bücher.example", "\udcff"],
)
def test_bad_allowed_hosts(name: str) -> None:
    with pytest.raises(UserError, match="without a port") as caught:
        allowed_host(name)
    assert repr(name) in str(caught.value)


def test_allowed_origins() -> None:
    assert allowed_origin("https://Chat.example.com/") == Origin("https", "chat.example.com", 443)
    for value in ("chat.example.com", "https://a/b", "null", "https://*.example.com", "\udcff"):
        with pytest.raises(UserError, match="without a path"):
            allowed_origin(value)


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "LOCALHOST", "::1", "[::1]", "::1%lo"])
def test_loopback_answers_to_loopback_names(bind: str) -> None:
    assert default_allowed_hosts(bind) == LOOPBACK
    assert bind_warning(bind, ApiKeys()) is None


def test_another_loopback_address_answers_to_itself_too() -> None:
    assert default_allowed_hosts("127.0.0.2") == (*LOOPBACK, "127.0.0.2")


@pytest.mark.parametrize(
    "bind", ["0.0.0.0", "::", "192.168.1.5", "example.com", "localhost.evil.example", "127.0.0.1.x"]
)
def test_other_binds(bind: str) -> None:
    assert default_allowed_hosts(bind) == ("*",)
    warning = bind_warning(bind, ApiKeys())
    assert warning is not None and bind in warning and "PEAGLE_API_KEY" in warning
    assert bind_warning(bind, ApiKeys(["0123456789abcdef"])) is None


def test_an_empty_bind_is_everywhere() -> None:
    warning = bind_warning("", ApiKeys())
    assert warning is not None and "all addresses" in warning
