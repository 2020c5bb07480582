"""Tools, texts that call them, and what a parser makes of a text."""

from __future__ import annotations

from typing import Any

from peagle.serving.tool_parsers import ToolCallParser
from peagle.serving.tools import message_from

NAMES = ("get", "get_weather", "b-2")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def parse(
    parser: ToolCallParser, *chunks: str
) -> tuple[str | None, list[tuple[str | None, str | None]]]:
    """Content and (name, arguments) of every call."""
    deltas = [delta for chunk in chunks for delta in parser.add(chunk)]
    deltas += parser.add("", final=True)
    content, calls = message_from(deltas)
    return content, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'
