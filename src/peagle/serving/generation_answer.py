"""What the answers of completions and chats share: the head, the events, and the usage."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from peagle.engine import SpeculationStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.generation import Generation
from peagle.serving.logprobs import TokenText
from peagle.serving.protocol import SamplingFields, StreamOptions
from peagle.serving.tokenizer import Tokenizer


class GenerationAnswer(ABC):
    """The answer to a completion or a chat, as one object or in events.

    Args:
        model: its name, as clients know it.
        body: of the request.
        tokenizer: of the model.
        generation: gives the outputs.
        kind: the beginning of the answer's id.
        object: the answer's `object`.
    """

    def __init__(
        self,
        model: str,
        body: SamplingFields,
        tokenizer: Tokenizer,
        generation: Generation,
        kind: str,
        object: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.generation = generation
        self.report = body.speculation is not None and body.speculation.report
        self.head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": object,
            "created": int(time.time()),
            "model": model,
        }
        options = body.stream_options or StreamOptions()
        self._has_last_usage = options.include_usage or self.report
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        self._num_tokens: Counter[tuple[int, int]] = Counter()

    @abstractmethod
    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        """Return an output as one of the answer's choices."""

    @abstractmethod
    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Return the events of a chunk."""

    def read(self, chunk: StreamChunk) -> StreamChunk:
        """Return a chunk as clients get it."""
        return chunk

    def usage(self) -> dict[str, Any]:
        """Return the usage of the whole request."""
        return usage_of(self.generation.ordered, report=self.report)

    async def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        await self.generation.finish()
        outputs = self.generation.outputs
        choices = [await self.choice(at[0], outputs[at]) for at in sorted(outputs)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer as it comes."""
        async with aclosing(self.generation.chunks()) as chunks:
            async for prompt_index, given in chunks:
                chunk = self.read(given)
                usage = self._add_usage(prompt_index, chunk)
                for event in await self.chunk_events(prompt_index, chunk):
                    yield event | usage
        if self._has_last_usage:
            yield {**self.head, "choices": [], "usage": self.usage()}

    def _add_usage(self, prompt_index: int, chunk: StreamChunk) -> dict[str, Any]:
        """The usage of a choice up to this chunk, if the stream wants it in every chunk."""
        if not self._has_running_usage:
            return {}
        key = prompt_index, chunk.output_index
        self._num_tokens[key] += len(chunk.token_ids)
        prompt, completion = len(self.generation.job.prompts[prompt_index]), self._num_tokens[key]
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {"usage": {**counts, "total_tokens": prompt + completion}}


def usage_of(
    outputs: Iterable[RequestOutput], *, report: bool, num_echoed: int | None = None
) -> dict[str, Any]:
    """Tokens of a request, each prompt counted once; with `report` its drafts too.

    `num_echoed`: completion tokens to report instead of the generated ones, for a prompt alone.
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
        usage["speculation"] = speculation_of(outputs)
    return usage


def speculation_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Drafts made and accepted."""
    total = SpeculationStats.pooled(output.stats for output in outputs)
    return {
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "acceptance_length": round(total.acceptance_length, 4),
    }


def report_of(chunk: StreamChunk, text_of: TokenText) -> dict[str, Any]:
    """What a step drafted, and what became of it."""
    accepted = chunk.num_accepted
    return {
        "num_drafted": chunk.num_drafted,
        "num_accepted": accepted,
        "tokens": [[text_of(token), i < accepted] for i, token in enumerate(chunk.token_ids)],
        "rejected": [text_of(token) for token in chunk.rejected_token_ids],
    }
