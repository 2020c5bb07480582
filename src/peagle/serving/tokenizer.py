"""The front end's tokenizer: prompts of requests as token ids.

A long text takes a while, and the event loop goes on meanwhile: two threads, each with a tokenizer
of its own, take short and long texts, so that a short one never waits behind long ones. A text of
more characters than the context can hold is refused before any of this.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from peagle.chat import opens_thinking, render_chat, resolve_chat_template
from peagle.engine.detokenizer import token_bytes
from peagle.engine.requests import word_ids
from peagle.errors import UserError
from peagle.models.target import load_tokenizer
from peagle.serving.errors import ApiError
from peagle.serving.limits import most

T = TypeVar("T")
# Characters, and half as many tokens, above which a text is a long one: some 20 ms of work.
_LONG = 16_384
_WATCH_S = 0.25


class _Lane:
    """A thread and the tokenizer that it alone encodes with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"peagle-tokenizer-{name}")

    async def run(self, call: Callable[[PreTrainedTokenizerBase], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, call, self.tokenizer)


class Tokenizer:
    """Encodes, renders and decodes texts for one model, in threads.

    Args:
        folder: of the model.
        chat_template: file or name of a template; None takes the model's, if there is one.

    Attributes:
        characters_per_token: the largest number in one token of the vocabulary.

    Raises:
        UserError: the tokenizer does not load, or the template that was named is not usable.
    """

    def __init__(self, folder: str, chat_template: str | None = None) -> None:
        self.tokenizer = load_tokenizer(folder)
        is_file = chat_template is not None and Path(chat_template).is_file()
        self._template = Path(str(chat_template)) if is_file else chat_template
        self._short = _Lane(self.tokenizer, "short")
        self._long = _Lane(load_tokenizer(folder), "long")
        self.characters_per_token = max(map(len, self.tokenizer.get_vocab()))
        self.template_source: str | None = None
        try:
            self.template_source = resolve_chat_template(self.tokenizer, self._template)
        except UserError:
            if chat_template is not None:
                raise

    def _lane(self, size: int) -> _Lane:
        """The lane for so many characters."""
        return self._long if size > _LONG else self._short

    async def encode(
        self, text: str, max_model_len: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Raises:
            ApiError: 400, it has more characters than a context of `max_model_len` tokens holds.
        """
        self._check_length(text, max_model_len)
        return await self._lane(len(text)).run(
            lambda tokenizer: encode_text(tokenizer, text, add_special_tokens=add_special_tokens)
        )

    def _check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        limit = max_model_len * self.characters_per_token
        if len(text) > limit:
            raise ApiError(
                400,
                f"The prompt has {len(text)} characters; expected at most {limit} (limit "
                f"prompt_characters): the model's context is {max_model_len} tokens, of "
                f"{self.characters_per_token} characters each at most. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Bad words as token ids, each as it is written at the start of a text and after a space.

        Raises:
            UserError: a word is nothing to the tokenizer.
        """

        def call(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
            return [list(ids) for ids in word_ids(tokenizer, words)]

        return await self._short.run(call)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_model_len: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> tuple[list[int], bool]:
        """Token ids of a conversation, and whether the answer begins inside its reasoning.

        Raises:
            UserError: as `peagle.chat.render_chat`; the template renders for too long.
            ApiError: as `encode`, of the rendered text.
        """
        deadline = _Deadline(most("template_seconds"))

        def call(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], bool]:
            def encode(text: str) -> list[int]:
                deadline.end()
                self._check_length(text, max_model_len, "messages")
                return encode_text(tokenizer, text, add_special_tokens=False)

            ids = deadline.run(
                lambda: render_chat(
                    tokenizer,
                    [_as_templates_read(message) for message in messages],
                    chat_template=self._template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_kwargs=template_kwargs,
                    tools=tools,
                    encode=encode,
                )
            )
            return ids, opens_thinking(tokenizer, ids)

        size = _num_characters(messages) + _num_characters(template_kwargs or {})
        rendering = asyncio.ensure_future(self._lane(size).run(call))
        watching = asyncio.ensure_future(deadline.watch(rendering))
        try:
            return await asyncio.shield(rendering)
        finally:
            if rendering.done():
                watching.cancel()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        ids = list(token_ids)

        def call(tokenizer: PreTrainedTokenizerBase) -> Any:
            return tokenizer.decode(ids, skip_special_tokens=False)

        return await self._lane(2 * len(ids)).run(call)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """As `token_text`, of each."""

        def call(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
            return [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

        return await self._lane(2 * len(token_ids)).run(call)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        return token_bytes(self.tokenizer, token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; half a character shows as U+FFFD."""
        text: Any = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of `tokenizer.encode`, if possible without computing offsets.

    A fast tokenizer encodes a batch without holding the interpreter.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation or backend.padding:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    encoded = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoded[0].ids


class _OutOfTime(BaseException):
    """Ends a rendering; no template can catch it."""


class _Deadline:
    """Ends what runs in another thread after some seconds.

    The exception is raised in the thread between two bytecodes, and in no other call than the one
    of `run`: both raising it and ending the call need the lock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._started = 0.0

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns.

        Raises:
            UserError: it took too long.
        """
        try:
            try:
                self._started = time.monotonic()
                self._thread = threading.get_ident()
                return call()
            finally:
                self.end()
        except _OutOfTime:
            raise UserError(
                f"The chat template rendered for more than {self._seconds} seconds (limit "
                "template_seconds); shorten the messages, or change chat_template_kwargs."
            ) from None

    def end(self) -> None:
        """No exception comes after this, in the thread of `run`."""
        with self._lock:
            if (thread := self._thread) is not None:
                self._thread = None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    async def watch(self, running: asyncio.Future[Any]) -> None:
        """Raise in the thread once the time is up, while `running` is not done."""
        while not running.done():
            await asyncio.wait({running}, timeout=_WATCH_S)
            with self._lock:
                is_late = time.monotonic() - self._started > self._seconds
                if self._thread is not None and is_late:
                    raised = ctypes.py_object(_OutOfTime)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)
                    return


def _num_characters(value: Any) -> int:
    """Characters of all strings in a value of JSON; those of names of fields are left out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0


def _as_templates_read(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in the form that chat templates read.

    OpenAI's API has the arguments of tool calls as JSON text; templates write objects as JSON. What
    is no JSON object stays as it is. vLLM names reasoning `reasoning`, templates
    `reasoning_content`.
    """
    if isinstance(reasoning := message.get("reasoning"), str):
        message = {"reasoning_content": reasoning, **message}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_read_call(call) for call in calls]}


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
