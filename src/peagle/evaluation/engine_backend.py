"""Engines on one loaded target: the backend of an evaluation, and timed runs."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.chat import opens_thinking, render_chat, resolve_chat_template
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.engine.detokenizer import split_output
from peagle.engine.drafting import draws_chain
from peagle.engine.memory_plan import free_and_total
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, DecodeCounts, Request, Run, require_some
from peagle.llm import LLM, StreamChunk
from peagle.models.target import TargetModel

WARM_UP_TOKENS = 16


# ---- engines ----


def build_llms(
    target: TargetModel,
    configurations: Mapping[str, SpeculativeConfig | None],
    **engine_options: Any,
) -> dict[str, LLM]:
    """Build one LLM for each configuration, all on the same target; None decodes plainly.

    Prefix caching is off unless asked for: repeated runs would find the KV of their prompts. On a
    GPU the engines share the free memory.

    Raises:
        UserError: a head does not fit the target, or an option is not usable.
    """
    options = {"enable_prefix_caching": False, **engine_options}
    most = options.get("gpu_memory_utilization", EngineConfig().gpu_memory_utilization)
    llms: dict[str, LLM] = {}
    for name, speculative in configurations.items():
        if (card := free_and_total(target.device)) is not None:
            # Each engine still to come gets an equal part of the memory that is left.
            in_use = 1 - card[0] / card[1]
            share = max(0.0, most - in_use) / (len(configurations) - len(llms))
            options["gpu_memory_utilization"] = in_use + share
        llms[name] = LLM(model=target, speculative_config=speculative, **options)
    return llms


def release(target: TargetModel) -> None:
    """Free the memory of a target's engines once no caller holds them."""
    target.drop_kv_caches()
    gc.collect()  # an engine and its parts refer to each other
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


# ---- timed runs ----


def time_requests(
    llm: LLM,
    prompts: Sequence[str | list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    watch: Callable[[StreamChunk], None] | None = None,
) -> Run:
    """Complete prompts and time the engine; `watch` gets every chunk, outside that time.

    The answers are in the order of the prompts, `params.n` for each.

    Raises:
        UserError: a prompt is empty or too long.
    """
    answers: dict[tuple[int, int], Answer] = {}
    seconds = 0.0
    stream = llm.stream(prompts, params)
    with _collections_paused():
        while True:
            start = time.perf_counter()
            chunk = next(stream, None)
            seconds += time.perf_counter() - start
            if chunk is None:
                break
            answer = answers.setdefault((chunk.index, chunk.output_index), Answer())
            _add_chunk(answer, chunk, seconds)
            if watch is not None:
                watch(chunk)
    return Run([answers[key] for key in sorted(answers)], seconds)


@contextmanager
def _collections_paused() -> Iterator[None]:
    """Pause garbage collection, as `timeit` does.

    A collection goes through all loaded objects and takes up to half a second, in one run of a few.
    The engine of a server does not go through them either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def warm_up(llms: Mapping[str, LLM], prompts: Sequence[str | list[int]]) -> None:
    """Run each engine for a few tokens: the first measurement would be slower otherwise."""
    for llm in llms.values():
        llm.generate(prompts, SamplingParams(max_tokens=WARM_UP_TOKENS))


# ---- the backend ----


class EngineBackend:
    """The backend that answers requests with an engine in this process; see `Backend`.

    Prompts are rendered and tokenised before the clock starts; the time of a chunk is the end of
    the engine's step that brought it. Nothing else may run on the engine meanwhile. Chat template
    and thinking mode are for messages, as in `peagle.chat.render_chat`.
    """

    name = "peagle"
    tells_steps = True

    def __init__(
        self, llm: LLM, *, chat_template: str | Path | None = None, thinking: bool | None = None
    ) -> None:
        self.llm = llm
        self.chat_template = chat_template
        self.thinking = thinking

    @property
    def counters(self) -> SpeculationStats:
        """Return the drafts that the engine made and accepted since it was built."""
        return self.llm.engine.speculation_stats.copy()

    def encode(self, request: Request) -> list[int]:
        """Return the token ids of the prompt; messages go through the chat template.

        Raises:
            UserError: the template cannot render the messages.
        """
        if isinstance(request.prompt, str):
            return self.llm.requests.encode(request.prompt)
        return render_chat(
            self.llm.tokenizer,
            request.prompt,
            tools=request.tools,
            chat_template=self.chat_template,
            thinking=self.thinking,
        )

    def answer_text(self, request: Request, answer: Answer) -> str:
        """Return the answer to a conversation without its reasoning."""
        tokenizer = self.llm.tokenizer
        opened = opens_thinking(tokenizer, self.encode(request))
        with_tools = bool(request.tools)
        source = resolve_chat_template(tokenizer, self.chat_template, with_tools=with_tools)
        return split_output(tokenizer, answer.text, answer.token_ids or [], source, opened=opened)[
            1
        ]

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        """Answer requests, as `Backend.run`.

        A request that the engine refuses, for one because its prompt is too long, has an answer
        with the reason as its `error`; the others go on. Where drawn chains may lead trees,
        requests go without their seeds, which would keep such chains away: the engine's seed and
        the order of the requests decide instead.

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
        speculative, prompts = self.llm.engine.speculative, [self.encode(one) for one in requests]

        def without_seed(params: SamplingParams) -> SamplingParams:
            free = replace(params, seed=None)
            return free if draws_chain(free, speculative) else params

        answers = [Answer(num_prompt_tokens=len(prompt)) for prompt in prompts]
        sent_s: dict[int, float] = {}  # by request in flight
        unsent = iter(range(len(requests)))

        def end(index: int) -> None:
            del sent_s[index]
            if watch is not None:
                watch(index, answers[index])

        def fill() -> None:
            while len(sent_s) < concurrency and (index := next(unsent, None)) is not None:
                sent_s[index] = time.perf_counter()
                try:
                    engine.add(index, prompts[index], without_seed(requests[index].params))
                except UserError as error:
                    answers[index].error = str(error)
                    end(index)

        before = self.counters
        first = last = time.perf_counter()
        with _collections_paused():
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
    drafts = chunk.num_drafted, chunk.num_accepted, chunk.draft_depth, chunk.text_from
    answer.steps.append(DecodeCounts(len(chunk.token_ids), *drafts))
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
    """Yield an engine on a target, built as by `build_llms`, and free its memory at the end.

    Raises:
        UserError: a head does not fit the target, or an option is not usable.
    """
    yield EngineBackend(build_llms(target, {"": config}, **engine_options)[""], thinking=thinking)
    release(target)
