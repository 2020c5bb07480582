"""Tokens to text while they arrive, several at once, characters cut across tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text.

    Only the tokens since the last safe point are decoded anew, so the cost does not grow with the
    output. Text that ends in an incomplete UTF-8 character is held back until it is whole.

    Args:
        tokenizer: of the model; special tokens are left out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # Tokens before `_shown` are in `text`; decoding starts at `_context`, a little earlier,
        # because some tokenizers write a token differently at the beginning of a text.
        self._context = 0
        self._shown = 0

    def add(self, token_ids: list[int], *, final: bool = False) -> str:
        """Add tokens and return the new text, which may be empty; `final` releases all of it."""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._context : self._shown])
        now = self._decode(self._token_ids[self._context :])
        if now.endswith(_INCOMPLETE) and not final:
            return ""
        new = now[len(before) :]
        # Tokens without text (special ones) are no context: a word after them would lose its space.
        if new:
            self._context, self._shown = self._shown, len(self._token_ids)
            self.text += new
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
