"""Drafts from the text itself."""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Drafts what followed the latest earlier occurrence of the last n tokens, longest n first.

    Prompt lookup decoding (Saxena, 2023): free, no head; the baseline any head must beat.

    Args:
        max_ngram, min_ngram: longest and shortest n.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def find(self, tokens: Sequence[int], num_drafts: int) -> list[int]:
        """The drafts that follow `tokens`, at most `num_drafts`, maybe none."""
        tokens = list(tokens)
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            pattern = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == pattern:
                    return tokens[start + n : start + n + num_drafts]
        return []
