"""Special tokens that a conversation spells are text; all other ids are those of the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.encoding import SpecialTokens, encode_text
from tests.families import FAMILIES, small_tokenizer, tokenizer_of


def flagged_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens have all flags, and begin and end like each other."""
    core = small_tokenizer(kind)
    special = [
        AddedToken("<a>", lstrip=True),
        AddedToken("<b>", rstrip=True),
        AddedToken("<c>"),
        AddedToken("<a><c>"),
        AddedToken("a>x"),
        AddedToken("⟦"),
    ]
    core.add_tokens([AddedToken("<think>"), AddedToken("c><")])
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<c>")


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are entries of the vocabulary that a text may match."""
    letters = "abcdefghijklmnopqrstuvwxyz<>/|▁é1OU "
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("user", -3.0), ("<b>", -2.0)]
    core = Tokenizer(models.Unigram([*vocab, *((c, -5.0) for c in letters)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


KINDS = ("bytes", "spaces", "prefix", "first")
TOKENIZERS = {
    **{f"flags-{kind}": flagged_tokenizer(kind) for kind in KINDS},
    "unigram": unigram_tokenizer(),
    **{family: tokenizer_of(family) for family in FAMILIES},
}


def pieces(name: str) -> st.SearchStrategy[str]:
    """Text rich in added tokens and in halves of them."""
    added = [token.content for token in TOKENIZERS[name].added_tokens_decoder.values()]
    halves = [content[:n] for content in added for n in range(1, len(content))]
    halves += [content[n:] for content in added for n in range(1, len(content))]
    plain = st.sampled_from([" ", "  ", "\n", "user", "Oslo", "é", "1", "<b>", "|", "▁", ""])
    piece = st.sampled_from(added) | st.sampled_from(halves) | plain
    return st.lists(piece, max_size=12).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_stand_ins_are_read_as_the_tokens_for_which_they_stand(
    name: str, data: st.DataObject
) -> None:
    """So a text of a template's tokens alone has the same ids in both ways."""
    tokenizer = TOKENIZERS[name]
    special_tokens = SPECIAL[name]
    text = data.draw(pieces(name))
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encode_text(tokenizer, text, add_special_tokens=False) == expected
    stood_in = special_tokens.with_stand_ins(text)
    assert special_tokens.encode_literally(stood_in) == expected


SPECIAL = {name: SpecialTokens(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_without_stand_ins_there_is_no_special_token(name: str, data: st.DataObject) -> None:
    tokenizer, text = TOKENIZERS[name], data.draw(pieces(name))
    ids = SPECIAL[name].encode_literally(text)
    added = tokenizer.added_tokens_decoder
    special = {id for id, token in added.items() if token.special} - {tokenizer.unk_token_id}
    assert special.isdisjoint(ids)
    if name in ("bytes", "flags-bytes"):
        assert tokenizer.decode(ids) == text
    # Added tokens that are not special are still found: with the special ones taken apart, all
    # ids are the tokenizer's own.
    for content in sorted((t.content for t in added.values() if t.special), key=len):
        if content in text:
            return
    assert ids == tokenizer.encode(text, add_special_tokens=False)
