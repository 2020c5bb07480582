"""A conversation with a model: its turns and its slash commands, without a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from peagle.cli.tally import Tally
from peagle.errors import UserError
from peagle.thinking import Piece

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
        reasoning: text that a thinking model wrote before the answer.
        answer: its text.
        facts: figures of the finished request, for JSON; None where the answer was stopped.
        num_prompt_tokens: tokens of the conversation before it.
        num_cached_tokens: prompt tokens whose keys and values were cached.
        tally: tokens, drafts and seconds of it.
        ended: "stop", "length", "context" (it is full) or "interrupt".
    """

    reasoning: str
    answer: str
    facts: dict[str, Any] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    tally: Tally
    ended: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation with this answer."""
        return self.num_prompt_tokens + self.tally.num_tokens


class ChatModel(Protocol):
    """A model that answers a conversation: one in this process, or one on a server."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a conversation."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 where nothing is drafted."""
        ...

    def answer(
        self, messages: Messages, stopped: Callable[[], bool]
    ) -> Generator[Piece, None, Turn]:
        """Yield the answer to `messages` as it comes, and return it; `stopped` may end it early.

        Raises:
            UserError: there is no room, or the messages are refused.
        """
        ...


class Conversation:
    """Messages that grow by a turn at a time.

    Args:
        model: the model that answers.
        system: the system message, if any.

    Attributes:
        messages: the conversation so far.
        turns: the turns in it.
        answered: all turns, including those taken back or forgotten.
        is_over: the user wants to leave.
    """

    def __init__(self, model: ChatModel, system: str | None = None) -> None:
        self.model = model
        self.system: Messages = [] if system is None else [{"role": "system", "content": system}]
        self.messages: Messages = list(self.system)
        self.turns: list[Turn] = []
        self.answered: list[Turn] = []
        self.is_over = False

    # ---- turns ------------------------------------------------------------------------------

    def say(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Send the user's text and yield the answer as it comes; the conversation then has both.

        Stopped before there is an answer, it has neither.

        Raises:
            UserError: there is no room, or the text is refused. The conversation stays as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        turn = yield from self.model.answer(messages, stopped)
        self.answered.append(turn)
        if turn.answer or turn.ended != "interrupt":
            self.turns.append(turn)
            self.messages = [*messages, {"role": "assistant", "content": turn.answer}]

    @property
    def last(self) -> Turn:
        """The turn that was just answered."""
        return self.answered[-1]

    # ---- slash commands ---------------------------------------------------------------------

    def command(self, line: str) -> str:
        """Run a slash command and return its output.

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
        *self.messages, question, _ = self.messages
        text = question["content"]
        return f"Took back: {text if len(text) <= 60 else f'{text[:57]}...'}"

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
        """Return tokens, speed and drafts of all answers, and how full the context is."""
        total = Tally()
        for turn in self.answered:
            total.add(turn.tally)
        drafting = total.drafting(self.model.num_speculative_tokens)
        cached = sum(turn.num_cached_tokens for turn in self.answered)
        prompts = sum(turn.num_prompt_tokens for turn in self.answered)
        used = self.turns[-1].num_tokens if self.turns else 0
        return (
            f"answers: {len(self.answered)}, {total.num_tokens} tokens, "
            f"{total.tokens_per_s:.1f} tokens/s, {drafting}\n"
            f"prompts: {cached} of {prompts} tokens were cached\n"
            f"context: {used} of {self.model.max_model_len} tokens"
        )
