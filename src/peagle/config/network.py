"""The machines that reach a server."""

from ipaddress import ip_address

# Names of a server on a loopback address.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def without_zone(bind_host: str) -> str:
    """Return an address without brackets and zone, in lower case."""
    return bind_host.strip("[]").partition("%")[0].lower()


def is_loopback(bind_host: str) -> bool:
    """Return whether only this machine reaches a server bound there; no name is resolved."""
    literal = without_zone(bind_host)
    try:
        return literal == "localhost" or ip_address(literal).is_loopback
    except ValueError:
        return False
