"""Drafts from the text itself."""

from array import array
from collections.abc import Sequence


class PromptLookup:
    """Drafts the tokens behind the latest earlier occurrence of the last n, longest n first.

    Prompt lookup decoding (Saxena, 2023): free, no head; the baseline any head must beat.

    Args:
        max_ngram, min_ngram: longest and shortest n.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def find(
        self, tokens: Sequence[int], max_drafts: int, prediction: Sequence[int] = ()
    ) -> list[int]:
        """Return the drafts that follow `tokens`, at most `max_drafts`, maybe none.

        Of equally long occurrences the first in the prediction counts (`Sequence.prediction`), else
        the latest in `tokens`.
        """
        # As bytes, because their search is fast; a match within a token is none.
        text, given = array("q", tokens), array("q", prediction)
        data, predicted, size = text.tobytes(), given.tobytes(), text.itemsize
        for n in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            pattern = data[-n * size :]
            at = predicted.find(pattern, 0, -size)
            while at % size and at > 0:
                at = predicted.find(pattern, at + 1, -size)
            found = given
            if at < 0:
                found, at = text, data.rfind(pattern, 0, -size)
            while at % size and at > 0:
                at = data.rfind(pattern, 0, at + len(pattern) - 1)
            if at >= 0:
                start = at // size + n
                return list(found[start : start + max_drafts])
        return []
