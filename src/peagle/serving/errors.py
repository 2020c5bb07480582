"""Errors as clients see them: a status and an object in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """What a client did wrong, or what the server cannot do for it.

    Args:
        status: of HTTP.
        message: names the value, what was expected and what to do.
        type: OpenAI's class of error; None derives it from the status.
        param: the field of the request that is meant.
        code: for programs.
        headers: of the answer.

    Attributes:
        is_counted: metrics know of it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.is_counted = False

    def body(self) -> dict[str, Any]:
        """The answer's JSON object."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}
