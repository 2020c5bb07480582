"""The routes of the server, and the form of their errors."""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from peagle import __version__
from peagle.config.checks import did_you_mean
from peagle.errors import short_repr
from peagle.serving import protocol
from peagle.serving.answers import GenerationAnswer
from peagle.serving.completions import answer_chat, complete
from peagle.serving.engine_pool import Deadline
from peagle.serving.errors import ApiError, reason_for_absence
from peagle.serving.head_swap import HeadSwaps
from peagle.serving.limits import LARGE_BYTES, limits_of_model, parse_body
from peagle.serving.logs import recorded_path
from peagle.serving.responses import respond
from peagle.serving.service import Caller, Service, failure_of

logger = logging.getLogger("peagle.serving")

PLAYGROUND = Path(__file__).parent / "playground"
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(service: Service) -> FastAPI:
    """Return the application of a service, without the middleware that guards it."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": "An error object in OpenAI's form"}
        for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
    }
    # The documentation pages of FastAPI load scripts from elsewhere.
    app = FastAPI(
        title="peagle", version=__version__, docs_url=None, redoc_url=None, responses=errors
    )
    _add_handlers(app, service)
    _add_status(app, service)
    _add_generation(app, service)
    if service.swaps is not None:
        _add_admin(app, service.swaps)
    if service.config.playground:
        _add_playground(app)
    return app


# ---- errors ----


def _add_handlers(app: FastAPI, service: Service) -> None:
    def answer(request: Request, error: ApiError) -> Response:
        if not error.is_counted:
            service.metrics.failed(failure_of(error.status))
        facts = {
            "request_id": request.scope.get("state", {}).get("request_id"),
            "method": request.method,
            "path": recorded_path(request.scope["path"]),
            "status": error.status,
            "code": error.code,
        }
        logger.info("refused", extra=facts)
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        # The endpoint's signature names the model of its body.
        model = get_type_hints(request.scope["endpoint"]).get("body")
        return answer(request, validation_error(error.errors(), model))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        path = recorded_path(request.scope["path"])
        reason = reason_for_absence(path)
        text = {
            404: f"There is no route {request.method} {path!r}"
            + (f": {reason}" if reason else "; see /openapi.json."),
            405: f"{path!r} does not take {request.method}.",
            400: "The body is not JSON in UTF-8, or too deeply nested; expected a JSON object.",
        }.get(error.status_code, str(error.detail))
        return answer(request, ApiError(error.status_code, text, headers=error.headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        text = "The server failed; its log says why."
        return answer(request, ApiError(500, text, code="internal_error"))


def validation_error(errors: Any, model: Any = None) -> ApiError:
    """Return the error for a body that does not fit `model`: the error of the deepest field.

    For a misspelt field the error names the closest field of `model`.
    """
    # A field that is missing may have been misspelt.
    first = max(errors, key=lambda e: (_field_path(e).count("."), e["type"] == "extra_forbidden"))
    place = _field_path(first)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, f"The body is not JSON: {reason}.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"Unknown field {short_repr(place)}; leave it out, or see /openapi.json."
            + _suggestion(str(first["loc"][-1]), _fields_at(model, first["loc"][:-1])),
            param=place,
            code="unknown_field",
        )
    if first["type"] == "missing":
        return ApiError(400, f"{place or 'The body'} is missing.", param=place or None)
    # Each branch of a union has an expectation of its own.
    wanted = dict.fromkeys(_expectation(error) for error in errors if _field_path(error) == place)
    given = short_repr(first.get("input"))
    text = f"{place[:200] or 'The body'} is {given}; it {' or '.join(wanted)}."
    return ApiError(400, text, param=place or None)


# Fields that other routes name differently.
_SYNONYMS = (
    {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"},
    {"messages", "input", "prompt"},
    {"response_format", "text"},
)


def _suggestion(name: str, known: set[str]) -> str:
    """Return a sentence that names the field probably meant by an unknown one, or ""."""
    others = [other for group in _SYNONYMS if name in group for other in sorted(group & known)]
    return f" Did you mean {others[0]!r}?" if others else did_you_mean(name, sorted(known))


def _fields_at(kind: Any, path: Any) -> set[str]:
    """Return the names of the fields of a type at a path, in whichever branch of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        names = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
        inner = [part for part in path if part in names]
        if not inner:
            return set(names)
        return _fields_at(names[inner[0]], path[path.index(inner[0]) + 1 :])
    return {name for part in get_args(kind) for name in _fields_at(part, path)}


_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")


def _expectation(error: Any) -> str:
    if error["type"] in _NO_OBJECT:
        kind = getattr(protocol, error.get("ctx", {}).get("class_name", ""), None)
        fields = ", ".join(sorted(_fields_at(kind, ()))) if _field_path(error) else ""
        return f"should be an object with the fields {fields}" if fields else "should be an object"
    message = str(error["msg"]).removeprefix("Value error, ")
    return re.sub(r"^\w+ should", "should", message)


def _field_path(error: Any) -> str:
    """Return the field of an error, without the parts that name a branch of a union."""
    parts = [part for part in error["loc"] if part != "body"]
    kept = [
        str(part)
        for part in parts
        if isinstance(part, int) or ("[" not in part and part not in _BRANCHES)
    ]
    return ".".join(kept)


_BRANCHES = {"str", "constrained-str", "int", "float", "bool", "nullable", "is-instance"}
_BRANCHES |= {
    protocol.ToolChoice.__name__,
    protocol.FunctionChoice.__name__,
} | protocol.PROMPT_KINDS


def parsed(model: type[BaseModel], body: Any) -> Any:
    """Return a body as its model; raise an ApiError if it does not fit."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(), model) from None


# ---- status ----


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/live")
    async def live() -> Response:
        """Tell whether the process works: 503 only once its engines are lost for good."""
        if service.pool.failure.done():
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    @app.get("/ready")
    @app.get("/ping")
    async def ready() -> Response:
        """Tell whether the server takes requests: 503 while it loads the model or drains."""
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        status = "draining" if service.is_draining else "loading"
        return JSONResponse({"status": status}, 503, {"Retry-After": "2"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of peagle."""
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return metrics for Prometheus."""
        body, content_type = service.metrics.render(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the model that is served, and its proposers."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the model of that name."""
        service.check_model(name)
        return _model(service)


def _model(service: Service) -> dict[str, Any]:
    tokenizer, info = service.loaded()
    depths = dict(info.num_speculative_tokens)
    depths.setdefault("plain", 0)
    model: dict[str, Any] = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "peagle",
        "max_model_len": info.max_model_len,
        "limits": limits_of_model(info.max_model_len, tokenizer.characters_per_token),
        "chat": tokenizer.template_source is not None,
        "speculation": {
            "default": service.proposers[0],
            "proposers": [
                {"name": name, "num_speculative_tokens": k}
                | ({"corrections": info.corrections[name]} if info.corrections.get(name) else {})
                for name, k in depths.items()
            ],
        },
    }
    if service.swaps is not None:
        model["head"] = service.swaps.head.to_json()
    return model


# ---- generation ----


class _JsonRequest(Request):
    """A request whose body FastAPI takes as `parse_body` returned it."""

    value: Any

    async def json(self) -> Any:
        return self.value


def _route_class(service: Service) -> type[APIRoute]:
    """Return routes that measure bodies before they parse them, large ones one after another."""
    large = asyncio.Lock()

    async def value_of(request: Request, body: bytes) -> Any:
        info = service.pool.info
        max_model_len = info.max_model_len if info else 0
        if len(body) < LARGE_BYTES:
            return parse_body(body, max_model_len)
        async with large:
            if await request.is_disconnected():  # its client is gone
                raise ClientDisconnect
            return await asyncio.to_thread(parse_body, body, max_model_len)

    class MeasuredRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle

            async def measure(request: Request) -> Response:
                measured = _JsonRequest(request.scope, request.receive)
                try:
                    if body := await measured.body():
                        measured.value = await value_of(measured, body)
                except ClientDisconnect:  # in the middle of its body, or while others were parsed
                    service.metrics.failed("cancelled")
                    return Response(status_code=499)
                return await handle(measured)

            return measure

    return MeasuredRoute


def _add_generation(app: FastAPI, service: Service) -> None:
    app.router.route_class = _route_class(service)

    async def answer(respond_to: Callable[..., Any], request: Request, body: Any) -> Response:
        deadline = Deadline.after(service.config.request_timeout_s)
        caller = Caller.of(request, body, deadline, service.recorder)
        try:
            async with asyncio.timeout_at(deadline and deadline.end_s) as timeout:
                response: GenerationAnswer = await respond_to(service, body, caller)
                response.is_recorded = caller.is_recorded
                return response
        except TimeoutError:
            if deadline is None or not timeout.expired():
                raise
            raise deadline.error from None

    @app.post("/v1/completions")
    async def completions(request: Request, body: protocol.CompletionBody) -> Response:
        """Complete prompts of text or token ids."""
        return await answer(complete, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: protocol.ChatBody) -> Response:
        """Answer a conversation."""
        return await answer(answer_chat, request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: protocol.ResponsesBody) -> Response:
        """Answer a conversation in OpenAI's newer form; nothing is stored."""
        return await answer(respond, request, body)

    @app.post("/invocations")
    async def invocations(request: Request, body: dict[str, Any]) -> Response:
        """Answer SageMaker: a chat if the body has `messages`, a completion if it has `prompt`."""
        if ("messages" in body) == ("prompt" in body):
            text = 'The body needs "messages" (a chat) or "prompt" (a completion), one of the two.'
            raise ApiError(400, text)
        if "messages" in body:
            chat_body: protocol.ChatBody = parsed(protocol.ChatBody, body)
            return await answer(answer_chat, request, chat_body)
        completion_body: protocol.CompletionBody = parsed(protocol.CompletionBody, body)
        return await answer(complete, request, completion_body)

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeBody) -> dict[str, Any]:
        """Return the token ids of a prompt, or of a conversation under the chat template."""
        tokenizer, info = service.loaded()
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, 'Expected "prompt" or "messages", one of the two.', param="prompt")
        if body.prompt is not None:
            with protocol.as_api_error("prompt"):
                ids = await tokenizer.encode(
                    body.prompt, info.max_model_len, add_special_tokens=body.add_special_tokens
                )
        else:
            tools = protocol.tool_dicts(body.tools)
            ids, _ = await service.render(body, tools, body.chat_template_kwargs)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": info.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = await tokenizer.token_texts(ids)
        return answer

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeBody) -> dict[str, str]:
        """Return the text of token ids."""
        tokenizer, info = service.loaded()
        service.check_model(body.model)
        if (count := len(body.tokens)) > info.max_model_len:
            text = f"tokens has {count} ids; expected at most {info.max_model_len}, the model's "
            raise ApiError(400, f"{text}context. Send them in parts.", param="tokens")
        wrong = next((i for i in body.tokens if not 0 <= i < info.vocab_size), None)
        if wrong is not None:
            text = f"tokens has {wrong}; expected ids from 0 to {info.vocab_size - 1}."
            raise ApiError(400, text, param="tokens")
        return {"prompt": await tokenizer.decode(body.tokens)}


# ---- administration ----


def _add_admin(app: FastAPI, swaps: HeadSwaps) -> None:
    @app.post("/admin/head")
    async def swap_head(body: protocol.HeadBody) -> dict[str, Any]:
        """Draft with another head from now on, at first on trial if `trial` is given."""
        return await swaps.swap(body.head, body.trial)

    @app.get("/admin/head")
    async def tell_head() -> dict[str, Any]:
        """Return the head that serves, and how its trial goes or went."""
        return swaps.facts()


# ---- playground ----


def _add_playground(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=PLAYGROUND), name="static")

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return FileResponse(PLAYGROUND / "index.html", headers={"Content-Security-Policy": _CSP})
