"""Questions answered by an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from peagle.chat import opens_thinking, render_chat, split_thinking
from peagle.config import SamplingParams
from peagle.data.regenerate import Ask, Failure, RegeneratedAnswer
from peagle.errors import UserError
from peagle.llm import LLM, RequestOutput


class LocalAnswerer:
    """An LLM that answers questions (an `Answerer`); answers carry their tokens.

    Args:
        llm: the target, with or without a head.
        params: how it is sampled; the seed is each question's own.
        is_chat: render the chat template; else the question is completed as it stands.
        chat_template, thinking: as `peagle.chat.render_chat` has them.

    Raises:
        UserError: more than one output a question, or the template or an option of it is not
            usable.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        is_chat: bool,
        chat_template: str | Path | None = None,
        thinking: bool | None = None,
    ) -> None:
        if params.n != 1:
            raise UserError(f"n is {params.n}; a prompt has one response. Leave n out.")
        self.llm, self.params, self.is_chat = llm, params, is_chat
        self._chat_template, self._thinking = chat_template, thinking
        if is_chat:
            self._render(({"role": "user", "content": "Hello"},))
        # Some questions always wait, so that no place in the batch stays empty.
        self._capacity = 2 * llm.engine.config.max_num_seqs

    def answers(
        self, take: Callable[[], Ask | None]
    ) -> Iterator[tuple[Ask, RegeneratedAnswer | Failure]]:
        """Yield answers as they finish, and keep the engine's batch full."""
        requests = self.llm.requests
        under_way: dict[int, Ask] = {}
        number = 0
        try:
            while True:
                while len(under_way) < self._capacity and (ask := take()) is not None:
                    number += 1
                    try:
                        requests.add(number, self._prompt(ask), replace(self.params, seed=ask.seed))
                    except UserError as error:
                        yield ask, Failure(str(error))
                    else:
                        under_way[number] = ask
                if not under_way:
                    return
                for chunk in requests.step():
                    if chunk.output is not None:
                        yield under_way.pop(chunk.index), self._answer(chunk.output)
        finally:
            requests.cancel_all()

    def _render(self, messages: tuple) -> list[int]:
        return render_chat(
            self.llm.tokenizer,
            messages,
            chat_template=self._chat_template,
            thinking=self._thinking,
        )

    def _prompt(self, ask: Ask) -> list[int]:
        if self.is_chat:
            return self._render(ask.messages)
        return self.llm.requests.encode(ask.messages[-1]["content"])

    def _answer(self, output: RequestOutput) -> RegeneratedAnswer:
        reasoning, text = "", output.text
        if self.is_chat:
            opened = opens_thinking(self.llm.tokenizer, output.prompt_token_ids)
            reasoning, text = split_thinking(output.text, opened=opened)
        return RegeneratedAnswer(
            text,
            output.finish_reason,
            reasoning,
            len(output.token_ids),
            output.prompt_token_ids,
            output.token_ids,
        )
