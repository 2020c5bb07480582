"""Host and Origin headers, and the hosts that a server answers to."""

import re
from ipaddress import AddressValueError, IPv6Address
from typing import NamedTuple

from peagle.config.network import LOOPBACK_NAMES, is_loopback, without_zone
from peagle.errors import UserError
from peagle.serving.keys import ApiKeys

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_NAME_LENGTH = 253  # of DNS
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?", re.ASCII | re.IGNORECASE)
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.ASCII | re.IGNORECASE)


class Host(NamedTuple):
    """A parsed Host header; `port` is None if none was given.

    The name is in lower case, without a trailing dot; IPv6 in its shortest form, in brackets.
    """

    name: str
    port: int | None


class Origin(NamedTuple):
    """The origin of a web page; `port` is None only for schemes without a usual port."""

    scheme: str
    name: str
    port: int | None

    def is_same_as(self, host: Host) -> bool:
        """Return whether a page from here, by http or https, lies on the server called `host`.

        The scheme is not compared: behind a proxy that ends TLS the server does not know it.
        """
        usual = _DEFAULT_PORTS.get(self.scheme)
        port = usual if host.port is None else host.port
        return usual is not None and self.name == host.name and self.port == port


def parse_host(value: bytes) -> Host | None:
    """Return the value of a Host header; None if it is malformed."""
    match = _HOST.fullmatch(value.decode("latin-1"))
    if match is None:
        return None
    name, port = match[1].lower(), int(match[2]) if match[2] else None
    if name.startswith("["):
        is_good = _is_ipv6(name[1:-1])
        name = f"[{IPv6Address(name[1:-1])}]" if is_good else name
    else:
        name = name.removesuffix(".")
        is_good = len(name) <= _MAX_NAME_LENGTH and all(map(_LABEL.fullmatch, name.split(".")))
    return Host(name, port) if is_good and (port is None or port <= 65535) else None


def parse_origin(value: bytes) -> Origin | None:
    """Return the value of an Origin header; None if it is malformed, or "null"."""
    match = _ORIGIN.fullmatch(value.decode("latin-1"))
    host = None if match is None else parse_host(match[2].encode("latin-1"))
    if match is None or host is None:
        return None
    scheme = match[1].lower()
    port = _DEFAULT_PORTS.get(scheme) if host.port is None else host.port
    return Origin(scheme, host.name, port)


def allowed_host(name: str) -> str:
    """Return the value of --allowed-host as it is compared: a name or an address.

    Raises:
        UserError: it is malformed, or has a port.
    """
    bracketed = f"[{name}]" if _is_ipv6(name) else name
    host = parse_host(bracketed.encode(errors="replace"))
    if host is None or host.port is not None:
        raise UserError(
            f"The allowed host is {name!r}: expected a name or an address without a port, such as "
            "chat.example.com, or * for any."
        )
    return host.name


def allowed_origin(value: str) -> Origin:
    """Return the value of --allowed-origin as it is compared, without a trailing slash.

    Raises:
        UserError: it is malformed.
    """
    origin = parse_origin(value.removesuffix("/").encode(errors="replace"))
    if origin is None:
        raise UserError(
            f"The allowed origin is {value!r}: expected a scheme and a host, without a path, such "
            "as https://chat.example.com, or * for any."
        )
    return origin


def default_allowed_hosts(bind_host: str) -> tuple[str, ...]:
    """Return the hosts that a server bound to `bind_host` answers to by default.

    A loopback server answers to the names of the loopback only: a web page whose DNS name is
    turned to 127.0.0.1 must not reach it. A server elsewhere has names that it cannot know.
    """
    if not is_loopback(bind_host):
        return ("*",)
    own = allowed_host(without_zone(bind_host))
    return LOOPBACK_NAMES if own in LOOPBACK_NAMES else (*LOOPBACK_NAMES, own)


def bind_warning(host: str, keys: ApiKeys) -> str | None:
    """Return a warning about a server bound to `host` without keys, if others reach it."""
    if keys or is_loopback(host):
        return None
    return (
        f"The server listens on {host or 'all addresses'} without an API key: everybody who can "
        "reach it can use it. Set PEAGLE_API_KEY or --api-key-file, or bind to 127.0.0.1."
    )


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True
