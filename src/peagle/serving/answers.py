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
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.serving.errors import ApiError

logger = logging.getLogger("peagle.serving")

_BYTES_AT_ONCE = 64 * 1024  # bytes of a whole answer
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
_RECORDED = [(b"x-peagle-recorded", b"true")]


class GenerationAnswer(Response, ABC):
    """An answer that takes a while: one JSON object, or server-sent events.

    The work is cancelled when the client disconnects. A stream waits for its first event before the
    answer begins, so that a refusal has its own status; a later error is an event.

    Attributes:
        end: what ends a stream.
        is_recorded: the answer is to be recorded; a header tells so.
    """

    end = b"data: [DONE]\n\n"
    is_recorded = False

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

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, *(_RECORDED if self.is_recorded else ())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_whole(self, send: Send) -> None:
        pieces = json_pieces(await self.whole())
        size = str(sum(map(len, pieces))).encode()
        await self._start(send, [(b"content-type", b"application/json"), (b"content-length", size)])
        start = length = 0
        for end, piece in enumerate(pieces, 1):
            length += len(piece)
            if length >= _BYTES_AT_ONCE or end == len(pieces):
                body, has_more = b"".join(pieces[start:end]), end < len(pieces)
                await send({"type": "http.response.body", "body": body, "more_body": has_more})
                start, length = end, 0
                if has_more:  # a client that reads fast would keep the event loop from others
                    await asyncio.sleep(0)

    async def _send_events(self, send: Send) -> None:
        has_started = False

        async def write(data: bytes) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                await self._start(send, _EVENTS)
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


class Written:
    """A part of an answer that is JSON already, in pieces that several answers may share."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces


def json_pieces(value: Any) -> list[bytes]:
    """Return the pieces of `to_json(value)`, where parts of the value are `Written`."""
    parts: list[Written] = []
    mark = uuid.uuid4().hex  # no client can have written it

    def place(part: Written) -> str:
        parts.append(part)
        return mark

    options: Any = {"separators": (",", ":"), "allow_nan": False, "default": place}
    try:
        data = json.dumps(value, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:
        parts.clear()
        data = json.dumps(value, **options).encode()
    first, *others = data.split(f'"{mark}"'.encode())
    pieces = [first]
    for part, after in zip(parts, others, strict=True):
        pieces += [*part.pieces, after]
    return pieces


def event_bytes(event: dict[str, Any]) -> bytes:
    """Return a server-sent event, named by its `type` if it has one."""
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return b"".join([name, b"data: ", *json_pieces(event), b"\n\n"])


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


# ---- usage ----


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
        length = round(total.acceptance_length, 4)
        usage["speculation"] = {**total.to_json(), "acceptance_length": length}
    return usage


def report_of(
    chunk: StreamChunk, text_of: Callable[[int], str], *, has_tree: bool = False
) -> dict[str, Any]:
    """Return the drafts of a step: which tokens were accepted, and which were rejected.

    With `has_tree` they include the tree of the step, if it was one: [text, row of the parent,
    whether the token is in the output] of each node. Row 0 is the token before the step, row i + 1
    is node i. `text_from` is there where the text drafts, see `StreamChunk`.
    """
    accepted = chunk.num_accepted
    facts: dict[str, Any] = {}
    if (tree := chunk.draft_tree) is not None:
        facts["draft_depth"] = tree.depth
        if has_tree:
            path = tree.path(chunk.token_ids[:accepted])
            nodes = enumerate(zip(tree.tokens, tree.parents, strict=True))
            facts["tree"] = [[text_of(token), parent, i in path] for i, (token, parent) in nodes]
    if chunk.text_from is not None:
        facts["text_from"] = chunk.text_from
    return {
        **facts,
        "num_drafted": chunk.num_drafted,
        "num_accepted": accepted,
        "tokens": [[text_of(token), i < accepted] for i, token in enumerate(chunk.token_ids)],
        "rejected": [text_of(token) for token in chunk.rejected_token_ids],
    }


# ---- log-probabilities ----

# One answer may hold millions of them. So they are written as JSON at once, not made into objects
# first, and between so many tokens the event loop goes on.
_TOKENS_AT_ONCE = 32

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

    def copy(self) -> TextOffset:
        """Return another counter that goes on from here."""
        other = TextOffset(self.value)
        other._decoder.setstate(self._decoder.getstate())
        return other


def _number(logprob: float) -> str:
    return repr(max(logprob, -9999.0))  # JSON has no -inf


def _name(data: bytes) -> str:
    r"""Return a token as text, or as "bytes:\xe2\x82" where it holds part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenNames:
    """Tokens as JSON has them; each is made once.

    Args:
        bytes_of: returns the bytes of a token.
        as_ids: name each token by its id, "token_id:5", as vLLM does.
    """

    def __init__(self, bytes_of: TokenBytes, *, as_ids: bool = False) -> None:
        self.bytes_of = cache(bytes_of)
        self._as_ids = as_ids
        self.name = cache(self._make_name)
        self.entry = cache(self._make_entry)

    def _make_name(self, token_id: int) -> str:
        if self._as_ids:
            return f'"token_id:{token_id}"'
        return _to_text(_name(self.bytes_of(token_id)))

    def _make_entry(self, token_id: int) -> tuple[str, str]:
        """Return an entry of chat completions up to its log-probability, and the rest of it."""
        numbers = ",".join(map(str, self.bytes_of(token_id)))
        return f'{{"token":{self.name(token_id)},"logprob":', f',"bytes":[{numbers}]'


class LogprobsWriter(ABC):
    """Writes log-probabilities as JSON in one of the forms that clients read."""

    def __init__(self, names: TokenNames) -> None:
        self.names = names
        self._entries: list[bytes] = []

    @abstractmethod
    def add(self, given: Iterable[TokenLogprobs | None]) -> None:
        """Add the next tokens; None stands for the first one of a prompt."""

    @abstractmethod
    def written(self) -> Written:
        """Return the JSON of all tokens so far."""

    async def write(self, given: Sequence[TokenLogprobs | None]) -> Written:
        """Add tokens, and let the event loop go on in between; return the JSON of all."""
        for start in range(0, len(given), _TOKENS_AT_ONCE):
            self.add(given[start : start + _TOKENS_AT_ONCE])
            await asyncio.sleep(0)
        return self.written()


class ChatLogprobs(LogprobsWriter):
    """The form of chat completions: an object for each token."""

    def add(self, given: Iterable[TokenLogprobs | None]) -> None:
        entry = self.names.entry
        written = []
        for one in given:
            assert one is not None, "a chat gives none of its prompt"
            tops = []
            for token_id, logprob in one.top:
                start, end = entry(token_id)
                tops.append(f"{start}{_number(logprob)}{end}}}")
            start, end = entry(one.token_id)
            own = f"{start}{_number(one.logprob)}{end}"
            written.append(f'{own},"top_logprobs":[{",".join(tops)}]}}')
        self._entries.append(",".join(written).encode())

    def written(self) -> Written:
        return Written(b'{"content":[', *_joined(self._entries), b'],"refusal":null}')


class CompletionLogprobs(LogprobsWriter):
    """The form of completions: lists side by side.

    Args:
        offset: where the first token begins; moved behind the last one.
        first: id of the first token of a prompt.
    """

    _LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, names: TokenNames, offset: TextOffset, first: int | None = None) -> None:
        super().__init__(names)
        self._offset = offset
        self._first = first
        self._lists: dict[str, list[bytes]] = {name: [] for name in self._LISTS}
        self._has_tops = False

    def copy(self) -> CompletionLogprobs:
        """Return another writer that goes on from here."""
        other = CompletionLogprobs(self.names, self._offset.copy(), self._first)
        other._lists = {name: list(pieces) for name, pieces in self._lists.items()}
        other._has_tops = self._has_tops
        return other

    def add(self, given: Iterable[TokenLogprobs | None]) -> None:
        name_of, bytes_of = self.names.name, self.names.bytes_of
        columns: dict[str, list[str]] = {name: [] for name in self._LISTS}
        for one in given:
            token_id = one.token_id if one is not None else self._first
            assert token_id is not None
            name = name_of(token_id)
            columns["tokens"].append(name)
            columns["text_offset"].append(str(self._offset.value))
            self._offset.add(bytes_of(token_id))
            if one is None:
                columns["token_logprobs"].append("null")
                columns["top_logprobs"].append("null")
                continue
            number = _number(one.logprob)
            columns["token_logprobs"].append(number)
            # Tokens may share their bytes: the token itself comes first, then the more likely ones.
            top = {name: number} if one.top else {}
            for other, logprob in one.top:
                top.setdefault(name_of(other), _number(logprob))
            self._has_tops |= bool(top)
            pairs = ",".join([f"{name}:{number}" for name, number in top.items()])
            columns["top_logprobs"].append(f"{{{pairs}}}")
        for name, column in columns.items():
            self._lists[name].append(",".join(column).encode())

    def written(self) -> Written:
        pieces: list[bytes] = []
        for name, column in self._lists.items():
            pieces.append(f'{"," if pieces else "{"}"{name}":'.encode())
            is_left_out = name == "top_logprobs" and not self._has_tops
            pieces += [b"null"] if is_left_out else [b"[", *_joined(column), b"]"]
        return Written(*pieces, b"}")


class PromptLogprobsWriter(LogprobsWriter):
    """vLLM's form of a prompt's: an object by token id for each token."""

    def add(self, given: Iterable[TokenLogprobs | None]) -> None:
        written = [self._entry(one) if one is not None else "null" for one in given]
        self._entries.append(",".join(written).encode())

    def _entry(self, one: TokenLogprobs) -> str:
        ranked = [(one.token_id, one.logprob, one.rank)]
        for rank, (token_id, logprob) in enumerate(one.top, 1):
            if token_id != one.token_id:
                ranked.append((token_id, logprob, rank))
        name = self.names.name
        fields = [
            f'"{token_id}":{{"logprob":{_number(logprob)},"rank":{rank},'
            f'"decoded_token":{name(token_id)}}}'
            for token_id, logprob, rank in ranked
        ]
        return f"{{{','.join(fields)}}}"

    def written(self) -> Written:
        return Written(b"[", *_joined(self._entries), b"]")


def _joined(pieces: Iterable[bytes]) -> list[bytes]:
    """Return pieces with a comma between each two that hold something."""
    joined: list[bytes] = []
    for piece in filter(None, pieces):
        joined += [b",", piece] if joined else [piece]
    return joined
