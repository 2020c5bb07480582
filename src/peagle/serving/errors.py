"""Errors as clients see them: a status and an object in OpenAI's form."""

from collections.abc import Mapping
from typing import Any

_MAX_CHARACTERS = 2_000
_MAX_OF_PARAM = 200
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A fault in a request, or a reason why the server cannot answer it.

    A client gets back little of its own text: a long message loses its middle.

    Args:
        message: names the value, what was expected and what to do.
        param: the field of the request that is wrong.
        code: a word for programs.
        headers: further headers of the answer.

    Attributes:
        is_counted: the metrics have counted this error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MAX_CHARACTERS:
            half = _MAX_CHARACTERS // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)
        self.status = status
        self.message = message
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.type = _TYPES.get(status, default)
        self.param = param and param[:_MAX_OF_PARAM]
        self.code = code
        self.headers = dict(headers or {})
        self.is_counted = False

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}


# ---- routes of OpenAI's and of vLLM's servers that peagle does not have ----

_EMBEDDINGS = (
    "peagle serves models that generate text, and computes no embeddings, scores or classes. Run a "
    "server with an embedding model or a classifier beside it."
)
_OTHER_MEDIA = (
    "peagle reads and writes text only. Send text to /v1/chat/completions, and media to a server "
    "whose model takes them."
)
_NO_STORAGE = (
    "peagle stores nothing between requests. Send the whole conversation with each request to "
    "/v1/responses or /v1/chat/completions."
)
_BATCHES = (
    "peagle stores no files and no jobs. Send the requests to /v1/chat/completions all at once: "
    "they are decoded together; or use peagle's LLM class, which takes a list of prompts."
)
_MANAGED = (
    "a running peagle server keeps its model and its settings. Start another `peagle serve` with "
    "the options that you want; /metrics and /v1/models describe this one."
)
# A path stands for itself and all paths below it; with a final slash for the paths below it alone.
_REASONS = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/v1/pooling"), _EMBEDDINGS),
    **dict.fromkeys(("/score", "/v1/score", "/classify", "/v1/classify"), _EMBEDDINGS),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/v1/moderations"), _EMBEDDINGS),
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _OTHER_MEDIA),
    **dict.fromkeys(("/v1/batches", "/v1/files", "/v1/uploads"), _BATCHES),
    **dict.fromkeys(("/v1/responses/", "/v1/chat/completions/", "/v1/conversations"), _NO_STORAGE),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores"), _NO_STORAGE),
    "/v1/fine_tuning": "a server trains nothing. Run `peagle train` for a draft head.",
    "/v1/messages": "peagle speaks OpenAI's API. Use /v1/chat/completions or /v1/responses.",
    "/generate": "peagle speaks OpenAI's API. Use /v1/completions.",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep"), _MANAGED),
    **dict.fromkeys(("/wake_up", "/reset_prefix_cache", "/server_info", "/load"), _MANAGED),
}


def reason_for_absence(path: str) -> str | None:
    """Return why peagle lacks a route of OpenAI's or vLLM's clients, and a route to use instead.

    None: `path` is no route of theirs.
    """
    parts = path.rstrip("/").split("/")
    beginnings = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    known = [*(beginning + "/" for beginning in beginnings[:-1]), *beginnings]
    return next((_REASONS[beginning] for beginning in known if beginning in _REASONS), None)
