"""The output items of a response, put together while the answer is written."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from peagle.serving.tools import CallDelta, Delta

Event = dict[str, Any]

# The first letters of an item's id, and the type of its text part.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """Makes items of a growing answer, and the events of a stream that tell of each step.

    One item is open at a time. Events have no `sequence_number` yet.

    Attributes:
        items: of the types "reasoning", "message" and "function_call", in order.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, reasoning: str, deltas: Iterable[Delta]) -> Iterator[Event]:
        """Add new reasoning, then new content and calls."""
        if reasoning:
            yield from self._add_text("reasoning", reasoning)
        for delta in deltas:
            if isinstance(delta, CallDelta):
                yield from self._add_call(delta)
            else:
                yield from self._add_text("message", delta.text)

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
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **told)
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
