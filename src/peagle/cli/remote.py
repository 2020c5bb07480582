"""A chat model on a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from peagle.cli.conversation import Messages, Turn
from peagle.cli.tally import Tally
from peagle.cli.terminal import printable
from peagle.client.api import ApiClient
from peagle.client.fields import served_drafts
from peagle.errors import UserError
from peagle.evaluation.endpoint_answers import speculation_of
from peagle.thinking import Piece


@dataclass(frozen=True, slots=True)
class ReportedPiece(Piece):
    """New text, and which of its tokens came from the draft.

    Attributes:
        tokens: the text of each and whether it was accepted from a draft; empty where the server
            did not say.
    """

    tokens: tuple[tuple[str, bool], ...] = ()


class RemoteModel:
    """A model of a server that answers conversations (a `ChatModel`).

    Args:
        server: its address.
        name: name of the model; None takes the first.
        fields: fields of every request, as `sampling_fields` makes them.
        num_speculative_tokens: K; None takes the server's, 0 turns drafts off.

    Attributes:
        name: name of the model, printable.
        max_tokens: most tokens of an answer; 0 where the server decides.
        max_model_len: most tokens of a conversation; 0 where the server does not say.
        num_speculative_tokens: K; 0 where nothing is drafted.

    Raises:
        UserError: the server cannot be asked, has no such model, the model cannot converse, or
            does not draft as was asked.
    """

    def __init__(
        self,
        server: ApiClient,
        name: str | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.server = server
        facts = _pick(server, name)
        self.name: str = printable(str(facts["id"]))
        self._request = {"model": facts["id"], **(fields or {})}
        self._request |= {"stream": True, "stream_options": {"include_usage": True}}
        self.max_tokens: int = self._request.get("max_tokens", 0)
        length = facts.get("max_model_len")
        self.max_model_len: int = length if isinstance(length, int) else 0
        most = served_drafts(facts)
        if num_speculative_tokens and not 0 < num_speculative_tokens <= (most or 0):
            raise UserError(
                f"-k is {num_speculative_tokens}; {self.name} on {server.url} drafts "
                f"{f'at most {most} tokens a step' if most else 'nothing'}."
            )
        self.num_speculative_tokens = most or 0
        if most is not None:
            # Other servers may refuse a field that they do not know.
            speculation: dict[str, Any] = {"report": True}
            if num_speculative_tokens is not None:
                self.num_speculative_tokens = num_speculative_tokens
                speculation["num_speculative_tokens"] = num_speculative_tokens
            self._request["speculation"] = speculation

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer as it comes, and return it.

        Raises:
            UserError: the server refused it, or failed on the way.
        """
        answer = _Answer()
        request = {**self._request, "messages": messages}
        with closing(self.server.events("/v1/chat/completions", request)) as events:
            start = time.perf_counter()
            for event in events:
                answer.tally.seconds += time.perf_counter() - start
                if event is not None:
                    yield from self._pieces(answer, event)
                if answer.finish_reason is None and stopped():
                    return answer.turn("interrupt")
                start = time.perf_counter()
        if answer.finish_reason is None:
            raise UserError(f"{self.server.url} ended the answer without a reason. Try again.")
        is_full = answer.num_prompt_tokens + answer.tally.num_tokens >= self.max_model_len > 0
        is_context = answer.finish_reason == "length" and is_full
        return answer.turn("context" if is_context else answer.finish_reason)

    def _pieces(self, answer: _Answer, event: Mapping[str, Any]) -> list[Piece]:
        try:
            return list(answer.add(event))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.server.url} sent a chunk that is none of a chat completion ({error}): "
                f"{printable(json.dumps(event)[:200])}"
            ) from None


def _pick(server: ApiClient, name: str | None) -> dict[str, Any]:
    """Return the facts of a model that can converse."""
    listed = {str(facts["id"]): facts for facts in server.models()}
    if not listed or (name is not None and name not in listed):
        names = printable(", ".join(listed)) or "none"
        raise UserError(f"{server.url} has no model {name or ''!r}; it has: {names}.")
    facts = next(iter(listed.values())) if name is None else listed[name]
    if facts.get("chat") is False:
        raise UserError(
            f"{printable(str(facts['id']))!r} on {server.url} has no chat template, so it is no "
            "chat model. Serve one that has, or start the server with a template for it."
        )
    return facts


class _Answer:
    """The part of an answer that has come."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.finish_reason: str | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._texts = {True: "", False: ""}
        self._first_s: float | None = None

    def add(self, event: Mapping[str, Any]) -> Generator[Piece]:
        """Take a chunk in and yield its text."""
        report = event.get("speculation") or {}
        if num_drafted := report.get("num_drafted"):
            self.tally.stats.record(num_drafted, report.get("num_accepted", 0))
        tokens = tuple((str(text), bool(accepted)) for text, accepted in report.get("tokens", ()))
        choices = event.get("choices") or ()
        for choice in choices:
            delta = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            for key in ("reasoning_content", "content"):
                if text := delta.get(key):
                    self._first_s = self._first_s or self.tally.seconds
                    is_reasoning = key == "reasoning_content"
                    self._texts[is_reasoning] += text
                    yield ReportedPiece(text, is_reasoning, tokens)
        # The usage replaces this count; without reports, a chunk is taken for a token.
        self.tally.num_tokens += len(tokens) or bool(choices)
        if usage := event.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens", 0)
            self.tally.num_tokens = usage.get("completion_tokens", self.tally.num_tokens)
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = details.get("cached_tokens") or 0
            self.tally.stats = speculation_of(usage) or self.tally.stats

    def turn(self, ended: str) -> Turn:
        """Return the answer as it stands."""
        answer, stats = self._texts[False], self.tally.stats
        facts = {
            "text": answer,
            "finish_reason": self.finish_reason,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
            "acceptance_length": stats.acceptance_length,
            "num_cached_tokens": self.num_cached_tokens,
            "time_to_first_token_s": self._first_s or self.tally.seconds,
            "elapsed_s": self.tally.seconds,
        }
        return Turn(
            reasoning=self._texts[True].strip(),
            answer=answer,
            facts=None if ended == "interrupt" else facts,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            tally=self.tally,
            ended=ended,
        )
