"""The socket of a server, bound before anything slow is imported, and how many may connect."""

from __future__ import annotations

import socket

from peagle.errors import UserError

BACKLOG = 2048
_MOST_FILES = 65536
_MOST_CONNECTIONS = 4096
# What else is open: pipes to engines, files that are read, connections that close at the moment.
_OTHER_FILES = 256


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections at once, before the server answers.

    Raises:
        UserError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another "
            "--host or --port."
        ) from None
    listening.setblocking(False)
    return listening


def connection_limit(asked: int | None) -> int:
    """Return the limit of open connections.

    The limit of open files is raised as far as this process may, to 65,536 at most.

    Args:
        asked: the limit that the user set; None takes what the files allow, at most 4,096.

    Raises:
        UserError: more are asked for than files may be open.
    """
    num_files = _raise_file_limit()
    room = num_files - min(_OTHER_FILES, num_files // 2)
    if asked is None:
        return min(room, _MOST_CONNECTIONS)
    if asked > room:
        raise UserError(
            f"--max-connections is {asked}, and this process may open {num_files} files: expected "
            f"at most {room}. Lower it, or raise the limit of open files (ulimit -n)."
        )
    return asked


def _raise_file_limit() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinity = resource.RLIM_INFINITY
    wanted = _MOST_FILES if hard == infinity else min(hard, _MOST_FILES)
    if soft == infinity or soft >= wanted:
        return _MOST_FILES if soft == infinity else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than its hard limit
        return soft
    return wanted
