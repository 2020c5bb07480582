"""POST /v1/responses: a chat whose input and output are items, and nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any

from starlette.responses import Response

from peagle.engine.outputs import RequestOutput
from peagle.serving.answers import EventStream, WholeAnswer
from peagle.serving.chat_completions import AnswerReaders, prepare
from peagle.serving.errors import ApiError
from peagle.serving.generation import Caller, Generation
from peagle.serving.protocol import (
    ChatBody,
    FunctionChoice,
    FunctionSpec,
    GenerationFields,
    JsonSchema,
    ResponseFormat,
    ResponsesBody,
    TextFormat,
    Tool,
    ToolChoice,
    ToolChoiceFunction,
)
from peagle.serving.response_input import messages_of
from peagle.serving.response_items import OutputItems
from peagle.serving.service import Service
from peagle.serving.usage import usage_of
from peagle.thinking import END

# Names of fields here, by their names in a chat.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


async def respond(service: Service, body: ResponsesBody, caller: Caller) -> Response:
    """The answer to a request for a response.

    Raises:
        ApiError: it cannot be served.
    """
    with _named_as_here():
        prompts, _ = service.loaded()
        chat = _as_chat(body, prompts.template_source or "")
        generation, readers = await prepare(service, chat, caller)
    answer = _Response(service, body, generation, readers)
    if body.stream:
        return EventStream(answer.events(), failed=answer.failed)
    return WholeAnswer(answer.whole)


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Let errors name the fields of this route."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        if param.startswith("tools["):
            param = param.replace(".function", "", 1)
        error.param = _NAMES.get(param, param) or None
        for name in ("reasoning_effort", "response_format", "max_tokens"):
            error.message = error.message.replace(name, _NAMES[name])
        raise


def _as_chat(body: ResponsesBody, template_source: str) -> ChatBody:
    """The request as a chat."""
    shared = {name: getattr(body, name) for name in GenerationFields.model_fields}
    functions = [
        FunctionSpec(**tool.model_dump(exclude={"type"}, exclude_none=True))
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        function = ToolChoiceFunction(name=choice.name)
        choice = ToolChoice(type="function", function=function)
    shape = body.text.format if body.text is not None else None
    return ChatBody(
        **shared,
        messages=messages_of(body.input, body.instructions, template_source),
        max_completion_tokens=body.max_output_tokens,
        tools=[Tool(type="function", function=function) for function in functions] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if shape is None else _format(shape),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _format(shape: TextFormat) -> ResponseFormat:
    if shape.type != "json_schema":
        return ResponseFormat(type=shape.type)
    if shape.schema_ is None:
        text = "text.format of type 'json_schema' needs 'schema'."
        raise ApiError(400, text, param="text.format.schema")
    schema = JsonSchema(name=shape.name, schema=shape.schema_, strict=shape.strict)
    return ResponseFormat(type=shape.type, json_schema=schema)


class _Response:
    """One response, whole or in events."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        generation: Generation,
        readers: AnswerReaders,
    ) -> None:
        self._prompts, _ = service.loaded()
        self._body = body
        self._generation = generation
        self._reader = readers.make()
        self._items = OutputItems()
        self._numbers = count()
        params = generation.job.params
        told = body.model_dump(mode="json", by_alias=True, exclude_none=True)
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **told.get("reasoning", {})},
            "background": False,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **told.get("text", {})},
            "tool_choice": told.get("tool_choice", "auto"),
            "tools": told.get("tools", []),
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    async def whole(self) -> dict[str, Any]:
        """The response as one object."""
        (output,) = await self._generation.finish()
        reasoning, deltas = self._reader.add(output.text, final=True)
        for _ in (*self._items.add(reasoning, deltas), *self._items.close(_status(output))):
            pass
        return await self._finished(output)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The response as it comes. The first events wait for the first token."""
        has_begun = False
        async with aclosing(self._generation.chunks()) as chunks:
            async for _, chunk in chunks:
                if not has_begun:
                    has_begun = True
                    for name in ("created", "in_progress"):
                        yield self._event(f"response.{name}", response=self._told("in_progress"))
                is_last = chunk.output is not None
                reasoning, deltas = self._reader.add(chunk.text, final=is_last)
                for event in self._items.add(reasoning, deltas):
                    yield self._event(**event)
        (output,) = self._generation.ordered
        for event in self._items.close(_status(output)):
            yield self._event(**event)
        response = await self._finished(output)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        reason = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._told("failed", error=reason))

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        return {"type": type, "sequence_number": next(self._numbers), **fields}

    def _told(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response so far."""
        facts = {"status": status, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "output": self._items.items, **facts, **fields}

    async def _finished(self, output: RequestOutput) -> dict[str, Any]:
        status = _status(output)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        usage = await self._usage(output)
        return self._told(status, incomplete_details=details, usage=usage)

    async def _usage(self, output: RequestOutput) -> dict[str, Any]:
        speculation = self._body.speculation
        counted = usage_of([output], report=speculation is not None and speculation.report)
        cached = counted.pop("prompt_tokens_details")
        return {
            "input_tokens": counted.pop("prompt_tokens"),
            "input_tokens_details": {**cached, "cache_write_tokens": 0},
            "output_tokens": counted.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": await self._num_reasoning(output)},
            **counted,
        }

    async def _num_reasoning(self, output: RequestOutput) -> int:
        """Tokens up to the end of the reasoning, markers included."""
        if not any(item["type"] == "reasoning" for item in self._items.items):
            return 0
        ids = output.token_ids
        low, high = 0, len(ids)
        while low < high:  # the fewest tokens whose text has the end marker, or all
            middle = (low + high) // 2
            has_ended = END in await self._prompts.decode(ids[:middle])
            low, high = (low, middle) if has_ended else (middle + 1, high)
        return low


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"
