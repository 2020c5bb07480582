"""The backend that sends the requests of an evaluation to a server with OpenAI's interface."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from peagle.client.answers import ForeignAnswer, StreamedAnswer, error_message
from peagle.client.api import KEY_VARIABLE, ApiClient, key_from_environment
from peagle.client.counters import Counters, read_counters
from peagle.client.fields import sampling_fields, served_drafts
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request, Run, require_some
from peagle.evaluation.endpoint_answers import PROBLEMS, read_answer, stats_of
from peagle.evaluation.http_client import HttpClient, Reply, run_clients

KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Watch = Callable[[int, Answer], None]
T = TypeVar("T")

_USAGE = {"include_usage": True}
# Streams with the most detail come first; servers that know fewer options refuse or ignore them.
_STREAM_OPTIONS = ({**_USAGE, "continuous_usage_stats": True}, _USAGE, None)
_UNSENT_FIELDS = ("prompt_logprobs", "n")
_SETTLE_S, _SETTLE_LOOKS = 0.1, 20
# Seconds that one request waits in all for a server that limits the rate, and of one wait where
# the server names no time.
_MAX_WAIT_S, _MAX_BACKOFF_S = 120.0, 30.0


class EndpointBackend:
    """A server with OpenAI's interface that answers a limited number of requests at a time.

    Text goes to /v1/completions, messages to /v1/chat/completions, both streamed. A request's clock
    starts as it is written to an open connection, and a chunk came when its bytes did.

    The drafts of a run come from the counters at /metrics (vLLM's and ours), read before and after.
    Our server also reports the drafts and steps of each request if `report` is set.

    Args:
        url: like http://127.0.0.1:8000, with or without /v1 at its end.
        model: the server's name of the model; None takes the first that the server lists.
        or_first: take the first too where the server lists models, and `model` is none of them.
        api_key: None takes the variable PEAGLE_API_KEY, else OPENAI_API_KEY, else none.
        extra_body: further fields of every request, over those of its parameters.
        report: ask our server for the drafts of every step, which costs it a little time.
        timeout_s: limit of a request.
        option: the option or argument that names the URL, for messages.

    `models` are the names that the server lists, `facts` its entry for the model. `notes` name each
    missing feature once. A server that `is_plain` is not expected to draft.

    Raises:
        UserError: the URL or the key is not usable, no server answers, or it lacks the model.
    """

    tells_steps = False

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        or_first: bool = False,
        api_key: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        report: bool = True,
        timeout_s: float = 600.0,
        option: str = "--endpoint",
    ) -> None:
        self.name, self.option = url, option
        self.is_plain = False
        self.notes: list[str] = []
        key = key_from_environment(*KEY_VARIABLES) if api_key is None else api_key
        self._api = ApiClient(url, key, timeout_s=timeout_s, option=option)
        self._client = HttpClient(self._api.base, self._api.headers, timeout_s=timeout_s)
        self._report = report
        self._extra_body = dict(extra_body or {})
        self._stream_options: dict[str, Mapping[str, Any] | None] = {}
        listed = {str(one["id"]): one for one in self._api.models(may_lack_list=True)}
        self.models = list(listed)
        if model is None and not listed:
            raise UserError(
                f"{url} lists no models; name the one to ask (--model), or correct {option}."
            )
        if model is not None and listed and model not in listed:
            if not or_first:
                raise self._no_model(model)
            model = None
        self.model = self.models[0] if model is None else model
        self.facts = listed.get(self.model, {})

    # ---- facts of the server ----

    @property
    def is_ours(self) -> bool:
        """Return whether the server is `peagle serve`, which reports speculation by request."""
        return isinstance(self.facts.get("speculation"), dict)

    @property
    def privacy_fields(self) -> dict[str, bool]:
        """Return the fields that keep requests out of the traffic that our server records."""
        return {"store": False} if self.is_ours else {}

    @property
    def has_chat(self) -> bool | None:
        """Return whether the model can converse; None where the server does not say."""
        return self.facts.get("chat")

    def num_speculative_tokens(self) -> int | None:
        """Return K from the server's model list or counters: 0 without drafts, None if unknown.

        Raises:
            UserError: the server cannot be reached.
        """
        if self.is_ours:
            return served_drafts(self.facts)
        counters = self.counters()
        if counters is None:
            return None
        return 0 if counters.drafts is None else len(counters.drafts.num_accepted_tokens_per_pos)

    def counters(self) -> Counters | None:
        """Return the server's counters so far; None if it has no page of metrics.

        Raises:
            UserError: the server cannot be reached.
        """
        reply = self._api.call("GET", "/metrics")
        return read_counters(reply.text, self.model) if reply.status == 200 else None

    def _settled_counters(self) -> Counters | None:
        """Return the counters once they no longer change: servers write them after the tokens."""
        now = self.counters()
        for _ in range(_SETTLE_LOOKS):
            time.sleep(_SETTLE_S)
            before, now = now, self.counters()
            if now == before:
                break
        return now

    # ---- a run ----

    def run(self, requests: Sequence[Request], concurrency: int, watch: Watch | None = None) -> Run:
        """Answer `requests`, as `Backend.run`.

        A request that fails by itself has an answer with the reason as its `error`; the others go
        on. `counters` is None, with a note, where the server counts no drafts.

        Raises:
            UserError: the concurrency is below 1; a request has a parameter that is not sent to
                servers; the server cannot be reached, refuses the key or the model, goes away, is
                no server of completions, or answers none of the requests.
        """
        require_some(concurrency)
        for path in dict.fromkeys(_path(request) for request in requests):
            if path not in self._stream_options:
                self._stream_options[path] = self._blocking(self._agree(path))
        before = self.counters()
        run = self._blocking(self._answer(requests, concurrency, watch))
        if run.answers and all(answer.error for answer in run.answers):
            raise UserError(
                f"{self.name} answered none of {len(run.answers)} requests; the first: "
                f"{run.answers[0].error}"
            )
        return self._with_counters(run, before, self._settled_counters())

    async def _answer(
        self, requests: Sequence[Request], concurrency: int, watch: Watch | None
    ) -> Run:
        bodies = [json.dumps(self._body(request)).encode() for request in requests]
        num_done = 0
        watched: dict[int, Answer] = {}

        async def ask(index: int) -> Reply:
            nonlocal num_done
            reply = await self._client.send("POST", _path(requests[index]), bodies[index])
            if reply.problem == "refused":
                raise UserError(
                    f"{self.name} went away after {num_done} of {len(requests)} requests: "
                    f"{reply.reason}. Start it again and run the same command."
                )
            self._check(reply)
            num_done += 1
            if watch is not None:
                watched[index] = self._read(reply)
                watch(index, watched[index])
            return reply

        done = await run_clients(concurrency, range(len(requests)), ask)
        # Reading JSON takes time in which nothing is received: it waits unless progress is shown.
        run = Run([watched.get(i) or self._read(reply) for i, reply in enumerate(done)], 0.0)
        if done:
            run.seconds = max(one.ended_s for one in done) - min(one.sent_s for one in done)
        return run

    def _with_counters(self, run: Run, before: Counters | None, after: Counters | None) -> Run:
        if before is None or after is None:
            self._note("has no page /metrics: acceptance is not known, speed and texts are")
            return run
        if before.drafts is None or after.drafts is None:
            if not self.is_plain:
                self._note(
                    "counts no drafts at /metrics: acceptance is not known, speed and texts are"
                )
        elif after.drafts.num_drafts < before.drafts.num_drafts:
            self._note("was restarted during a run: its counters began anew")
        else:
            run.counters = stats_of(after.drafts.since(before.drafts))
        if before.num_tokens is not None and after.num_tokens is not None:
            own = sum(answer.num_tokens for answer in run.answers)
            others = after.num_tokens - before.num_tokens - own
            if others > own // 20 + 64 and not any(answer.error for answer in run.answers):
                self._note(
                    "answers others too: neither speed nor counters are those of a run alone"
                )
        return run

    async def _agree(self, path: str) -> Mapping[str, Any] | None:
        """Find out with requests of one token which stream options the server takes."""
        prompt = "Hi" if path == COMPLETIONS else [{"role": "user", "content": "Hi"}]
        request = Request("", prompt, SamplingParams(max_tokens=1))
        for options in _STREAM_OPTIONS:
            self._stream_options[path] = options
            reply = await self._client.send("POST", path, self._body(request))
            self._check(reply)
            if reply.problem == "refused":
                raise self._api.unreachable(reply.reason)
            if reply.status not in (400, 422):
                break
        else:  # the server refuses something else
            options = _STREAM_OPTIONS[0]
        if reply.status == 200:
            is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
            if not is_stream:
                self._note("does not stream: the time to the first token is that of the answer")
            elif not _has_token_counts(reply):
                self._note("does not tell the tokens of a chunk: they are estimated by characters")
        return options

    def _body(self, request: Request) -> dict[str, Any]:
        path = _path(request)
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if (options := self._stream_options[path]) is not None:
            body["stream_options"] = options
        body |= _fields(request) | self.privacy_fields
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
            if request.tools:
                body["tools"] = [dict(tool) for tool in request.tools]
        return {**body, **self._extra_body}

    def _read(self, reply: Reply) -> Answer:
        try:
            return read_answer(reply)
        except ForeignAnswer as error:
            raise self._api.foreign(str(error)) from None

    # ---- single requests ----

    def ask(self, path: str, bodies: Sequence[Any], concurrency: int = 1) -> list[Reply]:
        """Send bodies to a path, and return the whole answers in order, whatever their status.

        After an answer of status 429 the request waits as Retry-After says, and is sent again.

        Raises:
            UserError: the server cannot be reached, goes away, refuses the key, or still limits the
                rate after 120 s of waiting.
        """
        num_done = 0

        async def ask(body: Any) -> Reply:
            nonlocal num_done
            waited, tries = 0.0, 0
            while True:
                reply = await self._client.send("POST", path, body)
                if reply.problem:
                    reason = reply.reason or PROBLEMS[reply.problem]
                    raise UserError(
                        f"{self.name} went away after {num_done} of {len(bodies)} requests: "
                        f"{reason}. Start it again and run the same command."
                    )
                if reply.status in (401, 403):
                    raise self._api.refusal(reply.status, reply.body)
                if reply.status != 429:
                    num_done += 1
                    return reply
                pause = _pause(reply, tries)
                if waited + pause > _MAX_WAIT_S:
                    raise UserError(
                        f"{self.name} limits the rate (429: {error_message(reply.body)}) and asks "
                        f"for a wait of {pause:g} s after {waited:g} s; expected at most "
                        f"{_MAX_WAIT_S:g} s in all. Lower --concurrency, or raise the key's limit."
                    )
                await asyncio.sleep(pause)
                waited, tries = waited + pause, tries + 1

        return self._blocking(run_clients(concurrency, bodies, ask))

    # ---- errors ----

    def _check(self, reply: Reply) -> None:
        """Raise a UserError if every further request would fail in the same way."""
        if reply.status in (401, 403):
            raise self._api.refusal(reply.status, reply.body)
        if reply.status == 404:
            message = error_message(reply.body)
            raise UserError(f"{self._no_model(self.model)} It says: {message}")

    def _no_model(self, model: str) -> UserError:
        names = ", ".join(self.models) or "none that it lists"
        return UserError(f"{self.name} has no completions of a model {model!r}; it has: {names}.")

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


def _pause(reply: Reply, tries: int) -> float:
    """Return the seconds to wait after an answer of status 429, the `tries`-th of a request."""
    backoff = min(2.0**tries, _MAX_BACKOFF_S)
    try:
        # Waits grow even where the server asks for none.
        return max(backoff / 10, float(reply.headers.get("retry-after", "")))
    except ValueError:  # no such header, or a date
        return backoff


def _path(request: Request) -> str:
    return COMPLETIONS if isinstance(request.prompt, str) else CHAT


def _has_token_counts(reply: Reply) -> bool:
    answer = StreamedAnswer()
    try:
        events = [event for _, data in reply.events if (event := answer.read(data)) is not None]
    except ForeignAnswer:
        return True
    return any(event.choices and (event.usage or event.report) for event in events)


def _fields(request: Request) -> dict[str, Any]:
    """Return the parameters of a request as fields; the server chooses parameters at their default.

    Raises:
        UserError: a parameter is not sent to servers.
    """
    params = request.params
    given = [one.name for one in fields(params) if getattr(params, one.name) != one.default]
    if refused := [name for name in _UNSENT_FIELDS if name in given]:
        raise UserError(
            f"Request {request.id}: {refused[0]} is not asked of a server here; leave it out."
        )
    body = sampling_fields(params, given)
    if params.logprobs is not None:
        of_chat = {"logprobs": True, "top_logprobs": params.logprobs}
        body |= {"logprobs": params.logprobs} if _path(request) == COMPLETIONS else of_chat
    return {**body, "max_tokens": params.max_tokens, "temperature": params.temperature}
