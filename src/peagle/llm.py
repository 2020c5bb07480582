"""`LLM`: load a target and a draft head, generate text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED_TARGET
from peagle.chat import (
    ChatMessage,
    Message,
    opens_thinking,
    render_chat,
    split_thinking,
    with_answer,
)
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import LLMEngine, SpeculationStats
from peagle.engine import Sequence as EngineSequence
from peagle.engine.output_text import OutputText
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.errors import UserError
from peagle.models.loading import resolve_model, with_local_head
from peagle.models.target import TargetModel, load_tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        text: the output, without the end-of-text token or the stop string.
        token_ids: output tokens, the stop token or those of the stop string included.
        prompt_token_ids: the prompt as the model read it.
        finish_reason: "stop" or "length".
        stats: drafts made and accepted.
        elapsed_s: seconds from the call to the last token.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: SpeculationStats
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, the fields of `peagle generate --format json` without the id."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "num_drafts": self.stats.num_drafts,
            "num_draft_tokens": self.stats.num_draft_tokens,
            "num_accepted_tokens": self.stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": self.stats.num_accepted_tokens_per_pos,
            "acceptance_length": self.stats.acceptance_length,
            "elapsed_s": self.elapsed_s,
        }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One step's addition to one request.

    Attributes:
        index: of the prompt in the list given.
        text: new text; may be empty while a character is incomplete.
        token_ids: new tokens.
        num_accepted: how many of them came from the draft (the first ones).
        num_drafted: draft tokens that the step verified, 0 in a prompt pass.
        output: the finished request with its last chunk, None before.
    """

    index: int
    text: str
    token_ids: list[int]
    num_accepted: int
    num_drafted: int
    output: RequestOutput | None


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The answer to a conversation.

    Attributes:
        answer: what the model said, without its reasoning.
        reasoning: what stood between the thinking markers, "" if it did not think.
        messages: the conversation with the answer as its last message: the next turn goes on here.
        output: the request as `generate` gives it.
    """

    answer: str
    reasoning: str
    messages: list[dict[str, Any]]
    output: RequestOutput


class LLM:
    """A target, with or without a draft head, ready to generate.

    Args:
        target: model folder or hub id, as "owner/name" or "owner/name@revision"; None takes the
            bundled code model.
        revision: branch, tag or commit of the target's hub id.
        speculative_config: how to draft: a SpeculativeConfig, a mapping or JSON text in vLLM's
            form; None decodes plainly.
        model: a target already loaded, in place of `target`.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: a folder, a hub id, a head or an option is not usable.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        revision: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        model: TargetModel | None = None,
        **engine_options: Any,
    ) -> None:
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(engine_options) - known):
            raise UserError(
                f"Unknown engine option {unknown[0]!r}; known options: {', '.join(sorted(known))}."
            )
        config = EngineConfig(**engine_options)
        speculative = None
        if speculative_config is not None:
            speculative = with_local_head(SpeculativeConfig.parse(speculative_config))
        if model is None:
            device = resolve_device(config.device)
            folder = resolve_model(target or BUNDLED_TARGET, revision)
            dtype = resolve_dtype(config.dtype, device)
            model = TargetModel.load(folder, dtype=dtype, device=device)
        elif target is not None or revision is not None:
            raise UserError(
                f"A loaded model was given, and target {target!r}, revision {revision!r}; leave "
                "one or the other out."
            )
        elif (config.dtype, config.device) != ("auto", "auto"):
            raise UserError(
                f"A loaded model was given, and dtype {config.dtype!r}, device {config.device!r}; "
                f"it is {model.dtype} on {model.device}. Leave them out, or load it so."
            )
        self.target = model
        self.tokenizer = load_tokenizer(model.name)
        self.engine = LLMEngine(model, config, speculative)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together.

        Args:
            prompts: text, token ids, or a list of either.
            params: for all of them, or one each.

        Returns:
            one output a prompt, in order.

        Raises:
            UserError: a prompt is empty or too long; nothing is generated then.
        """
        prompts = self._as_list(prompts)
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for chunk in self.stream(prompts, params):
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
        return [output for output in outputs if output is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete prompts, yielding each step's tokens as they come.

        Leaving the iterator early cancels what is unfinished. Arguments and errors as `generate`.
        """
        prompts = self._as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"{len(params)} sampling params for {len(prompts)} prompts; expected one each."
            )
        for one in params:
            if not isinstance(one, SamplingParams):
                raise UserError(f"Sampling params are {one!r}; expected SamplingParams.")
        if self.engine.has_unfinished:
            raise UserError(
                "This LLM is generating already; finish or close the other stream first, or make "
                "another LLM on the same model."
            )
        start = time.perf_counter()
        running: dict[int, tuple[int, EngineSequence, OutputText]] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                with _at(f"Prompt {index + 1} of {len(prompts)}"):
                    sequence = self.engine.add_request(self.encode(prompt), one)
                running[sequence.seq_id] = (index, sequence, OutputText(self.tokenizer, one.stop))
            while running:
                for step in self.engine.step():
                    index, sequence, written = running[step.sequence.seq_id]
                    new = written.add(step.new_token_ids, final=sequence.is_finished)
                    if new.stopped:
                        self.engine.stop(sequence, len(step.new_token_ids) - new.num_tokens)
                    output = None
                    if sequence.is_finished:
                        del running[sequence.seq_id]
                        output = self._output(sequence, written.text, time.perf_counter() - start)
                    yield StreamChunk(
                        index,
                        new.text,
                        step.new_token_ids[: new.num_tokens],
                        min(step.num_accepted, new.num_tokens),
                        step.num_drafted,
                        output,
                    )
        finally:
            for _, sequence, _ in running.values():
                self.engine.cancel(sequence)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[ChatOutput]:
        """Answer conversations, batched together.

        Args:
            conversations: one list of messages, or several; a message is a `ChatMessage` or a
                mapping with role and content.
            params: for all of them, or one each.
            **template_options: `chat_template`, `thinking`, `continue_final_message`,
                `template_kwargs`, `tools`, ... as `peagle.chat.render_chat` has them.

        Returns:
            one answer a conversation, in order.

        Raises:
            UserError: a conversation, the template or an option of it is not usable; nothing is
                generated then.
        """
        if conversations and isinstance(conversations[0], ChatMessage | Mapping):
            conversations = [conversations]  # type: ignore[list-item]
        chats: Sequence[Sequence[Message]] = conversations  # type: ignore[assignment]
        prompts = []
        for index, messages in enumerate(chats):
            with _at(f"Conversation {index + 1} of {len(chats)}"):
                prompts.append(render_chat(self.tokenizer, messages, **template_options))
        return [
            self._chat_output(messages, prompt, output)
            for messages, prompt, output in zip(
                chats, prompts, self.generate(prompts, params), strict=True
            )
        ]

    def _chat_output(
        self, messages: Sequence[Message], prompt: list[int], output: RequestOutput
    ) -> ChatOutput:
        opened = opens_thinking(self.tokenizer, prompt)
        reasoning, answer = split_thinking(output.text, opened=opened)
        return ChatOutput(
            answer, reasoning, with_answer(messages, output.text, opened=opened), output
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            UserError: it is neither text nor a list of token ids.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return list(prompt)
        except TypeError:
            raise UserError(f"A prompt is {prompt!r}; expected text or token ids.") from None

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, Iterable):
            raise UserError(f"The prompts are {prompts!r}; expected text, token ids, or a list.")
        items: list[Any] = list(prompts)
        return [items] if items and isinstance(items[0], int) else items

    @staticmethod
    def _output(sequence: EngineSequence, text: str, elapsed_s: float) -> RequestOutput:
        assert sequence.finish_reason is not None
        return RequestOutput(
            text=text,
            token_ids=list(sequence.output_token_ids),
            prompt_token_ids=list(sequence.prompt_token_ids),
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
            elapsed_s=elapsed_s,
        )


@contextmanager
def _at(which: str) -> Iterator[None]:
    """Let a user's mistake name the item of the list in which it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{which}: {error}") from None
