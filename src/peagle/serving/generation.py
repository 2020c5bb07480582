"""One request of a client on its way: its prompts on an engine, its times in metrics and spans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from peagle.config import SamplingParams
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.deadline import Deadline
from peagle.serving.engine_pool import EnginePool, EngineProcess
from peagle.serving.errors import ApiError
from peagle.serving.metrics import Failure, Metrics
from peagle.serving.quotas import Lease
from peagle.serving.tracing import Tracing, span_attributes

logger = logging.getLogger("peagle.serving.generation")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the answer depends on it.

    Attributes:
        request_id: for logs and spans.
        route: that was asked.
        cache_salt: of the key and the request.
        lease: on what its key may use.
        deadline: until when the request must be answered; None: for ever.
    """

    request_id: str
    route: str
    cache_salt: bytes = b""
    lease: Lease = field(default_factory=Lease)
    deadline: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts to complete, all in the same way."""

    prompts: list[list[int]]
    params: SamplingParams
    proposer: str
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompts and the most that the outputs can have."""
        num_outputs = len(self.prompts) * self.params.n
        return self.num_prompt_tokens + num_outputs * self.params.max_tokens


@dataclass(slots=True)
class Generation:
    """Runs a job and watches it.

    Attributes:
        outputs: finished ones, in the order in which they ended, by (prompt, output) index.
    """

    pool: EnginePool
    metrics: Metrics
    tracing: Tracing | None
    model: str
    job: Job
    caller: Caller
    log_prompts: bool = False
    outputs: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.perf_counter)
    _last: dict[tuple[int, int], float] = field(default_factory=dict)
    _first_s: float | None = None
    _num_tokens: int = 0

    async def chunks(self) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """(index of the prompt, chunk) as they come; leaving the iterator cancels all of it.

        Raises:
            ApiError: as `EnginePool`.
        """
        failure: Failure | None = "cancelled"
        status = 499
        self.metrics.begins_to_wait(self)
        try:
            engine = self.pool.choose(len(self.job.prompts) * self.job.params.n)
            self.caller.lease.reserve(self.job.most_tokens)
            async with aclosing(self._merged(engine)) as merged:
                async for index, chunk in merged:
                    if chunk.output is not None and chunk.output.error is not None:
                        raise _error_of(chunk.output)
                    self._watch(index, chunk, engine)
                    yield index, chunk
            failure, status = None, 200
        except ApiError as error:
            failure, status = failure_of(error.status), error.status
            error.is_counted = True
            raise
        except Exception:
            failure, status = "error", 500
            raise
        finally:
            self.metrics.waits_no_more(self)
            if failure is not None:
                self.metrics.failed(failure)
            self.caller.lease.settle(self.job.num_prompt_tokens + self._num_tokens)
            self._report_end(status, failure)

    async def finish(self) -> list[RequestOutput]:
        """All outputs, by prompt, then by output."""
        async with aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass
        return self.ordered

    @property
    def ordered(self) -> list[RequestOutput]:
        """The finished outputs, by prompt, then by output."""
        return [self.outputs[key] for key in sorted(self.outputs)]

    def _stream(self, engine: EngineProcess, prompt: list[int]) -> AsyncIterator[StreamChunk]:
        job = self.job
        return self.pool.stream(
            engine,
            prompt,
            job.params,
            proposer=job.proposer,
            priority=job.priority,
            cache_salt=self.caller.cache_salt,
            deadline=self.caller.deadline,
        )

    async def _merged(self, engine: EngineProcess) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """The chunks of all prompts as they come."""
        prompts = self.job.prompts
        if len(prompts) == 1:
            async with aclosing(self._stream(engine, prompts[0])) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    yield 0, chunk
            return
        items: asyncio.Queue[tuple[int, StreamChunk | Exception | None]] = asyncio.Queue()

        async def pump(index: int, prompt: list[int]) -> None:
            try:
                async for chunk in self._stream(engine, prompt):
                    items.put_nowait((index, chunk))
                items.put_nowait((index, None))
            except Exception as error:
                items.put_nowait((index, error))

        tasks = [asyncio.ensure_future(pump(i, prompt)) for i, prompt in enumerate(prompts)]
        num_left = len(tasks)
        try:
            while num_left:
                index, item = await items.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, index: int, chunk: StreamChunk, engine: EngineProcess) -> None:
        now = time.perf_counter()
        key = index, chunk.output_index
        last = self._last.get(key)
        if last is None:
            self.metrics.first_token(now - self._start, engine=engine.number)
            self._first_s = self._first_s or now - self._start
            self.metrics.waits_no_more(self)
        else:
            self.metrics.chunk(now - last, len(chunk.token_ids), engine=engine.number)
        self._last[key] = now
        self._num_tokens += len(chunk.token_ids)
        if chunk.output is not None:
            self.outputs[key] = chunk.output
            self.metrics.finished(chunk.output, now - self._start, engine=engine.number)

    def _report_end(self, status: int, failure: Failure | None) -> None:
        """Write the log line, and complete the span."""
        outputs = list(self.outputs.values())
        attributes = span_attributes(self.caller.route, self.model, outputs)
        seconds = time.perf_counter() - self._start
        facts: dict[str, Any] = {
            "request_id": self.caller.request_id,
            "path": self.caller.route,
            "status": status,
            "seconds": round(seconds, 4),
            "prompt_tokens": self.job.num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "acceptance_length": round(attributes["peagle.acceptance_length"], 3),
            "proposer": self.job.proposer,
        }
        if self.log_prompts:
            facts["log_prompts"] = {"output": [output.text for output in outputs]}
        logger.info(failure or "done", extra=facts)
        if self.tracing is None:
            return
        # Outputs that were left in the middle count too.
        attributes["gen_ai.usage.input_tokens"] = facts["prompt_tokens"]
        attributes["gen_ai.usage.output_tokens"] = facts["completion_tokens"]
        if failure is not None:
            attributes["error.type"] = failure
        queue_s = min((output.queue_time_s for output in outputs), default=None)
        end_s = self._started_s + seconds
        self.tracing.describe(attributes, self._started_s, queue_s, self._first_s, end_s)


def _error_of(output: RequestOutput) -> ApiError:
    """Return the client's error for an output that ended with an error."""
    status = 400 if output.error_code == "grammar_too_slow" else 500
    return ApiError(status, output.error or "", code=output.error_code)


def failure_of(status: int) -> Failure:
    """Return the name of an error status in the metrics."""
    if status in (429, 503):
        return "refused"
    if status in (408, 504):
        return "timeout"
    return "invalid" if status < 500 else "error"
