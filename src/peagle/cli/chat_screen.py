"""How `peagle chat` shows an answer: as text while it comes, or as a JSON object."""

from __future__ import annotations

import json
import sys
from typing import Protocol, TextIO

from peagle.cli.conversation import Conversation
from peagle.cli.remote import ReportedPiece
from peagle.cli.terminal import bright, dim, has_styles, printable
from peagle.thinking import Piece


class Screen(Protocol):
    """Where answers go."""

    def show(self, piece: Piece) -> None:
        """New text of an answer."""
        ...

    def end(self, conversation: Conversation) -> None:
        """The answer, the conversation's last, is complete."""
        ...

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """A message got no answer."""
        ...


class JsonScreen:
    """One JSON object a message."""

    def show(self, piece: Piece) -> None:
        """Nothing: the object comes at the end."""

    def end(self, conversation: Conversation) -> None:
        """Print the object."""
        turn = conversation.last
        assert turn.facts is not None
        self._print(
            {
                "turn": len(conversation.turns),
                "answer": turn.answer,
                "reasoning": turn.reasoning,
                **turn.facts,
                "num_prompt_tokens": turn.num_prompt_tokens,
            }
        )

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """Print why, so that a program that waits for an object gets one."""
        self._print({"turn": len(conversation.turns) + 1, "error": problem})

    @staticmethod
    def _print(record: dict[str, object]) -> None:
        print(json.dumps(record), flush=True)


class TextScreen:
    """Answers as they come, the reasoning apart from them, and a line of figures after each.

    Args:
        is_live: somebody sits at a terminal and reads the reasoning above the answer; else it goes
            to standard error.
    """

    def __init__(self, is_live: bool) -> None:
        self._is_live = is_live
        self._aside = sys.stdout if is_live else sys.stderr
        self._is_thinking = False

    def show(self, piece: Piece) -> None:
        """Print it."""
        if piece.is_reasoning and not self._is_thinking:
            self._is_thinking = True
            self._label("thinking:")
        elif self._is_thinking and not piece.is_reasoning:
            self._end_thinking()
            if self._is_live:
                self._label("answer:")
        if piece.is_reasoning:
            print(dim(_shown(piece.text, self._aside), self._aside), end="", file=self._aside)
            self._aside.flush()
        else:
            print(_marked(piece), end="", flush=True)

    def end(self, conversation: Conversation) -> None:
        """End the line, and print the figures."""
        if self._is_thinking:
            self._end_thinking()
        if not self._is_live or conversation.last.answer:
            print(flush=True)
        print(dim(f"[{_figures(conversation)}]", sys.stderr), file=sys.stderr, flush=True)

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """Nothing: the message is on standard error."""

    def _label(self, text: str) -> None:
        """Words where no style tells reasoning from answer; an answer in a pipe stands alone."""
        if not has_styles(self._aside):
            print(text, file=self._aside)

    def _end_thinking(self) -> None:
        self._is_thinking = False
        print("\n" if self._is_live else "", file=self._aside, flush=True)


def _shown(text: str, stream: TextIO) -> str:
    return printable(text) if stream.isatty() else text


def _marked(piece: Piece) -> str:
    """Text of an answer; tokens that were accepted from a draft stand out where that is known."""
    tokens = piece.tokens if isinstance(piece, ReportedPiece) else ()
    if "".join(text for text, _ in tokens) != piece.text:
        return _shown(piece.text, sys.stdout)
    shown = ((_shown(text, sys.stdout), is_accepted) for text, is_accepted in tokens)
    return "".join(bright(text, sys.stdout) if accepted else text for text, accepted in shown)


def _figures(conversation: Conversation) -> str:
    turn = conversation.last
    limit = conversation.model.max_tokens
    length = conversation.model.max_model_len
    cached = f"{turn.num_cached_tokens} of {turn.num_prompt_tokens}"
    k = conversation.model.num_speculative_tokens
    notes = {
        "interrupt": "stopped" if turn.answer else "stopped and forgotten",
        "length": f"cut at --max-new-tokens {limit}" if limit else "cut by the server",
        "context": f"the context of {length} tokens is full: /undo, /new or a larger "
        "--max-model-len",
    }
    parts = [
        f"{turn.tally.num_tokens} tokens, {turn.tally.tokens_per_s:.1f} tokens/s",
        *([] if turn.facts is None else [turn.tally.drafting(k)]),
        *([f"{cached} prompt tokens cached"] if turn.num_prompt_tokens else []),
        *([notes[turn.ended]] if turn.ended in notes else []),
    ]
    return ", ".join(parts)
