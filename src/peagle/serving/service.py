"""The service behind all routes that generate: checks, encoding, and one request on its way."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from peagle.config import SamplingParams
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.errors import UserError, short_repr
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.markers import unmarked
from peagle.serving.config import ServerConfig
from peagle.serving.engine_pool import Deadline, EnginePool, EngineProcess
from peagle.serving.engine_process import EngineInfo
from peagle.serving.errors import ApiError
from peagle.serving.head_swap import HeadSwaps
from peagle.serving.keys import Lease
from peagle.serving.limits import check_calls
from peagle.serving.metrics import Failure, Metrics
from peagle.serving.protocol import (
    ChatBody,
    GenerationFields,
    TokenizeBody,
    as_api_error,
    check_context,
    refuse_grammars,
)
from peagle.serving.recording import Recorder
from peagle.serving.tokenizer import Tokenizer
from peagle.serving.tool_parsers import detect_parser
from peagle.serving.tracing import Tracing, span_attributes

logger = logging.getLogger("peagle.serving.generation")


@dataclass(slots=True)
class Service:
    """The model that is served.

    Attributes:
        name: the clients' name for the model.
        typed_name: the target as the user typed it, another name for requests, or None.
        proposers: names of the proposers; the first one is the default.
        recorder: records answers; None records none.
        swaps: swaps the head; None keeps it.
        tokenizer: None while it loads.
        is_draining: the server takes no new requests.
        num_open: number of answers under way.
    """

    config: ServerConfig
    name: str
    proposers: tuple[str, ...]
    pool: EnginePool
    metrics: Metrics
    tracing: Tracing | None = None
    recorder: Recorder | None = None
    swaps: HeadSwaps | None = None
    tokenizer: Tokenizer | None = None
    is_draining: bool = False
    num_open: int = 0
    typed_name: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_ready(self) -> bool:
        return bool(self.tokenizer and self.pool.ready and not self.is_draining)

    def loaded(self) -> tuple[Tokenizer, EngineInfo]:
        """Return the tokenizer and the facts of the engine.

        Raises:
            ApiError: 503, the model still loads, or the server drains.
        """
        if self.is_draining:
            text = "The server is about to stop and takes no new requests; try another one."
            raise ApiError(503, text, code="draining", headers={"Retry-After": "5"})
        info = self.pool.info
        if self.tokenizer is None or info is None:
            text = "The model is not loaded yet; try again shortly."
            raise ApiError(503, text, code="not_ready", headers={"Retry-After": "2"})
        return self.tokenizer, info

    def check_model(self, model: str | None) -> None:
        """Refuse another model's name with status 404."""
        if model not in (None, self.name, self.typed_name):
            raise ApiError(
                404,
                f"The model {short_repr(model)} is not served here; expected {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def tool_parser(self) -> str:
        """Return the name of the parser for tool calls in free output."""
        kind = self.config.tool_call_parser
        if kind != "auto":
            return kind
        source = self.tokenizer.template_source if self.tokenizer else None
        return detect_parser(source) if source else "none"

    def generation(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        body: GenerationFields,
        caller: Caller,
    ) -> Generation:
        """Return a request that is ready to run.

        Raises:
            ApiError: the proposer, its number of drafts, its correction or the grammar is refused.
        """
        if not self.config.user_grammars:
            refuse_grammars(body)
        proposer, changes = self._drafting(body, self.loaded()[1])
        priority = 0 if self.config.ignore_priority else body.priority
        if changes:  # checking every field anew takes its time
            with as_api_error("prediction"):
                params = replace(params, **changes)
        return Generation(self, prompts, params, proposer, priority, caller)

    def _drafting(self, body: GenerationFields, info: EngineInfo) -> tuple[str, dict[str, Any]]:
        """Return the proposer of a request, and the sampling parameters that its drafts set."""
        asked = body.speculation
        if asked is None:
            return self.proposers[0], {}
        name = asked.proposer or self.proposers[0]
        k = asked.num_speculative_tokens
        if name == "plain" and name not in self.proposers:
            name, k = self.proposers[0], 0
        if name not in self.proposers:
            names = ", ".join(dict.fromkeys([*self.proposers, "plain"]))
            raise ApiError(
                400,
                f"speculation.proposer is {short_repr(name)}; expected one of: {names}.",
                param="speculation.proposer",
            )
        most = info.num_speculative_tokens[name]
        if k is not None and not 0 <= k <= most:
            raise ApiError(
                400,
                f"speculation.num_speculative_tokens is {k}; expected 0 (no drafts) to {most}.",
                param="speculation.num_speculative_tokens",
            )
        known, correction = info.corrections.get(name, ()), asked.correction
        if correction not in (None, *known):
            expected = (
                f"one of: {', '.join(known)}" if known else f"none: {name} has no --correction"
            )
            raise ApiError(
                400,
                f"speculation.correction is {short_repr(correction)}; expected {expected}.",
                param="speculation.correction",
            )
        changes: dict[str, Any] = {} if asked.prompt_lookup else {"prompt_lookup": False}
        if correction is not None:
            changes["correction"] = correction
        return name, changes if k is None else changes | {"num_speculative_tokens": k}

    # ---- texts as token ids ----

    async def render(
        self,
        body: ChatBody | TokenizeBody,
        tools: list[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[int], bool]:
        """Return the token ids of a conversation, and whether the answer begins in its reasoning.

        Raises:
            ApiError: the messages or the template's arguments are wrong.
        """
        tokenizer, info = self.loaded()
        check_calls(body.messages or [], info.max_model_len)
        try:
            return await tokenizer.render(
                body.messages or [],
                info.max_model_len,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        except UserError as error:
            text = str(error).replace(" template_kwargs", " chat_template_kwargs")
            param = "chat_template_kwargs" if text != str(error) else "messages"
            raise ApiError(400, text, param=param) from None

    async def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of a completion's prompts: a text, ids, or a list of either.

        Raises:
            ApiError: a prompt is empty, too long, or has ids outside the vocabulary.
        """
        tokenizer, info = self.loaded()
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        items: Sequence[Any] = [prompt] if is_one else prompt
        if not isinstance(items[0], str):
            check_context(max(map(len, items)), 1, info.max_model_len)
        encoded: list[list[int]] = []
        for item in items:
            if isinstance(item, str):
                with as_api_error("prompt"):
                    item = await tokenizer.encode(
                        item, info.max_model_len, add_special_tokens=add_special_tokens
                    )
            encoded.append(list(item))
        for ids in encoded:
            if not ids:
                text = "The prompt is empty; expected a token at least."
                raise ApiError(400, text, param="prompt")
            wrong = next((i for i in ids if not 0 <= i < info.vocab_size), None)
            if wrong is not None:
                text = f"The prompt has the token id {wrong}; expected 0 to {info.vocab_size - 1}."
                raise ApiError(400, text, param="prompt")
        return encoded

    async def encode_texts(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with texts as token ids, so that no engine has to encode them.

        Raises:
            ApiError: the tokenizer makes no token of a bad word; the prediction is too long.
        """
        tokenizer, info = self.loaded()
        changes: dict[str, Any] = {}
        if texts := [word for word in params.bad_words if isinstance(word, str)]:
            with as_api_error("bad_words"):
                words = await tokenizer.encode_words(texts)
            changes["bad_words"] = tuple(map(tuple, words))
        if isinstance(text := params.prediction, str):
            changes["prediction"] = await tokenizer.encode(
                text, info.max_model_len, add_special_tokens=False, param="prediction"
            )
        return replace(params, **changes) if changes else params


# ---- one request ----


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the answer depends on it.

    Attributes:
        cache_salt: salt of the key and the request: only equal salts share cached KV.
        lease: the request's part of its key's budget.
        deadline: when the answer must have ended; None sets no limit.
        key_salt: salt of the key alone.
        is_recorded: the answer is to be recorded.
    """

    request_id: str
    route: str
    cache_salt: bytes = b""
    lease: Lease = field(default_factory=Lease)
    deadline: Deadline | None = None
    key_salt: bytes = b""
    is_recorded: bool = False

    @classmethod
    def of(
        cls,
        request: Request,
        body: GenerationFields,
        deadline: Deadline | None,
        recorder: Recorder | None = None,
    ) -> Caller:
        """Return the sender of a request; its own salt is combined with its key's salt."""
        state: dict[str, Any] = request.scope.get("state", {})
        key_salt: bytes = state.get("cache_salt", b"")
        request_id: str = state.get("request_id", "")
        # With max_tokens 0 the client gets its prompt alone.
        is_recorded = (
            recorder is not None
            and getattr(body, "max_tokens", None) != 0
            and recorder.wants(request_id, key_salt, body.store)
        )
        salt = key_salt
        if body.cache_salt:
            own = b""
            with suppress(UnicodeEncodeError):
                own = body.cache_salt.encode()
            salt = hashlib.sha256(salt + b"\0" + own).digest()
        lease = state.get("lease", Lease())
        path = request.url.path
        return cls(request_id, path, salt, lease, deadline, key_salt, is_recorded)


@dataclass(slots=True)
class Generation:
    """Runs the prompts of a request on one engine; counts, logs and traces them.

    Attributes:
        outputs: finished ones, in the order in which they ended, by (prompt, output) index. Only
            `finish` gives them log-probabilities.
    """

    service: Service
    prompts: list[list[int]]
    params: SamplingParams
    proposer: str
    priority: int
    caller: Caller
    outputs: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.perf_counter)
    _last: dict[tuple[int, int], float] = field(default_factory=dict)
    _first_s: float | None = None
    _num_tokens: int = 0

    async def chunks(self) -> AsyncGenerator[list[tuple[int, StreamChunk]], None]:
        """Yield chunks as (index of the prompt, chunk); leaving the iterator cancels the rest.

        Raises:
            ApiError: no room, no tokens left for the key, or an output ended by an error.
        """
        metrics, lease = self.service.metrics, self.caller.lease
        num_outputs = len(self.prompts) * self.params.n
        num_prompt_tokens = sum(map(len, self.prompts))
        failure: Failure | None = "cancelled"
        status = 499
        metrics.begins_to_wait(self)
        try:
            engine = self.service.pool.choose(num_outputs)
            lease.reserve(num_prompt_tokens + num_outputs * self.params.max_tokens)
            stream = self.service.pool.stream(
                engine,
                self.prompts,
                self.params,
                proposer=self.proposer,
                priority=self.priority,
                cache_salt=self.caller.cache_salt,
                deadline=self.caller.deadline,
            )
            async with aclosing(stream) as lists:
                async for chunks in lists:
                    for at, (index, chunk) in enumerate(chunks):
                        if (output := chunk.output) is not None and output.error is not None:
                            yield chunks[:at]
                            status = 400 if output.error_code == "grammar_too_slow" else 500
                            raise ApiError(status, output.error, code=output.error_code)
                        self._count(index, chunk, engine)
                    yield chunks
            failure, status = None, 200
            caller, recorder = self.caller, self.service.recorder
            if recorder is not None and caller.is_recorded:
                recorder.add(
                    caller.request_id, caller.key_salt, self.params.temperature, self.ordered
                )
        except ApiError as error:
            failure, status = failure_of(error.status), error.status
            error.is_counted = True
            raise
        except Exception:
            failure, status = "error", 500
            raise
        finally:
            metrics.waits_no_more(self)
            if failure is not None:
                metrics.failed(failure)
            lease.settle(num_prompt_tokens + self._num_tokens)
            self._report_end(num_prompt_tokens, status, failure)

    async def run_to_end(self) -> list[RequestOutput]:
        """Run to the end; return all outputs, by prompt, then by output.

        They have the log-probabilities of their tokens, and the first of each prompt has the
        prompt's.
        """
        logprobs: defaultdict[tuple[int, int], list[TokenLogprobs]] = defaultdict(list)
        async with aclosing(self.chunks()) as lists:
            async for chunks in lists:
                for index, chunk in chunks:
                    if chunk.logprobs:
                        logprobs[index, chunk.output_index] += chunk.logprobs
        if self.params.logprobs is not None:
            for key, output in self.outputs.items():
                self.outputs[key] = replace(output, logprobs=logprobs[key])
        return self.ordered

    @property
    def ordered(self) -> list[RequestOutput]:
        """Return the finished outputs, by prompt, then by output."""
        return [self.outputs[key] for key in sorted(self.outputs)]

    def _count(self, index: int, chunk: StreamChunk, engine: EngineProcess) -> None:
        metrics, now = self.service.metrics, time.perf_counter()
        key = index, chunk.output_index
        last = self._last.get(key)
        if last is None:
            metrics.first_token(now - self._start, engine=engine.number)
            self._first_s = self._first_s or now - self._start
            metrics.waits_no_more(self)
        else:
            metrics.chunk(now - last, len(chunk.token_ids), engine=engine.number)
        self._last[key] = now
        self._num_tokens += len(chunk.token_ids)
        if chunk.output is not None:
            self.outputs[key] = chunk.output
            metrics.finished(chunk.output, now - self._start, engine=engine.number)

    def _report_end(self, num_prompt_tokens: int, status: int, failure: Failure | None) -> None:
        """Write the log line, and complete the span."""
        outputs = list(self.outputs.values())
        attributes = span_attributes(self.caller.route, self.service.name, outputs)
        seconds = time.perf_counter() - self._start
        facts: dict[str, Any] = {
            "request_id": self.caller.request_id,
            "path": self.caller.route,
            "status": status,
            "seconds": round(seconds, 4),
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "acceptance_length": round(attributes["peagle.acceptance_length"], 3),
            "proposer": self.proposer,
        }
        if self.service.config.log_prompts:
            facts["log_prompts"] = {"output": [unmarked(output.text) for output in outputs]}
        logger.info(failure or "done", extra=facts)
        if self.service.tracing is None:
            return
        # Outputs that were left in the middle count too.
        attributes["gen_ai.usage.input_tokens"] = num_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = self._num_tokens
        if failure is not None:
            attributes["error.type"] = failure
        queue_s = min((output.queue_time_s for output in outputs), default=None)
        end_s = self._started_s + seconds
        self.service.tracing.describe(attributes, self._started_s, queue_s, self._first_s, end_s)


def failure_of(status: int) -> Failure:
    """Return the name of an error status in the metrics."""
    if status in (429, 503):
        return "refused"
    if status in (408, 504):
        return "timeout"
    return "invalid" if status < 500 else "error"
