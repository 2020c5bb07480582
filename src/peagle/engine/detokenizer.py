"""Turn tokens into text while they arrive, and end the text at a stop string."""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from peagle.chat import split_thinking
from peagle.markers import SIGN, marker_token_ids, open_tail, unmarked
from peagle.thinking import family_splitter

_REPLACEMENT = "\ufffd"
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Invalid bytes may go on for ever: beyond so many tokens only the last few stay in the window. Four
# characters are enough: a UTF-8 decoder that starts anywhere is in step after three bytes.
_MAX_UNSETTLED, _KEPT_UNSETTLED, _IN_STEP = 32, 8, 4


# Kinds of tokens, by id: learned as tokens come, shared by all detokenisers of a tokenizer.
_SILENT, _TEXT, _BYTE = range(3)
_KINDS: WeakKeyDictionary[transformers.PreTrainedTokenizerBase, dict[int, int]] = (
    WeakKeyDictionary()
)
_BYTES: WeakKeyDictionary[transformers.PreTrainedTokenizerBase, _TokenBytes] = WeakKeyDictionary()

# Byte-level vocabularies write printable Latin-1 bytes as characters, others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + i): b for i, b in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))}


def token_bytes(tokenizer: transformers.PreTrainedTokenizerBase, token_id: int) -> bytes:
    """Return the UTF-8 bytes of a token inside a text; they may be part of a character."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(token, str):  # a padding row of the embedding
        return b""
    if tokenizer.is_fast and token_id not in tokenizer.added_tokens_decoder:
        decoder = repr(cast(Any, tokenizer).backend_tokenizer.decoder)
        if "ByteLevel" in decoder and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if "ByteFallback" in decoder and _FALLBACK_BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
    # The token is decoded behind itself: some tokenizers drop its space at the start of a text.
    alone, twice = (
        str(tokenizer.decode([token_id] * n, clean_up_tokenization_spaces=False)) for n in (1, 2)
    )
    text = twice[len(alone) :] if twice.startswith(alone) else alone
    return text.encode("utf-8", "surrogatepass")


class _TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens by id, learned as tokens come."""

    def __init__(self, backend: Tokenizer) -> None:
        self._decode = backend.decode
        self._token = backend.id_to_token

    def __missing__(self, token_id: int) -> bytes:
        text, token = self._decode([token_id]), self._token(token_id)
        found = text.encode()
        if text and token is not None and all(character in _BYTE_OF for character in token):
            data = bytes(_BYTE_OF[character] for character in token)
            # Versions differ on whether an added token stands for itself.
            if data.decode(errors="replace") == text:
                found = data
        self[token_id] = found
        return found


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text.

    The text is that of decoding all tokens at once, in whatever steps they come, and only grows. A
    byte-level tokenizer has the bytes of new tokens looked up. Other tokenizers decode the tokens
    since the last safe point again, so the cost does not grow with the output.

    Two kinds of text are held back until a later token settles them:

    - an incomplete UTF-8 character of a byte-level tokenizer;
    - a run of byte tokens (`<0xE6>`) of a byte-fallback tokenizer: one invalid byte turns all
      characters of its run, also the whole ones, into U+FFFD.

    Special tokens are left out of the text.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        kinds = _KINDS.get(tokenizer)
        if kinds is None:
            # Decoding leaves out tokens that the backend flags as special, not the named ones.
            special = tokenizer.all_special_ids
            if tokenizer.is_fast:
                added = tokenizer.added_tokens_decoder
                special = [token_id for token_id, token in added.items() if token.special]
            kinds = _KINDS[tokenizer] = dict.fromkeys(special, _SILENT)
        self._kinds = kinds
        self._decode, backend = _decoding(tokenizer)
        self._bytes: _TokenBytes | None = None
        if backend is not None and isinstance(backend.decoder, ByteLevel):
            self._bytes = _BYTES.get(tokenizer)
            if self._bytes is None:
                self._bytes = _BYTES[tokenizer] = _TokenBytes(backend)
        self._open = b""  # the beginning of a character, of a byte-level tokenizer
        self._pieces: list[str] = []
        # The window: `_num_context` tokens whose text is returned already, because some tokenizers
        # write a token differently at the beginning of a text; then new tokens. The tokens after
        # `_num_ready` are an open run of byte tokens.
        self._window: list[int] = []
        self._num_context = 0
        self._num_ready = 0
        self._num_shown = 0  # characters of the window's text that are returned already

    @property
    def text(self) -> str:
        """Return all text given out so far."""
        return "".join(self._pieces)

    def add(self, token_ids: list[int], *, final: bool = False) -> str:
        """Add tokens and return the new text, which may be empty; `final` releases all text."""
        if self._bytes is None:
            new = self._decode_window(token_ids, final)
        else:
            data = self._open + b"".join([self._bytes[token_id] for token_id in token_ids])
            new, num_read = utf_8_decode(data, "replace", final)
            self._open = data[num_read:]
        if new:
            self._pieces.append(new)
        return new

    def _decode_window(self, token_ids: list[int], final: bool) -> str:
        self._append(token_ids)
        if final:
            self._num_ready = len(self._window)
        text = self._decode(self._window[: self._num_ready])
        # Bytes that may yet become a character are one U+FFFD, the last one.
        incomplete = text.endswith(_REPLACEMENT) and not final
        settled = text[:-1] if incomplete else text
        new = settled[self._num_shown :]
        self._num_shown = max(self._num_shown, len(settled))
        if incomplete:
            self._shorten()
        elif new:
            # A token without text of its own is no context: a word after it would lose its space.
            self._move_window(self._num_context)
        return new

    def _append(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            kind = self._kinds.get(token_id)
            if kind is None:
                kind = self._kinds[token_id] = _kind(self._tokenizer, token_id)
            if kind == _SILENT:
                continue
            self._window.append(token_id)
            if kind != _BYTE:
                self._num_ready = len(self._window)

    def _move_window(self, start: int) -> None:
        """Make the ready tokens from `start` on the context of the next tokens."""
        del self._window[:start]
        self._num_ready -= start
        self._num_context = self._num_ready
        self._num_shown = len(self._decode(self._window[: self._num_ready]))

    def _shorten(self) -> None:
        if self._num_ready <= _MAX_UNSETTLED:
            return
        start = self._num_ready - _KEPT_UNSETTLED
        if len(self._decode(self._window[start : self._num_ready])) >= _IN_STEP:
            self._move_window(start)
            self._num_shown -= 1  # the last U+FFFD stays open


def _decoding(
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> tuple[Callable[[list[int]], str], Tokenizer | None]:
    """Return a decoder that drops special tokens, and the backend if it decodes alone."""
    cls = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
        and cls.decode is transformers.PreTrainedTokenizerBase.decode
        and cls._decode is transformers.PreTrainedTokenizerFast._decode
    )
    if is_plain:
        # The same text as both methods give, in a third of the time.
        backend = cast(Tokenizer, tokenizer.backend_tokenizer)
        return backend.decode, backend

    def decode(token_ids: list[int]) -> str:
        text = tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    return decode, None


def _kind(tokenizer: transformers.PreTrainedTokenizerBase, token_id: int) -> int:
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:  # a padding row of the embedding, without an entry in the vocabulary
        return _SILENT
    return _BYTE if _FALLBACK_BYTE.fullmatch(str(token)) else _TEXT


class SettledText(NamedTuple):
    """New text that no stop string can take back.

    `num_tokens` counts the tokens kept: all, or those up to the one that completes `stop`, the stop
    string that ends the text.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """Turns tokens into text up to the first stop string, which is left out.

    Of several stop strings the one that is complete first ends the text; of those complete with the
    same token, the one that begins first. A tail that may yet become a stop string is held back.
    Tokens are read one by one, so that the end does not depend on how many arrive at once.

    Args:
        marker_token_ids: special tokens that stay in the text, each as `markers.SIGN` and its
            name. No stop string contains one or reaches across one.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        marker_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = stop
        names = ((id, tokenizer.convert_ids_to_tokens(id)) for id in marker_token_ids)
        self._markers = {id: f"{SIGN}{name}" for id, name in names if name is not None}
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Return all text so far."""
        return "".join(self._pieces)

    def add(self, token_ids: list[int], *, final: bool = False) -> SettledText:
        """Read new tokens; `final` releases the text that is held back."""
        if not self._stop and self._markers.keys().isdisjoint(token_ids):
            self._pieces.append(self._detokenizer.add(token_ids, final=final))
            return SettledText(self._pieces[-1], len(token_ids))
        start = len(self._pieces)
        for index, token in enumerate(token_ids):
            is_last = final and index == len(token_ids) - 1
            marker = self._markers.get(token)
            if marker is None:
                self._held += self._detokenizer.add([token], final=is_last)
            else:
                self._held += self._detokenizer.add([], final=True)
                self._detokenizer = IncrementalDetokenizer(self._tokenizer)
            found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                begin, stop = min(found, key=itemgetter(0))
                self._pieces.append(self._held[:begin])
                return SettledText("".join(self._pieces[start:]), index + 1, stop)
            keep = 0
            if self._stop and marker is None and not is_last:
                keep = open_tail(self._held, self._stop)
            self._pieces.append(self._held[: len(self._held) - keep] + (marker or ""))
            self._held = self._held[len(self._held) - keep :]
        return SettledText("".join(self._pieces[start:]), len(token_ids))


def split_output(
    tokenizer: transformers.PreTrainedTokenizerBase,
    text: str,
    token_ids: list[int],
    chat_template: str,
    *,
    opened: bool,
    stop: object = None,
    markers: Sequence[str] | None = None,
) -> tuple[str, str]:
    """Return the reasoning and the answer of a finished output.

    Args:
        text, token_ids: text and tokens of the output.
        opened: whether the prompt ended by opening the reasoning (`peagle.chat.opens_thinking`).
        stop: the stop string that ended the output; any other value means none.
        markers: names of further marker tokens, for an answer that has all of its markers, each
            behind `SIGN`; None for an answer without the sign.
    """
    splitter = family_splitter(chat_template)
    stops = (stop,) if isinstance(stop, str) else ()
    if splitter is None:
        if markers:
            ids = marker_token_ids(tokenizer, markers, only_special=True)
            text = OutputText(tokenizer, stops, ids).add(token_ids, final=True).text
        return split_thinking(text, opened=opened)
    ids = marker_token_ids(tokenizer, (*splitter.markers, *(markers or ())))
    written = OutputText(tokenizer, stops, ids)
    pieces = list(splitter.add(written.add(token_ids, final=True).text, final=True))
    reasoning, answer = (
        "".join(piece.text for piece in pieces if piece.is_reasoning == kind)
        for kind in (True, False)
    )
    return reasoning, unmarked(answer) if markers is None else answer
