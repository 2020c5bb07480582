"""Tool calls in a growing output, by the form in which a family of models writes them.

See `peagle.serving.tool_reader` for what is a call, and what stays content.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from peagle.markers import open_tail
from peagle.serving.tool_reader import Steps, ToolCallParser

_LETTERS = string.ascii_letters + string.digits


class _MarkedParser(ToolCallParser, ABC):
    """Calls behind a marker anywhere; without one where an answer begins or a call has ended."""

    marker: str

    def _parse(self) -> Steps[None]:
        is_start = True
        while True:
            if is_start:
                yield from self._blanks()
            marked = yield from self._one_of([self.marker])
            held = self._at - self._start
            if (marked or is_start) and (yield from self._call(bool(marked))):
                is_start = True
                continue
            self._at = self._start + held
            if not marked and not (yield from self._more()):
                break
            self._give(self._at if marked else self._next_marker())
            is_start = False
        if not self._calls:  # else they are blanks after a call
            self._give(self._at)

    def _next_marker(self) -> int:
        """Where the marker, or the start of one, is first found after the next character."""
        after = self._at + 1
        found = self._text.find(self.marker, after)
        if found >= 0:
            return found
        return len(self._text) - open_tail(self._text[after:], (self.marker,))

    @abstractmethod
    def _call(self, marked: bool) -> Steps[bool]:
        """One call or several, as `_object`."""


class HermesParser(_MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen."""

    marker = "<tool_call>"

    def _call(self, marked: bool) -> Steps[bool]:
        if not marked:
            return False
        yield from self._blanks()
        if not (yield from self._object()):
            return False
        yield from self._blanks()
        if (yield from self._one_of(["</tool_call>"])):
            self._drop()
        self._at = self._start
        return True


class Llama3JsonParser(_MarkedParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between, or after `<|python_tag|>`."""

    marker = "<|python_tag|>"

    def _call(self, marked: bool) -> Steps[bool]:
        yield from self._blanks()
        if self._calls and not marked and (yield from self._one_of(";")):
            yield from self._blanks()
            yield from self._one_of([self.marker])
            yield from self._blanks()
        return (yield from self._object())


class MistralParser(_MarkedParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name{...}`."""

    marker = "[TOOL_CALLS]"

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._heads = {name + end: name for name in names for end in ("{", "[ARGS]", "[CALL_ID]")}

    def _call(self, marked: bool) -> Steps[bool]:
        yield from self._blanks()
        held = self._at - self._start
        if (yield from self._array()):
            return True
        self._at = self._start + held
        head = yield from self._one_of(self._heads)
        if head.endswith("[CALL_ID]"):
            while (yield from self._more()) and self._text[self._at] in _LETTERS:
                self._at += 1
            if not (yield from self._one_of(["[ARGS]"])):
                return False
        if head.endswith("{"):
            self._at -= 1
        if not head or not (yield from self._more()) or self._text[self._at] != "{":
            return False
        self._begin(self._heads[head])
        yield from self._value("{", stream=True)
        return True


class ForcedCall(ToolCallParser):
    """One call of a given function: all text is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__([name])

    def _parse(self) -> Steps[None]:
        (name,) = self._names.values()
        if (yield from self._more()):
            self._begin(name)
        while (yield from self._more()):
            self._at = len(self._text)
            self._argue()


class ForcedCalls(ToolCallParser):
    """An array of calls and nothing else, as `peagle.serving.tools.constraint` has it written."""

    def _parse(self) -> Steps[None]:
        yield from self._blanks()
        yield from self._array()
        self._at = self._start
        if self._calls:
            yield from self._blanks()
        while (yield from self._more()):
            self._give(len(self._text))


PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "none": ToolCallParser,
}


def detect_parser(chat_template: str) -> str:
    """The key of `PARSERS` that fits what a chat template tells the model; "none" if unknown."""
    if "<tool_call>" in chat_template:
        # Qwen3-Coder and GLM write the arguments as XML.
        is_xml = "<function=" in chat_template or "<arg_key>" in chat_template
        return "none" if is_xml else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    is_llama = re.search(r'\{\\?"name\\?": function name, \\?"parameters\\?"', chat_template)
    return "llama3_json" if is_llama or "<|python_tag|>" in chat_template else "none"


def parser_for(
    kind: str,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
) -> ToolCallParser:
    """A parser for the answer to one request, whose tools were checked.

    Args:
        kind: a key of `PARSERS`, for outputs that are not forced.
        tools: in OpenAI's form.
        tool_choice: None means "auto".

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in PARSERS:
        raise ValueError(
            f"Unknown tool-call parser {kind!r}; expected one of: {', '.join(PARSERS)}."
        )
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names or tool_choice == "none":
        return ToolCallParser()
    if isinstance(tool_choice, Mapping):
        return ForcedCall(tool_choice["function"]["name"])
    return ForcedCalls(names) if tool_choice == "required" else PARSERS[kind](names)
