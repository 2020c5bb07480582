"""Token ids of cut texts against those of the tokenizer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.data.segments import SegmentEncoder
from tests.conftest import byte_tokenizer

PIECES = ["<s>", "<s>>", "<<s>", "</s>", "<L>", "<R>", "<n>", "<w>", "s>", "<", " ", "  ", "\n"]
PIECES += ["a", "ab", "b a", "\u2581", "é", "A"]


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Of the kinds that models have, with special tokens that take blanks beside them or not."""
    if kind == "bytes":
        data = json.loads(byte_tokenizer().backend_tokenizer.to_str())
        data["model"]["vocab"]["\u0120a"] = 258
        data["model"]["merges"] = [["\u0120", "a"]]
        core = Tokenizer.from_str(json.dumps(data))
    else:
        letters = [*"ab<>s/LRnw\n\u2581é", "\u2581a", "ab", "\u2581\u2581", "<unk>"]
        merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "\u2581")]
        vocab = {letter: i for i, letter in enumerate(letters)}
        core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
        if kind == "prepend":
            steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            core.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(  # type: ignore[assignment]
                prepend_scheme=kind
            )
    special = {"special": True, "normalized": False}
    core.add_special_tokens([AddedToken(t, **special) for t in ("<s>", "</s>", "<<s>")])
    core.add_special_tokens([AddedToken("<L>", lstrip=True, **special)])
    core.add_special_tokens([AddedToken("<R>", rstrip=True, **special)])
    core.add_tokens([AddedToken("<n>", normalized=True), AddedToken("s>", normalized=False)])
    if kind == "always":
        core.add_special_tokens([AddedToken("<w>", single_word=True, **special)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "prepend"])
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=14), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_ids_are_those_of_the_whole_text(kind: str, texts: list[list[str]]) -> None:
    tokenizer = make_tokenizer(kind)
    encode = SegmentEncoder(tokenizer)
    for text in map("".join, texts):
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False), text


def test_a_segment_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("bytes")
    seen, real = [], tokenizer.encode

    def encode(text: str, **options: Any) -> list[int]:
        seen.append(text)
        return real(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    segments = SegmentEncoder(tokenizer)
    for turns in range(1, 30):
        segments("first" + "".join(f"<s>turn {i}" for i in range(turns)))
    assert seen == ["first", *(f"<s>turn {i}" for i in range(29))]
