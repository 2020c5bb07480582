"""Reasoning and answer of a thinking model, told apart while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peagle.chat import split_thinking
from peagle.markers import open_tail

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some new text, of the reasoning or of the answer."""

    text: str
    is_reasoning: bool


class ThinkingSplitter:
    """Cuts a growing output into pieces; together they are what `split_thinking` gives.

    Args:
        opened: the prompt ended by opening the reasoning (see `peagle.chat.opens_thinking`).
    """

    def __init__(self, *, opened: bool) -> None:
        self.text = ""
        self._opened = opened
        self._given = {True: 0, False: 0}

    def add(self, text: str, *, final: bool = False) -> Iterator[Piece]:
        """What new text brings; `final` releases what was held back as the start of a marker."""
        self.text += text
        settled = self.text if final else self.text[: len(self.text) - open_tail(self.text, (END,))]
        if not final and START.startswith(settled.lstrip()):
            return
        reasoning, answer = split_thinking(settled, START, END, opened=self._opened)
        for is_reasoning, whole in ((True, reasoning), (False, answer)):
            if new := whole[self._given[is_reasoning] :]:
                self._given[is_reasoning] = len(whole)
                yield Piece(new, is_reasoning)
