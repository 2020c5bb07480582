"""Which written prompts are worth an answer: not empty, short, looping, or said before."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

# Characters of scripts without spaces count as words.
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|\w+")
_FEWEST_WORDS = 3
_LOOP_WORDS, _LOOP_TIMES = 6, 3
_SHINGLE = 3
_ALIKE = 0.6
_FEWEST_SHINGLES = 5
_QUOTED_WORDS = 13


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def find_fault(text: str) -> str | None:
    """Return why a prompt is dropped whatever else was written, None if it is not."""
    if not text.strip():
        return "empty"
    words = words_of(text)
    if len(words) < _FEWEST_WORDS:
        return f"fewer than {_FEWEST_WORDS} words"
    counts = Counter(_windows(words, _LOOP_WORDS))
    if counts and counts.most_common(1)[0][1] >= _LOOP_TIMES:
        return f"looping: {_LOOP_WORDS} words occur {_LOOP_TIMES} times"
    return None


class NearDuplicates:
    """Finds texts that say what an earlier one says.

    Two texts are alike if they share 60% of the sequences of three words that the shorter one has.
    Where the shorter one has fewer than five of them, those of the longer one count.

    Args:
        quotes: 13 words in a row that both have make them alike too.
    """

    def __init__(self, texts: Iterable[str] = (), *, quotes: bool = False) -> None:
        self._quotes = quotes
        self._sizes: list[int] = []
        self._texts_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._quoted: set[tuple[str, ...]] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Remember a text."""
        words = words_of(text)
        shingles = _shingles(words)
        for shingle in shingles:
            self._texts_with[shingle].append(len(self._sizes))
        self._sizes.append(len(shingles))
        if self._quotes:
            self._quoted.update(_windows(words, _QUOTED_WORDS))

    def has_like(self, text: str) -> bool:
        """Return whether a remembered text is like this one."""
        words = words_of(text)
        shingles = _shingles(words)
        shared = Counter(one for s in shingles for one in self._texts_with.get(s, ()))
        for number, count in shared.items():
            shorter, longer = sorted((self._sizes[number], len(shingles)))
            if count >= _ALIKE * (shorter if shorter >= _FEWEST_SHINGLES else longer):
                return True
        return any(one in self._quoted for one in _windows(words, _QUOTED_WORDS))


def _windows(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    """Return the sequences of three words; of a shorter text, all its words as one."""
    return set(_windows(words, _SHINGLE)) or {tuple(words)}
