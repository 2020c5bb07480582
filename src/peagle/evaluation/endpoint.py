"""Any server with OpenAI's interface, as what answers the requests of an evaluation."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.counters import Counters, read_counters
from peagle.evaluation.decoding import Answer, Request, Run, require_some
from peagle.evaluation.endpoint_answers import ForeignAnswer, message_of, read_answer
from peagle.evaluation.http_client import HttpClient, Reply, at_most

API_KEY_VARIABLES = ("PEAGLE_API_KEY", "OPENAI_API_KEY")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Watch = Callable[[int, Answer], None]
T = TypeVar("T")

_USAGE = {"include_usage": True}
# Streams that tell most come first; servers that know less refuse them or leave them alone.
_STREAM_OPTIONS = ({**_USAGE, "continuous_usage_stats": True}, _USAGE, None)
_UNSENT = ("structured_output", "logprobs", "prompt_logprobs", "n")
_SETTLE_S, _SETTLE_LOOKS = 0.1, 20


class EndpointBackend:
    """A server with OpenAI's interface that answers requests, so many in flight at a time.

    Text goes to /v1/completions, messages to /v1/chat/completions, both streamed. A request's clock
    starts as it is written to a connection that stands, and a chunk came when its bytes did.

    Drafts of a run are told by the server's own counters at /metrics (those of vLLM and ours), read
    before and after; a request's own drafts and steps where the server is ours and `report` is set.

    Args:
        url: like http://127.0.0.1:8000, with or without /v1 at its end.
        model: its name there; None takes the first that the server lists.
        api_key: None takes the variable PEAGLE_API_KEY, else OPENAI_API_KEY, else none.
        extra_body: further fields of every request, over those of its parameters.
        report: ask our server for the drafts of every step, which costs it a little time.
        timeout_s: of a request.

    Attributes:
        name: the URL.
        model: the name that requests go to.
        facts: what the server lists of the model; {} if nothing.
        notes: what does not work here, each said once.

    Raises:
        UserError: the URL or the key is not usable, nobody answers there, or there is no such
            model.
    """

    tells_steps = False

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        report: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self.name = url
        self.notes: list[str] = []
        base, headers = url.rstrip("/").removesuffix("/v1"), _headers(api_key)
        try:
            self._client = HttpClient(base, headers, timeout_s=timeout_s)
        except ValueError:
            raise UserError(
                f"The endpoint is {url!r}; expected a URL like http://127.0.0.1:8000."
            ) from None
        self.model, self._listed = "", list[str]()
        self._report = report
        self._extra_body = dict(extra_body or {})
        self._stream_options: dict[str, Mapping[str, Any] | None] = {}
        listed = self._blocking(self._models())
        self.facts = self._find(model, listed)
        self.model = str(self.facts["id"]) if model is None else model
        self._listed = list(listed)

    # ---- what there is ----------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Whether this is `peagle serve`, which takes and tells of speculation per request."""
        return isinstance(self.facts.get("speculation"), dict)

    @property
    def has_chat(self) -> bool | None:
        """Whether the model can converse; None where the server does not say."""
        return self.facts.get("chat")

    def num_speculative_tokens(self) -> int | None:
        """K, as the server's list of models or its counters tell; 0 is no drafts, None unknown."""
        if self.is_ours:
            told = self.facts["speculation"]
            by_name = {one["name"]: one for one in told.get("proposers", ())}
            return int(by_name.get(told.get("default"), {}).get("num_speculative_tokens", 0))
        counters = self.counters()
        if counters is None:
            return None
        return 0 if counters.drafts is None else len(counters.drafts.num_accepted_tokens_per_pos)

    def counters(self) -> Counters | None:
        """What the server counted so far, drafts included; None if it has no page of metrics."""
        return self._blocking(self._counters())

    async def _counters(self) -> Counters | None:
        reply = await self._client.get("/metrics")
        if reply.status != 200 or reply.problem:
            return None
        return read_counters(reply.body.decode(errors="replace"), self.model)

    async def _settled(self) -> Counters | None:
        """The counters once they stand still: servers write them a moment after the tokens."""
        now = await self._counters()
        for _ in range(_SETTLE_LOOKS):
            await asyncio.sleep(_SETTLE_S)
            before, now = now, await self._counters()
            if now == before:
                break
        return now

    async def _models(self) -> dict[str, dict[str, Any]]:
        """Facts of the models by name; {} where the server lists none."""
        reply = await self._client.get("/v1/models")
        self._check(reply)
        if reply.status in (404, 405):
            return {}
        if reply.status >= 500:
            raise UserError(
                f"{self.name} is not ready ({reply.status}: {message_of(reply.body)}). Try again."
            )
        try:
            listed = reply.json["data"]
            return {str(facts["id"]): dict(facts) for facts in listed}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign(reply.body[:80].decode(errors="replace")) from None

    def _find(self, model: str | None, listed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        if not listed:
            if model is None:
                raise UserError(f"{self.name} lists no models; name the one to ask (--model).")
            return {}
        if model is not None and model not in listed:
            raise UserError(self._no_model(model, list(listed)))
        return next(iter(listed.values())) if model is None else listed[model]

    # ---- a run ------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request], concurrency: int, watch: Watch | None = None) -> Run:
        """Answer `requests`, as `Backend.run`.

        A request that fails by itself has an answer with the reason as its `error`; the others go
        on. `counters` is None, with a note, where the server counts no drafts.

        Raises:
            UserError: the concurrency is below 1; a request asks for what servers are not asked
                for here; the server cannot be reached, refuses the key or the model, goes away, is
                no server of completions, or answers none of the requests.
        """
        require_some(concurrency)
        return self._blocking(self._run(requests, concurrency, watch))

    async def _run(self, requests: Sequence[Request], concurrency: int, watch: Watch | None) -> Run:
        for path in dict.fromkeys(_path(request) for request in requests):
            if path not in self._stream_options:
                self._stream_options[path] = await self._agree(path)
        bodies = [json.dumps(self._body(request)).encode() for request in requests]
        before = await self._counters()
        replies: list[Reply] = []
        told: dict[int, Answer] = {}

        async def ask(index: int) -> Reply:
            reply = await self._client.send("POST", _path(requests[index]), bodies[index])
            if reply.problem == "refused":
                raise UserError(
                    f"{self.name} went away after {len(replies)} of {len(requests)} requests: "
                    f"{reply.reason}. Start it again and run the same command."
                )
            self._check(reply)
            replies.append(reply)
            if watch is not None:
                told[index] = self._read(reply)
                watch(index, told[index])
            return reply

        done = await at_most(concurrency, range(len(requests)), ask)
        after = await self._settled()
        # Reading JSON takes time in which nothing is received: it waits unless somebody watches.
        read = (told.get(i) or self._read(reply) for i, reply in enumerate(done))
        run = Run(list(read), 0.0)
        if done:
            run.seconds = max(one.ended_s for one in done) - min(one.sent_s for one in done)
        if done and all(answer.error for answer in run.answers):
            raise UserError(
                f"{self.name} answered none of {len(done)} requests; the first: "
                f"{run.answers[0].error}"
            )
        return self._with_counters(run, before, after)

    def _with_counters(self, run: Run, before: Counters | None, after: Counters | None) -> Run:
        if before is None or after is None:
            self._note("has no page /metrics: acceptance is not known, speed and texts are")
            return run
        if before.drafts is None or after.drafts is None:
            self._note("counts no drafts at /metrics: acceptance is not known, speed and texts are")
        elif after.drafts.num_drafts < before.drafts.num_drafts:
            self._note("was restarted during a run: its counters began anew")
        else:
            run.counters = after.drafts.since(before.drafts)
        if before.num_tokens is not None and after.num_tokens is not None:
            own = sum(answer.num_tokens for answer in run.answers)
            others = after.num_tokens - before.num_tokens - own
            if others > own // 20 + 64 and not any(answer.error for answer in run.answers):
                self._note(
                    "answers others too: neither speed nor counters are those of a run alone"
                )
        return run

    async def _agree(self, path: str) -> Mapping[str, Any] | None:
        """The stream options that the server takes, found with requests of one token."""
        prompt = "Hi" if path == COMPLETIONS else [{"role": "user", "content": "Hi"}]
        request = Request("", prompt, SamplingParams(max_tokens=1))
        for options in _STREAM_OPTIONS:
            self._stream_options[path] = options
            body = self._body(request)
            reply = await self._client.send("POST", path, body)
            self._check(reply)
            if reply.problem == "refused":
                raise self._unreachable(reply)
            if reply.status not in (400, 422):
                break
        else:  # whatever it refuses is none of these
            options = _STREAM_OPTIONS[0]
        if reply.status == 200:
            is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
            if not is_stream:
                self._note("does not stream: the time to the first token is that of the answer")
            elif not self._tells_tokens(reply):
                self._note("does not tell the tokens of a chunk: they are estimated by characters")
        return options

    def _tells_tokens(self, reply: Reply) -> bool:
        try:
            chunks = [chunk for chunk in reply.chunks if chunk.get("choices")]
        except ValueError:
            return True
        return any(chunk.get("usage") or chunk.get("speculation") for chunk in chunks)

    def _body(self, request: Request) -> dict[str, Any]:
        path = _path(request)
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if (options := self._stream_options[path]) is not None:
            body["stream_options"] = options
        body |= _fields(request)
        k = request.params.num_speculative_tokens
        if self.is_ours and (self._report or k is not None):
            body["speculation"] = {"report": self._report, "num_speculative_tokens": k}
        elif k is not None:
            raise UserError(
                f"K is {k}, but {self.name} decides on its own K; serve it with that K instead."
            )
        if isinstance(request.prompt, str):
            body["prompt"] = request.prompt
        else:
            body["messages"] = [dict(message) for message in request.prompt]
        return {**body, **self._extra_body}

    def _read(self, reply: Reply) -> Answer:
        try:
            return read_answer(reply)
        except ForeignAnswer as error:
            raise self._foreign(str(error)) from None

    # ---- errors -----------------------------------------------------------------------------

    def _check(self, reply: Reply) -> None:
        """Refuse to go on where all requests would fare likewise.

        Raises:
            UserError: saying why.
        """
        if reply.status in (401, 403):
            raise UserError(
                f"{self.name} refused the key ({reply.status}: {message_of(reply.body)}). Set the "
                f"variable {API_KEY_VARIABLES[0]} to one that it takes."
            )
        if reply.status == 404 and self.model:
            said = message_of(reply.body)
            raise UserError(f"{self._no_model(self.model, self._listed)} It says: {said}")
        if reply.status == 0 and not self.model:
            raise self._unreachable(reply)

    def _no_model(self, model: str, listed: list[str]) -> str:
        names = ", ".join(listed) or "none that it lists"
        return f"{self.name} has no completions of a model {model!r}; it has: {names}."

    def _unreachable(self, reply: Reply) -> UserError:
        reason = reply.reason or "it does not speak HTTP"
        return UserError(
            f"No server answers at {self.name}: {reason}. Start one, or correct the endpoint."
        )

    def _foreign(self, what: str) -> UserError:
        return UserError(
            f"{self.name} answered {what!r}, which is none of OpenAI's interface. Correct the "
            "endpoint; it takes the URL up to /v1."
        )

    def _note(self, text: str) -> None:
        note = f"{self.name} {text}"
        if note not in self.notes:
            self.notes.append(note)

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        async def alone() -> T:
            try:
                return await work
            finally:
                self._client.close()

        return asyncio.run(alone())


def _path(request: Request) -> str:
    return COMPLETIONS if isinstance(request.prompt, str) else CHAT


def _fields(request: Request) -> dict[str, Any]:
    """Parameters as fields of a request; those that have their default are left to the server.

    Raises:
        UserError: one is not asked of servers here.
    """
    params = request.params
    given = {
        field.name: value
        for field in fields(params)
        if (value := getattr(params, field.name)) != field.default
    }
    if refused := [name for name in _UNSENT if name in given]:
        raise UserError(
            f"Request {request.id}: {refused[0]} is not asked of a server here; leave it out."
        )
    given.pop("num_speculative_tokens", None)
    if bias := given.pop("logit_bias", None):
        # JSON has no infinity; -100 is what OpenAI's interface calls a ban.
        given["logit_bias"] = {str(token): max(value, -100.0) for token, value in bias}
    return {**given, "max_tokens": params.max_tokens, "temperature": params.temperature}


def _headers(api_key: str | None) -> dict[str, str]:
    source = "The key"
    for variable in API_KEY_VARIABLES:
        if api_key is None and os.environ.get(variable):
            # A server's own variable may hold several.
            api_key, source = os.environ[variable].partition(",")[0], variable
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise UserError(f"{source} has characters that no key has; expected ASCII text.")
    return {"Authorization": f"Bearer {api_key.strip()}"}
