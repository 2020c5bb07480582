"""`LLM`: load a target and a draft head, generate text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from peagle.bundled import BUNDLED
from peagle.chat import (
    ChatMessage,
    Message,
    opens_thinking,
    render_chat,
    split_thinking,
    with_answer,
)
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import EngineStats, LLMEngine
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.engine.requests import Prompt, Requests
from peagle.errors import CheckpointError, UserError
from peagle.models.loading import resolve_model, with_local_head
from peagle.models.target import TargetModel, load_tokenizer

ENGINES = ("peagle", "vllm")


def named_target(target: str | Path | None, model: str | Path | None) -> str | Path | None:
    """The target's name, under whichever of its two names it was given.

    Raises:
        UserError: both were.
    """
    if target is not None and model is not None:
        raise UserError(
            f"target is {str(target)!r} and model is {str(model)!r}; both name the target, leave "
            "one of them out."
        )
    return model if target is None else target


__all__ = ["LLM", "ChatOutput", "Prompt", "RequestOutput", "StreamChunk"]


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
        target: model folder or hub id, as "owner/name" or "owner/name@revision"; "bundled" or None
            takes the bundled code model.
        revision: branch, tag or commit of the target's hub id.
        speculative_config: how to draft: a SpeculativeConfig, a mapping or JSON text in vLLM's
            form; None decodes plainly.
        model: a target already loaded, in place of `target`; or what `target` takes, under the name
            that other engines have for it.
        engine: "peagle", or "vllm", with the arguments of `peagle.vllm_llm.VllmLLM`.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: a folder, a hub id, a head or an option is not usable.
    """

    def __new__(cls, *_: Any, engine: str = "peagle", **__: Any) -> LLM:
        """An LLM on the engine named."""
        if engine not in ENGINES:
            raise UserError(f"engine is {engine!r}; expected one of {', '.join(ENGINES)}.")
        if engine == "vllm" and cls is LLM:
            from peagle.vllm_llm import VllmLLM

            return object.__new__(VllmLLM)
        return object.__new__(cls)

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        revision: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        model: TargetModel | str | Path | None = None,
        engine: str = "peagle",
        **engine_options: Any,
    ) -> None:
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(engine_options) - known):
            raise UserError(
                f"Unknown engine option {unknown[0]!r}; known options: {', '.join(sorted(known))}."
            )
        config = EngineConfig(**engine_options)
        if isinstance(model, (str, Path)):
            target, model = named_target(target, model), None
        elif not isinstance(model, (TargetModel, NoneType)):
            raise UserError(
                f"model is of type {type(model).__name__}; expected a folder, a hub id, or a "
                "loaded TargetModel."
            )
        speculative = None
        if speculative_config is not None:
            speculative = with_local_head(SpeculativeConfig.parse(speculative_config))
        if model is None:
            device = resolve_device(config.device)
            folder = resolve_model(target or BUNDLED, revision)
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
        self.requests = Requests(self.engine, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together.

        Args:
            prompts: text, token ids, or a list of either.
            params: for all of them, or one each; None takes `default_params`.
            priority: for all of them, or one each; lower goes first.

        Returns:
            the outputs in the order of the prompts, `params.n` of each.

        Raises:
            UserError: a prompt is empty or too long, or parameters ask for what is not there;
                nothing is generated then.
        """
        outputs: dict[tuple[int, int], RequestOutput] = {}
        for chunk in self.stream(prompts, params, priority=priority):
            if chunk.output is not None:
                outputs[chunk.index, chunk.output_index] = chunk.output
        return [outputs[key] for key in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamChunk]:
        """Complete prompts, yielding each step's tokens as they come.

        Leaving the iterator early cancels what is unfinished. Arguments and errors as `generate`.
        """
        prompts = self._as_list(prompts)
        if params is None:
            params = self.default_params()
        every = each(params, SamplingParams, "sampling params", len(prompts))
        priorities = each(priority, int, "priorities", len(prompts))
        requests = self.requests
        if requests.has_unfinished:
            raise UserError(
                "This LLM is generating already; finish or close the other stream first, or make "
                "another LLM on the same model."
            )
        try:
            for index, prompt in enumerate(prompts):
                with _at(f"Prompt {index + 1} of {len(prompts)}"):
                    requests.add(index, prompt, every[index], priority=priorities[index])
            while requests.has_unfinished:
                yield from requests.step()
        finally:
            requests.cancel_all()

    def default_params(self) -> SamplingParams:
        """How the model asks to be sampled, in its generation_config; greedy if it does not.

        Its stop ids count for every request, whatever its params.

        Raises:
            CheckpointError: the generation_config has a value that is out of range.
        """
        try:
            return SamplingParams(**self.target.generation_defaults())
        except UserError as error:
            path = Path(self.target.name, "generation_config.json")
            raise CheckpointError(f"{path}: {error} Mend the file, or give params.") from None

    @property
    def stats(self) -> EngineStats:
        """How the engine stands, and what it did so far."""
        return self.engine.stats

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
        every = [params] if isinstance(params, SamplingParams) else params or ()
        if most := max((one.n for one in every if isinstance(one, SamplingParams)), default=1) - 1:
            raise UserError(f"n is {most + 1}; a conversation has one answer. Leave n out.")
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

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, Iterable):
            raise UserError(f"The prompts are {prompts!r}; expected text, token ids, or a list.")
        items: list[Any] = list(prompts)
        return [items] if items and isinstance(items[0], int) else items


def each(values: Any, kind: type, what: str, count: int) -> list[Any]:
    """One value for all, or a list of one each, as a list of one each.

    Raises:
        UserError: it is neither, or not one each.
    """
    listed = [values] * count if isinstance(values, kind) else values
    if not isinstance(listed, Sequence) or not all(isinstance(one, kind) for one in listed):
        raise UserError(f"The {what} are {values!r}; expected {kind.__name__}, or a list of them.")
    if len(listed) != count:
        raise UserError(f"{len(listed)} {what} for {count} prompts; expected one each.")
    return list(listed)


@contextmanager
def _at(which: str) -> Iterator[None]:
    """Let a user's mistake name the item of the list in which it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{which}: {error}") from None
