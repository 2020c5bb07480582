"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.answers import EventStream, WholeAnswer
from peagle.serving.errors import ApiError
from peagle.serving.generation import Caller, Generation
from peagle.serving.logprobs import TextOffset, completion_logprobs, prompt_logprobs
from peagle.serving.params import completion_params
from peagle.serving.prompts import Prompts
from peagle.serving.protocol import CompletionBody
from peagle.serving.service import Service
from peagle.serving.usage import RunningUsage, report_of, usage_of


async def complete(service: Service, body: CompletionBody, caller: Caller) -> Response:
    """The answer to a completion request.

    Raises:
        ApiError: it cannot be served.
    """
    prompts, info = service.loaded()
    service.check_model(body.model)
    encoded = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    params = completion_params(body, info, max(map(len, encoded)))
    params = await service.encode_words(params)
    if body.stream and params.prompt_logprobs is not None:
        asked = "prompt_logprobs" if body.prompt_logprobs is not None else "echo with logprobs"
        raise ApiError(400, f"{asked} does not stream; leave stream or it out.", param="stream")
    generation = service.generation(encoded, params, body, caller)
    answer = _Completion(service.name, body, prompts, encoded, generation)
    return EventStream(answer.events()) if body.stream else WholeAnswer(answer.whole)


class _Completion:
    """One answer, whole or in events."""

    def __init__(
        self,
        model: str,
        body: CompletionBody,
        prompts: Prompts,
        encoded: list[list[int]],
        generation: Generation,
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._encoded = encoded
        self._generation = generation
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._report = body.speculation is not None and body.speculation.report
        self._n = generation.job.params.n
        self._only_prompt = body.max_tokens == 0
        self._offsets: dict[int, TextOffset] = {}
        self._running = RunningUsage(body.stream_options, [*map(len, encoded)])

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        await self._generation.finish()
        outputs = self._generation.outputs
        choices = [await self._choice(at[0], outputs[at]) for at in sorted(outputs)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def _choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        prompt = await self._prompt_text(prompt_index) if self._body.echo else ""
        text = prompt if self._only_prompt else prompt + output.text
        choice: dict[str, Any] = {
            "index": prompt_index * self._n + output.index,
            "text": text,
            "logprobs": self._logprobs(output, prompt),
            "finish_reason": self._finish_reason(output),
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            given = prompt_logprobs(output.prompt_logprobs, self._prompts.token_bytes)
            choice["prompt_logprobs"] = given
        return choice

    def _finish_reason(self, output: RequestOutput) -> str:
        return "length" if self._only_prompt else output.finish_reason

    def _logprobs(self, output: RequestOutput, prompt: str) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        own = [] if self._only_prompt else output.logprobs
        bytes_of = self._prompts.token_bytes
        if not self._body.echo or output.prompt_logprobs is None:
            return completion_logprobs(own, bytes_of, TextOffset(len(prompt)))
        first = output.prompt_token_ids[0]
        given = [*output.prompt_logprobs, *own]
        return completion_logprobs(given, bytes_of, TextOffset(), first)

    async def _prompt_text(self, prompt_index: int) -> str:
        given = self._body.prompt
        if isinstance(given, str):
            return given
        one = given[prompt_index] if len(self._encoded) > 1 else given[0]
        return (
            one if isinstance(one, str) else await self._prompts.decode(self._encoded[prompt_index])
        )

    def _usage(self) -> dict[str, Any]:
        outputs = self._generation.ordered
        echoed = 0 if self._only_prompt else None
        return usage_of(outputs, report=self._report, num_echoed=echoed)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes."""
        body, echoed = self._body, set[int]()
        async with aclosing(self._generation.chunks()) as chunks:
            async for prompt_index, chunk in chunks:
                if self._only_prompt:
                    chunk = replace(chunk, text="", token_ids=[], logprobs=[])
                index = prompt_index * self._n + chunk.output_index
                prompt = ""
                if body.echo and index not in echoed:
                    echoed.add(index)
                    prompt = await self._prompt_text(prompt_index)
                usage = self._running.add(prompt_index, chunk)
                if (event := self._event(index, chunk, prompt)) is not None:
                    yield event | ({"usage": usage} if self._running.is_wanted else {})
        options = body.stream_options
        if (options is not None and options.include_usage) or self._report:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _event(self, index: int, chunk: StreamChunk, prompt: str) -> dict[str, Any] | None:
        reason = self._finish_reason(chunk.output) if chunk.output else None
        text = prompt + chunk.text
        if not text and reason is None and not self._report and not chunk.logprobs:
            return None  # half a character: the next chunk brings it
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason}
        choice["logprobs"] = None
        if self._body.logprobs is not None and not self._only_prompt:
            offset = self._offsets.setdefault(index, TextOffset(len(prompt)))
            given = completion_logprobs(chunk.logprobs, self._prompts.token_bytes, offset)
            choice["logprobs"] = given
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._report:
            event["speculation"] = report_of(chunk, self._prompts.token_text)
        return event
