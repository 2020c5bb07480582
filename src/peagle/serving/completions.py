"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.responses import Response

from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.answers import EventStream, WholeAnswer
from peagle.serving.errors import ApiError
from peagle.serving.generation import Caller, Generation
from peagle.serving.generation_answer import GenerationAnswer, report_of, usage_of
from peagle.serving.logprobs import TextOffset, completion_logprobs, prompt_logprobs
from peagle.serving.params import completion_params
from peagle.serving.protocol import CompletionBody
from peagle.serving.service import Service
from peagle.serving.tokenizer import Tokenizer


async def complete(service: Service, body: CompletionBody, caller: Caller) -> Response:
    """The answer to a completion request.

    Raises:
        ApiError: it cannot be served.
    """
    tokenizer, info = service.loaded()
    service.check_model(body.model)
    encoded = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    params = completion_params(body, info, max(map(len, encoded)))
    params = await service.encode_words(params)
    if body.stream and params.prompt_logprobs is not None:
        asked = "prompt_logprobs" if body.prompt_logprobs is not None else "echo with logprobs"
        raise ApiError(400, f"{asked} does not stream; leave stream or it out.", param="stream")
    generation = service.generation(encoded, params, body, caller)
    answer = _Completion(service.name, body, tokenizer, generation)
    return EventStream(answer.events()) if body.stream else WholeAnswer(answer.whole)


class _Completion(GenerationAnswer):
    """A completion, whole or in events."""

    def __init__(
        self, model: str, body: CompletionBody, tokenizer: Tokenizer, generation: Generation
    ) -> None:
        super().__init__(model, body, tokenizer, generation, "cmpl", "text_completion")
        self._body = body
        self._n = generation.job.params.n
        self._only_prompt = body.max_tokens == 0
        self._offsets: dict[int, TextOffset] = {}
        self._echoed: set[int] = set()

    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        prompt = await self._prompt_text(prompt_index) if self._body.echo else ""
        text = prompt if self._only_prompt else prompt + output.text
        choice: dict[str, Any] = {
            "index": prompt_index * self._n + output.index,
            "text": text,
            "logprobs": self._logprobs(output, prompt),
            "finish_reason": self._finish_reason(output),
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            given = prompt_logprobs(output.prompt_logprobs, self.tokenizer.token_bytes)
            choice["prompt_logprobs"] = given
        return choice

    def _finish_reason(self, output: RequestOutput) -> str:
        return "length" if self._only_prompt else output.finish_reason

    def _logprobs(self, output: RequestOutput, prompt: str) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        own = [] if self._only_prompt else output.logprobs
        bytes_of = self.tokenizer.token_bytes
        if not self._body.echo or output.prompt_logprobs is None:
            return completion_logprobs(own, bytes_of, TextOffset(len(prompt)))
        first = output.prompt_token_ids[0]
        given = [*output.prompt_logprobs, *own]
        return completion_logprobs(given, bytes_of, TextOffset(), first)

    async def _prompt_text(self, prompt_index: int) -> str:
        given = self._body.prompt
        if isinstance(given, str):
            return given
        ids = self.generation.job.prompts
        one = given[prompt_index] if len(ids) > 1 else given[0]
        return one if isinstance(one, str) else await self.tokenizer.decode(ids[prompt_index])

    def usage(self) -> dict[str, Any]:
        echoed = 0 if self._only_prompt else None
        return usage_of(self.generation.ordered, report=self.report, num_echoed=echoed)

    def read(self, chunk: StreamChunk) -> StreamChunk:
        return replace(chunk, text="", token_ids=[], logprobs=[]) if self._only_prompt else chunk

    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        index = prompt_index * self._n + chunk.output_index
        prompt = ""
        if self._body.echo and index not in self._echoed:
            self._echoed.add(index)
            prompt = await self._prompt_text(prompt_index)
        reason = self._finish_reason(chunk.output) if chunk.output else None
        text = prompt + chunk.text
        if not text and reason is None and not self.report and not chunk.logprobs:
            return []  # half a character: the next chunk brings it
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason}
        choice["logprobs"] = None
        if self._body.logprobs is not None and not self._only_prompt:
            offset = self._offsets.setdefault(index, TextOffset(len(prompt)))
            given = completion_logprobs(chunk.logprobs, self.tokenizer.token_bytes, offset)
            choice["logprobs"] = given
        event: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.report:
            event["speculation"] = report_of(chunk, self.tokenizer.token_text)
        return [event]
