"""The text of a request while it grows: detokenised, and ended by a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import transformers

from peagle.engine.detokenizer import IncrementalDetokenizer
from peagle.markers import open_tail


@dataclass(frozen=True, slots=True)
class TextStep:
    """What new tokens brought.

    Attributes:
        text: new text that no stop string can take back.
        num_tokens: how many of the tokens stand: all, or those up to the one that completes a
            stop string.
        stop: the stop string that is complete, after which nothing comes; None while none is.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """Turns tokens into text up to the first stop string, which is left out.

    Where several could end the text, the one that is complete first does; of those complete with
    the same token, the one that begins first. A tail that may yet become a stop string is held
    back. Tokens are read one by one, so that the end does not depend on how many land at once.

    Args:
        tokenizer: of the model.
        stop: stop strings.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, stop: Sequence[str] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = stop
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def add(self, token_ids: list[int], *, final: bool = False) -> TextStep:
        """Read new tokens; `final` releases what is held back."""
        if not self._stop:
            self._pieces.append(self._detokenizer.add(token_ids, final=final))
            return TextStep(self._pieces[-1], len(token_ids))
        start = len(self._pieces)
        for index, token in enumerate(token_ids):
            is_last = final and index == len(token_ids) - 1
            self._held += self._detokenizer.add([token], final=is_last)
            found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                begin, stop = min(found, key=itemgetter(0))
                self._pieces.append(self._held[:begin])
                return TextStep("".join(self._pieces[start:]), index + 1, stop)
            keep = 0 if is_last else open_tail(self._held, self._stop)
            self._pieces.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return TextStep("".join(self._pieces[start:]), len(token_ids))
