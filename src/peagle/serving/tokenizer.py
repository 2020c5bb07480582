"""The front end's tokenizer: prompts of requests as token ids.

A long text takes a while, and the event loop must go on: two threads, each with a tokenizer
of its own, take short and long texts, so that a short one never waits behind long ones. A text of
more characters than the context can hold is refused before any of this.
"""

import asyncio
import ctypes
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from peagle.chat import opens_thinking, render_chat, resolve_chat_template
from peagle.encoding import encode_text, share_special_tokens, special_tokens_of
from peagle.engine.detokenizer import OutputText, token_bytes
from peagle.engine.requests import word_ids
from peagle.errors import UserError
from peagle.markers import marker_token_ids
from peagle.models.target import load_tokenizer
from peagle.serving.errors import ApiError
from peagle.serving.limits import most
from peagle.thinking import AnswerSplitter

T = TypeVar("T")
# Characters, and half as many tokens, above which a text is a long one: some 20 ms of work.
_LONG = 16_384
_WATCH_S = 0.25


class Tokenizer:
    """Encodes, renders and decodes texts for one model, in threads.

    Args:
        chat_template: file or name of a template; None takes the model's, if there is one.
        parse_special_tokens: as `peagle.chat.render_chat` has it.

    Attributes:
        characters_per_token: the largest number in one token of the vocabulary.

    Raises:
        UserError: the tokenizer does not load, or the template that was named is not usable.
    """

    def __init__(
        self, folder: str, chat_template: str | None = None, *, parse_special_tokens: bool = False
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        is_file = chat_template is not None and Path(chat_template).is_file()
        self._template = Path(str(chat_template)) if is_file else chat_template
        # A thread, and the tokenizer that it alone encodes with.
        self._short = ThreadPoolExecutor(1, "peagle-tokenizer-short"), self.tokenizer
        self._long = ThreadPoolExecutor(1, "peagle-tokenizer-long"), load_tokenizer(folder)
        self.characters_per_token = max(map(len, self.tokenizer.get_vocab()))
        self._marker_token_ids: dict[tuple[tuple[str, ...], bool], tuple[int, ...]] = {}
        self.template_source: str | None = None
        try:
            self.template_source = resolve_chat_template(self.tokenizer, self._template)
        except UserError:
            if chat_template is not None:
                raise
        self._parse_special_tokens = parse_special_tokens
        if self.template_source is not None and not parse_special_tokens:
            share_special_tokens(self.tokenizer, self._long[1])
            special_tokens_of(self.tokenizer).prepare()

    async def _run(self, size: int, call: Callable[[PreTrainedTokenizerBase], T]) -> T:
        """Call a function with the tokenizer of the thread for so many characters."""
        thread, tokenizer = self._long if size > _LONG else self._short
        return await asyncio.get_running_loop().run_in_executor(thread, call, tokenizer)

    async def encode(
        self,
        text: str,
        max_model_len: int,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ApiError: 400, it has more characters than a context of `max_model_len` tokens holds.
        """
        self._check_length(text, max_model_len, param)
        return await self._run(
            len(text),
            lambda tokenizer: encode_text(tokenizer, text, add_special_tokens=add_special_tokens),
        )

    def _check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        limit = max_model_len * self.characters_per_token
        if len(text) > limit:
            what = "prediction" if param == "prediction" else "prompt"
            raise ApiError(
                400,
                f"The {what} has {len(text)} characters; expected at most {limit} (limit "
                f"prompt_characters): the model's context is {max_model_len} tokens, of "
                f"{self.characters_per_token} characters each at most. Shorten the {what}.",
                param=param,
                code="context_length_exceeded",
            )

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return bad words as token ids, each as at the start of a text and after a space.

        Raises:
            UserError: the tokenizer makes no token of a word.
        """
        found = await self._run(0, lambda tokenizer: word_ids(tokenizer, words))
        return [list(ids) for ids in found]

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
        """Return the ids of a conversation, and whether the answer begins inside its reasoning.

        Raises:
            UserError: as `peagle.chat.render_chat`; the template renders for too long.
            ApiError: as `encode`, of the rendered text.
        """
        limit = _TimeLimit(most("template_seconds"))

        def call(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], bool]:
            def check(text: str) -> None:
                limit.end()
                self._check_length(text, max_model_len, "messages")

            ids = limit.run(
                lambda: render_chat(
                    tokenizer,
                    messages,
                    chat_template=self._template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_kwargs=template_kwargs,
                    tools=tools,
                    parse_special_tokens=self._parse_special_tokens,
                    check_text=check,
                )
            )
            return ids, opens_thinking(tokenizer, ids)

        size = _num_characters(messages) + _num_characters(template_kwargs or {})
        rendering = asyncio.ensure_future(self._run(size, call))
        watching = asyncio.ensure_future(limit.watch(rendering))
        try:
            return await asyncio.shield(rendering)
        finally:
            if rendering.done():
                watching.cancel()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones included."""
        ids = list(token_ids)
        return await self._run(2 * len(ids), lambda tokenizer: _decode(tokenizer, ids))

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return `token_text` of each id."""
        return await self._run(
            2 * len(token_ids), lambda tokenizer: [_decode(tokenizer, [id]) for id in token_ids]
        )

    def marker_token_ids(self, names: tuple[str, ...], *, only_special: bool) -> tuple[int, ...]:
        """Return `markers.marker_token_ids` of this tokenizer."""
        asked = names, only_special
        if asked not in self._marker_token_ids:
            found = marker_token_ids(self.tokenizer, names, only_special=only_special)
            self._marker_token_ids[asked] = found
        return self._marker_token_ids[asked]

    async def num_reasoning(
        self,
        token_ids: list[int],
        marker_token_ids: tuple[int, ...],
        new_splitter: Callable[[], AnswerSplitter | None],
    ) -> int:
        """Return the number of tokens of an output up to the last one of its reasoning."""

        def call(tokenizer: PreTrainedTokenizerBase) -> int:
            def num_characters(num_tokens: int) -> int:
                text = OutputText(tokenizer, (), marker_token_ids).add(token_ids[:num_tokens]).text
                splitter = new_splitter()
                pieces = splitter.add(text) if splitter is not None else ()
                return sum(len(piece.text) for piece in pieces if piece.is_reasoning)

            counts = range(len(token_ids) + 1)
            return bisect_left(counts, num_characters(len(token_ids)), key=num_characters)

        return await self._run(2 * len(token_ids), call)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        return token_bytes(self.tokenizer, token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; half a character is U+FFFD."""
        return _decode(self.tokenizer, [token_id])


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Any:
    return tokenizer.decode(ids, skip_special_tokens=False)


class _OutOfTime(BaseException):
    """Ends a rendering; no template can catch it."""


class _TimeLimit:
    """Ends a call in another thread after some seconds.

    The exception is raised in the thread between two bytecodes, and in no other call than the one
    of `run`: both raising it and ending the call need the lock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_raised = False
        self._started = 0.0

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`; raise a UserError if it takes too long."""
        try:
            try:
                self._started = time.monotonic()
                self._thread = threading.get_ident()
                return call()
            except _OutOfTime:
                self._is_raised = False  # it has arrived
                raise
            finally:
                self.end()
        except _OutOfTime:
            raise UserError(
                f"The chat template rendered for more than {self._seconds} seconds (limit "
                "template_seconds); shorten the messages, or change chat_template_kwargs."
            ) from None

    def end(self) -> None:
        """Stop limiting: no exception is raised in the thread of `run` after this."""
        with self._lock:
            # Taking back what was never raised leaves Python 3.11 with a flag that slows it down,
            # and on which a traced call waits for ever.
            if self._thread is not None and self._is_raised:
                _raise_in(self._thread, None)
            self._thread = None

    async def watch(self, running: asyncio.Future[Any]) -> None:
        """Raise in the thread once the time is up, while `running` is not done."""
        while not running.done():
            await asyncio.wait({running}, timeout=_WATCH_S)
            with self._lock:
                if self._thread is not None and time.monotonic() - self._started > self._seconds:
                    _raise_in(self._thread, _OutOfTime)
                    self._is_raised = True
                    return


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    """Raise in a thread; None takes back an exception that has not been raised yet."""
    raised = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _num_characters(value: Any) -> int:
    """Count the characters of all strings in a JSON value, names of fields left out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0
