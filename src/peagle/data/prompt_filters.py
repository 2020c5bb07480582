"""Filters of written prompts: empty, short, looping and repeated ones are worth no answer."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import nsmallest
from itertools import chain

# Characters of scripts without spaces count as words.
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|\w+")
_MIN_WORDS = 3
_LOOP_WORDS, _LOOP_TIMES = 6, 3
_SHINGLE = 3
_MIN_SHARED = 0.6
_MIN_SHINGLES = 5
_QUOTED_WORDS = 13


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def find_fault(text: str) -> str | None:
    """Return why a prompt is dropped whatever else was written, None if it is not."""
    if not text.strip():
        return "empty"
    words = words_of(text)
    if len(words) < _MIN_WORDS:
        return f"fewer than {_MIN_WORDS} words"
    counts = Counter(_windows(words, _LOOP_WORDS))
    if counts and counts.most_common(1)[0][1] >= _LOOP_TIMES:
        return f"looping: {_LOOP_WORDS} words occur {_LOOP_TIMES} times"
    return None


class NearDuplicates:
    """Finds texts that repeat an earlier one.

    Two texts are alike if they share 60% of the sequences of three words that the shorter one has.
    Where the shorter one has fewer than five of them, the longer one's sequences count.

    Of 60% one is among any 41%: so texts are looked up by their rarest sequences, and those that
    many texts have (how they begin, mostly) cost nothing.

    Args:
        quotes: 13 words in a row that both have make them alike too.
    """

    def __init__(self, texts: Iterable[str] = (), *, quotes: bool = False) -> None:
        self._quotes = quotes
        self._texts: list[set[tuple[str, ...]]] = []
        self._with: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._with_as_rare: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._quoted: set[tuple[str, ...]] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Remember a text, so that later ones are compared with it."""
        words = words_of(text)
        shingles = _shingles(words)
        for shingle in self._rarest(shingles):
            self._with_as_rare[shingle].append(len(self._texts))
        for shingle in shingles:
            self._with[shingle].append(len(self._texts))
        self._texts.append(shingles)
        if self._quotes:
            self._quoted.update(_windows(words, _QUOTED_WORDS))

    def has_like(self, text: str) -> bool:
        """Return whether a remembered text is like this one."""
        words = words_of(text)
        shingles = _shingles(words)
        longer = (self._with.get(shingle, ()) for shingle in self._rarest(shingles))
        shorter = (self._with_as_rare.get(shingle, ()) for shingle in shingles)
        if any(_are_alike(shingles, self._texts[one]) for one in set(chain(*longer, *shorter))):
            return True
        return any(one in self._quoted for one in _windows(words, _QUOTED_WORDS))

    def _rarest(self, shingles: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return sequences of which a text that shares enough of a longer one's shares one."""
        count = len(shingles) - math.ceil(_MIN_SHARED * len(shingles)) + 1
        return nsmallest(count, shingles, key=lambda shingle: len(self._with.get(shingle, ())))


def _are_alike(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
    shorter, longer = sorted((len(one), len(other)))
    counting = shorter if shorter >= _MIN_SHINGLES else longer
    return len(one & other) >= _MIN_SHARED * counting


def _windows(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    """Return the sequences of three words; of a shorter text, all its words as one."""
    return set(_windows(words, _SHINGLE)) or {tuple(words)}
