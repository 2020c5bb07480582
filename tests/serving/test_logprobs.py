"""Log-probabilities as JSON: bytes, names and places of tokens that hold part of a character."""

import asyncio
import json
import math
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.engine import SpeculationStats
from peagle.engine.detokenizer import token_bytes
from peagle.engine.outputs import RequestOutput
from peagle.kernels.sampling.logprobs import PromptLogprobs, TokenLogprobs, logprob_table
from peagle.serving.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsWriter,
    PromptLogprobsWriter,
    TextOffset,
    TokenBytes,
    TokenNames,
    json_pieces,
)
from peagle.serving.completions import _Completion
from peagle.serving.protocol import CompletionBody
from tests.conftest import byte_tokenizer

TEXT = "aé€😀 b"


def value_of(writer: LogprobsWriter, given: Sequence[TokenLogprobs | None]) -> Any:
    """Return what a client reads of these log-probabilities."""
    return json.loads(b"".join(json_pieces(asyncio.run(writer.write(given)))))


def completion_logprobs(given: Any, bytes_of: TokenBytes, offset: TextOffset) -> Any:
    return value_of(CompletionLogprobs(TokenNames(bytes_of), offset), given)


def chat_logprobs(given: Any, bytes_of: TokenBytes) -> Any:
    return value_of(ChatLogprobs(TokenNames(bytes_of)), given)


def prompt_logprobs(given: Any, bytes_of: TokenBytes) -> Any:
    return value_of(PromptLogprobsWriter(TokenNames(bytes_of)), given)


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


def test_tokens_named_by_their_ids() -> None:
    names = TokenNames(lambda _: b"\xe2", as_ids=True)
    given = [TokenLogprobs(7, -1.0, 1, [(7, -1.0), (9, -2.0)])]
    completion = value_of(CompletionLogprobs(names, TextOffset()), given)
    assert completion["tokens"] == ["token_id:7"]
    assert completion["top_logprobs"] == [{"token_id:7": -1.0, "token_id:9": -2.0}]
    (chat,) = value_of(ChatLogprobs(names), given)["content"]
    assert (chat["token"], chat["bytes"]) == ("token_id:7", [0xE2])
    assert [one["token"] for one in chat["top_logprobs"]] == ["token_id:7", "token_id:9"]


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


# ---- many of them ----


def some_logprobs(count: int) -> list[TokenLogprobs]:
    dice = random.Random(count)

    def token() -> int:
        return dice.randrange(2, 258)

    return [
        TokenLogprobs(
            token(),
            dice.choice([-0.0, -1e-300, -dice.random() * 20, -math.inf]),
            dice.randrange(1, 300),
            [(token(), -dice.random()) for _ in range(dice.choice([0, 1, 20]))],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 200])
def test_each_form_is_that_of_dictionaries(count: int) -> None:
    bytes_of = partial(token_bytes, byte_tokenizer())
    given = some_logprobs(count)

    def name(token_id: int) -> str:
        data = bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = list(bytes_of(token_id))
        return {"token": name(token_id), "logprob": max(logprob, -9999.0), "bytes": data}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]}
        for one in given
    ]
    assert chat_logprobs(given, bytes_of) == {"content": content, "refusal": None}

    def fields(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": max(logprob, -9999.0),
            "rank": rank,
            "decoded_token": name(token_id),
        }

    expected = [
        {str(token_id): fields(token_id, x.logprob, x.rank) for token_id, x in one.items()}
        for one in given
    ]
    found = prompt_logprobs([None, *given], bytes_of)
    # A token may be twice among `top` here, and JSON then has its name twice.
    assert found[0] is None and [*map(sorted, found[1:])] == [*map(sorted, expected)]

    # Completions: any cut into writes, and a copy that goes on, give the same.
    whole = completion_logprobs(given, bytes_of, TextOffset(2))
    writer = CompletionLogprobs(TokenNames(bytes_of), TextOffset(2))
    writer.add(given[:5])
    for _ in range(2):
        assert value_of(writer.copy(), given[5:]) == whole
    assert whole["tokens"] == [name(one.token_id) for one in given]
    assert whole["token_logprobs"] == [max(one.logprob, -9999.0) for one in given]
    tops = [
        {name(i): max(v, -9999.0) for i, v in reversed([(one.token_id, one.logprob), *one.top])}
        if one.top
        else {}
        for one in given
    ]
    assert whole["top_logprobs"] == (tops if any(tops) else None)


def test_the_loop_goes_on_while_many_are_written() -> None:
    names = TokenNames(partial(token_bytes, byte_tokenizer()))
    given = some_logprobs(2_000)
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def write() -> None:
        turning = asyncio.ensure_future(turn())
        for writer in (
            ChatLogprobs(names),
            CompletionLogprobs(names, TextOffset()),
            PromptLogprobsWriter(names),
        ):
            before = num_turns
            await writer.write(given)
            assert num_turns - before >= len(given) // 64
        turning.cancel()

    asyncio.run(write())


def test_logprobs_of_a_prompt_are_read_from_tables() -> None:
    torch.manual_seed(0)
    logits_NV, ids = torch.randn(9, 40), [3, *torch.randint(40, (9,)).tolist()]
    whole = PromptLogprobs(ids, 4)
    whole.add(logprob_table(logits_NV, torch.tensor(ids[1:]), 4))
    cut = PromptLogprobs(ids, 4)
    assert len(cut) == 1 and list(cut) == [None]
    for first, last in ((0, 1), (1, 1), (1, 7), (7, 9)):
        cut.add(logprob_table(logits_NV[first:last], torch.tensor(ids[1:])[first:last], 4))
    assert len(cut) == 10 and cut == whole == list(cut) and cut[2:5] == list(cut)[2:5]
    assert cut[-1] == whole[9] and cut[0] is None and not cut.has_nan
    with pytest.raises(IndexError):
        cut[10]
    expected_NV = logits_NV.log_softmax(-1)
    for token, one, expected_V in zip(ids[1:], cut[1:], expected_NV, strict=True):
        assert one is not None and one.token_id == token
        assert one.logprob == pytest.approx(expected_V[token].item())
        assert [other for other, _ in one.top] == expected_V.topk(4).indices.tolist()
    cut.add(torch.full((1, 10), math.nan, dtype=torch.float64))
    assert cut.has_nan


def test_a_prompt_of_many_outputs_is_written_once() -> None:
    """And between two parts of the answer the event loop goes on."""
    num_read = num_turns = 0

    class Counted(PromptLogprobs):
        def __getitem__(self, index: Any) -> Any:
            nonlocal num_read
            num_read += isinstance(index, int)
            return super().__getitem__(index)

    ids, of_prompt = [70, *([71] * 199)], some_logprobs(199)
    given = Counted(ids, 20)
    given.tables = [torch.tensor([[-1.0, 2, *range(20), *[-2.0] * 20]] * 199).double().numpy()]
    outputs = {
        (0, i): RequestOutput(
            "x", [70] * 99, ids, "length", SpeculationStats(), 1.0, i,
            logprobs=of_prompt[:99], prompt_logprobs=None if i else given,
        )
        for i in range(8)
    }  # fmt: skip

    async def finish() -> list[RequestOutput]:
        return list(outputs.values())

    tokenizer = SimpleNamespace(token_bytes=partial(token_bytes, byte_tokenizer()))
    service: Any = SimpleNamespace(loaded=lambda: (tokenizer, None), name="m")
    generation: Any = SimpleNamespace(
        params=SimpleNamespace(n=8),
        prompts=[ids],
        outputs=outputs,
        ordered=[*outputs.values()],
        run_to_end=finish,
    )

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def answer(**fields: Any) -> dict[str, Any]:
        nonlocal num_read, num_turns
        num_read = num_turns = 0
        body = CompletionBody(prompt="x", n=8, logprobs=20, **fields)
        bodies: list[bytes] = []

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))

        async def receive() -> Any:
            return await asyncio.get_running_loop().create_future()

        turning = asyncio.ensure_future(turn())
        await _Completion(service, body, generation)({}, receive, send)
        turning.cancel()
        assert num_read == len(ids)
        assert num_turns > (len(ids) + 8 * 99) / 40
        assert max(map(len, bodies)) < 200_000
        return json.loads(b"".join(bodies))

    with_prompt = asyncio.run(answer(prompt_logprobs=20))["choices"]
    assert all(
        choice["prompt_logprobs"] == with_prompt[0]["prompt_logprobs"] for choice in with_prompt
    )
    assert len(with_prompt[7]["prompt_logprobs"]) == 200
    with_echo = asyncio.run(answer(echo=True))["choices"]
    assert {len(choice["logprobs"]["tokens"]) for choice in with_echo} == {299}
    assert with_echo[7]["logprobs"]["tokens"][200:] == with_prompt[7]["logprobs"]["tokens"]
