"""POST /v1/responses: a chat whose input and output are items; the server stores nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any

from peagle.engine.outputs import RequestOutput
from peagle.errors import short_repr
from peagle.serving.answers import GenerationAnswer, event_bytes, usage_of
from peagle.serving.completions import AnswerReader, prepare_chat
from peagle.serving.errors import ApiError
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
from peagle.serving.service import Caller, Generation, Service
from peagle.serving.tools import CallDelta, Delta, ReasoningDelta

# Names of fields of this route, by their names in a chat.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


async def respond(service: Service, body: ResponsesBody, caller: Caller) -> GenerationAnswer:
    """Return the answer to a request for a response.

    Raises:
        ApiError: the request cannot be served.
    """
    with _renamed_fields():
        chat = _as_chat(body)
        generation, (reader,) = await prepare_chat(service, chat, caller)
    return _Response(service, body, generation, reader)


@contextmanager
def _renamed_fields() -> Iterator[None]:
    """Rename the fields in errors to the names of this route."""
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


def _as_chat(body: ResponsesBody) -> ChatBody:
    """Return the request as a chat."""
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
        messages=messages_of(body.input, body.instructions),
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


class _Response(GenerationAnswer):
    end = b""

    def __init__(
        self, service: Service, body: ResponsesBody, generation: Generation, reader: AnswerReader
    ) -> None:
        super().__init__(is_stream=bool(body.stream))
        self._tokenizer, _ = service.loaded()
        self._body = body
        self._generation = generation
        self._reader = reader
        self._items = OutputItems()
        self._numbers = count()
        params = generation.params
        given = body.model_dump(mode="json", by_alias=True, exclude_none=True)
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
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "background": False,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    async def whole(self) -> dict[str, Any]:
        (output,) = await self._generation.run_to_end()
        deltas = self._reader.add(output.text, final=True)
        for _ in (*self._items.add(deltas), *self._items.close(_status(output))):
            pass
        return await self._finished(output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as it comes; the first events wait for the first token."""
        has_begun = False
        async with aclosing(self._generation.chunks()) as lists:
            async for chunks in lists:
                data = b""
                if not has_begun:
                    has_begun = True
                    for name in ("response.created", "response.in_progress"):
                        response = self._response("in_progress")
                        data += self._encoded([{"type": name, "response": response}])
                for _, chunk in chunks:
                    deltas = self._reader.add(chunk.text, final=chunk.output is not None)
                    data += self._encoded(self._items.add(deltas))
                yield data
        (output,) = self._generation.ordered
        yield self._encoded(self._items.close(_status(output)))
        response = await self._finished(output)
        yield self._encoded([{"type": f"response.{response['status']}", "response": response}])

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Number and write events, each before the next is made, because they share items."""
        return b"".join([event_bytes(self._event(**event)) for event in events])

    def failed(self, error: ApiError) -> dict[str, Any]:
        reason = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=reason))

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        return {"type": type, "sequence_number": next(self._numbers), **fields}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        facts = {"status": status, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "output": self._items.items, **facts, **fields}

    async def _finished(self, output: RequestOutput) -> dict[str, Any]:
        status = _status(output)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        usage = await self._usage(output)
        return self._response(status, incomplete_details=details, usage=usage)

    async def _usage(self, output: RequestOutput) -> dict[str, Any]:
        speculation = self._body.speculation
        counted = usage_of([output], report=speculation is not None and bool(speculation.report))
        cached = counted.pop("prompt_tokens_details")
        return {
            "input_tokens": counted.pop("prompt_tokens"),
            "input_tokens_details": {**cached, "cache_write_tokens": 0},
            "output_tokens": counted.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": await self._num_reasoning(output)},
            **counted,
        }

    async def _num_reasoning(self, output: RequestOutput) -> int:
        if not any(item["type"] == "reasoning" for item in self._items.items):
            return 0
        markers = self._generation.params.marker_token_ids
        new_splitter = self._reader.new_splitter
        return await self._tokenizer.num_reasoning(output.token_ids, markers, new_splitter)


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"


# ---- the input as messages ----

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat completions.

    A message of the assistant, the reasoning before it and the function calls after it become one
    message. Reasoning that nothing follows is left out.

    Args:
        given: the text of a user, or items of the types "message", "function_call",
            "function_call_output" and "reasoning"; a type may be left out of a message.
        instructions: a system message that comes first.

    Raises:
        ApiError: 400, an item has another type or another form.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    names: dict[str, str] = {}  # of functions, by the id of their call
    reasoning = ""
    for i, item in enumerate(given):
        place = f"input[{i}]"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            reasoning += _reasoning(item, place)
        elif kind == "message":
            role = _text(item, "role", place)
            messages.append({"role": role, "content": _content(item.get("content"), place)})
            reasoning = _explain(messages[-1], reasoning)
        elif kind == "function_call":
            name, call_id = _text(item, "name", place), _text(item, "call_id", place)
            names[call_id] = name
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": name, "arguments": _text(item, "arguments", place)}
            call = {"id": call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            reasoning = _explain(messages[-1], reasoning)
        elif kind == "function_call_output":
            call_id = _text(item, "call_id", place)
            if call_id not in names:
                text = (
                    f"{place} answers the call {short_repr(call_id)}, and no function_call before"
                )
                raise _wrong(f"{text} it has that call_id; send the function_call too.", place)
            content = _content(item.get("output"), place, "output")
            tool = {"role": "tool", "tool_call_id": call_id, "name": names[call_id]}
            messages.append({**tool, "content": content})
        else:
            raise _wrong(
                f"{place} has the type {short_repr(kind)}; expected message, function_call, "
                "function_call_output or reasoning. peagle stores no items and runs no tools.",
                f"{place}.type",
            )
    return messages


def _explain(message: dict[str, Any], reasoning: str) -> str:
    """Give reasoning to a message of the assistant; return an empty reasoning."""
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    return ""


def _reasoning(item: Mapping[str, Any], place: str) -> str:
    """Return the text of a reasoning item: the reasoning itself, or else its summary."""
    for name in ("content", "summary"):
        if parts := item.get(name):
            ok = isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts)
            if not ok:
                raise _wrong(
                    f"{place}.{name} is {short_repr(parts)}; expected a list of parts.", place
                )
            return "".join(_text(part, "text", f"{place}.{name}") for part in parts)
    return ""


def _content(content: Any, place: str, name: str = "content") -> Any:
    """Return text, or parts of text in the form of chat completions."""
    place = f"{place}.{name}"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(f"{place} is {short_repr(content)}; expected text or a list of parts.", place)
    parts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise _wrong(
                f"{place}[{j}] has the type {short_repr(kind)}; expected input_text or "
                "output_text. peagle reads text only.",
                f"{place}[{j}].type",
            )
        parts.append({"type": "text", "text": _text(part, _TEXT_PARTS[kind], f"{place}[{j}]")})
    return parts


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name} is {short_repr(value)}; expected text.", f"{place}.{name}")
    return value


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)


# ---- the output as items ----

Event = dict[str, Any]

# The first letters of an item's id, and the type of its text part.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """Makes items of a growing answer, and the events of a stream for each step.

    One item is open at a time. Events have no `sequence_number` yet.

    Attributes:
        items: items of the types "reasoning", "message" and "function_call", in order.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, deltas: Iterable[Delta]) -> Iterator[Event]:
        """Add new reasoning, content and calls."""
        for delta in deltas:
            if isinstance(delta, CallDelta):
                yield from self._add_call(delta)
            else:
                kind = "reasoning" if isinstance(delta, ReasoningDelta) else "message"
                yield from self._add_text(kind, delta.text)

    def close(self, status: str) -> Iterator[Event]:
        """End the answer; its last item gets the status "completed" or "incomplete".

        An answer of nothing is an empty message.
        """
        if not self.items:
            yield from self._begin("message")
        yield from self._end(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._begin(kind)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        yield self._event(f"{_PARTS[kind]}.delta", delta=text, **self._of_part())

    def _add_call(self, delta: CallDelta) -> Iterator[Event]:
        if delta.name is not None:
            yield from self._begin("function_call", call_id=delta.id, name=delta.name, arguments="")
        if delta.arguments:
            self.items[-1]["arguments"] += delta.arguments
            yield self._event("function_call_arguments.delta", delta=delta.arguments)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        item = {"id": f"{_IDS[kind]}_{uuid.uuid4().hex}", "type": kind, **fields}
        if kind == "message":
            item["role"] = "assistant"
        if kind == "reasoning":
            item |= {"summary": [], "encrypted_content": None}
        if kind in _PARTS:
            item["content"] = []
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(item),
        }
        if kind in _PARTS:
            part = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._event("content_part.added", part=dict(part), content_index=0)

    def _end(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **call)
        else:
            (part,) = item["content"]
            yield self._event(f"{part['type']}.done", text=part["text"], **self._of_part())
            yield self._event("content_part.done", part=part, content_index=0)
        item["status"] = status
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _of_part(self) -> dict[str, Any]:
        is_message = self.items[-1]["type"] == "message"
        return {"content_index": 0, **({"logprobs": []} if is_message else {})}

    def _event(self, name: str, /, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **fields}
