"""The display of an answer of `peagle chat`: text while it comes, or a JSON object."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from peagle.cli.conversation import Conversation
from peagle.cli.remote import ReportedPiece
from peagle.cli.terminal import bright, dim, has_styles, printable
from peagle.thinking import Piece


class JsonScreen:
    """Prints one JSON object a message, where a program reads."""

    def show(self, piece: Piece) -> None:
        """Print nothing: the object comes at the end."""

    def end(self, conversation: Conversation) -> None:
        """Print the conversation's last answer."""
        turn = conversation.last
        assert turn.facts is not None
        record = {
            "turn": len(conversation.turns),
            "answer": turn.answer,
            "reasoning": turn.reasoning,
            **turn.facts,
            "num_prompt_tokens": turn.num_prompt_tokens,
        }
        print(json.dumps(record), flush=True)

    def refuse(self, conversation: Conversation, problem: str) -> None:
        """Print why a message got no answer, so that a program that waits gets an object."""
        record = {"turn": len(conversation.turns) + 1, "error": problem}
        print(json.dumps(record), flush=True)


class TextScreen:
    """Prints answers as they come, the reasoning apart from them, and figures after each.

    Args:
        is_live: somebody sits at a terminal and reads the reasoning above the answer; else it goes
            to standard error.
    """

    def __init__(self, is_live: bool) -> None:
        self._is_live = is_live
        self._aside = sys.stdout if is_live else sys.stderr
        self._is_thinking = False

    def show(self, piece: Piece) -> None:
        """Print new text of an answer."""
        if piece.is_reasoning and not self._is_thinking:
            self._is_thinking = True
            self._label("thinking:")
        elif self._is_thinking and not piece.is_reasoning:
            self._end_thinking()
            if self._is_live:
                self._label("answer:")
        if piece.is_reasoning:
            print(dim(_safe(piece.text, self._aside), self._aside), end="", file=self._aside)
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
        """Print nothing: the message is on standard error."""

    def _label(self, text: str) -> None:
        # Where no style separates reasoning from answer; an answer in a pipe stands alone.
        if not has_styles(self._aside):
            print(text, file=self._aside)

    def _end_thinking(self) -> None:
        self._is_thinking = False
        print("\n" if self._is_live else "", file=self._aside, flush=True)


def _safe(text: str, stream: TextIO) -> str:
    return printable(text) if stream.isatty() else text


def _marked(piece: Piece) -> str:
    """Return the text of an answer; tokens accepted from a draft stand out where reported."""
    tokens = piece.tokens if isinstance(piece, ReportedPiece) else ()
    if "".join(text for text, _ in tokens) != piece.text:
        return _safe(piece.text, sys.stdout)
    safe = ((_safe(text, sys.stdout), is_accepted) for text, is_accepted in tokens)
    return "".join(bright(text, sys.stdout) if accepted else text for text, accepted in safe)


def _figures(conversation: Conversation) -> str:
    turn, model = conversation.last, conversation.model
    notes = {
        "interrupt": "stopped" if turn.answer else "stopped and forgotten",
        "length": f"cut at --max-new-tokens {model.max_tokens}"
        if model.max_tokens
        else "cut by the server",
        "context": f"the context of {model.max_model_len} tokens is full: /undo, /new or a larger "
        "--max-model-len",
    }
    parts = [f"{turn.tally.num_tokens} tokens, {turn.tally.tokens_per_s:.1f} tokens/s"]
    if turn.facts is not None:
        parts.append(turn.tally.drafting(model.num_speculative_tokens))
    if turn.num_prompt_tokens:
        parts.append(f"{turn.num_cached_tokens} of {turn.num_prompt_tokens} prompt tokens cached")
    if turn.ended in notes:
        parts.append(notes[turn.ended])
    return ", ".join(parts)
