"""Calls of endpoints that SageMaker's data capture wrote to S3, as records of training data.

A line is {"captureData": {"endpointInput", "endpointOutput"}, "eventMetadata"}. Both have `data`,
text or base64: bodies of OpenAI's chat completions or completions.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.client.answers import AnswerEvent, ForeignAnswer, StreamedAnswer, read_whole
from peagle.errors import UserError

CALL = "captureData"
CALL_BEGIN = re.compile(rb'\s*\{\s*"(captureData|eventMetadata|eventVersion)"')
# With these a server makes another prompt than `peagle data prepare` would.
_PROMPT_FIELDS = ("chat_template", "continue_final_message", "echo", "reasoning_effort", "suffix")
_THINKING = {"enable_thinking", "thinking"}  # prepare has its own option


class UnusableCall(Exception):
    """A captured call cannot be training data; its arguments are the reason and a detail."""


def captured_files(folder: Path) -> list[Path]:
    """Return the .jsonl files below a folder, sorted; none if none begins with a call.

    Raises:
        UserError: one cannot be read.
        OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    walked = os.walk(folder, onerror=refuse) if folder.is_dir() else ()
    found = (Path(place, name) for place, _, names in walked for name in names)
    files = sorted(one for one in found if one.name.endswith(".jsonl"))
    return files if any(map(_begins_with_call, files)) else []


def _begins_with_call(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return CALL_BEGIN.match(opened.read(64)) is not None
    except OSError as error:
        reason = f"{str(file)!r} cannot be read: {error.strerror}"
        raise UserError(f"{reason}. Make it readable, or move it away.") from None


def record_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a captured call as a record, with the answer of the first choice.

    That has token ids where the answer has them (vLLM's `return_token_ids`), else the messages with
    the answer, or prompt and response as text.

    Raises:
        UnusableCall: it is not to be stored, failed, is cut, of another kind, or its prompt was
            made otherwise.
    """
    request, events = _request(call), _events(call)
    parts: list[Any] = [
        (raw, choice)
        for event in events
        for raw, choice in zip(event.body.get("choices") or (), event.choices, strict=True)
        if choice.index == 0
    ]
    text = "".join(choice.text for _, choice in parts)
    reason = next((c.finish_reason for _, c in parts if c.finish_reason), "")
    record: dict[str, Any] = {"finish_reason": reason, "temperature": request.get("temperature")}
    told = call.get("eventMetadata")
    record["time"] = told.get("inferenceTime", "") if isinstance(told, Mapping) else ""
    is_chat = "messages" in request
    if is_chat:
        answer = {
            "role": "assistant",
            "content": text,
            "reasoning_content": "".join(choice.reasoning for _, choice in parts) or None,
            "tool_calls": [call for _, choice in parts for call in choice.tool_calls],
        }
        if len(parts) > 1 and answer["tool_calls"]:
            raise UnusableCall("a call of a tool was streamed")
        messages = [*request["messages"], answer]
        record |= {"messages": messages, "tools": request.get("tools"), "turn": len(messages)}
    sources = [*(event.body for event in events), *(raw for raw, _ in parts)]
    prompt_ids = next((ids for one in sources if (ids := one.get("prompt_token_ids"))), None)
    ids = [token for raw, _ in parts for token in raw.get("token_ids") or ()]
    num_tokens = max((e.usage.num_tokens or 0 for e in events if e.usage), default=0)
    if prompt_ids and ids and num_tokens in (0, len(ids)):
        return record | {"prompt_token_ids": prompt_ids, "response_token_ids": ids}
    _check_prompt(request)
    if is_chat:
        return record
    prompt = request["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise UnusableCall("the prompt is not one text", json.dumps(prompt)[:60])
    specials = request.get("add_special_tokens") is not False
    return record | {"prompt": prompt, "response": text, "add_special_tokens": specials}


def _body(call: Mapping[str, Any], side: str) -> tuple[bytes, str]:
    """Return a body of a call and its content type."""
    try:
        part = call[CALL][side]
        data: bytes = part["data"].encode()
        if part.get("encoding") == "BASE64":
            data = base64.b64decode(data, validate=True)
        return data, str(part.get("observedContentType"))
    except (LookupError, TypeError, AttributeError, ValueError):
        raise UnusableCall(f"{side} was not captured as text or base64") from None


def _request(call: Mapping[str, Any]) -> dict[str, Any]:
    raw, _ = _body(call, "endpointInput")
    try:
        request = json.loads(raw)
        if isinstance(request["messages"] if "messages" in request else [request["prompt"]], list):
            if request.get("store") is not False:
                return request
            raise UnusableCall('the request says "store": false')
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise UnusableCall("the request is no chat or completion", raw[:60].decode(errors="replace"))


def _check_prompt(request: Mapping[str, Any]) -> None:
    names = [name for name in _PROMPT_FIELDS if request.get(name)]
    names += {*(request.get("chat_template_kwargs") or ())} - _THINKING
    if request.get("tools") and request.get("tool_choice") == "none":
        names.append("tool_choice")
    if names:
        raise UnusableCall("the prompt of the request is made otherwise", f"by {names[0]}")


def _events(call: Mapping[str, Any]) -> list[AnswerEvent]:
    """Return the events of a complete stream, or the one of a whole answer."""
    raw, kind = _body(call, "endpointOutput")
    events: list[AnswerEvent] = []
    stream = StreamedAnswer() if "event-stream" in kind or raw.startswith(b"data:") else None
    try:
        events.extend([read_whole(raw)] if stream is None else stream.read_stream([raw]))
        is_whole = stream is None or stream.is_whole
    except ForeignAnswer:
        is_whole = False
    if error := next((event.error for event in events if event.error), ""):
        raise UnusableCall("the request failed", error)
    if not is_whole or any(c.finish_reason == "abort" for e in events for c in e.choices):
        shown = raw[:60].decode(errors="replace")
        raise UnusableCall("the answer is no completion, or is not complete", shown)
    return events
