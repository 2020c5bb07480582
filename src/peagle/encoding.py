"""Texts as token ids; special tokens that a conversation only spells stay text.

A tokenizer makes a special token of every text that spells it, so a user who writes `<|im_end|>`
would end a turn. Before a chat template is rendered, `Marks` therefore puts a mark into each such
text. What the rendered text spells without a mark is the template's own.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from peagle.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of `tokenizer.encode`, if possible without computing offsets.

    A fast tokenizer encodes a batch without holding the interpreter.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation or backend.padding:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


@dataclass(frozen=True, slots=True)
class Rests:
    """The rests of special tokens that a template begins, and the beginnings of these rests."""

    whole: frozenset[str]
    parts: frozenset[str]


class SpecialTokens:
    """The special tokens of a tokenizer, as they are when it is first used.

    They are the added tokens with `special: true`, and those that have a role, like the end of a
    text. Other added tokens, like `<think>` of many models, are text that everybody may write; so
    is a single character or white space, which some tokenizers have as padding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        added.pop("", None)
        named = set(tokenizer.all_special_tokens)
        self._special = {
            content
            for content, token in added.items()
            if (token.special or content in named) and len(content) > 1 and not content.isspace()
        }
        # A tokenizer looks for normalised ones afterwards, in the text between the others.
        self._added = _any_of({*self._special, *(c for c, t in added.items() if not t.normalized)})
        self._spelled = _any_of(self._special)
        self._longest = max(map(len, self._special), default=0)
        self._beginnings = frozenset(_beginnings(self._special))
        self._first_character = _any_of({content[0] for content in self._special})
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self.rests_after = lru_cache(maxsize=16)(self._find_rests)
        self.without_special = lru_cache(maxsize=16)(self._find_without_special)
        # Nobody outside can write it.
        self._secret = secrets.token_hex(8)

    def prepare(self) -> None:
        """Build the tokenizer of `encode_literally` now: that takes a second or so."""
        _ = self._literal

    @cached_property
    def _literal(self) -> Tokenizer | None:
        """Return the tokenizer with other names for its special tokens: their stand-ins.

        It is a copy, because transformers' own switch for special tokens is a state that threads
        would share, and because the vocabularies of some models have special tokens as ordinary
        entries too. None where the tokenizer is no fast one.
        """
        if self._backend is None:
            return None
        from tokenizers import Tokenizer

        names = {content: self._stand_in(content) for content in self._special}
        state: dict[str, Any] = json.loads(self._backend.to_str())
        state.update(truncation=None, padding=None, post_processor=None)
        for token in state["added_tokens"]:
            if token["content"] in names:
                token.update(content=names[token["content"]], normalized=False)
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(one, one), score] for one, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [
                pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])
            ]
        return Tokenizer.from_str(json.dumps(state))

    def _stand_in(self, content: str) -> str:
        return f"\ufdd0{self._secret}{content.encode().hex()}\ufdd1"

    def with_stand_ins(self, text: str) -> str:
        """Return a text with stand-ins of the special tokens that a tokenizer finds in it."""

        def replaced(found: re.Match[str]) -> str:
            return self._stand_in(found[0]) if found[0] in self._special else found[0]

        return self._added.sub(replaced, text)

    def encode_literally(self, text: str) -> list[int]:
        """Return the ids of a text in which only stand-ins are special tokens.

        Raises:
            UserError: the tokenizer is no fast one, and cannot do it.
        """
        if self._literal is None:
            found = self._spelled.search(text)
            raise UserError(
                f"The conversation spells the special token {found[0] if found else '?'!r}, and "
                "the tokenizer of this model runs in Python and cannot read it as text. Leave it "
                "out, or set parse_special_tokens (--parse-special-tokens of peagle serve)."
            )
        return self._literal.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def places_in(self, text: str, rests: Rests, kept: re.Pattern[str] | None) -> set[int]:
        """Return the places of the characters at which a special token may begin or go on.

        These are the first characters of the tokens that a text spells, of a beginning of one at
        its end, and of one of the `rests` at its start. White space around the text does not
        count, because templates remove it.

        Args:
            kept: texts that the template looks for, if the template may change the text it writes:
                leave characters out, or make small letters of capitals. Every character that
                begins a special token then counts, except in these texts. None: the template
                changes nothing.
        """
        places = set()
        if kept is not None:
            spans = [found.span() for found in kept.finditer(text)]
            inside = {place for start, end in spans for place in range(start, end)}
            firsts = {first.start() for first in self._first_character.finditer(text)}
            places |= firsts - inside
        if self._first_character.search(text):
            place = 0
            while found := self._spelled.search(text, place):
                places.add(found.start())
                place = found.start() + 1
            end = len(text.rstrip())
            for first in self._first_character.finditer(text, max(0, end - self._longest + 1), end):
                if text[first.start() : end] in self._beginnings:
                    places.add(first.start())
        if rests.whole:
            start = len(text) - len(text.lstrip())
            head = text[start : start + self._longest]
            lengths = range(1, len(head) + 1)
            if head.rstrip() in rests.parts or any(head[:n] in rests.whole for n in lengths):
                places.add(start)
        return places

    def _find_without_special(self, literals: frozenset[str]) -> re.Pattern[str]:
        """Return a pattern of the literals that spell no special token and are no single letter."""
        return _any_of(one for one in literals if len(one) > 1 and not self._spelled.search(one))

    def _find_rests(self, literals: frozenset[str]) -> Rests:
        """Return the rests of the special tokens that literals begin at their end."""
        lengths = range(1, self._longest)
        ends = {literal[-length:] for literal in literals for length in lengths}
        whole = {
            content[len(end) :]
            for end in ends & self._beginnings
            for content in self._special
            if content.startswith(end)
        }
        return Rests(frozenset(whole), frozenset(_beginnings(whole)))


_of_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, SpecialTokens] = WeakKeyDictionary()


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens of a tokenizer; the same object for the same tokenizer."""
    if tokenizer not in _of_tokenizers:
        _of_tokenizers[tokenizer] = SpecialTokens(tokenizer)
    return _of_tokenizers[tokenizer]


def share_special_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> None:
    """Let an equal tokenizer have the same object, which holds a copy of the vocabulary."""
    _of_tokenizers[other] = special_tokens_of(tokenizer)


class Marks:
    """Marks where the strings of one conversation spell special tokens, or parts of them.

    Args:
        special_tokens: the tokenizer's special tokens.
        literals: all texts that the chat template itself writes.
        names: the words that the template reads, like the names of fields. A part of a special
            token is not marked in them.
        changes_text: the template may leave out parts in the middle of a text, or change letters.
    """

    def __init__(
        self,
        special_tokens: SpecialTokens,
        literals: frozenset[str],
        names: Collection[str],
        *,
        changes_text: bool = False,
    ) -> None:
        self._special_tokens = special_tokens
        self._kept = special_tokens.without_special(literals) if changes_text else None
        self._rests, self._names = special_tokens.rests_after(literals), names
        # Digits pass through all filters of templates: trim, upper, tojson. Nobody can guess them.
        self._mark = f"{secrets.randbelow(10**20):020}"

    def marked(self, value: Any) -> Any:
        """Return a JSON value with marks in its strings and keys, each behind a first character."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = map(self.marked, value)
            return tuple(items) if isinstance(value, tuple) else list(items)
        return value

    def _marked_text(self, text: str) -> str:
        places = self._special_tokens.places_in(text, self._rests, self._kept)
        if not places or text in self._names:
            return text
        cuts = [0, *(place + 1 for place in sorted(places)), len(text)]
        return self._mark.join(text[a:b] for a, b in pairwise(cuts))

    def removed(self, text: str) -> str:
        """Return a rendered text without marks."""
        return text.replace(self._mark, "")

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a rendered text, in which special tokens are the template's alone.

        Args:
            encode: makes the ids of a text in which the conversation spells no special token.

        Raises:
            UserError: as `SpecialTokens.encode_literally`.
        """
        text, special_tokens = self.removed(rendered), self._special_tokens
        if len(text) == len(rendered):
            return encode(text)
        # The character before a mark begins no token of the template.
        *pieces, last = rendered.split(self._mark)
        pieces = [special_tokens.with_stand_ins(piece[:-1]) + piece[-1:] for piece in pieces]
        literal = "".join([*pieces, special_tokens.with_stand_ins(last)])
        if literal == special_tokens.with_stand_ins(text):
            return encode(text)
        return special_tokens.encode_literally(literal)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of the texts that begins at a place; none if there are none.

    It is a tree: the time of a search does not grow with the number of texts.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(c) + pattern(after) for c, after in node.items() if c]
        if not branches:
            return ""
        is_end = "" in node
        joined = "|".join(branches)
        return f"(?:{joined})?" if is_end else joined if len(branches) == 1 else f"(?:{joined})"

    return re.compile(pattern(tree) or r"(?!)")


def _beginnings(texts: Iterable[str]) -> Iterator[str]:
    """Yield the parts of texts that begin as they do and are shorter, not empty."""
    for text in texts:
        yield from (text[:length] for length in range(1, len(text)))
