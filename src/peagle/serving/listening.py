"""The socket of a server, bound before anything slow is imported."""

from __future__ import annotations

import socket

from peagle.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on, though nobody answers yet.

    Raises:
        UserError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise UserError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another "
            "--host or --port."
        ) from None
    listening.setblocking(False)
    return listening
