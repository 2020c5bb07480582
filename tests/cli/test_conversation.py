"""Conversations with a model in this process or on a server."""

import io
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client.streams import Stream, by_name
from peagle import LLM, SamplingParams
from peagle.chat import split_thinking
from peagle.cli.conversation import Conversation, LocalModel, RemoteModel, ReportedPiece, TextScreen
from peagle.cli.terminal import interrupt_asks
from peagle.client.api import ApiClient
from peagle.errors import UserError
from peagle.thinking import ThinkingSplitter
from tests.cli.conftest import Peagle, Result
from tests.evaluation.fake_endpoint import Script, endpoint
from tests.test_llm_chat import TEMPLATE

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(target_folder)


@pytest.fixture
def talk(llm: LLM) -> Conversation:
    return Conversation(LocalModel(llm, PARAMS, chat_template=TEMPLATE))


def say(talk: Conversation, text: str) -> str:
    return "".join(piece.text for piece in talk.say(text) if not piece.is_reasoning)


# ---- turns ----


def test_turns_are_those_of_the_library(llm: LLM) -> None:
    talk = Conversation(LocalModel(llm, PARAMS, chat_template=TEMPLATE), "Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("hello", "and?"):
        (expected,) = llm.chat(
            [*messages, {"role": "user", "content": text}], PARAMS, chat_template=TEMPLATE
        )
        assert say(talk, text) == expected.answer == talk.last.answer
        assert talk.messages == expected.messages
        assert talk.last.num_prompt_tokens == len(expected.output.prompt_token_ids)
        messages = expected.messages
    assert talk.last.ended == "length"
    assert [turn.tally.num_tokens for turn in talk.turns] == [6, 6]


def test_reasoning_is_kept_apart(llm: LLM) -> None:
    talk = Conversation(LocalModel(llm, PARAMS, chat_template=TEMPLATE, thinking=True))
    pieces = list(talk.say("hello"))
    assert pieces and all(piece.is_reasoning for piece in pieces)
    assert "".join(piece.text for piece in pieces) == talk.last.reasoning
    assert talk.messages[-1] == {"role": "assistant", "content": ""}


def test_a_stopped_answer_stays_and_the_conversation_goes_on(talk: Conversation, llm: LLM) -> None:
    stops = iter([False, False, False, True])
    text = "".join(piece.text for piece in talk.say("hello", lambda: next(stops)))
    assert talk.last.ended == "interrupt" and talk.last.facts is None
    assert talk.last.tally.num_tokens == 4
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert say(talk, "more") and not llm.engine.has_unfinished


def test_a_turn_stopped_before_its_answer_is_forgotten(llm: LLM) -> None:
    talk = Conversation(LocalModel(llm, PARAMS, chat_template=TEMPLATE, thinking=True))
    stops = iter([False, False, False, True])
    assert list(talk.say("hello", lambda: next(stops)))
    assert (talk.messages, talk.turns) == ([], [])
    assert len(talk.answered) == 1


@pytest.mark.slow
def test_a_full_context_is_said_and_keeps_the_conversation(llm: LLM) -> None:
    model = LocalModel(llm, PARAMS, chat_template=TEMPLATE)
    talk = Conversation(model)
    say(talk, "hello")
    before = list(talk.messages)
    with pytest.raises(UserError, match=r"context of 256 has no room.*/new.*--max-model-len"):
        say(talk, "x" * 300)
    assert talk.messages == before and len(talk.turns) == 1
    model.params = SamplingParams(max_tokens=300, ignore_eos=True)
    say(talk, "go on")
    assert talk.last.ended == "context" and talk.last.num_tokens == 256
    with pytest.raises(UserError, match="no room for an answer"):
        say(talk, "again")
    talk.command("/undo")
    model.params = PARAMS
    assert say(talk, "again")


# ---- slash commands ----


def test_undo_and_new(talk: Conversation) -> None:
    talk.system = talk.messages = [{"role": "system", "content": "s"}]
    say(talk, "one")
    after_one = list(talk.messages)
    say(talk, "two")
    assert talk.command("/undo") == "Took back: two"
    assert talk.messages == after_one
    say(talk, "y" * 70)
    assert talk.command("/undo ") == f"Took back: {'y' * 57}..."
    assert talk.command("/new") == "A new conversation."
    assert talk.messages == [{"role": "system", "content": "s"}]
    with pytest.raises(UserError, match="no turn to take back"):
        talk.command("/undo")


def test_stats_count_what_was_taken_back_too(talk: Conversation) -> None:
    assert "context: 0 of 256 tokens" in talk.command("/stats")
    say(talk, "one")
    say(talk, "two")
    used = talk.last.num_tokens
    assert f"context: {used} of 256" in talk.command("/stats")
    talk.command("/new")
    text = talk.command("/stats")
    assert text.startswith("answers: 2, 12 tokens, ") and "context: 0 of 256" in text
    assert "no speculation" in text and "tokens were cached" in text


def test_save_never_overwrites(talk: Conversation, tmp_path: Path) -> None:
    say(talk, "hé")
    path = tmp_path / "a chat.json"
    assert talk.command(f"/save {path}") == f"Saved 2 messages to {path}"
    assert json.loads(path.read_text(encoding="utf-8")) == {"messages": talk.messages}
    before = path.read_text()
    for argument, problem in (
        (path, "is there already; name a file that is not"),
        (tmp_path / "no" / "x.json", "cannot be written: No such file"),
        ("", "/save needs the name of a file"),
    ):
        with pytest.raises(UserError, match=problem):
            talk.command(f"/save {argument}")
    assert path.read_text() == before


def test_exit_and_help(talk: Conversation) -> None:
    text = talk.command("/help")
    for name in ("/new", "/undo", "/stats", "/save FILE", "/exit", "//text"):
        assert name in text
    assert not talk.is_over
    assert talk.command("/exit") == "" and talk.is_over


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/undoo", "no command '/undoo'; did you mean /undo\\? /help lists them"),
        ("/etc/passwd", "no command '/etc/passwd'; /help lists them.*two slashes"),
        ("/", "no command '/'"),
        ("/new x", "/new stands alone; 'x' was given"),
    ],
)
def test_bad_commands(talk: Conversation, line: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        talk.command(line)


# ---- thinking ----


def parts(text: str, seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    while text:
        size = chance.randint(1, 4)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "answer",
        " \n answer\n",
        "<think>reason</think>answer",
        "\n<think>\n reason\n\n</think>\n\nanswer\n",
        "<think>a < b </thin > c</think>d </think> e <",
        "<think>cut off </thi",
        "reason </think> answer",
        "<thinking>no marker</thinking>",
        "<thi",
        "<think></think>",
    ],
)
def test_pieces_are_the_split_text(text: str, opened: bool) -> None:
    for seed in range(5):
        splitter = ThinkingSplitter(opened=opened)
        found = {True: "", False: ""}
        for part in parts(text, seed):
            for piece in splitter.add(part):
                found[piece.is_reasoning] += piece.text
        for piece in splitter.add("", final=True):
            found[piece.is_reasoning] += piece.text
        assert (found[True], found[False]) == split_thinking(text, opened=opened)


MODEL = {
    "id": "tiny",
    "max_model_len": 64,
    "chat": True,
    "speculation": {
        "default": "peagle",
        "proposers": [
            {"name": "peagle", "num_speculative_tokens": 7},
            {"name": "plain", "num_speculative_tokens": 0},
        ],
    },
}
DONE = "[DONE]"


def chunk(content: str = "", *, reasoning: str = "", finish: str | None = None, **more: Any) -> Any:
    delta = {"content": content} if content else {}
    delta |= {"reasoning_content": reasoning} if reasoning else {}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def report(*tokens: tuple[str, bool], drafted: int = 3) -> dict[str, Any]:
    accepted = sum(is_accepted for _, is_accepted in tokens)
    return {"num_drafted": drafted, "num_accepted": accepted, "tokens": tokens, "rejected": []}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "speculation": {
            "num_drafts": 2,
            "num_draft_tokens": 6,
            "num_accepted_tokens": 3,
            "num_accepted_tokens_per_pos": [2, 1, 0],
            "acceptance_length": 2.5,
        },
    },
}
ANSWER = [
    chunk(reasoning="hm", speculation=report(("hm", False), drafted=0)),
    chunk("def f", speculation=report(("def", True), (" f", False))),
    chunk("():", speculation=report(("()", True), (":", False))),
    chunk(finish="stop"),
    USAGE,
    DONE,
]


@pytest.fixture
def fake() -> Iterator[Script]:
    script = Script(models=[MODEL], stream=ANSWER)
    with endpoint(script):
        yield script


Chat = Callable[..., Result]


@pytest.fixture
def chat(peagle: Peagle, fake: Script, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """chat("line\\nline\\n", "--option") talks with the fake through a pipe."""

    def talk(lines: str, *options: object) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return peagle("chat", "--server", fake.url, *options)

    return talk


# ---- what it says ----


def test_a_conversation(chat: Chat, fake: Script) -> None:
    result = chat("hello\n/stats\nmore\n", "--system", "Be brief.")
    assert result.status == 0, result.err
    assert result.out == "def f():\ndef f():\n"
    assert "thinking:\nhm\n" in result.err
    assert "5 tokens, " in result.err and "acceptance length 2.50 at K=7" in result.err
    assert "4 of 9 prompt tokens cached" in result.err
    assert "context: 14 of 64 tokens" in result.err
    first, second = fake.bodies
    assert first["model"] == "tiny" and first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert first["speculation"] == {"report": True}
    system, hello = first["messages"]
    assert (system["role"], hello) == ("system", {"role": "user", "content": "hello"})
    answer = {"role": "assistant", "content": "def f():"}
    assert second["messages"] == [system, hello, answer, {"role": "user", "content": "more"}]
    # What nobody asked for is the server's to decide.
    assert first.keys() == {"model", "messages", "stream", "stream_options", "speculation"}


def test_options_become_fields(chat: Chat, fake: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_SAMPLING", '{"top_p": 0.9, "logit_bias": {"5": "-inf"}}')
    options = ["--temperature", 0.5, "--seed", 3, "--stop", "a", "--stop", "b", "-k", 4]
    options += ["--max-new-tokens", 12, "--no-thinking", "--bad-word", "no"]
    assert chat("hello\n", *options).status == 0
    (asked,) = fake.bodies
    expected = {
        "temperature": 0.5,
        "seed": 3,
        "stop": ["a", "b"],
        "bad_words": ["no"],
        "max_tokens": 12,
        "top_p": 0.9,
        "logit_bias": {"5": -100.0},
        "chat_template_kwargs": {"enable_thinking": False},
        "speculation": {"report": True, "num_speculative_tokens": 4},
    }
    assert {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content", "reasoning"]])
def test_reasoning_under_either_name_is_told_once(
    chat: Chat, fake: Script, names: list[str]
) -> None:
    thought = {"choices": [{"index": 0, "delta": dict.fromkeys(names, "hm")}]}
    fake.stream = [thought, chunk("yes", finish="stop"), DONE]
    result = chat("hello\n", "--format", "json")
    record = json.loads(result.out)
    assert (record["reasoning"], record["answer"]) == ("hm", "yes")


def test_structures(chat: Chat, fake: Script) -> None:
    assert chat("x\n", "--json-object").status == 0
    assert chat("x\n", "--json-schema", '{"type": "array"}').status == 0
    assert chat("x\n", "--regex", "[ab]+").status == 0
    json_object, schema, regex = (asked["response_format"] for asked in fake.bodies)
    assert json_object == {"type": "json_object"}
    assert regex == {"type": "regex", "pattern": "[ab]+"}
    assert schema["type"] == "json_schema" and schema["json_schema"]["schema"] == {"type": "array"}


def test_no_speculation(chat: Chat, fake: Script) -> None:
    fake.stream = [chunk("a"), chunk("b", finish="stop"), DONE]
    result = chat("hello\n", "--no-speculation")
    assert fake.bodies[0]["speculation"] == {"report": True, "num_speculative_tokens": 0}
    assert "no speculation" in result.err and "2 tokens" in result.err


def test_a_server_of_another_kind_is_sent_nothing_of_ours(chat: Chat, fake: Script) -> None:
    fake.models = [{"id": "other"}, {"id": "second"}]
    assert chat("hello\n", "--model", "second").status == 0
    assert fake.bodies[0]["model"] == "second" and "speculation" not in fake.bodies[0]
    assert "nothing" in chat("hello\n", "-k", 2).err


def test_json_facts(chat: Chat) -> None:
    result = chat("hello\n", "--format", "json")
    record = json.loads(result.out)
    assert record["answer"] == record["text"] == "def f():" and record["reasoning"] == "hm"
    assert record["turn"] == 1 and record["finish_reason"] == "stop"
    assert record["num_accepted_tokens_per_pos"] == [2, 1, 0]
    assert record["acceptance_length"] == 2.5 and record["num_prompt_tokens"] == 9
    assert 0 < record["time_to_first_token_s"] <= record["elapsed_s"]


# ---- acceptance as it comes ----


def test_pieces_carry_what_was_accepted(fake: Script) -> None:
    model = RemoteModel(ApiClient(fake.url))
    pieces = [p for p in Conversation(model).say("hello") if isinstance(p, ReportedPiece)]
    assert [p.text for p in pieces] == ["hm", "def f", "():"]
    assert pieces[1].tokens == (("def", True), (" f", False))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_accepted_tokens_stand_out_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    screen = TextScreen(is_live=True)
    screen.show(ReportedPiece("a\x1bb", False, (("a\x1b", True), ("b", False))))
    assert terminal.getvalue() == "\x1b[1;32ma\ufffd\x1b[0mb"
    # Tokens that are not the text (a character was cut in two) mark nothing.
    screen.show(ReportedPiece("ä", False, (("\ufffd", True), ("\ufffd", False))))
    assert terminal.getvalue().endswith("\x1b[0mbä")


def test_counts_until_the_usage_comes(fake: Script) -> None:
    fake.stream = [*ANSWER[:3], 30]
    talk = Conversation(RemoteModel(ApiClient(fake.url)))
    pieces = talk.say("hello", lambda: len(seen) == 3)
    seen: list[Any] = []
    for piece in pieces:
        seen.append(piece)
    turn = talk.last
    assert turn.ended == "interrupt" and turn.facts is None
    assert turn.tally.num_tokens == 5 and turn.tally.stats.num_drafts == 2
    assert turn.tally.stats.acceptance_length == 2.0
    assert talk.messages[-1] == {"role": "assistant", "content": "def f():"}


# ---- stopping ----


def test_ctrl_c_closes_the_connection_while_the_server_is_silent(fake: Script) -> None:
    fake.stream = [chunk("one"), 30]
    talk = Conversation(RemoteModel(ApiClient(fake.url)))
    start = time.monotonic()
    with interrupt_asks() as stopped:
        for piece in talk.say("hello", stopped):
            assert piece.text == "one"
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert fake.dropped.wait(5) and time.monotonic() - start < 5
    assert talk.last.ended == "interrupt" and talk.messages[-1]["content"] == "one"


def test_a_context_that_is_full(chat: Chat, fake: Script) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 4}}
    fake.stream = [chunk("a"), chunk(finish="length"), usage, DONE]
    assert "the context of 64 tokens is full" in chat("x\n").err
    usage["usage"] = {"prompt_tokens": 30, "completion_tokens": 4}
    assert "cut at --max-new-tokens 4" in chat("x\n", "--max-new-tokens", 4).err
    assert "cut by the server" in chat("x\n").err


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("status", "models", "message"),
    [
        (404, "<html>not here</html>", "'no such page (404)', which is not OpenAI's interface"),
        (200, [], "has no model ''; it has: none"),
        (200, [{**MODEL, "chat": False}], "has no chat template, so it is no chat model"),
        (503, '{"error": {"message": "loading\\u001b[2J"}}', "(503: loading [2J). Try again."),
        (500, "", "refused the request (500: it gave no reason)"),
    ],
)
def test_models_that_cannot_be_had(
    chat: Chat, fake: Script, status: int, models: Any, message: str
) -> None:
    fake.models_status, fake.models = status, models
    result = chat("hello\n")
    assert (result.status, result.out) == (2, "")
    assert message in result.err and "Traceback" not in result.err
    assert fake.bodies == []


def test_addresses_and_keys(
    chat: Chat, peagle: Peagle, fake: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/client has the ways in which either may be wrong."""
    assert "--server is 'nonsense'; expected a URL" in peagle("chat", "--server", "nonsense").err
    nobody = peagle("chat", "--server", "http://127.0.0.1:9").err
    assert "No server answers at http://127.0.0.1:9" in nobody and "`peagle serve`" in nobody
    monkeypatch.setenv("PEAGLE_API_KEY", "sk-secret,sk-other")
    fake.key = "sk-secret"
    assert chat("hello\n").status == 0
    fake.key = "sk-new"
    assert "sk-" not in (refused := chat("hello\n").err) and "refused the key (401" in refused


def test_a_model_that_is_not_there(chat: Chat) -> None:
    assert "has no model 'big'; it has: tiny" in chat("hello\n", "--model", "big").err
    assert "drafts at most 7 tokens a step" in chat("hello\n", "-k", 8).err


@by_name
def test_recorded_streams_of_four_servers(fake: Script, stream: Stream) -> None:
    fake.models = [{**MODEL, "max_model_len": 4096}]
    fake.stream = [stream.raw[:700], stream.raw[700:]]
    talk = Conversation(RemoteModel(ApiClient(fake.url)))
    if stream.error:
        with pytest.raises(UserError, match=re.escape(f"ended the answer: {stream.error}")):
            list(talk.say("hello"))
        return
    list(talk.say("hello"))
    assert talk.last.ended == stream.finish_reasons[-1]
    if len(stream.texts) == 1:  # it asks for one choice
        assert (talk.last.answer, talk.last.reasoning) == (stream.texts[0], stream.reasoning)
    if stream.usage is not None:
        assert talk.last.tally.num_tokens == stream.usage.num_tokens
        assert talk.last.num_prompt_tokens == stream.usage.num_prompt_tokens
        assert talk.last.num_cached_tokens == stream.usage.num_cached_tokens


@pytest.mark.parametrize(
    ("status", "kind", "stream", "message"),
    [
        (400, "application/json", ['{"error": {"message": "too long"}}'], "(400: too long)"),
        (401, "application/json", ['{"error": {"message": "key"}}'], "refused the key (401: key)"),
        (404, "text/html", ["nope"], "no such page (404)"),
        (200, "text/html", ["hello"], "a body of 'text/html', not a stream"),
        (200, "text/event-stream", [{"error": {"message": "died"}}], "ended the answer: died"),
        (200, "text/event-stream", [chunk("a"), {"error": {"message": "died"}}], "answer: died"),
        (200, "text/event-stream", [chunk("a")], "broke: it ended in the middle of the answer"),
        (200, "text/event-stream", [chunk("a"), DONE], "ended the answer without a reason"),
        (200, "text/event-stream", ["{nonsense"], "answered '{nonsense', which is not"),
        (200, "text/event-stream", [{"choices": 5}], "a chunk that is none of a chat completion"),
        (200, "text/event-stream", [{"choices": ["x"]}], "a chunk that is none of a chat comple"),
    ],
)
def test_answers_that_fail(
    chat: Chat, fake: Script, status: int, kind: str, stream: list[Any], message: str
) -> None:
    fake.status, fake.content_type, fake.stream = status, kind, stream
    result = chat("hello\n", "--format", "json")
    assert result.status == 2
    assert message in result.err and "Traceback" not in result.err
    (record,) = map(json.loads, result.out.splitlines())
    assert record["turn"] == 1 and message in record["error"]


def test_a_failed_answer_leaves_the_conversation_as_it_was(fake: Script) -> None:
    talk = Conversation(RemoteModel(ApiClient(fake.url)))
    list(talk.say("one"))
    before = list(talk.messages)
    fake.stream = [chunk("half")]
    with pytest.raises(UserError, match="in the middle"):
        list(talk.say("two"))
    assert talk.messages == before
    fake.stream = ANSWER
    list(talk.say("two"))
    assert [m["content"] for m in talk.messages] == ["one", "def f():", "two", "def f():"]


@pytest.mark.parametrize(
    "options",
    [
        ["--target", "x"],
        ["--draft", "x"],
        ["--dtype", "float32"],
        ["--threads", 1],
        ["--chat-template", "x.jinja"],
        ["--method", "ngram"],
        ["--show-config"],
    ],
)
def test_options_of_a_model_in_this_process(
    chat: Chat, fake: Script, options: list[object]
) -> None:
    result = chat("hello\n", *options)
    assert result.status == 2 and fake.paths == []
    assert f"{options[0]} and --server contradict each other" in result.err


def test_a_model_of_no_server(peagle: Peagle) -> None:
    assert "--model 'x' is for --server" in peagle("chat", "--model", "x").err
