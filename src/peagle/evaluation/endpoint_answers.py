"""Reads the answer of a server with OpenAI's interface: texts, times, tokens, drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.client.api import error_message, printable
from peagle.client.events import DONE
from peagle.engine import SpeculationStats
from peagle.evaluation.decoding import Answer, DecodedStep
from peagle.evaluation.http_client import Reply

_PROBLEMS = {
    "refused": "no connection",
    "unanswered": "the server closed the connection without an answer",
    "cut": "the answer ended in the middle",
    "timeout": "no whole answer in time",
    "dropped": "dropped",
}


class ForeignAnswer(ValueError):
    """An answer that is none of a completion; the message shows its beginning."""


@dataclass(slots=True)
class _OutputPart:
    """The output of one step of the server, as far as events separate steps."""

    seconds: float
    text: str = ""
    answer: str = ""
    num_tokens: int = 0
    step: DecodedStep | None = None


def read_answer(reply: Reply) -> Answer:
    """Read the answer to a completion or a chat completion, streamed or whole.

    Our server's reports, or usage in every chunk (`continuous_usage_stats`), count the tokens of a
    chunk; else they are estimated: the tokens of the whole answer, shared out by the characters of
    the chunks. Reasoning counts as output; `text` leaves it out where the server separates it.

    Raises:
        ForeignAnswer: whatever answered knows nothing of completions.
    """
    if reply.problem and not reply.events:
        return Answer(seconds=reply.seconds, error=_PROBLEMS[reply.problem])
    if reply.status != 200:
        return Answer(seconds=reply.seconds, error=f"{reply.status}: {error_message(reply.body)}")
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        return _streamed(reply)
    return _whole(reply)


def speculation_of(usage: Mapping[str, Any]) -> SpeculationStats | None:
    """Return the drafts of a request, None where the usage has none (our server's has)."""
    drafts = usage.get("speculation")
    if not isinstance(drafts, Mapping):
        return None
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    per_pos = [int(count) for count in drafts.get("num_accepted_tokens_per_pos", ())]
    counts = {name: int(drafts.get(name, 0)) for name in names}
    return SpeculationStats(**counts, num_accepted_tokens_per_pos=per_pos)


def _whole(reply: Reply) -> Answer:
    """An answer in one part: its first token is its last."""
    try:
        body = json.loads(reply.body)
        choice = body["choices"][0]
        text, content = _texts(choice.get("message") or choice)
        usage = body.get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ForeignAnswer(_beginning(reply.body)) from None
    count = int(usage.get("completion_tokens") or bool(text))
    return Answer(
        text=content,
        finish_reason=choice.get("finish_reason") or "",
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_tokens=count,
        chunks=[(reply.seconds, count)],
        seconds=reply.seconds,
        texts=[text],
        stats=speculation_of(usage),
    )


def _streamed(reply: Reply) -> Answer:
    """Read the events of a stream."""
    events = [(when - reply.sent_s, _event(data)) for when, data in reply.events if data != DONE]
    written = [event for _, event in events if event.get("choices")]
    # Some put the usage of the whole answer into the last chunk that has text.
    has_usage = bool(written) and all(event.get("usage") for event in written)
    has_steps = any(event.get("speculation") for event in written)
    parts: list[_OutputPart] = []
    usage: Mapping[str, Any] = {}
    finish_reason = error = ""
    so_far = 0  # tokens of the chunks so far, by their usage
    for seconds, event in events:
        try:
            if problem := event.get("error"):
                error = error_message(json.dumps({"error": problem}).encode())
            usage = event.get("usage") or usage
            if not event.get("choices"):
                continue
            choice = event["choices"][0]
            finish_reason = choice.get("finish_reason") or finish_reason
            text, content = _texts(choice.get("delta") or choice)
            part = _OutputPart(seconds)
            if has_steps:
                report = event.get("speculation") or {}
                part.num_tokens = len(report.get("tokens", ()))
                drafted, accepted = report.get("num_drafted", 0), report.get("num_accepted", 0)
                depth = report.get("draft_depth")
                part.step = DecodedStep(part.num_tokens, drafted, accepted, depth)
            elif has_usage:
                count = max(int(usage.get("completion_tokens") or 0), so_far)
                part.num_tokens, so_far = count - so_far, count
        except (ValueError, TypeError, AttributeError, KeyError):
            raise ForeignAnswer(_beginning(json.dumps(event).encode())) from None
        # Without tokens of its own an event goes on with the step before it.
        is_new = part.num_tokens if has_steps or has_usage else text
        if is_new or (text and not parts):
            parts.append(part)
        if text:
            parts[-1].text += text
            parts[-1].answer += content
    is_ended = finish_reason or (reply.events and reply.events[-1][1] == DONE)
    if not error and (reply.problem or not is_ended):
        error = _PROBLEMS[reply.problem or "cut"]
    count = usage.get("completion_tokens")
    if not has_steps and not has_usage:
        _share_out(parts, len(parts) if count is None else int(count))
    steps = [part.step for part in parts if part.step is not None]
    return Answer(
        text="".join(part.answer for part in parts),
        finish_reason="" if error else finish_reason,
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_tokens=sum(part.num_tokens for part in parts) if count is None else int(count),
        chunks=[(part.seconds, part.num_tokens) for part in parts],
        seconds=reply.seconds,
        texts=[part.text for part in parts],
        steps=steps if steps and len(steps) == len(parts) else None,
        stats=speculation_of(usage),
        error=error,
    )


def _event(data: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    # An event about something else has at least one of these.
    if not isinstance(event, dict) or not {"choices", "usage", "error"} & set(event):
        raise ForeignAnswer(_beginning(data))
    return event


def _share_out(parts: list[_OutputPart], count: int) -> None:
    """Divide tokens among parts by their characters; the first has at least one."""
    total = sum(len(part.text) for part in parts)
    so_far = given = 0
    for part in parts:
        so_far += len(part.text)
        due = math.ceil(count * so_far / total)
        part.num_tokens, given = due - given, due


def _texts(part: Mapping[str, Any]) -> tuple[str, str]:
    """(all text, text without the reasoning) of a choice, a delta or a message."""
    reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
    content = part.get("content") or part.get("text") or ""
    if not isinstance(reasoning, str) or not isinstance(content, str):
        raise TypeError(content)
    return reasoning + content, content


def _beginning(raw: bytes) -> str:
    return printable(raw[:80].decode(errors="replace"))
