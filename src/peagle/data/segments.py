"""Token ids of texts that have most of their parts in common, like the prompts of a conversation.

A fast tokenizer first divides a text at its special tokens, and encodes the parts between them
piece by piece. So a text may be cut before a special token: the ids of the segments, one after the
other, make the ids of the text. The ids of a segment that was seen before are known already.
"""

import re
from functools import lru_cache
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

_SEGMENTS = 4096  # kept; a conversation has two a turn


class SegmentEncoder:
    """Encodes texts without adding special tokens, and each segment of them once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Tokens that are found in the text as it stands; others are found within a segment.
        added = [t for t in tokenizer.added_tokens_decoder.values() if not t.normalized]
        contents = sorted((t.content for t in added if t.content), key=len, reverse=True)
        # Whether such a token is found depends on the text before it.
        self._inner = {t.content for t in added if t.lstrip or not t.special}
        can_cut = tokenizer.is_fast and not any(t.single_word for t in added)
        self._added = re.compile("|".join(map(re.escape, contents if can_cut else [])) or "(?!)")
        self._ids_of = lru_cache(_SEGMENTS)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        found = (f for f in self._added.finditer(text) if f[0] not in self._inner)
        cuts = [0, *(one.start() for one in found), len(text)]
        return [i for begin, end in pairwise(cuts) for i in self._ids_of(text[begin:end])]

    def _encode(self, segment: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(segment, add_special_tokens=False))
