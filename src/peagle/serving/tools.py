"""Tool calls of chat completions: checked, forced by a schema, and as answers have them.

The parsers of what a model writes are in `peagle.serving.tool_parsers`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.config.structured import StructuredOutput
from peagle.serving.errors import ApiError

ToolChoice = str | Mapping[str, Any] | None

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID_LETTERS = string.ascii_letters + string.digits
_CUT = 100
# Of a schema: what constrains nothing, what holds values, what maps names to schemas.
_NOTES = ("$schema", "$id", "$comment", "title", "description", "default", "examples")
_VALUES = ("const", "enum", "required")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ALTERNATIVES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


# ---- requests -------------------------------------------------------------------------------


def check_tools(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice = None) -> None:
    """Refuse tools and a choice of them that peagle cannot work with.

    Args:
        tools: in OpenAI's form, {"type": "function", "function": {"name", "parameters", ...}}.
        tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name"}};
            None means "auto" where there are tools.

    Raises:
        ApiError: 400, with the field that is wrong as `param`.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        place, name = f"tools[{i}].function", tool["function"]["name"]
        if not _NAME.fullmatch(name):
            raise _error(
                f"tools[{i}] has the name {_cut(name)}; expected 1 to 64 characters, each a "
                "letter, a digit, '_' or '-'.",
                f"{place}.name",
            )
        if name in names:
            raise _error(
                f"Two tools have the name {name!r}; give each function a name of its own.",
                f"{place}.name",
            )
        names.add(name)
        _check_parameters(tool["function"].get("parameters") or {}, f"{place}.parameters")
    if tool_choice is None or tool_choice == "none":
        return
    if not names:
        raise _error(
            f"tool_choice is {_cut(tool_choice)}, and there are no tools; give tools, or leave "
            "tool_choice out.",
            "tool_choice",
        )
    if isinstance(tool_choice, Mapping) and (name := tool_choice["function"]["name"]) not in names:
        raise _error(
            f"tool_choice names the function {_cut(name)}, which is not among the tools: "
            f"{_cut(', '.join(sorted(names)))}.",
            "tool_choice",
        )


def _check_parameters(parameters: Mapping[str, Any], place: str) -> None:
    """A schema of an object; whether a grammar can enforce it shows when it is forced."""
    if parameters.get("type", "object") != "object":
        raise _error(
            f"{place} has the type {_cut(parameters['type'])}; expected a JSON schema of an "
            'object, {"type": "object", "properties": {...}}.',
            place,
        )
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not all(
        isinstance(schema, Mapping | bool) for schema in properties.values()
    ):
        raise _error(
            f"{place} has the properties {_cut(properties)}; expected an object of schemas.",
            f"{place}.properties",
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _error(
            f"{place} has required: {_cut(required)}; expected a list of names.",
            f"{place}.required",
        )


def _error(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _CUT else f"{text[:_CUT]}..."


# ---- forced calls ---------------------------------------------------------------------------


def constraint(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: ToolChoice = None,
    parallel: bool = True,
) -> StructuredOutput | None:
    """Return the constraint that forces the calls of a choice; None for "auto" and "none".

    A named function: the whole output is its arguments. "required": it is an array of objects
    {"name": ..., "arguments": {...}}, one only unless `parallel`.

    Args:
        tools: as `check_tools` lets them through.
        tool_choice: likewise.
        parallel: several calls in one answer are fine.

    Raises:
        ApiError: a schema is nested too deeply.
        UserError: a schema cannot be written as JSON. What a grammar cannot enforce shows when it
            is compiled.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    try:
        if isinstance(tool_choice, Mapping):
            function = functions[tool_choice["function"]["name"]]
            return StructuredOutput.json_schema(_arguments(function, "#"))
        if tool_choice == "required":
            return StructuredOutput.json_schema(_calls(functions, parallel))
    except RecursionError:
        raise _error(
            "The parameters of a tool are nested too deeply; flatten them.", "tools"
        ) from None
    return None


def _calls(functions: Mapping[str, Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls; definitions of a function stay within its own."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in functions
    ]
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    definitions = {name: _arguments(f, f"#/$defs/{name}") for name, f in functions.items()}
    return {**schema, "$defs": definitions}


def _arguments(function: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the schema of a function's arguments at the place `root`: always an object."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = _moved(parameters, root)
    if not any(key in schema for key in ("type", *_ALTERNATIVES)):
        schema["type"] = "object"
    return schema


def _moved(schema: Any, root: str) -> Any:
    """A schema, or a list of them, with references that count from `root`, and without notes."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = root + value[1:]
        elif key in _MAPS and isinstance(value, Mapping):
            moved[key] = {name: _moved(part, root) for name, part in value.items()}
        elif key in _VALUES:
            moved[key] = value
        elif key not in _NOTES:
            moved[key] = _moved(value, root)
    return moved


# ---- answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the answer."""

    text: str

    def body(self) -> dict[str, Any]:
        """As the `delta` of a streamed chunk."""
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new call, or more of its arguments.

    Attributes:
        index: of the call in the answer, from 0.
        arguments: new text of the arguments, as the model wrote it.
        id: of the call, on its first delta only.
        name: of the function, on the first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def body(self) -> dict[str, Any]:
        """As the `delta` of a streamed chunk."""
        call: dict[str, Any] = {"index": self.index, "function": {"arguments": self.arguments}}
        if self.name is not None:
            call |= {"id": self.id, "type": "function"}
            call["function"] = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [call]}


Delta = ContentDelta | CallDelta


def new_call_id() -> str:
    """An id for a call: "call_" and 24 random letters and digits."""
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of the same kind and call as one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + delta.text)
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.index == last.index
        ):
            arguments = last.arguments + delta.arguments
            result[-1] = CallDelta(last.index, arguments, last.id, last.name)
        else:
            result.append(delta)
    return result


def message_from(deltas: Iterable[Delta]) -> tuple[str | None, list[dict[str, Any]]]:
    """Content, None if there is none, and tool calls in OpenAI's form, of a whole answer."""
    content: list[str] = []
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif delta.name is not None:
            calls.append((delta, [delta.arguments]))
        else:
            calls[delta.index][1].append(delta.arguments)
    return "".join(content) or None, [
        {
            "id": first.id,
            "type": "function",
            "function": {"name": first.name, "arguments": "".join(arguments)},
        }
        for first, arguments in calls
    ]


def finish_reason(reason: str, called: bool, tool_choice: ToolChoice = None) -> str:
    """Why an answer ended, for the client.

    "tool_calls" where the model stopped by itself after a call. As in OpenAI's API (and vLLM), it
    stays "stop" where the request named the function, and an answer that was cut off keeps
    "length".

    Args:
        reason: why the engine stopped.
        called: the answer has a call.
        tool_choice: of the request.
    """
    is_named = isinstance(tool_choice, Mapping)
    return "tool_calls" if reason == "stop" and called and not is_named else reason
