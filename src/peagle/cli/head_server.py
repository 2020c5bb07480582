"""A running server that takes a new head of `peagle adapt`: `POST /admin/head`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.client.api import ApiClient

ADMIN_KEY = "PEAGLE_ADMIN_KEY"
_PATH = "/admin/head"


def find_server(url: str | None, key_file: Path | None) -> ApiClient | None:
    """Return the server of --serve, None without one; its key is in a file, or in `ADMIN_KEY`.

    Raises:
        UserError: there is no key, or the server would not take a head.
    """
    if url is None:
        if key_file is not None:
            raise UserError("--admin-key-file was given; expected --serve URL with it.")
        return None
    from peagle.client.api import ApiClient
    from peagle.serving.keys import read_keys

    key = os.environ.get(ADMIN_KEY) if key_file is None else read_keys({}, key_file)[0]
    if not key:
        raise UserError(
            f"--serve {url!r} needs a key of the server's --admin-key-file; give it with "
            f"--admin-key-file FILE, or in the variable {ADMIN_KEY}."
        )
    server = ApiClient(url, key, option="--serve")
    _call(server, "GET")
    return server


def hand_over(server: ApiClient, head: Path, trial_requests: int) -> dict[str, Any]:
    """Hand a head to the server, on trial for so many requests, 0 at once; return what it told.

    Raises:
        UserError: the server refused it.
    """
    body: dict[str, Any] = {"head": str(head.resolve())}
    if trial_requests:
        body["trial"] = {"requests": trial_requests}
    try:
        return _call(server, "POST", body)
    except UserError as error:
        raise UserError(f"{error} The new head stays in {str(head)!r}.") from None


def _call(server: ApiClient, method: str, body: Any = None) -> dict[str, Any]:
    from peagle.client.answers import error_message

    reply = server.call(method, _PATH, body)
    if reply.status == 200:
        return server.json_object(reply.body)
    message = error_message(reply.body)
    remedy = {
        401: f" Give another key with --admin-key-file, or in {ADMIN_KEY}.",
        404: " Start it with --admin-key-file and --allow-heads.",
    }
    raise UserError(
        f"{server.url} refused {method} {_PATH} ({reply.status}: {message})."
        + remedy.get(reply.status, "")
    )


def told_of(served: Mapping[str, Any], url: str, key_file: Path | None) -> str:
    """Return what the server does with the head, and how to look at it."""
    version = f"{url} serves it as version {served['head']['version']}"
    if (trial := served.get("trial")) is None:
        return version
    address = url.rstrip("/").removesuffix("/v1") + _PATH
    key = f"${ADMIN_KEY}"
    if key_file is not None:
        key = f"$(grep -m 1 '^[^#]' {shlex.quote(str(key_file))})"
    return (
        f"{version}, on trial for {trial['requests']} requests; look:\n"
        f'  curl {address} -H "Authorization: Bearer {key}"'
    )
