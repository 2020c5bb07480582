"""What a body may hold: the table, and that each limit is applied before the work it bounds."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.bundled import BUNDLED_TARGET
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.models.target import load_tokenizer
from peagle.serving import tokenizer as tokenizer_file
from peagle.serving.app import parsed
from peagle.serving.config import ServerConfig
from peagle.serving.errors import ApiError
from peagle.serving.limits import LIMITS, most, parse_body, table
from peagle.serving.metrics import Metrics
from peagle.serving.protocol import ChatBody, CompletionBody, ResponsesBody, refuse_grammars
from peagle.serving.service import Caller, Service
from peagle.serving.tokenizer import Tokenizer, encode_text
from serving.live import KEYS, LOOPING_TEMPLATE, LiveServer

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 2048
MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(body, CONTEXT)
    assert caught.value.status == 400
    return caught.value


# ---- the table ----


def test_the_documentation_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "safety.md").read_text()


def test_models_tell_the_limits(server: LiveServer) -> None:
    with server.client() as client:
        limits = client.get("/v1/models").json()["data"][0]["limits"]
    assert {name: limits[name] for name in LIMITS} == {n: most(n) for n in LIMITS}
    assert limits["prompt_tokens"] == CONTEXT and limits["prompt_characters"] > CONTEXT


# ---- before JSON is parsed ----


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"bad_words": [' + b"1," * 2_000_000 + b"1]}", "json_values"),
        (b'{"stop": [' + b'"",' * 100_000 + b'""]}', "json_strings"),
        (b'{"prompt": [' + b"[]," * 40_000 + b"[]]}", "json_containers"),
        (b'{"metadata": ' + b'{"a":' * 97 + b"1" + b"}" * 97 + b"}", "json_depth"),
        (b"[" * 1_000, "json_depth"),
        (b'{"max_tokens": 1' + b"0" * 4_300 + b"}", "json_digits"),
        (b'{"n": 0.' + b"3" * 101 + b"}", "json_digits"),
        (json.dumps({f"f{i}": 1 for i in range(129)}).encode(), "129 fields"),
    ],
)
def test_json_of_too_much(body: bytes, words: str) -> None:
    error = refusal(body)
    assert words in error.message
    name = next(name for name in LIMITS if f"limit {name})" in error.message)
    assert str(most(name)) in error.message


def test_the_field_of_a_long_number_is_named() -> None:
    body = b'{"prompt": "a \\" , b", "max_tokens" : 1' + b"0" * 4_300 + b', "n": 1}'
    error = refusal(body)
    assert error.param == "max_tokens" and "'max_tokens'" in error.message


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": ',[{:"\\' * 200_000},
        {"prompt": '\\"' * 100_000 + "\\"},
        {"prompt": "1" * 5_000},
        {"prompt": [1] * 100_000},
        {
            "prompt": "\N{GRINNING FACE}\u00e9\ud83d\ude00".encode(
                "utf-16", "surrogatepass"
            ).decode("utf-16")
        },
        {"x": [[[[0.5, -1e-3, None, True]]]], "y": {"z": {}}},
    ],
)
def test_text_does_not_count(value: Any) -> None:
    for is_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=is_ascii).encode()
        assert parse_body(body, CONTEXT) == value == json.loads(body)


def test_two_contexts_of_token_ids_fit() -> None:
    body = b"[" + b"1," * 299_999 + b"1]"
    assert "json_values" in refusal(body).message
    assert len(parse_body(body, 150_001)) == 300_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_unicode"),
        (b'{"prompt": "\xff"}', "invalid_unicode"),
        (b'{"prompt": "\\ud800"}', "invalid_unicode"),
        (b'{"prompt": "\\ud800\\n"}', "invalid_unicode"),
        (b'{"prompt": "\\udfff"}', "invalid_unicode"),
        (b'{"prompt": ', "invalid_json"),
        (b"{'prompt': 1}", "invalid_json"),
    ],
)
def test_what_is_not_json_in_utf8(body: bytes, code: str) -> None:
    assert refusal(body).code == code


# ---- counts and lengths ----


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("bad_words", ["x"] * 257, "bad_words"),
        ("bad_words", ["x", "y" * 65], "bad_words.1"),
        ("bad_words", [1] * 10_000, "bad_words.0"),
        ("stop", ["x"] * 65, "stop"),
        ("stop", "x" * 257, "stop"),
        ("stop", ["x" * 257], "stop.0"),
        ("stop_token_ids", [1] * 257, "stop_token_ids"),
        ("allowed_token_ids", [1] * 16_385, "allowed_token_ids"),
        ("logit_bias", {str(i): 1 for i in range(1_025)}, "logit_bias"),
        ("guided_choice", ["x"] * 1_025, "guided_choice"),
        ("guided_regex", "x" * 65_537, "guided_regex"),
        ("response_format", {"type": "regex", "pattern": "x" * 65_537}, "response_format.pattern"),
        ("metadata", {str(i): i for i in range(65)}, "metadata"),
        ("structured_outputs", {str(i): i for i in range(65)}, "structured_outputs"),
        ("user", "x" * 1_025, "user"),
        ("cache_salt", "x" * 1_025, "cache_salt"),
        ("model", "x" * 1_025, "model"),
        ("prompt", ["x"] * 257, "prompt"),
        ("prompt", [[1]] * 257, "prompt"),
        ("prompt", [1, 2, "x"], "prompt.2"),
        ("prompt", ["x", 2], "prompt.1"),
        ("prompt", [[1], ["x"]], "prompt.1.0"),
        ("stream_options", {str(i): i for i in range(129)}, "stream_options"),
    ],
)
def test_a_field_of_too_much(field: str, value: Any, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(CompletionBody, {"prompt": "x", field: value})
    assert caught.value.status == 400 and caught.value.param == place, caught.value.message
    assert "at most" in caught.value.message or "valid" in caught.value.message


@pytest.mark.parametrize(
    ("model", "body", "place"),
    [
        (ChatBody, {"messages": MESSAGES * 4_097}, "messages"),
        (ChatBody, {"messages": MESSAGES, "tools": [TOOL] * 129}, "tools"),
        (
            ChatBody,
            {"messages": MESSAGES, "chat_template_kwargs": {str(i): 1 for i in range(65)}},
            "chat_template_kwargs",
        ),
        (ResponsesBody, {"input": MESSAGES * 4_097}, "input"),
        (ResponsesBody, {"input": "x", "include": ["x"] * 17}, "include"),
    ],
)
def test_a_conversation_of_too_much(model: Any, body: Any, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(model, body)
    assert caught.value.param == place and "at most" in caught.value.message


def test_the_first_wrong_element_is_told_alone() -> None:
    from pydantic import ValidationError

    for body in ({"prompt": ["x"] * 5 + [1] * 200}, {"prompt": "x", "bad_words": [1] * 200}):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate(body)
        assert len(caught.value.errors()) == 1


def test_limits_of_n_times_entries(server: LiveServer) -> None:
    many: dict[str, Any] = {
        "stop": [f"z{i}" for i in range(5)],
        "bad_words": [f"z{i}" for i in range(65)],
        "logit_bias": {str(i): 1 for i in range(65)},
        "allowed_token_ids": list(range(1_025)),
    }
    with server.client() as client:
        for field, value in many.items():
            body = {"prompt": "x", "max_tokens": 1, "temperature": 1, "n": 64, field: value}
            error = client.post(COMPLETIONS, json=body).json()["error"]
            assert error["param"] == field and f"limit n_{field}" in error["message"]
        body = {"prompt": "x", "max_tokens": 2, "stop": ["zz"] * 64, "bad_words": ["zz"] * 256}
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_a_schema_that_is_too_long_does_not_reach_the_engine(server: LiveServer) -> None:
    names = [f"field_{i}" for i in range(8_000)]
    schema = {"type": "object", "properties": {name: {} for name in names}}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with server.client() as client:
        for body, param in (
            ({"response_format": wanted}, "response_format"),
            ({"guided_json": schema}, "guided_json"),
            ({"structured_outputs": {"choice": names}}, "structured_outputs"),
            ({"tools": [tool], "tool_choice": "required"}, None),
        ):
            answer = client.post(CHAT, json={"messages": MESSAGES, **body}).json()["error"]
            assert "at most" in answer["message"] and param in (None, answer["param"])


@pytest.mark.parametrize("is_ignored", [False, True])
def test_priority_can_be_ignored(is_ignored: bool) -> None:
    info: Any = SimpleNamespace(max_model_len=8, num_speculative_tokens={"plain": 0})
    pool: Any = SimpleNamespace(info=info)
    config = ServerConfig(ignore_priority=is_ignored)
    service = Service(config, "m", ("plain",), pool, Metrics("m"), None)  # type: ignore[arg-type]
    service.tokenizer = SimpleNamespace()  # type: ignore[assignment]
    body = CompletionBody(prompt="x", priority=-5)
    generation = service.generation([[1]], SamplingParams(), body, Caller("id", COMPLETIONS))
    assert generation.priority == (0 if is_ignored else -5)


def test_the_model_has_its_name_and_the_typed_one() -> None:
    pool: Any = None
    service = Service(ServerConfig(), "m", ("plain",), pool, Metrics("m"), typed_name="./m")
    service.check_model("m")
    service.check_model("./m")
    with pytest.raises(ApiError, match="'x' is not served here; expected 'm'"):
        service.check_model("x")


# ---- texts ----


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(BUNDLED_TARGET))


def test_a_text_that_cannot_fit_is_not_tokenised(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    limit = CONTEXT * tokenizer.characters_per_token
    with server.client() as client:
        for path, body, param in (
            (COMPLETIONS, {"prompt": "x" * (limit + 1)}, "prompt"),
            (COMPLETIONS, {"prompt": ["x", "x" * (limit + 1)]}, "prompt"),
            ("/tokenize", {"prompt": "x" * (limit + 1)}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": "x" * limit}]}, "messages"),
        ):
            error = client.post(path, json=body).json()["error"]
            assert error["param"] == param and error["code"] == "context_length_exceeded"
            assert f"at most {limit}" in error["message"] and "2048" in error["message"]
        error = client.post(COMPLETIONS, json={"prompt": [1] * 3_000}).json()["error"]
        assert "3000" in error["message"] and "2048" in error["message"]
        error = client.post("/detokenize", json={"tokens": [1] * 2_049}).json()["error"]
        assert error["param"] == "tokens" and "2049" in error["message"]
        assert client.post("/detokenize", json={"tokens": [1] * 2_048}).status_code == 200
        longest = client.post("/tokenize", json={"prompt": "x" * limit, "return_token_strs": True})
        assert longest.json()["count"] == len(longest.json()["token_strs"])
    monkeypatch.setattr(tokenizer_file, "encode_text", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ApiError):
        asyncio.run(tokenizer.encode("x" * (limit + 1), CONTEXT))


def test_ids_are_those_of_the_tokenizer() -> None:
    tokenizer = load_tokenizer(str(BUNDLED_TARGET))
    draw = random.Random(1)
    special = [
        *tokenizer.all_special_tokens,
        "\u00e9\N{GRINNING FACE}",
        " ",
        "\n\n\t",
        "def f(x):",
        "\0",
    ]
    texts = ["", *special, *tokenizer.get_vocab()]
    texts += [
        "".join(draw.choices([*special, "word", "1"], k=draw.randrange(40))) for _ in range(300)
    ]
    texts += ["".join(chr(draw.randrange(1, 0xD800)) for _ in range(60)) for _ in range(100)]
    for text in texts:
        for added in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=added)
            assert encode_text(tokenizer, text, add_special_tokens=added) == expected


def test_short_texts_do_not_wait_for_long_ones(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    is_let_go = threading.Event()
    encode = tokenizer_file.encode_text

    def held(tokenizer: Any, text: str, **options: Any) -> list[int]:
        if len(text) > 20_000:
            assert is_let_go.wait(60)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer_file, "encode_text", held)

    async def both() -> None:
        long = [asyncio.ensure_future(tokenizer.encode("x " * 15_000, 2048)) for _ in range(3)]
        assert await tokenizer.encode("def f", 2048)
        assert not any(task.done() for task in long)
        is_let_go.set()
        assert await asyncio.gather(*long)

    asyncio.run(both())


def test_bad_words_reach_the_engine_as_ids(tokenizer: Tokenizer) -> None:
    ids = asyncio.run(tokenizer.encode_words(["foo", " foo", "foo"]))
    texts = {tokenizer.tokenizer.decode(one) for one in ids}
    assert texts == {"foo", " foo"}


# ---- templates ----


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    template = tmp_path_factory.mktemp("loop") / "loop.jinja"
    template.write_text(LOOPING_TEMPLATE)
    yield Tokenizer(str(BUNDLED_TARGET), str(template))


@pytest.mark.slow
def test_a_template_that_loops_ends(monkeypatch: pytest.MonkeyPatch, looping: Tokenizer) -> None:
    monkeypatch.setattr(tokenizer_file, "most", lambda _: 0.5)
    raise_in, raised = tokenizer_file._raise_in, list[Any]()

    def recorded(thread: int, exception: type[BaseException] | None) -> None:
        raised.append(exception)
        raise_in(thread, exception)

    monkeypatch.setattr(tokenizer_file, "_raise_in", recorded)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(UserError, match="template_seconds"):
                await looping.render(MESSAGES, CONTEXT, template_kwargs={"forever": True})
            ids, _ = await looping.render(MESSAGES, CONTEXT)
            assert ids == looping.tokenizer.encode("x", add_special_tokens=False)

    asyncio.run(run())
    # One that is taken back slows Python 3.11 down, and lets a traced call wait for ever.
    assert raised == [tokenizer_file._OutOfTime] * 2


@pytest.mark.slow
def test_a_deadline_ends_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "_WATCH_S", 0.0005)
    endings: set[str] = set()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            for number in range(120):
                deadline = tokenizer_file._TimeLimit(0)
                end = time.monotonic() + 0.002 * (number % 15)

                def call(end: float = end) -> str:
                    while time.monotonic() < end:
                        pass
                    return "done"

                running_call = loop.run_in_executor(thread, deadline.run, call)
                watching = asyncio.ensure_future(deadline.watch(running_call))
                try:
                    assert await running_call == "done"
                    endings.add("done")
                except UserError:
                    endings.add("late")
                await watching
                assert await loop.run_in_executor(thread, sum, range(10_000)) == 49_995_000

    asyncio.run(run())
    assert endings == {"done", "late"}


def test_a_request_with_such_a_template(strict: LiveServer) -> None:
    with strict.as_holder(KEYS[5]) as client:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"forever": True}, "max_tokens": 1}
        answer = client.post(CHAT, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and "template_seconds" in error["message"]
        fine = client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, "priority": -9})
        assert fine.status_code == 200


# ---- grammars of requests ----


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "root ::= [a]"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= [a]"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_grammar": "root ::= [a]"}, "guided_grammar"),
    ],
)
def test_each_way_to_bring_a_grammar_is_refused(fields: dict[str, Any], param: str) -> None:
    refusal = refusal_of(CompletionBody.model_validate({"prompt": "x", **fields}))
    assert refusal is not None and "--no-user-grammars" in refusal.message
    assert (refusal.status, refusal.param) == (400, param)
    assert refusal.code == "grammars_not_allowed"


def refusal_of(body: CompletionBody | ChatBody | ResponsesBody) -> ApiError | None:
    try:
        refuse_grammars(body)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"guided_json": SCHEMA},
        {"guided_regex": None},
    ],
)
def test_other_structures_stay(fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    for body in (
        CompletionBody.model_validate({"prompt": "x", **fields}),
        ChatBody.model_validate({"messages": messages, **fields}),
        ResponsesBody.model_validate({"input": "x"}),
    ):
        assert refusal_of(body) is None


def complete(server: LiveServer, **fields: Any) -> Any:
    with server.as_holder(KEYS[4]) as client:
        body = {"prompt": "x", "max_tokens": 8, "temperature": 0, **fields}
        return client.post("/v1/completions", json=body)


def test_a_server_that_takes_no_grammars(strict: LiveServer) -> None:
    answer = complete(strict, guided_regex="a+")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammars_not_allowed"
    assert complete(strict).status_code == 200


def test_a_grammar_beyond_the_budget(strict: LiveServer) -> None:
    pytest.importorskip("xgrammar")
    for _ in range(2):
        answer = complete(strict, guided_choice=["yes", "no"])
        assert answer.status_code == 400
        assert "--grammar-budget" in answer.json()["error"]["message"]
