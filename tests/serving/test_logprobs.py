"""Log-probabilities as JSON: bytes, names and places of tokens that hold part of a character."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.engine.detokenizer import token_bytes
from peagle.kernels.logprobs import TokenLogprobs
from peagle.serving.answers import (
    TextOffset,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from tests.conftest import byte_tokenizer

TEXT = "aé€😀 b"


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Single letters, "▁b" and byte tokens, as tokenizers with byte fallback have them."""
    names = ["<unk>", "a", "b", "▁b", "▁", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "b")], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


@pytest.fixture(params=["byte-level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return byte_tokenizer() if request.param == "byte-level" else fallback_tokenizer()


def test_bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    is_fallback = tokenizer.eos_token == "</s>"
    ids = tokenizer.encode(TEXT.replace(" ", "▁") if is_fallback else TEXT)
    found = [token_bytes(tokenizer, token_id) for token_id in ids]
    assert b"".join(found) == TEXT.encode() and len(found) > len(TEXT)
    end: Any = tokenizer.eos_token_id
    assert token_bytes(tokenizer, end) == str(tokenizer.eos_token).encode()
    assert token_bytes(tokenizer, 10**6) == b""

    given = completion_logprobs(
        [TokenLogprobs(token_id, -1.0, 1, []) for token_id in ids],
        partial(token_bytes, tokenizer),
        TextOffset(3),
    )
    # The offset of the character that each byte belongs to.
    places = [3 + i for i, character in enumerate(TEXT) for _ in character.encode()]
    assert given["text_offset"] == (places[:-1] if is_fallback else places)  # "▁b" is one token
    assert given["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert given["top_logprobs"] is None


def test_equal_names_do_not_hide_the_token() -> None:
    tokenizer = byte_tokenizer()
    bytes_of = partial(token_bytes, tokenizer)
    ids = {bytes_of(token_id): token_id for token_id in range(2, 258)}
    first, second, third = (ids[bytes([byte])] for byte in (0xE2, 0x82, 0xAC))
    one = TokenLogprobs(second, -3.0, 3, [(first, -0.5), (third, -1.0)])
    (top,) = completion_logprobs([one], bytes_of, TextOffset())["top_logprobs"]
    assert top == {"bytes:\\x82": -3.0, "bytes:\\xe2": -0.5, "bytes:\\xac": -1.0}
    # Two tokens of the same bytes: the one that was chosen, then the more likely one, count.
    same = TokenLogprobs(7, -2.0, 2, [(8, -0.25), (9, -4.0)])
    (top,) = completion_logprobs([same], lambda _: b"x", TextOffset())["top_logprobs"]
    assert top == {"x": -2.0}

    (content,) = chat_logprobs([one], bytes_of)["content"]
    assert (content["token"], content["bytes"], content["logprob"]) == ("bytes:\\x82", [0x82], -3)
    assert [other["bytes"] for other in content["top_logprobs"]] == [[0xE2], [0xAC]]


def test_prompt_logprobs_by_token_id() -> None:
    bytes_of = partial(token_bytes, byte_tokenizer())
    low = float("-inf")
    given = [None, TokenLogprobs(70, low, 5, [(71, -0.5), (70, low)])]
    expected = {
        "70": {"logprob": -9999.0, "rank": 5, "decoded_token": bytes_of(70).decode()},
        "71": {"logprob": -0.5, "rank": 1, "decoded_token": bytes_of(71).decode()},
    }
    assert prompt_logprobs(given, bytes_of) == [None, expected]
