"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    EventTemplate,
    GenerationAnswer,
    PromptLogprobsWriter,
    TextOffset,
    TokenNames,
    Written,
    event_bytes,
    report_of,
    usage_of,
)
from peagle.serving.errors import ApiError
from peagle.serving.protocol import (
    ChatBody,
    CompletionBody,
    SamplingFields,
    StreamOptions,
    as_api_error,
    chat_params,
    completion_params,
    tool_dicts,
)
from peagle.serving.service import Caller, Generation, Service
from peagle.serving.tool_parsers import ToolCallParser, parser_for
from peagle.serving.tools import (
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolChoiceDict,
    check_tools,
    constraint,
    finish_reason,
    merge_deltas,
    message_from,
)
from peagle.thinking import START, AnswerSplitter, Piece, ThinkingSplitter, family_splitter

_CHUNKS_AT_ONCE = 64  # chunks


class _Completions(GenerationAnswer):
    """The answer to a completion or a chat: `choices`, and the tokens used."""

    def __init__(
        self, service: Service, body: SamplingFields, generation: Generation, id: str, object: str
    ) -> None:
        super().__init__(is_stream=bool(body.stream))
        self.tokenizer, _ = service.loaded()
        self.generation = generation
        wanted = body.speculation.report if body.speculation is not None else False
        self.report = bool(wanted)
        self._has_trees = wanted == "trees"
        self.head = {
            "id": f"{id}-{uuid.uuid4().hex}",
            "object": object,
            "created": int(time.time()),
            "model": service.name,
        }
        options = body.stream_options or StreamOptions()
        self._has_last_usage = options.include_usage or self.report
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        self._num_tokens: Counter[tuple[int, int]] = Counter()
        self._templates: dict[Any, EventTemplate] = {}
        self.names = TokenNames(self.tokenizer.token_bytes, as_ids=body.return_tokens_as_token_ids)

    @abstractmethod
    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        """Return an output as one of the answer's choices."""

    @abstractmethod
    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""

    def report_event(self, chunk: StreamChunk) -> dict[str, Any]:
        """Return the drafts of a chunk under the key that events have them under."""
        text_of = self.tokenizer.token_text
        return {"speculation": report_of(chunk, text_of, has_tree=self._has_trees)}

    def read(self, chunk: StreamChunk) -> StreamChunk:
        """Return the part of a chunk that the client gets."""
        return chunk

    def usage(self) -> dict[str, Any]:
        return usage_of(self.generation.ordered, report=self.report)

    async def whole(self) -> dict[str, Any]:
        await self.generation.run_to_end()
        outputs = self.generation.outputs
        choices = [await self.choice(at[0], outputs[at]) for at in sorted(outputs)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.generation.chunks()) as lists:
            async for chunks in lists:
                for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
                    if start:  # a client that reads slowly has many
                        await asyncio.sleep(0)
                    some = chunks[start : start + _CHUNKS_AT_ONCE]
                    data = [await self.chunk_events(i, self.read(chunk)) for i, chunk in some]
                    yield b"".join(data)
        if self._has_last_usage:
            yield event_bytes({**self.head, "choices": [], "usage": self.usage()})

    def choice_events(self, choices: Iterable[dict[str, Any]], **others: Any) -> bytes:
        """Return an event for each choice, with other fields beside it."""
        return b"".join(
            event_bytes({**self.head, "choices": [choice], **others}) for choice in choices
        )

    def text_event(
        self,
        key: Any,
        make: Callable[[str], dict[str, Any]],
        text: str,
        others: dict[str, dict[str, int]],
    ) -> bytes:
        """Return the event of the choice `make(text)`, with `others` of `running_usage` beside it.

        All `make` of a key do the same.
        """
        counts = others.get("usage", {})
        template = self._templates.get(key)
        if template is None:

            def event(text: str, *numbers: Any) -> bytes:
                usage = {"usage": dict(zip(counts, numbers))} if counts else {}
                return self.choice_events([make(text)], **usage)

            template = self._templates[key] = EventTemplate(event, len(counts))
        return template(text, *counts.values())

    def running_usage(self, prompt_index: int, chunk: StreamChunk) -> dict[str, dict[str, int]]:
        """Return the usage of a choice up to this chunk, if the stream wants it in every chunk."""
        if not self._has_running_usage:
            return {}
        key = prompt_index, chunk.output_index
        self._num_tokens[key] += len(chunk.token_ids)
        prompt, completion = len(self.generation.prompts[prompt_index]), self._num_tokens[key]
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {"usage": {**counts, "total_tokens": prompt + completion}}


# ---- completions ----


async def complete(service: Service, body: CompletionBody, caller: Caller) -> GenerationAnswer:
    """Return the answer to a completion request.

    Raises:
        ApiError: the request cannot be served.
    """
    info = service.loaded()[1]
    service.check_model(body.model)
    encoded = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    params = completion_params(body, info, max(map(len, encoded)))
    params = await service.encode_texts(params)
    if body.stream and params.prompt_logprobs is not None:
        asked = "prompt_logprobs" if body.prompt_logprobs is not None else "echo with logprobs"
        raise ApiError(400, f"{asked} does not stream; leave stream or it out.", param="stream")
    return _Completion(service, body, service.generation(encoded, params, body, caller))


class _Completion(_Completions):
    def __init__(self, service: Service, body: CompletionBody, generation: Generation) -> None:
        super().__init__(service, body, generation, "cmpl", "text_completion")
        self._body = body
        self._n = generation.params.n
        self._only_prompt = body.max_tokens == 0
        self._offsets: dict[int, TextOffset] = {}
        self._echoed: set[int] = set()
        # By the index of the prompt.
        self._of_prompts: dict[int, Written] = {}
        self._echoes: dict[int, CompletionLogprobs] = {}
        self._has_only_text = not self.report and body.logprobs is None and not body.echo

    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        prompt = await self._prompt_text(prompt_index) if self._body.echo else ""
        choice: dict[str, Any] = {
            "index": prompt_index * self._n + output.index,
            "text": prompt if self._only_prompt else prompt + output.text,
            "logprobs": await self._logprobs(prompt_index, output, prompt),
            "finish_reason": self._finish_reason(output),
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await self._prompt_logprobs(prompt_index)
        return choice

    async def _prompt_logprobs(self, prompt_index: int) -> Written:
        """Return the log-probabilities of a prompt, which all its choices share."""
        if prompt_index not in self._of_prompts:
            given = self.generation.outputs[prompt_index, 0].prompt_logprobs
            writer = PromptLogprobsWriter(self.names)
            self._of_prompts[prompt_index] = await writer.write(given or ())
        return self._of_prompts[prompt_index]

    def _finish_reason(self, output: RequestOutput) -> str:
        return "length" if self._only_prompt else output.finish_reason

    async def _logprobs(
        self, prompt_index: int, output: RequestOutput, prompt: str
    ) -> Written | None:
        if output.logprobs is None:
            return None
        if self._body.echo:
            writer = (await self._echo(prompt_index)).copy()
        else:
            writer = CompletionLogprobs(self.names, TextOffset(len(prompt)))
        return await writer.write([] if self._only_prompt else output.logprobs)

    async def _echo(self, prompt_index: int) -> CompletionLogprobs:
        """Return the writer of a prompt's tokens, behind which each choice goes on."""
        if prompt_index not in self._echoes:
            first = self.generation.outputs[prompt_index, 0]
            writer = CompletionLogprobs(self.names, TextOffset(), first.prompt_token_ids[0])
            await writer.write(first.prompt_logprobs or ())
            self._echoes[prompt_index] = writer
        return self._echoes[prompt_index]

    async def _prompt_text(self, prompt_index: int) -> str:
        given = self._body.prompt
        if isinstance(given, str):
            return given
        ids = self.generation.prompts
        one = given[prompt_index] if len(ids) > 1 else given[0]
        return one if isinstance(one, str) else await self.tokenizer.decode(ids[prompt_index])

    def usage(self) -> dict[str, Any]:
        num_echoed = 0 if self._only_prompt else None
        return usage_of(self.generation.ordered, report=self.report, num_echoed=num_echoed)

    def read(self, chunk: StreamChunk) -> StreamChunk:
        return chunk._replace(text="", token_ids=[], logprobs=[]) if self._only_prompt else chunk

    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> bytes:
        index = prompt_index * self._n + chunk.output_index
        others: dict[str, Any] = self.running_usage(prompt_index, chunk)
        if self._has_only_text and chunk.output is None:
            if not chunk.text:
                return b""  # half a character: the next chunk brings it
            return self.text_event(index, lambda text: _choice(index, text), chunk.text, others)
        prompt = ""
        if self._body.echo and index not in self._echoed:
            self._echoed.add(index)
            prompt = await self._prompt_text(prompt_index)
        reason = self._finish_reason(chunk.output) if chunk.output else None
        text = prompt + chunk.text
        if not text and reason is None and not self.report and not chunk.logprobs:
            return b""
        logprobs = None
        if self._body.logprobs is not None and not self._only_prompt:
            offset = self._offsets.setdefault(index, TextOffset(len(prompt)))
            writer = CompletionLogprobs(self.names, offset)
            writer.add(chunk.logprobs)
            logprobs = writer.written()
        if self.report:
            others = {**self.report_event(chunk), **others}
        return self.choice_events([_choice(index, text, reason, logprobs)], **others)


def _choice(
    index: int, text: str, reason: str | None = None, logprobs: Written | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}


# ---- chat ----


async def answer_chat(service: Service, body: ChatBody, caller: Caller) -> GenerationAnswer:
    """Return the answer to a chat request.

    Raises:
        ApiError: the request cannot be served.
    """
    return _Chat(service, body, *await prepare_chat(service, body, caller))


async def prepare_chat(
    service: Service, body: ChatBody, caller: Caller
) -> tuple[Generation, list[AnswerReader]]:
    """Return the generation of a chat request, and a reader for each of its outputs.

    Raises:
        ApiError: the request cannot be served.
    """
    tokenizer, info = service.loaded()
    service.check_model(body.model)
    tools = tool_dicts(body.tools)
    choice = body.tool_choice
    tool_choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
    check_tools(tools, tool_choice)
    source = tokenizer.template_source
    if source is None:
        raise ApiError(
            400,
            f"The model {service.name!r} has no chat template; use /v1/completions, or start the "
            "server with --chat-template FILE.",
            param="messages",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in source:
            raise ApiError(
                400,
                f"reasoning_effort is {body.reasoning_effort!r}, and the chat template of this "
                "model reads no effort, so it would have no effect. Leave reasoning_effort out.",
                param="reasoning_effort",
            )
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    ids, is_reasoning = await service.render(body, tools if tool_choice != "none" else [], kwargs)
    with as_api_error("tools"):
        forced = constraint(tools, tool_choice, body.parallel_tool_calls is not False)
    params = chat_params(body, info, len(ids), forced)
    family = family_splitter(source)
    is_new = body.add_generation_prompt is not False and not body.continue_final_message
    if family is not None and params.structured_output is not None and is_new:
        name = tool_choice["function"]["name"] if isinstance(tool_choice, Mapping) else None
        opening = family.opening(name)
        ids += await tokenizer.encode(opening, info.max_model_len, add_special_tokens=False)
        params = chat_params(body, info, len(ids), forced)
    params = await service.encode_texts(params)
    if body.stream and params.prompt_logprobs is not None:
        text = "prompt_logprobs does not stream; leave one of the two out."
        raise ApiError(400, text, param="stream")

    def splitter() -> AnswerSplitter | None:
        if forced is not None:  # all text is calls, even where the prompt opened the reasoning
            return None
        thinks = is_reasoning or START in source
        return family_splitter(source) or (
            ThinkingSplitter(opened=is_reasoning) if thinks else None
        )

    readers = [
        AnswerReader(splitter, parser_for(service.tool_parser(), tools, tool_choice), tool_choice)
        for _ in range(params.n)
    ]
    if params.structured_output is None:
        params.marker_token_ids = tokenizer.marker_token_ids(
            readers[0].markers, only_special=family is None
        )
    return service.generation([ids], params, body, caller), readers


class AnswerReader:
    """Separates reasoning, content and tool calls in the growing text of one output.

    Args:
        new_splitter: makes a splitter, or None where the model does not reason.

    Attributes:
        markers: names of the marker tokens that the text should have.
    """

    def __init__(
        self,
        new_splitter: Callable[[], AnswerSplitter | None],
        parser: ToolCallParser,
        tool_choice: ToolChoiceDict,
    ) -> None:
        self.new_splitter = new_splitter
        self._splitter = splitter = new_splitter()
        # Whether all text is content.
        self._is_plain = splitter is None and type(parser) is ToolCallParser
        self.markers = (*(splitter.markers if splitter else ()), *parser.markers)
        self._parser = parser
        self._tool_choice = tool_choice
        self._has_called = False

    def add(self, text: str, *, final: bool) -> list[Delta]:
        """Return the new reasoning, content and calls, in the order of the text."""
        if self._is_plain:
            return [ContentDelta(text)] if text else []
        deltas: list[Delta] = []
        pieces = [Piece(text, is_reasoning=False)]
        if self._splitter is not None:
            pieces = list(self._splitter.add(text, final=final))
        for piece in pieces:
            if piece.is_reasoning:
                deltas.append(ReasoningDelta(piece.text))
            else:
                deltas += self._parser.add(piece.text)
        if final:
            deltas += self._parser.add("", final=True)
        self._has_called |= any(isinstance(delta, CallDelta) for delta in deltas)
        return merge_deltas(deltas)

    def finish_reason(self, output: RequestOutput) -> str:
        return finish_reason(output.finish_reason, self._has_called, self._tool_choice)


class _Chat(_Completions):
    def __init__(
        self, service: Service, body: ChatBody, generation: Generation, readers: list[AnswerReader]
    ) -> None:
        object = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, generation, "chatcmpl", object)
        self._has_logprobs = bool(body.logprobs)
        self._has_only_text = not self.report and not self._has_logprobs
        self._readers = readers
        self._begun: set[int] = set()

    async def whole(self) -> dict[str, Any]:
        answer = await super().whole()
        if (given := self.generation.ordered[0].prompt_logprobs) is not None:
            answer["prompt_logprobs"] = await PromptLogprobsWriter(self.names).write(given)
        return answer

    async def choice(self, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        reader = self._readers[output.index]
        deltas = reader.add(output.text, final=True)
        content, calls = message_from(deltas)
        reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
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
            "logprobs": None if given is None else await ChatLogprobs(self.names).write(given),
            "finish_reason": reader.finish_reason(output),
        }

    async def chunk_events(self, prompt_index: int, chunk: StreamChunk) -> bytes:
        """Return the role first, then the new deltas, and the reason at the end."""
        index, reader = chunk.output_index, self._readers[chunk.output_index]
        new = reader.add(chunk.text, final=chunk.output is not None)
        others: dict[str, Any] = self.running_usage(prompt_index, chunk)
        if self._has_only_text and chunk.output is None and index in self._begun:
            if not new:
                return b""
            if len(new) == 1 and not isinstance(new[0], CallDelta):
                kind = type(new[0])

                def choice(text: str) -> dict[str, Any]:
                    return _delta(index, kind(text).body())

                return self.text_event((index, kind), choice, new[0].text, others)
        deltas: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"role": "assistant", "content": ""})
        deltas += [delta.body() for delta in new]
        if not deltas and (self.report or chunk.logprobs):
            deltas.append({"content": ""})
        choices = [_delta(index, delta) for delta in deltas]
        if chunk.output is not None:
            choices.append(_delta(index, {}, reader.finish_reason(chunk.output)))
        if choices and chunk.logprobs and self._has_logprobs:
            writer = ChatLogprobs(self.names)
            writer.add(chunk.logprobs)
            choices[-1]["logprobs"] = writer.written()
        first = others
        if choices and self.report:
            first = {**self.report_event(chunk), **others}
        return self.choice_events(choices[:1], **first) + self.choice_events(choices[1:], **others)


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
