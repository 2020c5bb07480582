"""A chat model on a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from peagle.cli.conversation import Messages, Turn
from peagle.cli.remote_server import RemoteServer
from peagle.cli.tally import Tally
from peagle.cli.terminal import printable
from peagle.config import SamplingParams, StructuredOutput
from peagle.engine.stats import SpeculationStats
from peagle.errors import UserError
from peagle.thinking import Piece


@dataclass(frozen=True, slots=True)
class ReportedPiece(Piece):
    """New text, and which of its tokens came from the draft.

    Attributes:
        tokens: the text of each and whether it was accepted from a draft; empty where the server
            did not say.
    """

    tokens: tuple[tuple[str, bool], ...] = ()


# ---- requests -------------------------------------------------------------------------------


def sampling_fields(params: SamplingParams, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of sampling, as fields of a request; the rest is left to the server.

    Args:
        params: all values, checked.
        given: by the names of those that were given.
    """
    fields = {name: getattr(params, name) for name in given}
    if bias := fields.pop("logit_bias", None):
        # JSON has no infinity; -100 is what OpenAI's interface calls a ban.
        fields["logit_bias"] = {str(k): max(v, -100.0) for k, v in bias}
    if (structure := fields.pop("structured_output", None)) is not None:
        fields["response_format"] = _response_format(structure)
    # Nobody would see these in a chat.
    for name in ("n", "logprobs", "prompt_logprobs", "num_speculative_tokens"):
        fields.pop(name, None)
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(structure: StructuredOutput) -> dict[str, Any]:
    if structure.kind == "json":
        return {"type": "json_object"}
    if structure.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(structure.source), "strict": True}
        return {"type": "json_schema", "json_schema": schema}
    kind, field = {"regex": ("regex", "pattern"), "ebnf": ("grammar", "grammar")}[structure.kind]
    return {"type": kind, field: structure.source}


class RemoteModel:
    """A model of a server that answers conversations (a `ChatModel`).

    Args:
        server: where it is.
        name: of the model; None takes the first.
        fields: of every request, as `sampling_fields` makes them.
        num_speculative_tokens: K; None takes the server's, 0 turns drafts off.

    Raises:
        UserError: the server cannot be asked, has no such model, the model cannot converse, or
            does not draft as was asked.
    """

    def __init__(
        self,
        server: RemoteServer,
        name: str | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.server = server
        facts = _pick(server, name)
        self.name: str = printable(str(facts["id"]))
        self._length = facts.get("max_model_len")
        self._request = {"model": facts["id"], **(fields or {})}
        self._request |= {"stream": True, "stream_options": {"include_usage": True}}
        most = _served_drafts(facts)
        if num_speculative_tokens and not 0 < num_speculative_tokens <= (most or 0):
            raise UserError(
                f"-k is {num_speculative_tokens}; {self.name} on {server.url} drafts "
                f"{f'at most {most} tokens a step' if most else 'nothing'}."
            )
        self.num_speculative_tokens = most or 0
        if most is not None:
            # Other servers may refuse a field that they do not know.
            wish: dict[str, Any] = {"report": True}
            if num_speculative_tokens is not None:
                self.num_speculative_tokens = num_speculative_tokens
                wish["num_speculative_tokens"] = num_speculative_tokens
            self._request["speculation"] = wish

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer; 0 where the server decides."""
        return self._request.get("max_tokens", 0)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a conversation; 0 where the server does not say."""
        return self._length if isinstance(self._length, int) else 0

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer as it comes, and return it.

        Raises:
            UserError: the server refused it, or failed on the way.
        """
        written = _Answer()
        with closing(self.server.events({**self._request, "messages": messages})) as events:
            start = time.perf_counter()
            for event in events:
                written.tally.seconds += time.perf_counter() - start
                if event is not None:
                    yield from self._taken(written, event)
                if written.finish_reason is None and stopped():
                    return written.turn("interrupt")
                start = time.perf_counter()
        if written.finish_reason is None:
            raise UserError(f"{self.server.url} ended the answer without a reason. Try again.")
        is_full = written.num_prompt_tokens + written.tally.num_tokens >= self.max_model_len > 0
        is_context = written.finish_reason == "length" and is_full
        return written.turn("context" if is_context else written.finish_reason)

    def _taken(self, written: _Answer, event: Mapping[str, Any]) -> list[Piece]:
        try:
            return list(written.add(event))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.server.url} sent a chunk that is none of a chat completion ({error}): "
                f"{printable(json.dumps(event)[:200])}"
            ) from None


def _pick(server: RemoteServer, name: str | None) -> dict[str, Any]:
    """The facts of a model that can converse."""
    listed = {str(facts.get("id")): facts for facts in server.models()}
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


def _served_drafts(facts: Mapping[str, Any]) -> int | None:
    """K of the default proposer; None where the server does not speak of speculation."""
    speculation = facts.get("speculation")
    if not isinstance(speculation, dict):
        return None
    by_name = {p.get("name"): p for p in speculation.get("proposers", ()) if isinstance(p, dict)}
    return int(by_name.get(speculation.get("default"), {}).get("num_speculative_tokens", 0))


class _Answer:
    """What of an answer has come."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.finish_reason: str | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._texts = {True: "", False: ""}
        self._first_s: float | None = None

    def add(self, event: Mapping[str, Any]) -> Generator[Piece]:
        """Take a chunk in and yield its text."""
        report = event.get("speculation") or {}
        if drafted := report.get("num_drafted"):
            self.tally.stats.record(drafted, report.get("num_accepted", 0))
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
        # Until the usage comes; without reports nobody knows, and a chunk is taken for a token.
        self.tally.num_tokens += len(tokens) or bool(choices)
        if usage := event.get("usage"):
            self._settle(usage)

    def _settle(self, usage: Mapping[str, Any]) -> None:
        """What the server counted goes over what was counted here."""
        self.num_prompt_tokens = usage.get("prompt_tokens", 0)
        self.tally.num_tokens = usage.get("completion_tokens", self.tally.num_tokens)
        details = usage.get("prompt_tokens_details") or {}
        self.num_cached_tokens = details.get("cached_tokens") or 0
        if drafts := usage.get("speculation"):
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            per_pos = list(drafts.get("num_accepted_tokens_per_pos", ()))
            counts = {name: int(drafts.get(name, 0)) for name in names}
            self.tally.stats = SpeculationStats(**counts, num_accepted_tokens_per_pos=per_pos)

    def turn(self, ended: str) -> Turn:
        """The answer as it stands."""
        answer = self._texts[False]
        return Turn(
            reasoning=self._texts[True].strip(),
            answer=answer,
            facts=None if ended == "interrupt" else self._facts(answer),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            tally=self.tally,
            ended=ended,
        )

    def _facts(self, answer: str) -> dict[str, Any]:
        stats, first_s = self.tally.stats, self._first_s
        return {
            "text": answer,
            "finish_reason": self.finish_reason,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
            "acceptance_length": stats.acceptance_length,
            "num_cached_tokens": self.num_cached_tokens,
            "time_to_first_token_s": self.tally.seconds if first_s is None else first_s,
            "elapsed_s": self.tally.seconds,
        }
