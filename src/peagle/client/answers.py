"""Reads answers of servers with OpenAI's interface, streamed or whole, event by event.

The servers differ: vLLM and SGLang name reasoning `reasoning` or `reasoning_content`, TGI sends an
error as text and finish reasons "" before the end, SageMaker cuts a stream anywhere.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.client.counters import DraftCounts
from peagle.client.events import DONE, EventReader

_MAX_MESSAGE = 600  # characters of a server's words
_SHOWN_CHARACTERS = 80  # characters of an answer of another kind


class ForeignAnswer(ValueError):
    """An answer that is none of a completion; the message is its beginning on one line.

    Attributes:
        data: the answer, or the event of a stream.
        is_object: it is a JSON object at least.
    """

    def __init__(self, data: bytes, *, is_object: bool) -> None:
        super().__init__(printable_line(data[:_SHOWN_CHARACTERS].decode(errors="replace")))
        self.data, self.is_object = data, is_object


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The new part of one choice; a whole answer is one part.

    Attributes:
        index: number of the choice.
        text: new text, without reasoning.
        reasoning: new text of the reasoning, where the server separates it.
        tool_calls: new parts of calls of tools, as OpenAI's interface has them.
        finish_reason: "" before the choice ends.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer, as its server counted them up to an event.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        num_tokens: output tokens; None where the server does not say.
        num_cached_tokens: prompt tokens that the server had in its cache.
        drafts: counts of the request's drafts; None from other servers than ours.
    """

    num_prompt_tokens: int = 0
    num_tokens: int | None = None
    num_cached_tokens: int = 0
    drafts: DraftCounts | None = None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The report of our server on the step behind an event.

    Attributes:
        tokens: text of each output token, and whether it was accepted from a draft.
        num_drafted: draft tokens that the step verified.
        num_accepted: verified tokens that were accepted.
        draft_depth: depth of a tree of drafts; None for a chain.
        text_from: number of accepted tokens before those that the text alone drafted; None where no
            text drafts.
    """

    tokens: tuple[tuple[str, bool], ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    draft_depth: int | None = None
    text_from: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """An event of a streamed answer, or a whole answer.

    Attributes:
        body: the JSON object.
        choices: the new parts; empty in an event of usage or of an error alone.
        usage, report: None where the event has none.
        error: the server's words on why it ended the answer, on one line; "" without an error.
    """

    body: Mapping[str, Any]
    choices: tuple[ChoiceDelta, ...]
    usage: Usage | None
    report: DraftReport | None
    error: str


class StreamedAnswer:
    """Reads one streamed answer: its bytes, whole (`read_stream`) or as they come, or its events.

    Nothing behind [DONE] is read.

    Attributes:
        is_done: [DONE] came.
        finish_reasons: finish reason of each choice, "" while it goes on.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.finish_reasons: dict[int, str] = {}
        self._reader = EventReader()

    @property
    def is_whole(self) -> bool:
        """Return whether the answer ended by [DONE], or by the end of all its choices."""
        reasons = self.finish_reasons.values()
        return self.is_done or (bool(reasons) and all(reasons))

    def read_stream(self, parts: Iterable[bytes]) -> Iterator[AnswerEvent]:
        """Yield the events of all the bytes; see `feed` for the errors."""
        for part in parts:
            yield from self.feed(part)
        yield from self.end()

    def feed(self, raw: bytes) -> Iterator[AnswerEvent]:
        """Yield the events that these bytes complete.

        Raises:
            ForeignAnswer: one is none of a completion.
            ValueError: one is longer than MAX_EVENT_BYTES.
        """
        return self._read_all(self._reader.feed(raw))

    def end(self) -> Iterator[AnswerEvent]:
        """Yield the last event, if the bytes ended before the blank line behind it.

        Raises:
            ForeignAnswer: it is none of a completion.
        """
        return self._read_all(self._reader.end())

    def read(self, data: bytes) -> AnswerEvent | None:
        """Return an event from its data, None for [DONE] and all data after it.

        Raises:
            ForeignAnswer: it is none of a completion.
        """
        self.is_done |= data == DONE
        if self.is_done:
            return None
        event = _read_event(data)
        for choice in event.choices:
            so_far = self.finish_reasons.get(choice.index, "")
            self.finish_reasons[choice.index] = choice.finish_reason or so_far
        return event

    def _read_all(self, every: list[bytes]) -> Iterator[AnswerEvent]:
        return (event for data in every if (event := self.read(data)) is not None)


def read_whole(raw: bytes) -> AnswerEvent:
    """Return an answer that was not streamed; it has a choice with text, or an error.

    Raises:
        ForeignAnswer: it is none of a completion.
    """
    event = _read_event(raw)
    listed = event.body.get("choices") or ()
    if not (listed or event.error) or not all({"message", "text"} & set(one) for one in listed):
        raise ForeignAnswer(raw, is_object=True)
    return event


def error_message(raw: bytes) -> str:
    """Return the message in the body of an error, on one line."""
    try:
        value = json.loads(raw)
        error = value.get("error", value.get("message", value.get("detail")))
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = raw.decode(errors="replace").strip()
    return printable_line(str(text or "it gave no reason")[:_MAX_MESSAGE])


def printable_line(text: str) -> str:
    """Return text on one line that cannot steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


# ---- an event ----


def _read_event(data: bytes) -> AnswerEvent:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ForeignAnswer(data, is_object=False)
    try:
        # An event about something else has at least one of these.
        if not {"choices", "usage", "error"} & set(body):
            raise KeyError("choices")
        return AnswerEvent(
            body=body,
            choices=tuple(map(_choice, body.get("choices") or ())),
            usage=_usage(body["usage"]) if body.get("usage") else None,
            report=_report(body["speculation"]) if body.get("speculation") else None,
            error=error_message(data) if body.get("error") else "",
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ForeignAnswer(data, is_object=True) from None


def _choice(choice: Mapping[str, Any]) -> ChoiceDelta:
    part = choice.get("delta") or choice.get("message") or choice
    calls = part.get("tool_calls") or ()
    if isinstance(calls, Mapping):  # of older TGI
        calls = (calls,)
    if not all(isinstance(call, Mapping) for call in calls):
        raise TypeError(calls)
    return ChoiceDelta(
        index=int(choice.get("index") or 0),
        text=_text(part.get("content") or part.get("text")),
        reasoning=_text(part.get("reasoning_content") or part.get("reasoning")),
        tool_calls=tuple(calls),
        finish_reason=_text(choice.get("finish_reason")),
    )


def _usage(usage: Mapping[str, Any]) -> Usage:
    count = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    drafts = usage.get("speculation")
    return Usage(
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_tokens=None if count is None else int(count),
        num_cached_tokens=int(details.get("cached_tokens") or 0),
        drafts=_drafts(drafts) if isinstance(drafts, Mapping) else None,
    )


def _drafts(drafts: Mapping[str, Any]) -> DraftCounts:
    return DraftCounts(
        int(drafts.get("num_drafts", 0)),
        int(drafts.get("num_draft_tokens", 0)),
        int(drafts.get("num_accepted_tokens", 0)),
        tuple(map(int, drafts.get("num_accepted_tokens_per_pos", ()))),
        tuple(map(int, drafts.get("num_accepted_text_tokens_per_pos", ()))),
    )


def _report(report: Mapping[str, Any]) -> DraftReport:
    return DraftReport(
        tokens=tuple((str(text), bool(accepted)) for text, accepted in report.get("tokens", ())),
        num_drafted=int(report.get("num_drafted", 0)),
        num_accepted=int(report.get("num_accepted", 0)),
        draft_depth=report.get("draft_depth"),
        text_from=report.get("text_from"),
    )


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(value)
    return value or ""
