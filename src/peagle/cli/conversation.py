"""A conversation with a model: turns, and the slash commands about them. It needs no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.chat import opens_thinking, render_chat, split_thinking, with_answer
from peagle.cli.tally import Tally
from peagle.cli.thinking import Piece, ThinkingSplitter
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.llm import LLM, RequestOutput

Messages = list[dict[str, Any]]

HELP = """
/new        forget the conversation
/undo       take back the last turn
/stats      tokens, speed, drafts, and how full the context is
/save FILE  write the conversation as JSON
/exit       leave; Ctrl-D does the same
/help       this list
//text      say something that begins with a slash
Ctrl-C stops an answer; what there is of it stays in the conversation.
""".strip()


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    Attributes:
        reasoning: what a thinking model wrote before it.
        answer: the text.
        output: the request; None where the answer was stopped.
        num_prompt_tokens: of the whole conversation before it.
        tally: what it took.
        ended: "stop", "length", "context" (it is full) or "interrupt".
    """

    reasoning: str
    answer: str
    output: RequestOutput | None
    num_prompt_tokens: int
    tally: Tally
    ended: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation with this answer."""
        return self.num_prompt_tokens + self.tally.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were there already."""
        return 0 if self.output is None else self.output.num_cached_tokens


class Conversation:
    """Messages that grow by a turn at a time.

    Args:
        llm: what answers.
        params: how.
        system: the first message, if any.
        **template_options: of `peagle.chat.render_chat`.

    Attributes:
        messages: the conversation so far.
        turns: those in it.
        answered: all turns, those taken back or forgotten included.
        is_over: the user wants to leave.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None = None, **template_options: Any
    ) -> None:
        self.llm = llm
        self.params = params
        self.template_options = template_options
        self.system: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.messages: Messages = list(self.system)
        self.turns: list[Turn] = []
        self.answered: list[Turn] = []
        self.is_over = False

    # ---- turns ------------------------------------------------------------------------------

    def say(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Say something and yield the answer as it comes; the conversation then has both.

        Stopped before there is an answer, it has neither.

        Args:
            text: the user's.
            stopped: asked after every step; True ends the answer there.

        Raises:
            UserError: there is no room, or the template refuses the text. The conversation stays as
                it was.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = render_chat(self.llm.tokenizer, asked, **self.template_options)
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
        ended = self._ended(output, len(prompt) + tally.num_tokens)
        turn = Turn(reasoning, answer, output, len(prompt), tally, ended)
        self.answered.append(turn)
        if answer or ended != "interrupt":
            self.turns.append(turn)
            self.messages = with_answer(asked, written.text, opened=opened)

    @property
    def last(self) -> Turn:
        """The turn that was just answered."""
        return self.answered[-1]

    def _check_room(self, num_tokens: int) -> None:
        longest = self.llm.engine.max_model_len
        if num_tokens >= longest:
            raise UserError(
                f"With this message the conversation has {num_tokens} tokens, and the context of "
                f"{longest} has no room for an answer. Take turns back with /undo, begin anew with "
                "/new, or start with a larger --max-model-len."
            )

    def _ended(self, output: RequestOutput | None, num_tokens: int) -> str:
        if output is None:
            return "interrupt"
        is_full = num_tokens >= self.llm.engine.max_model_len
        return "context" if output.finish_reason == "length" and is_full else output.finish_reason

    # ---- slash commands ---------------------------------------------------------------------

    def command(self, line: str) -> str:
        """Do what a slash command says and return what there is to tell.

        Raises:
            UserError: there is no such command, or it cannot be done.
        """
        name, _, argument = line.strip().partition(" ")
        commands: dict[str, Callable[..., str]] = {
            "/new": self.new,
            "/undo": self.undo,
            "/stats": self.stats,
            "/save": self.save,
            "/exit": self.exit,
            "/help": lambda: HELP,
        }
        if name not in commands:
            near = get_close_matches(name, commands, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"There is no command {name!r}; {hint}/help lists them. To say it to the model, "
                "begin with two slashes."
            )
        if name == "/save":
            return self.save(argument.strip())
        if argument.strip():
            raise UserError(f"{name} stands alone; {argument.strip()!r} was given beside it.")
        return commands[name]()

    def new(self) -> str:
        """Forget all turns; the system message stays."""
        self.messages, self.turns = list(self.system), []
        return "A new conversation."

    def undo(self) -> str:
        """Take back the last message of the user and its answer."""
        if not self.turns:
            raise UserError("There is no turn to take back.")
        self.turns.pop()
        *self.messages, asked, _ = self.messages
        return f"Took back: {_short(asked['content'])}"

    def exit(self) -> str:
        """Leave."""
        self.is_over = True
        return ""

    def save(self, file: str) -> str:
        """Write the messages into a new file."""
        if not file:
            raise UserError("/save needs the name of a file, like /save chat.json.")
        path = Path(file).expanduser()
        try:
            with path.open("x", encoding="utf-8") as stream:
                json.dump({"messages": self.messages}, stream, ensure_ascii=False, indent=2)
                stream.write("\n")
        except FileExistsError:
            raise UserError(f"{file!r} is there already; name a file that is not.") from None
        except OSError as error:
            raise UserError(f"{file!r} cannot be written: {error.strerror}.") from None
        return f"Saved {len(self.messages)} messages to {file}"

    def stats(self) -> str:
        """What all answers took, and how full the context is."""
        total = Tally()
        for turn in self.answered:
            total.add(turn.tally)
        cached = sum(turn.num_cached_tokens for turn in self.answered)
        prompts = sum(turn.num_prompt_tokens for turn in self.answered)
        used = self.turns[-1].num_tokens if self.turns else 0
        return (
            f"answers: {len(self.answered)}, {total.num_tokens} tokens, "
            f"{total.tokens_per_s:.1f} tokens/s, {total.drafting(self.llm)}\n"
            f"prompts: {cached} of {prompts} tokens were cached\n"
            f"context: {used} of {self.llm.engine.max_model_len} tokens"
        )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
