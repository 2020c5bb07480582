"""Messages and tools of a conversation, in the form that chat templates read.

They come as OpenAI's API has them. Templates differ from it: the arguments of a call are an object,
some templates know no developer message, and the template of gpt-oss has a form of its own.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from peagle.errors import UserError, short_repr

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant", or another one that the template knows.
        content: text, or a list of `{"type": "text", "text": ...}` parts, as in the OpenAI API.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]]


Message = ChatMessage | Mapping[str, Any]


def checked_messages(messages: Any, further_roles: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return a conversation as dictionaries with text content.

    Args:
        further_roles: roles that are taken beside `ROLES`.

    Raises:
        UserError: a message is malformed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UserError(f"The messages are {short_repr(messages)}; expected a list of messages.")
    if not messages:
        raise UserError("The list of messages is empty; expected at least one message.")
    conversation = []
    for number, message in enumerate(messages, 1):
        which = f"Message {number} of {len(messages)}"
        if isinstance(message, ChatMessage):
            message = {"role": message.role, "content": message.content}
        if not isinstance(message, Mapping):
            shown = short_repr(message)
            raise UserError(f"{which} is {shown}; expected an object with role and content.")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or (role not in ROLES and role not in further_roles):
            roles = ", ".join(ROLES)
            raise UserError(f"{which} has the role {short_repr(role)}; expected one of: {roles}.")
        checked = {key: value for key, value in message.items() if key != "content"}
        if content is not None:
            checked["content"] = text_of(content, which)
        elif not (role == "assistant" and message.get("tool_calls")):
            raise UserError(f"{which} ({role}) has no content; expected text.")
        conversation.append(checked)
    return conversation


def text_of(content: Any, which: str) -> str:
    """Return the content of a message as text, its parts joined by newlines.

    Args:
        which: name of the message in errors.

    Raises:
        UserError: the content is neither text nor a list of text parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        shown = short_repr(content)
        raise UserError(f"{which} has the content {shown}; expected text or text parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UserError(
                f"{which} has a part of type {short_repr(kind)}; peagle reads text only, expected "
                '{"type": "text", "text": ...}.'
            )
        if not isinstance(part.get("text"), str):
            shown = short_repr(part.get("text"))
            raise UserError(f"{which} has a text part with the text {shown}.")
        texts.append(part["text"])
    if not texts:
        raise UserError(f"{which} has an empty list of parts as content; expected text.")
    return "\n".join(texts)


def in_template_form(
    conversation: Sequence[Mapping[str, Any]], *, knows_developer: bool, is_harmony: bool
) -> list[dict[str, Any]]:
    """Return checked messages in the form that a chat template reads.

    OpenAI's API has the arguments of tool calls as JSON text; templates write objects as JSON. Text
    that is no JSON object stays. vLLM names reasoning `reasoning`, templates `reasoning_content`.

    Args:
        knows_developer: the template has a developer role; otherwise these messages become system
            messages.
        is_harmony: the template is gpt-oss's.

    Raises:
        UserError: the tool calls of a message are no list; a system message comes where the
            template of gpt-oss would lose it.
    """
    formed = []
    for number, given in enumerate(conversation, 1):
        message = dict(given)
        if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
            message["reasoning_content"] = message["reasoning"]
        calls = calls_of(
            message.pop("tool_calls", None), f"Message {number} of {len(conversation)}"
        )
        if calls:  # some templates take an empty list for calls
            message["tool_calls"] = [_with_arguments(call) for call in calls]
        formed.append(message)
    if is_harmony:
        return _in_harmony_form(formed)
    return formed if knows_developer else _without_developers(formed)


def tools_in_template_form(tools: Any, *, is_harmony: bool) -> list[dict[str, Any]]:
    """Return tools as a list of objects; a list may be given as JSON text, and so may each tool.

    The template of gpt-oss needs the description of each function, if need be an empty one.

    Raises:
        UserError: the tools are something else.
    """
    expected = "expected a list of JSON schemas of functions, or such a list as JSON text"
    listed = _parsed(tools)
    if listed is None or (isinstance(listed, str) and not listed.strip()):
        return []
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Sequence):
        raise UserError(f"The tools are {short_repr(tools)}; {expected}.")
    formed = []
    for number, given in enumerate(listed, 1):
        tool = _parsed(given)
        which = f"Tool {number} of {len(listed)}"
        if not isinstance(tool, Mapping):
            raise UserError(f"{which} is {short_repr(given)}; {expected}.")
        formed.append(dict(tool))
        if is_harmony:
            if not isinstance(function := tool.get("function"), Mapping):
                raise UserError(
                    f"{which} has the function {short_repr(function)}; the chat template of "
                    'gpt-oss reads {"type": "function", "function": {"name", "parameters"}}.'
                )
            formed[-1]["function"] = {**function, "description": function.get("description") or ""}
    return formed


def _parsed(value: Any) -> Any:
    """Return the value of JSON text; any other text or value as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def calls_of(calls: Any, which: str) -> Sequence[Any]:
    """Return the tool calls of a message, which may be JSON text; UserError: they are no list."""
    listed = () if calls is None else _parsed(calls)
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        shown = short_repr(calls)
        raise UserError(f"{which} has the tool_calls {shown}; expected a list of calls.")
    return listed


def _with_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object where they are the JSON text of one."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function)}
    if isinstance(call.get("arguments"), str):
        arguments = _parsed(call["arguments"])
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    return call


# ---- system messages ----


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with system messages in place of developer messages.

    Many templates read one system message, at the start. So a developer message at the start and
    the system messages around it become one.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    start = list(takewhile(_is_system, messages))
    rest = [
        {**m, "role": "system"} if m["role"] == "developer" else m for m in messages[len(start) :]
    ]
    if all(message["role"] == "system" for message in start):
        return [*start, *rest]
    return [{**_joined(start), "role": "system"}, *rest]


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first of some messages with the content of all."""
    return {**messages[0], "content": "\n\n".join(message["content"] for message in messages)}


# ---- gpt-oss ----


def _in_harmony_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the template of gpt-oss reads them.

    The template names reasoning `thinking`, refuses content beside the thinking of a call, writes
    the first call of a message alone, takes each result for the last call's, and leaves out
    all system messages but the first. So system messages at the start become one, content before a
    call follows its thinking, and several calls become messages, each before its results.

    Raises:
        UserError: a system message comes later, and would be lost.
    """
    system = list(takewhile(_is_system, messages))
    if late := [i for i, m in enumerate(messages) if _is_system(m) and i >= len(system)]:
        raise UserError(
            f"Message {late[0] + 1} of {len(messages)} is a system message, and the chat template "
            "of gpt-oss reads such messages at the start alone; move it there."
        )
    formed = [_joined(system)] if system else []
    turns: list[list[dict[str, Any]]] = []  # a message and the results after it
    for message in messages[len(system) :]:
        if message["role"] == "tool" and turns:
            turns[-1].append(message)
        else:
            turns.append([message])
    for message, *results in turns:
        message = dict(message)
        thinking, calls = message.pop("reasoning_content", None), message.pop("tool_calls", None)
        if not calls:
            formed += [{**message, "thinking": thinking} if thinking else message, *results]
            continue
        content = message.pop("content", "")
        thinking = "\n\n".join(text for text in (thinking, content) if text)
        for call in calls:
            message["thinking"] = thinking
            formed.append({**message, "tool_calls": [call]})
            thinking = ""
            name = call.get("id") if isinstance(call, Mapping) else None
            formed += [result for result in results if result.get("tool_call_id") == name]
            results = [result for result in results if result.get("tool_call_id") != name]
        formed += results
    return formed
