"""Our engine in this process, as what answers the requests of an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.chat import opens_thinking, render_chat
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.acceptance import DecodedStep
from peagle.evaluation.decoding import Answer, Request, Run, require_some
from peagle.llm import LLM, StreamChunk

Watch = Callable[[int, Answer], None]


class EngineBackend:
    """An engine that answers requests, so many in flight at a time.

    Prompts are rendered and tokenised before the clock starts; the time of a chunk is when the
    engine's step that brought it ended.

    Args:
        llm: what decodes; nothing else may run on it meanwhile.
        chat_template: for messages, as `peagle.chat.render_chat` has it.
        thinking: for messages; None leaves it to the template.
    """

    name = "peagle"
    tells_steps = True

    def __init__(
        self,
        llm: LLM,
        *,
        chat_template: str | Path | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.llm = llm
        self.chat_template = chat_template
        self.thinking = thinking

    @property
    def counters(self) -> SpeculationStats:
        """Drafts that the engine made and accepted since it was built."""
        return self.llm.engine.speculation_stats.copy()

    def encode(self, request: Request) -> list[int]:
        """Token ids of the prompt, behind the chat template if it is messages.

        Raises:
            UserError: the template cannot render the messages.
        """
        if isinstance(request.prompt, str):
            return self.llm.requests.encode(request.prompt)
        return render_chat(
            self.llm.tokenizer,
            request.prompt,
            chat_template=self.chat_template,
            thinking=self.thinking,
        )

    def opens_thinking(self, request: Request) -> bool:
        """Whether the prompt ends inside the model's reasoning."""
        return opens_thinking(self.llm.tokenizer, self.encode(request))

    def run(self, requests: Sequence[Request], concurrency: int, watch: Watch | None = None) -> Run:
        """Answer `requests`, as `Backend.run`.

        A request that the engine refuses, for one because its prompt is too long, has an answer
        with the reason as its `error`; the others go on.

        Raises:
            UserError: the concurrency is below 1, a request asks for several outputs, messages
                cannot be rendered, or the engine is busy; nothing is sent then.
        """
        require_some(concurrency)
        if self.llm.requests.has_unfinished:
            raise UserError("This LLM is generating already; finish or close the other run first.")
        for request in requests:
            if request.params.n != 1:
                raise UserError(f"Request {request.id}: n is {request.params.n}; expected 1.")
        loop = _ClosedLoop(self.llm, requests, [self.encode(one) for one in requests], watch)
        before = self.counters
        seconds = loop.run(concurrency)
        return Run(loop.answers, seconds, self.counters.since(before))


class _ClosedLoop:
    """Sends the next request as one ends, and fills in their answers."""

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[Request],
        prompts: Sequence[list[int]],
        watch: Watch | None,
    ) -> None:
        self._running = llm.requests
        self._requests = requests
        self._prompts = prompts
        self._watch = watch
        self._sent_s: dict[int, float] = {}
        self._next = 0
        self.answers = [Answer(num_prompt_tokens=len(prompt)) for prompt in prompts]

    def run(self, concurrency: int) -> float:
        """Answer all of them; seconds from the first request to the last answer."""
        start = end = time.perf_counter()
        try:
            self._fill(concurrency)
            while self._running.has_unfinished:
                chunks = self._running.step()
                end = time.perf_counter()
                for chunk in chunks:
                    self._take(chunk, end)
                self._fill(concurrency)
        finally:
            self._running.cancel_all()
        return end - start

    def _fill(self, concurrency: int) -> None:
        while self._next < len(self._requests) and len(self._sent_s) < concurrency:
            index, self._next = self._next, self._next + 1
            self._sent_s[index] = time.perf_counter()
            try:
                self._running.add(index, self._prompts[index], self._requests[index].params)
            except UserError as error:
                self.answers[index].error = str(error)
                self._end(index)

    def _take(self, chunk: StreamChunk, now: float) -> None:
        answer = self.answers[chunk.index]
        if answer.steps is None:
            answer.steps = []
        answer.steps.append(
            DecodedStep(len(chunk.token_ids), chunk.num_drafted, chunk.num_accepted)
        )
        answer.chunks.append((now - self._sent_s[chunk.index], len(chunk.token_ids)))
        answer.texts.append(chunk.text)
        output = chunk.output
        if output is None:
            return
        answer.text, answer.finish_reason = output.text, output.finish_reason
        answer.token_ids, answer.stats = output.token_ids, output.stats
        answer.num_tokens = len(output.token_ids)
        answer.seconds = now - self._sent_s[chunk.index]
        self._end(chunk.index)

    def _end(self, index: int) -> None:
        del self._sent_s[index]
        if self._watch is not None:
            self._watch(index, self.answers[index])
