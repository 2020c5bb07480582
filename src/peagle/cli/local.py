"""A chat model in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from peagle.chat import opens_thinking, render_chat, split_thinking
from peagle.cli.conversation import Messages, Turn
from peagle.cli.tally import Tally, drafts_of
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.llm import LLM, RequestOutput
from peagle.thinking import Piece, ThinkingSplitter


class LocalModel:
    """An LLM that answers conversations (a `ChatModel`).

    Args:
        llm: what answers.
        params: how.
        **template_options: of `peagle.chat.render_chat`.
    """

    def __init__(self, llm: LLM, params: SamplingParams, **template_options: Any) -> None:
        self.llm = llm
        self.params = params
        self.template_options = template_options

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.params.max_tokens

    @property
    def max_model_len(self) -> int:
        """Most tokens of a conversation."""
        return self.llm.engine.max_model_len

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 where nothing is drafted."""
        return drafts_of(self.llm)

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer as it comes, and return it; `stopped` is asked after every step.

        Raises:
            UserError: there is no room, or the template refuses the messages.
        """
        prompt = render_chat(self.llm.tokenizer, messages, **self.template_options)
        self._check_room(len(prompt))
        opened = opens_thinking(self.llm.tokenizer, prompt)
        written, tally, output = ThinkingSplitter(opened=opened), Tally(), None
        with closing(tally.watch(self.llm.stream([prompt], self.params))) as chunks:
            for chunk in chunks:
                output = chunk.output
                yield from written.add(chunk.text, final=output is not None)
                if output is None and stopped():
                    yield from written.add("", final=True)
                    break
        reasoning, answer = split_thinking(written.text, opened=opened)
        facts = None if output is None else output.to_json()
        num_cached = 0 if output is None else output.num_cached_tokens
        ended = self._ended(output, len(prompt) + tally.num_tokens)
        return Turn(reasoning, answer, facts, len(prompt), num_cached, tally, ended)

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise UserError(
                f"With this message the conversation has {num_tokens} tokens, and the context of "
                f"{self.max_model_len} has no room for an answer. Take turns back with /undo, "
                "begin anew with /new, or start with a larger --max-model-len."
            )

    def _ended(self, output: RequestOutput | None, num_tokens: int) -> str:
        if output is None:
            return "interrupt"
        is_full = num_tokens >= self.max_model_len
        return "context" if output.finish_reason == "length" and is_full else output.finish_reason
