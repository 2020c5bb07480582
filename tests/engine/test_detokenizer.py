"""Text that arrives in pieces: together the full decoding, never half a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.engine.detokenizer import IncrementalDetokenizer
from tests.conftest import byte_tokenizer

INCOMPLETE = "\ufffd"
BYTES = byte_tokenizer()
END = 0


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading-space mark, whose decoding drops the mark at the start of a text."""
    words = ["<unk>", "▁a", "▁word", "s", "▁é", "▁", "!"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


METASPACE = metaspace_tokenizer()


def cut(token_ids: list[int], seed: int) -> list[list[int]]:
    """Steps of 0 to 5 tokens."""
    rng, steps = random.Random(seed), []
    while token_ids:
        size = rng.randint(0, 5)
        steps.append(token_ids[:size])
        token_ids = token_ids[size:]
    return steps


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def chunks_of(
    tokenizer: PreTrainedTokenizerBase, steps: list[list[int]], *, final: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    last = len(steps) - 1
    chunks = [detokenizer.add(step, final=final and i == last) for i, step in enumerate(steps)]
    assert detokenizer.text == "".join(chunks)
    return chunks


@settings(deadline=None, max_examples=300)
@given(st.text(min_size=1), st.integers(0, 99))
def test_chunks_add_up_to_the_text(text: str, seed: int) -> None:
    token_ids = BYTES.encode(text)
    steps = cut(token_ids, seed)
    chunks = chunks_of(BYTES, steps)
    assert "".join(chunks) == decode(BYTES, token_ids) == text
    if INCOMPLETE not in text:
        assert not any(INCOMPLETE in chunk for chunk in chunks)
    # Nothing is held back longer than needed: a step that ends a character shows it.
    shown, done = "", 0
    for step, chunk in zip(steps, chunks):
        shown, done = shown + chunk, done + len(step)
        so_far = decode(BYTES, token_ids[:done])
        if step and not so_far.endswith(INCOMPLETE):
            assert shown == so_far


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 257), min_size=1, max_size=40), st.integers(0, 99))
def test_any_tokens_add_up_to_their_decoding(token_ids: list[int], seed: int) -> None:
    """Also bytes that are no UTF-8 at all, and special tokens in between."""
    assert "".join(chunks_of(BYTES, cut(token_ids, seed))) == decode(BYTES, token_ids)


@pytest.mark.parametrize("character", ["é", "€", "漢", "😀", "👩‍👩‍👧"])
def test_a_character_appears_when_its_last_byte_does(character: str) -> None:
    token_ids = BYTES.encode("a" + character + "b")
    chunks = chunks_of(BYTES, [[token] for token in token_ids])
    assert chunks[0] == "a"
    assert chunks[-1] == "b"
    points = [chunk for chunk in chunks[1:-1] if chunk]
    assert points == list(character)
    assert len(chunks) == len(token_ids)


def test_a_step_that_ends_inside_a_character_waits_for_the_rest() -> None:
    token_ids = BYTES.encode("né€!")  # 1, 2, 3 and 1 bytes
    steps = [token_ids[:2], token_ids[2:5], token_ids[5:6], token_ids[6:]]
    assert chunks_of(BYTES, steps) == ["", "", "né€", "!"]


def test_an_incomplete_end_is_released_when_final() -> None:
    token_ids = BYTES.encode("a€")[:-1]
    assert chunks_of(BYTES, [[token] for token in token_ids], final=False) == ["a", "", ""]
    assert chunks_of(BYTES, [[token] for token in token_ids]) == ["a", "", INCOMPLETE]


def test_a_replacement_character_in_the_text_itself_comes_through() -> None:
    token_ids = BYTES.encode(f"a{INCOMPLETE}b{INCOMPLETE}")
    assert "".join(chunks_of(BYTES, [[t] for t in token_ids])) == f"a{INCOMPLETE}b{INCOMPLETE}"


def test_special_tokens_are_left_out() -> None:
    first, second = BYTES.encode("a"), BYTES.encode("b")
    assert chunks_of(BYTES, [first, [END], second, [END]]) == ["a", "", "b", ""]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(0, 99))
def test_spaces_between_words_survive_the_cuts(token_ids: list[int], seed: int) -> None:
    """Decoding a word by itself loses its leading space; in the stream it must not, even after
    special tokens.
    """
    assert "".join(chunks_of(METASPACE, cut(token_ids, seed))) == decode(METASPACE, token_ids)


def test_the_cost_does_not_grow_with_the_output(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    detokenizer = IncrementalDetokenizer(BYTES)
    inner = detokenizer._decode

    def counting(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return inner(token_ids)

    monkeypatch.setattr(detokenizer, "_decode", counting)
    for token in BYTES.encode("some text, é and 漢, " * 30):
        detokenizer.add([token])
    assert max(decoded) < 10
