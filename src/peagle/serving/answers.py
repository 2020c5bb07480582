"""Answers of the routes that generate: whole or as events, with usage and log-probabilities."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.engine import SpeculationStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.kernels.logprobs import TokenLogprobs
from peagle.serving.errors import ApiError

logger = logging.getLogger("peagle.serving")

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class GenerationAnswer(Response, ABC):
    """An answer that takes a while: one JSON object, or server-sent events.

    The work is cancelled when the client disconnects. A stream waits for its first event before the
    answer begins, so that a refusal has its own status; a later error is an event.

    Attributes:
        end: what ends a stream.
    """

    end = b"data: [DONE]\n\n"

    def __init__(self, *, is_stream: bool) -> None:
        self.is_stream = is_stream
        self.status_code = 200
        self.background = None

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes: server-sent events, all that came together at once."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that an error ends."""
        return error.body()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnection() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = self._send_events(send) if self.is_stream else self._send_whole(send)
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnection())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _send_whole(self, send: Send) -> None:
        body = to_json(await self.whole())
        size = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        has_started = False

        async def write(data: bytes) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with aclosing(self.events()) as events:
                async for data in events:
                    if data:
                        await write(data)
        except Exception as error:
            if not has_started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "The server failed; its log says why.", code="internal_error")
            await write(event_bytes(self.failed(error)))
        await send({"type": "http.response.body", "body": self.end})


_to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8, with half a surrogate pair as an escape."""
    text = _to_text(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event_bytes(event: dict[str, Any]) -> bytes:
    """Return a server-sent event, named by its `type` if it has one."""
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + to_json(event) + b"\n\n"


@cache
def _names(count: int) -> tuple[list[str], list[bytes], re.Pattern[bytes]]:
    """Return names of places in a template, their JSON, and what finds them: no event has them."""
    names = [uuid.uuid4().hex for _ in range(count)]
    places = [to_json(name) for name in names]
    return names, places, re.compile(b"(%b)" % b"|".join(places))


class EventTemplate:
    """An event of which only some values change: all else is written once.

    Args:
        make: returns the event of a text and of numbers.
        num_numbers: how many numbers there are.
    """

    def __init__(self, make: Callable[..., bytes], num_numbers: int = 0) -> None:
        names, places, pattern = _names(1 + num_numbers)
        literals = pattern.split(make(*names))
        self._order = [places.index(place) for place in literals[1::2]]
        self._form = b"%b".join(literal.replace(b"%", b"%%") for literal in literals[::2])

    def __call__(self, text: str, *numbers: int) -> bytes:
        """Return the event of these values."""
        values = to_json(text), *[b"%d" % number for number in numbers]
        return self._form % tuple([values[index] for index in self._order])


# ---- usage ---------------------------------------------------------------------------------------


def usage_of(
    outputs: Iterable[RequestOutput], *, report: bool, num_echoed: int | None = None
) -> dict[str, Any]:
    """Return the tokens of a request, each prompt counted once; with `report` its drafts too.

    `num_echoed`: completion tokens to report in place of the generated ones.
    """
    outputs = list(outputs)
    firsts = [output for output in outputs if output.index == 0]
    prompt = sum(len(output.prompt_token_ids) for output in firsts)
    completion = sum(len(output.token_ids) for output in outputs)
    completion = completion if num_echoed is None else num_echoed
    cached = sum(output.num_cached_tokens for output in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if report:
        total = SpeculationStats.pooled(output.stats for output in outputs)
        usage["speculation"] = {
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
            "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
            "acceptance_length": round(total.acceptance_length, 4),
        }
    return usage


def report_of(
    chunk: StreamChunk, text_of: Callable[[int], str], *, has_tree: bool = False
) -> dict[str, Any]:
    """Return the drafts of a step: which tokens were accepted, and which were rejected.

    With `has_tree` they include the tree of the step, if it was one: [text, row of the parent,
    whether the token is in the output] of each node. Row 0 is the token before the step, row i + 1
    is node i.
    """
    accepted = chunk.num_accepted
    facts: dict[str, Any] = {}
    if (tree := chunk.draft_tree) is not None:
        facts["draft_depth"] = tree.depth
        if has_tree:
            path = tree.path(chunk.token_ids[:accepted])
            nodes = enumerate(zip(tree.tokens, tree.parents, strict=True))
            facts["tree"] = [[text_of(token), parent, i in path] for i, (token, parent) in nodes]
    return {
        **facts,
        "num_drafted": chunk.num_drafted,
        "num_accepted": accepted,
        "tokens": [[text_of(token), i < accepted] for i, token in enumerate(chunk.token_ids)],
        "rejected": [text_of(token) for token in chunk.rejected_token_ids],
    }


# ---- log-probabilities ---------------------------------------------------------------------------

TokenBytes = Callable[[int], bytes]


class TextOffset:
    """Counts the characters of a text whose bytes come token by token.

    A token that holds part of a character has the offset at which that character begins.

    Attributes:
        value: number of complete characters so far.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        """Count the characters that these bytes complete."""
        self.value += len(self._decoder.decode(data))


def _number(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -inf


def _name(data: bytes) -> str:
    r"""Return a token as text, or as "bytes:\xe2\x82" where it holds part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(given: Sequence[TokenLogprobs], bytes_of: TokenBytes) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions: an object for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = bytes_of(token_id)
        return {"token": _name(data), "logprob": _number(logprob), "bytes": list(data)}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]}
        for one in given
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    given: Sequence[TokenLogprobs | None],
    bytes_of: TokenBytes,
    offset: TextOffset,
    first: int | None = None,
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions: lists side by side.

    Args:
        given: the tokens; None stands for the first token of a prompt, whose id is `first`.
        offset: where the first token begins; moved behind the last one.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in given:
        token_id = one.token_id if one is not None else first
        assert token_id is not None
        data = bytes_of(token_id)
        tokens.append(_name(data))
        offsets.append(offset.value)
        offset.add(data)
        if one is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_number(one.logprob))
        # Tokens may share their bytes: the token itself comes first, then the more likely ones.
        top = {tokens[-1]: _number(one.logprob)} if one.top else {}
        for other, logprob in one.top:
            top.setdefault(_name(bytes_of(other)), _number(logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    given: Sequence[TokenLogprobs | None], bytes_of: TokenBytes
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt in vLLM's form: an object by token id for each token."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        name = _name(bytes_of(token_id))
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": name}

    return [
        {str(id): entry(id, found.logprob, found.rank) for id, found in one.items()}
        if one is not None
        else None
        for one in given
    ]
