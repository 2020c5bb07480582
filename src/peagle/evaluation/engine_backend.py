"""Our engine in this process, as a backend of an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.chat import opens_thinking, render_chat
from peagle.config import SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.acceptance import DecodedStep
from peagle.evaluation.compare import build, release
from peagle.evaluation.decoding import Answer, Request, Run, require_some
from peagle.llm import LLM, StreamChunk
from peagle.models.target import TargetModel


class EngineBackend:
    """An engine that answers requests; see `Backend`.

    Prompts are rendered and tokenised before the clock starts; the time of a chunk is when the
    engine's step that brought it ended.

    Args:
        llm: the engine; nothing else may run on it meanwhile.
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
        """Return the token ids of the prompt, behind the chat template if it is messages.

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
        """Return whether the prompt ends inside the model's reasoning."""
        return opens_thinking(self.llm.tokenizer, self.encode(request))

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        """Answer requests, as `Backend.run`.

        Where the engine refuses a request, for one because its prompt is too long, the answer has
        the reason as its `error`; the others go on.

        Raises:
            UserError: the concurrency is below 1, a request asks for several outputs, messages
                cannot be rendered, or the engine is busy; nothing is sent then.
        """
        require_some(concurrency)
        engine = self.llm.requests
        if engine.has_unfinished:
            raise UserError("This LLM is generating already; finish or close the other run first.")
        for request in requests:
            if request.params.n != 1:
                raise UserError(f"Request {request.id}: n is {request.params.n}; expected 1.")
        prompts = [self.encode(one) for one in requests]
        answers = [Answer(num_prompt_tokens=len(prompt)) for prompt in prompts]
        sent_s: dict[int, float] = {}  # of the requests in flight
        unsent = iter(range(len(requests)))

        def end(index: int) -> None:
            del sent_s[index]
            if watch is not None:
                watch(index, answers[index])

        def fill() -> None:
            while len(sent_s) < concurrency and (index := next(unsent, None)) is not None:
                sent_s[index] = time.perf_counter()
                try:
                    engine.add(index, prompts[index], requests[index].params)
                except UserError as error:
                    answers[index].error = str(error)
                    end(index)

        before = self.counters
        first = last = time.perf_counter()
        try:
            fill()
            while engine.has_unfinished:
                chunks = engine.step()
                last = time.perf_counter()
                for chunk in chunks:
                    _add_chunk(answers[chunk.index], chunk, last - sent_s[chunk.index])
                    if chunk.output is not None:
                        end(chunk.index)
                fill()
        finally:
            engine.cancel_all()
        return Run(answers, last - first, self.counters.since(before))


def _add_chunk(answer: Answer, chunk: StreamChunk, seconds: float) -> None:
    answer.steps = answer.steps or []
    answer.steps.append(DecodedStep(len(chunk.token_ids), chunk.num_drafted, chunk.num_accepted))
    answer.chunks.append((seconds, len(chunk.token_ids)))
    answer.texts.append(chunk.text)
    if (output := chunk.output) is not None:
        answer.text, answer.finish_reason = output.text, output.finish_reason
        answer.token_ids, answer.stats = output.token_ids, output.stats
        answer.num_tokens, answer.seconds = len(output.token_ids), seconds


@contextmanager
def open_engine(
    target: TargetModel,
    config: SpeculativeConfig | None,
    *,
    thinking: bool | None = None,
    **engine_options: Any,
) -> Iterator[EngineBackend]:
    """Build an engine on a target, as `compare.build` does, and free its memory at the end.

    Raises:
        UserError: a head does not fit the target, or an option is not usable.
    """
    yield EngineBackend(build(target, {"": config}, **engine_options)[""], thinking=thinking)
    release(target)
