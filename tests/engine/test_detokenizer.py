"""Text that arrives in pieces: together the full decoding, never half a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens join bytes across the borders of characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["the words and the emoji 👩‍👩‍👧👍🏽", "漢字漢字仮名 né é à", "    return 漢字 + é"]
    core.train_from_iterator(lines * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2: a mark for the space, put before the text too, and bytes for the rest."""
    words = ["▁", "a", "b", "é", "▁a", "▁b", "ab", "\u0301", "\u200d"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


METASPACE = metaspace_tokenizer()
TRAINED = trained_tokenizer()
FALLBACK = fallback_tokenizer()
KINDS = {"trained": TRAINED, "fallback": FALLBACK, "metaspace": METASPACE, "bytes": BYTES}
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"), st.sampled_from("aab  \né漢字\u0301\u200d👩👧👍🏽\ufffd▁")
    ),
    max_size=30,
)
STEPS = st.lists(st.integers(0, 6), max_size=60)


def fallback_bytes(data: bytes) -> list[int]:
    return [2 + byte for byte in data]


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


@pytest.mark.parametrize("character", ["é", "€", "漢", "😀", "👩‍👩‍👧"])
def test_a_character_appears_when_its_last_byte_does(character: str) -> None:
    token_ids = BYTES.encode("a" + character + "b")
    chunks = chunks_of(BYTES, [[token] for token in token_ids])
    assert chunks[0] == "a"
    assert chunks[-1] == "b"
    points = [chunk for chunk in chunks[1:-1] if chunk]
    assert points == list(character)
    assert len(chunks) == len(token_ids)


def test_an_incomplete_end_is_released_when_final() -> None:
    token_ids = BYTES.encode("a€")[:-1]
    assert chunks_of(BYTES, [[token] for token in token_ids], final=False) == ["a", "", ""]
    assert chunks_of(BYTES, [[token] for token in token_ids]) == ["a", "", INCOMPLETE]


def stream(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], sizes: list[int]
) -> IncrementalDetokenizer:
    """Token ids in steps of `sizes`, the rest in the last; the text must grow by the chunks."""
    detokenizer, shown = IncrementalDetokenizer(tokenizer), ""
    rest = token_ids
    for size in sizes:
        step, rest = rest[:size], rest[size:]
        shown += detokenizer.add(step)
        assert detokenizer.text == shown
        assert decode(tokenizer, token_ids).startswith(shown)
    shown += detokenizer.add(rest, final=True)
    assert detokenizer.text == shown
    return detokenizer


@pytest.mark.parametrize("kind", ["trained", "fallback"])
@settings(deadline=None, max_examples=200)
@given(text=TEXTS, sizes=STEPS)
def test_any_cut_gives_the_text_of_decoding_at_once(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = stream(tokenizer, token_ids, sizes)
    assert detokenizer.text == decode(tokenizer, token_ids)
    if "▁" not in text:
        assert detokenizer.text == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
@settings(deadline=None, max_examples=200)
@given(data=st.data(), sizes=STEPS)
def test_any_tokens_in_any_cut_give_the_text_of_decoding_at_once(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    """Also invalid bytes, special tokens between bytes, and ids outside the vocabulary."""
    tokenizer = KINDS[kind]
    ids = st.integers(0, len(tokenizer) + 3)
    if kind == "fallback":
        few = [*fallback_bytes(b"\xc3\xa9\xff\xe6\xbc\xa2 a"), 0, 1, 258, 259, 262]
        ids = st.one_of(ids, st.sampled_from(few))
    token_ids = data.draw(st.lists(ids, max_size=60))
    assert stream(tokenizer, token_ids, sizes).text == decode(tokenizer, token_ids)


def test_byte_tokens_come_out_when_their_run_ends() -> None:
    """A later byte of the run could still make U+FFFD of all of it."""
    a, b = FALLBACK.convert_tokens_to_ids(["a", "b"])
    steps = [[a], fallback_bytes("é".encode()), [b]]
    assert chunks_of(FALLBACK, steps, final=False) == ["a", "", "éb"]
    steps = [[a], fallback_bytes("é".encode()), fallback_bytes(b"\xff"), [b]]
    assert chunks_of(FALLBACK, steps) == ["a", "", "", 3 * INCOMPLETE + "b"]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("token_id", [0, 5, 201, 257, 10_000, None])
def test_the_cost_of_a_token_does_not_grow_with_the_output(
    kind: str, token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token for ever: invalid bytes, special tokens, padding rows; and of a text (None)."""
    tokens = KINDS[kind].encode("some text, é and 漢, " * 30, add_special_tokens=False)
    if token_id is not None:
        tokens = [min(token_id, 6) if kind == "metaspace" else token_id] * 300
    detokenizer, decoded = IncrementalDetokenizer(KINDS[kind]), []
    inner = detokenizer._decode

    def counting(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return inner(token_ids)

    monkeypatch.setattr(detokenizer, "_decode", counting)
    for token in tokens:
        detokenizer.add([token])
    assert max(decoded, default=0) < 40
    detokenizer.add([], final=True)
    assert detokenizer.text == decode(KINDS[kind], tokens)


def test_added_tokens_outside_the_byte_alphabet_add_up() -> None:
    tokenizer = trained_tokenizer()
    tokenizer.add_tokens(["<think> é", " 漢 "])
    token_ids = tokenizer.encode("a<think> é漢 漢 né", add_special_tokens=False)
    assert len(tokenizer) - 2 in token_ids
    assert stream(tokenizer, token_ids, [1] * len(token_ids)).text == decode(tokenizer, token_ids)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return str(super()._decode(*args, **kwargs)).upper()  # type: ignore[arg-type]

    tokenizer = Shouting(tokenizer_object=BYTES.backend_tokenizer)
    token_ids = BYTES.encode("some words", add_special_tokens=False)
    assert stream(tokenizer, token_ids, [3, 1]).text == "SOME WORDS"
