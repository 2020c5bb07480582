"""A request of an evaluation with its answer."""

from __future__ import annotations

from dataclasses import dataclass

from peagle.evaluation.decoding import Answer


@dataclass(frozen=True, slots=True)
class Observation:
    """One request of an evaluation and its answer.

    Attributes:
        set, category: of prompts; a category may be "".
        id: of the prompt.
        turn: of the conversation, from 0.
        prompt: what the user said, as text.
        answer: what came of it.
    """

    set: str
    category: str
    id: str
    turn: int
    prompt: str
    answer: Answer

    @property
    def conversation(self) -> str:
        """What the turns of one prompt share."""
        return f"{self.set}/{self.id}"

    @property
    def group(self) -> str:
        """Set and category."""
        return f"{self.set}/{self.category}" if self.category else self.set
