"""Markers in a text that is still growing, and special tokens that are markers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A detokeniser writes it before the name of a marker token. It is half a surrogate pair, which no
# decoded text contains. So a text that only spells the name is no marker.
SIGN = "\ud800"


def unmarked(text: str) -> str:
    """Return a text with the mere names of its marker tokens."""
    return text.replace(SIGN, "")


def marker_token_ids(
    tokenizer: PreTrainedTokenizerBase, names: Collection[str], *, only_special: bool = False
) -> tuple[int, ...]:
    """Return the ids of the tokens of these names, for `SamplingParams.marker_token_ids`.

    Names without an added token of their own are left out: they are ordinary text, or not in the
    vocabulary. With `only_special` so are tokens that are text like all others.
    """
    return tuple(
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.content in names and (token.special or not only_special)
    )


def open_tail(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a marker begins."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(m.startswith(end) for m in markers)), 0)
