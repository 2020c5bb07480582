"""Tool calls of chat completions: checked, forced by a schema, and in the form of answers.

The parsers of tool calls in a model's text are in `peagle.serving.tool_parsers`.
"""

import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.config.structured import StructuredOutput
from peagle.errors import short_repr
from peagle.serving.errors import ApiError

# "none", "auto", "required", a named function in OpenAI's form, or None for "auto".
ToolChoiceDict = str | Mapping[str, Any] | None

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID_LETTERS = string.ascii_letters + string.digits
# Keys of a schema: notes that constrain nothing, values, and maps of names to schemas.
_NOTES = ("$schema", "$id", "$comment", "title", "description", "default", "examples")
_VALUES = ("const", "enum", "required")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ALTERNATIVES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


# ---- requests ----


def check_tools(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoiceDict = None) -> None:
    """Refuse tools in OpenAI's form, and a choice of them, that peagle cannot work with.

    Raises:
        ApiError: 400, with the field that is wrong as `param`.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        place, name = f"tools[{i}].function", tool["function"]["name"]
        if not _NAME.fullmatch(name):
            raise _error(
                f"tools[{i}] has the name {short_repr(name)}; expected 1 to 64 characters, each a "
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
    if tool_choice in (None, "none", "auto"):
        return
    if not names:
        raise _error(
            f"tool_choice is {short_repr(tool_choice)}, and there are no tools; give tools, or "
            "leave tool_choice out.",
            "tool_choice",
        )
    if isinstance(tool_choice, Mapping) and (name := tool_choice["function"]["name"]) not in names:
        raise _error(
            f"tool_choice names the function {short_repr(name)}, which is not among the tools: "
            f"{short_repr(', '.join(sorted(names)))}.",
            "tool_choice",
        )


def _check_parameters(parameters: Mapping[str, Any], place: str) -> None:
    """Check the schema of an object; the grammar compiler decides whether it can be enforced."""
    if parameters.get("type", "object") != "object":
        raise _error(
            f"{place} has the type {short_repr(parameters['type'])}; expected a JSON schema of an "
            'object, {"type": "object", "properties": {...}}.',
            place,
        )
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not all(
        isinstance(schema, Mapping | bool) for schema in properties.values()
    ):
        raise _error(
            f"{place} has the properties {short_repr(properties)}; expected an object of schemas.",
            f"{place}.properties",
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _error(
            f"{place} has required: {short_repr(required)}; expected a list of names.",
            f"{place}.required",
        )


def _error(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)


# ---- forced calls ----


def constraint(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: ToolChoiceDict = None,
    parallel: bool = True,
) -> StructuredOutput | None:
    """Return the constraint that forces the calls of a choice; None for "auto" and "none".

    A named function: the whole output is its arguments. "required": the output is an array of
    objects {"name": ..., "arguments": {...}}, one only unless `parallel`.

    Raises:
        ApiError: a schema is nested too deeply.
        UserError: a schema cannot be written as JSON.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    try:
        if isinstance(tool_choice, Mapping):
            function = functions[tool_choice["function"]["name"]]
            return StructuredOutput.json_schema(_arguments(function, "#"))
        if tool_choice != "required":
            return None
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
        # Definitions of a function stay within its own.
        definitions = {name: _arguments(f, f"#/$defs/{name}") for name, f in functions.items()}
        return StructuredOutput.json_schema({**schema, "$defs": definitions})
    except RecursionError:
        text = "The parameters of a tool are nested too deeply; flatten them."
        raise _error(text, "tools") from None


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
    """Return a schema, or a list of them, without notes, with references that count from `root`."""
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


# ---- answers ----


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the reasoning."""

    text: str

    def body(self) -> dict[str, Any]:
        """Return the `delta` of a streamed chunk, with vLLM's name beside the usual one."""
        return {"reasoning_content": self.text, "reasoning": self.text}


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text of the answer."""

    text: str

    def body(self) -> dict[str, Any]:
        """Return the `delta` of a streamed chunk."""
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A new call, or more of its arguments.

    Attributes:
        index: number of the call in the answer, from 0.
        arguments: new text of the arguments, as the model wrote it.
        id, name: id of the call and name of its function, on the call's first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the `delta` of a streamed chunk."""
        call: dict[str, Any] = {"index": self.index, "function": {"arguments": self.arguments}}
        if self.name is not None:
            call |= {"id": self.id, "type": "function"}
            call["function"] = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [call]}


Delta = ReasoningDelta | ContentDelta | CallDelta


def new_call_id() -> str:
    """Return "call_" and 24 random letters and digits."""
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24))


def merge_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Return neighbours of the same kind and call as one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, CallDelta):
            if isinstance(last, CallDelta) and delta.index == last.index:
                arguments = last.arguments + delta.arguments
                result[-1] = CallDelta(last.index, arguments, last.id, last.name)
                continue
        elif last is not None and not isinstance(last, CallDelta) and type(last) is type(delta):
            result[-1] = type(delta)(last.text + delta.text)
            continue
        result.append(delta)
    return result


def message_from(deltas: Iterable[Delta]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the content of a whole answer, None if it is empty, and its calls in OpenAI's form."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            continue
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif delta.name is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            calls[delta.index]["function"]["arguments"] += delta.arguments
    return content or None, calls


def finish_reason(reason: str, called: bool, tool_choice: ToolChoiceDict = None) -> str:
    """Return why an answer ended, for the client.

    "tool_calls" where the model stopped by itself after a call. As in OpenAI's API (and vLLM), it
    stays "stop" where the request named the function, and an answer that was cut off keeps
    "length".
    """
    is_named = isinstance(tool_choice, Mapping)
    return "tool_calls" if reason == "stop" and called and not is_named else reason
