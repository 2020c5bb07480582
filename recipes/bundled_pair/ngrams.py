"""Hashed n-grams of words and of lines, for decontamination and near-duplicate detection."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

NGRAM_WORDS = 13
SHINGLE_LINES = 5
_WORD = re.compile(r"[a-z0-9]+")
# Odd multipliers: position matters, and no window position is lost modulo 2**64.
_MULTIPLIERS = [pow(0x9E3779B97F4A7C15, k + 1, 1 << 64) | 1 for k in range(32)]
_word_hash: dict[str, int] = {}


def stable_hash(text: str) -> int:
    """64-bit hash of `text`, equal in every process and run (unlike `hash`)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _hash_word(word: str) -> int:
    value = _word_hash.get(word)
    if value is None:
        value = _word_hash[word] = stable_hash(word)
    return value


def _windows(hashes: list[int], width: int) -> np.ndarray:
    """Hash of every run of `width` consecutive items: sum_k hashes[i + k] * m_k mod 2**64."""
    items = np.array(hashes, dtype=np.uint64)
    count = len(items) - width + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for k in range(width):
        total += items[k : k + count] * np.uint64(_MULTIPLIERS[k])
    return total


def word_ngrams(text: str, width: int = NGRAM_WORDS) -> np.ndarray:
    """Hashes [count] of the word n-grams of `text`; a word is a lower-cased alphanumeric run."""
    return _windows([_hash_word(word) for word in _WORD.findall(text.lower())], width)


def line_shingles(text: str, width: int = SHINGLE_LINES) -> np.ndarray:
    """Hashes [count] of every `width` consecutive non-empty lines, ignoring indentation."""
    lines = (line.strip() for line in text.splitlines())
    return _windows([stable_hash(line) for line in lines if line], width)


class NgramIndex:
    """The word n-grams of some texts, to be looked for in others."""

    def __init__(self, texts: Iterable[str], width: int = NGRAM_WORDS):
        self.width = width
        parts = [word_ngrams(text, width) for text in texts]
        self.hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))

    def matches(self, text: str) -> np.ndarray:
        """The indexed n-gram hashes that occur in `text`."""
        found = word_ngrams(text, self.width)
        if not len(self.hashes) or not len(found):
            return found[:0]
        slots = np.searchsorted(self.hashes, found).clip(max=len(self.hashes) - 1)
        return found[self.hashes[slots] == found]

    def overlaps(self, text: str) -> bool:
        """Whether `text` shares at least one n-gram with the indexed texts."""
        return len(self.matches(text)) > 0
