"""Prompts of requests as token ids: the front end's use of the tokenizer.

Fast tokenizers must not be used from several threads at once, and a long prompt takes a while: one
thread does it all, and the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from peagle.chat import opens_thinking, render_chat, resolve_chat_template
from peagle.engine.detokenizer import token_bytes
from peagle.errors import UserError
from peagle.models.target import load_tokenizer

T = TypeVar("T")


class Prompts:
    """Encodes, renders and decodes for one model.

    Args:
        folder: of the model.
        chat_template: file or name of a template; None takes the model's, if there is one.

    Raises:
        UserError: the tokenizer does not load, or the template that was named is not usable.
    """

    def __init__(self, folder: str, chat_template: str | None = None) -> None:
        self.tokenizer = load_tokenizer(folder)
        is_file = chat_template is not None and Path(chat_template).is_file()
        self._template = Path(str(chat_template)) if is_file else chat_template
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peagle-tokenizer")
        self.template_source: str | None = None
        try:
            self.template_source = resolve_chat_template(self.tokenizer, self._template)
        except UserError:
            if chat_template is not None:
                raise

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

        def call() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._run(call)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> tuple[list[int], bool]:
        """Token ids of a conversation, and whether the answer begins inside its reasoning.

        Raises:
            UserError: as `peagle.chat.render_chat`.
        """

        def call() -> tuple[list[int], bool]:
            ids = render_chat(
                self.tokenizer,
                [_as_templates_read(message) for message in messages],
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                tools=tools,
            )
            return ids, opens_thinking(self.tokenizer, ids)

        return await self._run(call)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        ids = list(token_ids)
        text: Any = await self._run(lambda: self.tokenizer.decode(ids, skip_special_tokens=False))
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
        return token_bytes(self.tokenizer, token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; half a character shows as U+FFFD."""
        text: Any = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


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
