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
class _Piece:
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
        return _Stream(reply).answer
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
    """An answer in one piece: its first token is its last."""
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


class _Stream:
    """Reads the events of a stream."""

    def __init__(self, reply: Reply) -> None:
        self.pieces: list[_Piece] = []
        self.finish_reason = self.error = ""
        self.usage: Mapping[str, Any] = {}
        self._so_far = 0  # tokens of the chunks so far, by their usage
        events: list[tuple[float, Mapping[str, Any]]] = []
        for when, data in reply.events:
            if data != DONE:
                events.append((when - reply.sent_s, _event(data)))
        written = [event for _, event in events if event.get("choices")]
        # Some put the usage of the whole answer into the last chunk that has text.
        self._has_usage = bool(written) and all(event.get("usage") for event in written)
        self._has_steps = any(event.get("speculation") for event in written)
        for seconds, event in events:
            try:
                self._take(seconds, event)
            except (ValueError, TypeError, AttributeError, KeyError):
                raise ForeignAnswer(_beginning(json.dumps(event).encode())) from None
        ended = self.finish_reason or (reply.events and reply.events[-1][1] == DONE)
        if not self.error and (reply.problem or not ended):
            self.error = _PROBLEMS[reply.problem or "cut"]
        self.answer = self._answer(reply.seconds)

    def _take(self, seconds: float, event: Mapping[str, Any]) -> None:
        if error := event.get("error"):
            self.error = error_message(json.dumps({"error": error}).encode())
        self.usage = event.get("usage") or self.usage
        if not event.get("choices"):
            return
        choice = event["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text, content = _texts(choice.get("delta") or choice)
        piece = self._piece(seconds, event)
        # Without tokens of its own an event goes on with the step before it.
        is_new = piece.num_tokens if self._has_steps or self._has_usage else text
        if is_new or (text and not self.pieces):
            self.pieces.append(piece)
        if text:
            self.pieces[-1].text += text
            self.pieces[-1].answer += content

    def _piece(self, seconds: float, event: Mapping[str, Any]) -> _Piece:
        if self._has_steps:
            report = event.get("speculation") or {}
            count = len(report.get("tokens", ()))
            step = DecodedStep(count, report.get("num_drafted", 0), report.get("num_accepted", 0))
            return _Piece(seconds, num_tokens=count, step=step)
        count = int(self.usage.get("completion_tokens") or 0) if self._has_usage else 0
        before, self._so_far = self._so_far, max(count, self._so_far)
        return _Piece(seconds, num_tokens=self._so_far - before)

    def _answer(self, seconds: float) -> Answer:
        pieces = self.pieces
        count = self.usage.get("completion_tokens")
        if not self._has_steps and not self._has_usage:
            _share_out(pieces, len(pieces) if count is None else int(count))
        steps = [piece.step for piece in pieces if piece.step is not None]
        return Answer(
            text="".join(piece.answer for piece in pieces),
            finish_reason="" if self.error else self.finish_reason,
            num_prompt_tokens=int(self.usage.get("prompt_tokens") or 0),
            num_tokens=sum(p.num_tokens for p in pieces) if count is None else int(count),
            chunks=[(piece.seconds, piece.num_tokens) for piece in pieces],
            seconds=seconds,
            texts=[piece.text for piece in pieces],
            steps=steps if steps and len(steps) == len(pieces) else None,
            stats=speculation_of(self.usage),
            error=self.error,
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


def _share_out(pieces: list[_Piece], count: int) -> None:
    """Give so many tokens to pieces by their characters; the first has at least one."""
    total = sum(len(piece.text) for piece in pieces)
    so_far = given = 0
    for piece in pieces:
        so_far += len(piece.text)
        due = math.ceil(count * so_far / total)
        piece.num_tokens, given = due - given, due


def _texts(part: Mapping[str, Any]) -> tuple[str, str]:
    """(all text, text without the reasoning) of a choice, a delta or a message."""
    reasoning = part.get("reasoning_content") or part.get("reasoning") or ""
    content = part.get("content") or part.get("text") or ""
    if not isinstance(reasoning, str) or not isinstance(content, str):
        raise TypeError(content)
    return reasoning + content, content


def _beginning(raw: bytes) -> str:
    return printable(raw[:80].decode(errors="replace"))
