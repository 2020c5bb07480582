"""Calls of endpoints that SageMaker's data capture wrote to S3, as records of training data.

A line is {"captureData": {"endpointInput", "endpointOutput"}, "eventMetadata"}. Input and output
have `data`, which is text or, with `encoding` BASE64, base64: the bodies of OpenAI's chat
completions or completions. `aws s3 sync` keeps the folders ENDPOINT/VARIANT/yyyy/mm/dd/hh/.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.client.answers import (
    AnswerEvent,
    ChoiceDelta,
    ForeignAnswer,
    StreamedAnswer,
    read_whole,
)

_CALL = "captureData"
_HEAD = re.compile(rb'\s*\{\s*"(captureData|eventMetadata|eventVersion)"')
# Fields with which a server makes another prompt of a request than `peagle data prepare` would.
_PROMPT_FIELDS = (
    *("chat_template", "continue_final_message", "documents", "reasoning_effort"),
    *("echo", "suffix"),
)
_THINKING = {"enable_thinking", "thinking"}  # of chat_template_kwargs; prepare has its own option


class UnusableCall(Exception):
    """A captured call cannot be training data; its arguments are the reason and a detail."""


def is_call(value: Any) -> bool:
    """Return whether the value of a line is a captured call."""
    return isinstance(value, Mapping) and _CALL in value


def begins_call(line: bytes) -> bool:
    """Return whether a line begins as a captured call does; it may be cut."""
    return _HEAD.match(line) is not None


def captured_files(folder: Path) -> list[Path]:
    """Return the .jsonl files below a folder by their paths; none if none begins with a call."""
    files = sorted(one for one in folder.rglob("*.jsonl") if one.is_file())
    return files if any(map(_holds_calls, files)) else []


def _holds_calls(file: Path) -> bool:
    try:
        with file.open("rb") as lines:
            return begins_call(lines.read(64))
    except OSError:  # whoever reads it says so
        return False


def record_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a captured call as a record with the answer of the first choice.

    The record has token ids where the answer has them (vLLM's `return_token_ids`); otherwise it has
    messages that end with the answer, or prompt and response as text.

    Raises:
        UnusableCall: the client wants nothing stored, the request failed, a body is missing, cut or
            of another kind, or another prompt was made of the request than it shows.
    """
    request = _request(call)
    answer = _Answer(_events(call))
    metadata = call.get("eventMetadata")
    record: dict[str, Any] = {
        "id": metadata.get("eventId") if isinstance(metadata, Mapping) else None,
        "temperature": request.get("temperature"),
        "finish_reason": answer.finish_reason,
        **{name: request.get(name) for name in ("tools", "functions")},
    }
    record = {key: value for key, value in record.items() if value is not None}
    if isinstance(request.get("messages"), list):
        messages = [*request["messages"], answer.message]
        record |= {"messages": messages, "turn": len(messages)}
    if answer.has_ids:
        return record | {
            "prompt_token_ids": answer.prompt_token_ids,
            "response_token_ids": answer.token_ids,
        }
    _check_prompt(request)
    if isinstance(request.get("messages"), list):
        return record
    prompt = request["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise UnusableCall("the prompt is not one text", json.dumps(prompt)[:60])
    with_specials = request.get("add_special_tokens") is not False
    response = answer.message["content"]
    return record | {"prompt": prompt, "response": response, "add_special_tokens": with_specials}


def _body(call: Mapping[str, Any], side: str) -> tuple[bytes, str]:
    """Return one of the two bodies of a call and its content type."""
    captured = call[_CALL]
    part = captured.get(side) if isinstance(captured, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(part.get("data"), str):
        raise UnusableCall(f"{side} was not captured")
    data, kind = part["data"], str(part.get("observedContentType"))
    try:
        if part.get("encoding") == "BASE64":
            return base64.b64decode(data, validate=True), kind
        return data.encode(), kind
    except ValueError as error:
        raise UnusableCall(f"{side} cannot be decoded", str(error)) from None


def _request(call: Mapping[str, Any]) -> dict[str, Any]:
    raw, _ = _body(call, "endpointInput")
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict) or not (
        isinstance(request.get("messages"), list) or request.get("prompt")
    ):
        shown = raw[:60].decode(errors="replace")
        raise UnusableCall("the request is neither a chat nor a completion", shown)
    if request.get("store") is False:
        raise UnusableCall('the request says "store": false')
    return request


def _check_prompt(request: Mapping[str, Any]) -> None:
    """Raise an UnusableCall if a server made another prompt of a request than it shows."""
    names = [name for name in _PROMPT_FIELDS if request.get(name)]
    if isinstance(kwargs := request.get("chat_template_kwargs"), Mapping):
        names += [name for name in kwargs if name not in _THINKING]
    if request.get("tool_choice") == "none" and request.get("tools"):
        names.append("tool_choice")
    if request.get("add_generation_prompt") is False:
        names.append("add_generation_prompt")
    if names:
        raise UnusableCall("the request changes how its prompt is made", f"it has {names[0]}")


def _events(call: Mapping[str, Any]) -> list[AnswerEvent]:
    """Return the events of a whole answer, of which there is one, or of a complete stream."""
    raw, kind = _body(call, "endpointOutput")
    events: list[AnswerEvent] = []
    if "event-stream" in kind or raw.lstrip().startswith(b"data:"):
        stream = StreamedAnswer()
        try:
            events.extend(stream.read_stream([raw]))
            is_whole = stream.is_whole
        except ValueError:  # an event was cut
            is_whole = False
    else:
        try:
            events, is_whole = [read_whole(raw)], True
        except ForeignAnswer as error:
            raise UnusableCall("the answer is no completion", str(error)) from None
    if error := next((event.error for event in events if event.error), ""):
        raise UnusableCall("the request failed", error)
    if not is_whole:
        raise UnusableCall("a streamed answer is not complete")
    return events


class _Answer:
    """The first choice of an answer, joined from its events.

    Attributes:
        message: as OpenAI's API has it.
        finish_reason: None where the answer has none.
        prompt_token_ids, token_ids: where the answer has them.
        has_ids: whether they are there, for every token.
    """

    def __init__(self, events: Sequence[AnswerEvent]) -> None:
        parts: list[tuple[Mapping[str, Any], ChoiceDelta]] = []
        for event in events:
            pairs = zip(event.body.get("choices") or (), event.choices, strict=True)
            parts += [(raw, choice) for raw, choice in pairs if choice.index == 0]
        choices = [choice for _, choice in parts]
        self.message = {
            "role": "assistant",
            "content": "".join(choice.text for choice in choices),
            "reasoning_content": "".join(choice.reasoning for choice in choices) or None,
            "tool_calls": _joined_calls([call for one in choices for call in one.tool_calls]),
        }
        self.finish_reason = next((c.finish_reason for c in choices if c.finish_reason), None)
        if self.finish_reason in ("abort", "error"):
            raise UnusableCall("the request failed", f"its finish reason is {self.finish_reason}")
        sources = [*(event.body for event in events), *(raw for raw, _ in parts)]
        self.prompt_token_ids = next(
            (one["prompt_token_ids"] for one in sources if one.get("prompt_token_ids")), None
        )
        ids = [raw.get("token_ids") for raw, _ in parts]
        self.token_ids = [token for part in ids if isinstance(part, list) for token in part]
        counts = (event.usage.num_tokens for event in events if event.usage is not None)
        num_tokens = max((count for count in counts if count is not None), default=None)
        self.has_ids = bool(self.prompt_token_ids) and num_tokens in (None, len(self.token_ids))
        self.has_ids = self.has_ids and bool(self.token_ids)


def _joined_calls(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of tools whose parts a stream had; a whole call is one part."""
    calls: dict[str, dict[str, str]] = {}
    for number, part in enumerate(parts):
        function = part.get("function")
        call = calls.setdefault(str(part.get("index", number)), {"name": "", "arguments": ""})
        for key in call:
            text = function.get(key) if isinstance(function, Mapping) else None
            if text is not None and not isinstance(text, str):
                raise UnusableCall("a call of a tool is no text", json.dumps(text)[:60])
            call[key] += text or ""
    return [{"type": "function", "function": call} for call in calls.values()]
