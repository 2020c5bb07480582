"""The input of POST /v1/responses as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.serving.errors import ApiError

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None, template_source: str
) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat completions.

    A message of the assistant, the reasoning before it and the function calls after it become one
    message. Reasoning that nothing follows is left out. The role "developer" becomes "system"
    where the chat template does not know it.

    Args:
        given: the text of a user, or items of the types "message", "function_call",
            "function_call_output" and "reasoning"; a type may be left out of a message.
        instructions: a system message that comes first.
        template_source: the chat template.

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
            if role == "developer" and role not in template_source:
                role = "system"
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
                text = f"{place} answers the call {call_id!r:.80}, and no function_call before it "
                raise _wrong(f"{text}has that call_id; send the function_call too.", place)
            content = _content(item.get("output"), place, "output")
            tool = {"role": "tool", "tool_call_id": call_id, "name": names[call_id]}
            messages.append({**tool, "content": content})
        else:
            raise _wrong(
                f"{place} has the type {kind!r:.80}; expected message, function_call, "
                "function_call_output or reasoning. peagle stores no items and runs no tools.",
                f"{place}.type",
            )
    return messages


def _explain(message: dict[str, Any], reasoning: str) -> str:
    """Give reasoning to a message of the assistant; the reasoning that is left."""
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    return ""


def _reasoning(item: Mapping[str, Any], place: str) -> str:
    """The text of a reasoning item: the reasoning itself, or else its summary."""
    for name in ("content", "summary"):
        if parts := item.get(name):
            ok = isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts)
            if not ok:
                raise _wrong(f"{place}.{name} is {parts!r:.80}; expected a list of parts.", place)
            return "".join(_text(part, "text", f"{place}.{name}") for part in parts)
    return ""


def _content(content: Any, place: str, name: str = "content") -> Any:
    """Text, or parts of text in the form of chat completions."""
    place = f"{place}.{name}"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(f"{place} is {content!r:.80}; expected text or a list of parts.", place)
    parts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise _wrong(
                f"{place}[{j}] has the type {kind!r:.80}; expected input_text or output_text. "
                "peagle reads text only.",
                f"{place}[{j}].type",
            )
        parts.append({"type": "text", "text": _text(part, _TEXT_PARTS[kind], f"{place}[{j}]")})
    return parts


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name} is {value!r:.80}; expected text.", f"{place}.{name}")
    return value


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)
