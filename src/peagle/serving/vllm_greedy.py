"""Refuses requests that would sample, where vLLM's sampling is wrong.

Speculation in a CPU build of vLLM verifies drafts for greedy decoding only. vLLM turns texts such
as "0.7" into numbers and takes temperatures from more than one place, so that only a request that
is known to decode greedily passes. Standard library only, as of Python 3.10: see `vllm_guard`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from peagle.serving.errors import ApiError

# Where temperature is a field of the body, and one that is absent is the server's default, 0.
_SAMPLING = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
        *("/v1/responses", "/v1/messages", "/invocations"),
    }
)
# Takes `sampling_params` as vLLM itself has them, in which an absent temperature is 1.
_BARE = "/inference/v1/generate"
# These draw no tokens.
_OTHERS = re.compile(
    r"/(tokenize|detokenize|ping|v1/messages/count_tokens|v1/(chat/)?completions/render"
    r"|v1/responses/[^/]+/cancel)"
)
_NESTED = ("sampling_params", "extra_body")
_REMEDY = "Send temperature 0, or start the server with --no-speculation."


def check_greedy(path: str, body: bytes) -> None:
    """Refuse a request that vLLM would not decode greedily, or of which that is not known.

    Args:
        path: the route.
        body: the request's.

    Raises:
        ApiError: a temperature other than 0; a field given twice; a body that is no JSON object; a
            route that is not known.
    """
    if _OTHERS.fullmatch(path):
        return
    if path not in _SAMPLING and path != _BARE:
        raise ApiError(
            403,
            f"{path!r} is none of the routes that are known to decode greedily: on a CPU, vLLM "
            "samples wrongly with speculative decoding. Use /v1/completions, /v1/chat/completions, "
            "/v1/responses or /v1/messages, or start the server with --no-speculation.",
            code="route_not_allowed",
        )
    request = _object(body)
    _check_temperature("temperature", request.get("temperature"))
    for name in _NESTED:
        inner = request.get(name)
        if isinstance(inner, dict):
            _check_temperature(f"{name}.temperature", inner.get("temperature"))
        elif inner is not None:
            raise ApiError(400, f"{name} is no object: expected one, or none.", param=name)
    if path == _BARE and (request.get("sampling_params") or {}).get("temperature") is None:
        raise ApiError(
            400,
            "sampling_params.temperature is absent, which vLLM takes for 1 here: on a CPU, vLLM "
            f"samples wrongly with speculative decoding. {_REMEDY}",
            param="sampling_params.temperature",
        )


def _check_temperature(name: str, value: Any) -> None:
    # By type, since True and False are numbers too.
    if value is None or (type(value) in (int, float) and value == 0):
        return
    found = value if type(value) in (int, float, bool) else type(value).__name__
    raise ApiError(
        400,
        f"{name} is {found}, expected the number 0 or none: on a CPU, vLLM samples wrongly with "
        f"speculative decoding. {_REMEDY}",
        param=name,
    )


def _object(body: bytes) -> dict[str, Any]:
    """The body as an object; the JSON that is refused could be read differently by vLLM."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "The body is no JSON object in UTF-8: expected one.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"The body has the field {twice[:100]!r} twice: expected it once.")
    return found
