"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.answers import EventStream, WholeAnswer
from peagle.serving.errors import ApiError
from peagle.serving.generation import Caller, Generation
from peagle.serving.generation_answer import GenerationAnswer, report_of
from peagle.serving.logprobs import chat_logprobs, prompt_logprobs
from peagle.serving.params import as_api_error, chat_params
from peagle.serving.protocol import ChatBody
from peagle.serving.service import Service, tool_dicts
from peagle.serving.tokenizer import Tokenizer
from peagle.serving.tool_parsers import ToolCallParser, parser_for
from peagle.serving.tools import (
    CallDelta,
    Delta,
    check_tools,
    constraint,
    finish_reason,
    message_from,
)
from peagle.thinking import START, ThinkingSplitter

ToolChoice = str | dict[str, Any] | None


async def chat(service: Service, body: ChatBody, caller: Caller) -> Response:
    """The answer to a chat request.

    Raises:
        ApiError: it cannot be served.
    """
    generation, readers = await prepare(service, body, caller)
    answer = _Chat(service, body, generation, readers)
    return EventStream(answer.events()) if body.stream else WholeAnswer(answer.whole)


async def prepare(
    service: Service, body: ChatBody, caller: Caller
) -> tuple[Generation, AnswerReaders]:
    """A chat request ready to run, and what reads its outputs.

    Raises:
        ApiError: it cannot be served.
    """
    tokenizer, info = service.loaded()
    service.check_model(body.model)
    tools = tool_dicts(body.tools)
    choice = body.tool_choice
    tool_choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
    check_tools(tools, tool_choice)
    if tokenizer.template_source is None:
        raise ApiError(
            400,
            f"The model {service.name!r} has no chat template; use /v1/completions, or start the "
            "server with --chat-template FILE.",
            param="messages",
        )
    kwargs = _template_kwargs(body, tokenizer.template_source)
    ids, opened = await service.render(body, tools if tool_choice != "none" else [], kwargs)
    with as_api_error("tools"):
        forced = constraint(tools, tool_choice, body.parallel_tool_calls is not False)
    params = await service.encode_words(chat_params(body, info, len(ids), forced))
    if body.stream and params.prompt_logprobs is not None:
        text = "prompt_logprobs does not stream; leave one of the two out."
        raise ApiError(400, text, param="stream")
    generation = service.generation([ids], params, body, caller)
    return generation, AnswerReaders(tokenizer, opened, service.tool_parser(), tools, tool_choice)


def _template_kwargs(body: ChatBody, template_source: str) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in template_source:
            raise ApiError(
                400,
                f"reasoning_effort is {body.reasoning_effort!r}, and the chat template of this "
                "model reads no effort, so it would have no effect. Leave reasoning_effort out.",
                param="reasoning_effort",
            )
        given.setdefault("reasoning_effort", body.reasoning_effort)
    return given


class AnswerReaders:
    """Makes readers that separate reasoning, content and tool calls of an output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        opened: bool,
        kind: str,
        tools: list[dict[str, Any]],
        tool_choice: ToolChoice,
    ) -> None:
        self.thinks = opened or START in (tokenizer.template_source or "")
        self.opened = opened
        self.tool_choice = tool_choice
        self._kind, self._tools = kind, tools

    def make(self) -> AnswerReader:
        """One for an output."""
        splitter = ThinkingSplitter(opened=self.opened) if self.thinks else None
        return AnswerReader(splitter, parser_for(self._kind, self._tools, self.tool_choice))


class AnswerReader:
    """Takes the text of an output as it comes."""

    def __init__(self, splitter: ThinkingSplitter | None, parser: ToolCallParser) -> None:
        self._splitter = splitter
        self._parser = parser
        self.has_called = False

    def add(self, text: str, *, final: bool) -> tuple[str, list[Delta]]:
        """(new reasoning, new content and calls)."""
        if self._splitter is None:
            reasoning, answer = "", text
        else:
            pieces = list(self._splitter.add(text, final=final))
            reasoning = "".join(piece.text for piece in pieces if piece.is_reasoning)
            answer = "".join(piece.text for piece in pieces if not piece.is_reasoning)
        deltas = self._parser.add(answer, final=final)
        self.has_called |= any(isinstance(delta, CallDelta) for delta in deltas)
        return reasoning, deltas


class _Chat(GenerationAnswer):
    """The answer to a chat, whole or in events."""

    def __init__(
        self, service: Service, body: ChatBody, generation: Generation, readers: AnswerReaders
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service.name, body, service.loaded()[0], generation, "chatcmpl", kind)
        self._body = body
        self._tool_choice = readers.tool_choice
        self._readers = [readers.make() for _ in range(generation.job.params.n)]
        self._begun: set[int] = set()

    async def whole(self) -> dict[str, Any]:
        answer = await super().whole()
        if (given := self.generation.ordered[0].prompt_logprobs) is not None:
            answer["prompt_logprobs"] = prompt_logprobs(given, self.tokenizer.token_bytes)
        return answer

    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        reader = self._readers[output.index]
        reasoning, deltas = reader.add(output.text, final=True)
        content, calls = message_from(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message["reasoning"] = reasoning or None  # vLLM's name, always there
        if content is None and not calls:
            message["content"] = ""
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        given = output.logprobs
        return {
            "index": output.index,
            "message": message,
            "logprobs": None if given is None else chat_logprobs(given, self.tokenizer.token_bytes),
            "finish_reason": self._finish_reason(output, reader),
        }

    def _finish_reason(self, output: RequestOutput, reader: AnswerReader) -> str:
        return finish_reason(output.finish_reason, reader.has_called, self._tool_choice)

    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Return the role first, then the new deltas, and the reason at the end."""
        index, reader = chunk.output_index, self._readers[chunk.output_index]
        reasoning, new = reader.add(chunk.text, final=chunk.output is not None)
        deltas: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"role": "assistant", "content": ""})
        if reasoning:
            deltas.append({"reasoning_content": reasoning, "reasoning": reasoning})
        deltas += [delta.body() for delta in new]
        if not deltas and (self.report or chunk.logprobs):
            deltas.append({"content": ""})
        events = [self._event(index, delta) for delta in deltas]
        if chunk.output is not None:
            reason = self._finish_reason(chunk.output, reader)
            events.append(self._event(index, {}, reason))
        if events and chunk.logprobs and self._body.logprobs:
            given = chat_logprobs(chunk.logprobs, self.tokenizer.token_bytes)
            events[-1]["choices"][0]["logprobs"] = given
        if events and self.report:
            events[0]["speculation"] = report_of(chunk, self.tokenizer.token_text)
        return events

    def _event(
        self, index: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self.head, "choices": [choice]}
