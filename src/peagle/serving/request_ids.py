"""Ids of requests, for logs and headers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def request_id_from(headers: Mapping[str, str]) -> str:
    """The client's X-Request-ID if it is fit for logs and headers, else a new one of 32 hex digits.

    Args:
        headers: of the request; their names may be in any case.
    """
    given = next((value for name, value in headers.items() if name.lower() == "x-request-id"), "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
