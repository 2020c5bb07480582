"""`peagle chat` through pipes and in a terminal."""

import io
import json
import os
import pty
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams
from tests.cli.conftest import Pair, Peagle, Result, environment
from tests.test_llm_chat import TEMPLATE

Chat = Callable[..., Result]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.txt"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def chat(peagle: Peagle, pair: Pair, template: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """chat("line\\nline\\n", "--option") talks with the tiny model through a pipe."""

    def talk(lines: str | bytes, *options: object, models: tuple[object, ...] = ()) -> Result:
        raw = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        models = models or ("--target", pair.target, "--chat-template", template)
        return peagle("chat", *models, "--max-new-tokens", 8, *options)

    return talk


def turns(pair: Pair, texts: list[str]) -> list[str]:
    """The answers of the library to one conversation."""
    llm, messages, answers = LLM(pair.target), [], []
    for text in texts:
        messages = [*messages, {"role": "user", "content": text}]
        (out,) = llm.chat(messages, SamplingParams(max_tokens=8), chat_template=TEMPLATE)
        messages = out.messages
        answers.append(out.answer)
    return answers


def test_a_conversation_through_a_pipe(chat: Chat, pair: Pair) -> None:
    result = chat("hello\n\n/stats\nand /then?\n/exit\nnever\n", "--draft", pair.peagle, "-k", 3)
    assert result.status == 0, result.err
    assert result.out == "".join(f"{text}\n" for text in turns(pair, ["hello", "and /then?"]))
    assert result.err.count("acceptance length") == 3 and "at K=3" in result.err
    assert " 0 of 22 prompt tokens cached" in result.err
    assert " 16 of 63 prompt tokens cached" in result.err, "the second begins as the first"
    assert "context: " in result.err and "\x1b" not in result.err


def test_json_has_one_object_an_answer(chat: Chat, pair: Pair) -> None:
    result = chat("hello\n//new\n/new\nhello", "--format", "json", "--system", "s")
    assert result.status == 0, result.err
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["turn"] for record in records] == [1, 2, 1]
    assert records[0]["answer"] == records[2]["answer"] == records[0]["text"]
    assert records[0]["num_prompt_tokens"] == len("<system>s<user>hello<assistant>")
    assert records[1]["num_prompt_tokens"] > records[0]["num_prompt_tokens"] + len("<user>/new")
    assert records[0]["reasoning"] == "" and records[0]["acceptance_length"] == 1


def test_reasoning_goes_to_standard_error(chat: Chat) -> None:
    result = chat("hello\n", "--thinking")
    assert (result.status, result.out) == (0, "\n"), "it was cut off before an answer"
    assert "thinking:\n" in result.err and "cut at --max-new-tokens 8" in result.err
    assert chat("hello\n", "--no-thinking").out != "\n"


def test_mistakes_in_a_conversation_do_not_end_it(chat: Chat) -> None:
    result = chat(f"/foo\n{'x' * 3000}\nhello\n", "--format", "json")
    assert result.status == 2
    refused, answered = map(json.loads, result.out.splitlines())
    assert refused["turn"] == answered["turn"] == 1 and answered["answer"]
    assert "/new, or start with a larger --max-model-len" in refused["error"]
    assert "There is no command '/foo'" in result.err and "3017 tokens" in result.err


def test_nothing_said_is_no_mistake(chat: Chat) -> None:
    result = chat("")
    assert (result.status, result.out) == (0, "")


def test_input_that_is_not_text(chat: Chat) -> None:
    result = chat(b"\xff\n")
    assert (result.status, result.out) == (2, "")
    assert "Standard input is not UTF-8 text (byte 0xff)" in result.err


def test_flags_over_the_model_over_greedy(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[SamplingParams] = []
    stream = LLM.stream

    def spy(self: LLM, prompts: object, params: SamplingParams) -> object:
        used.append(params)
        return stream(self, prompts, params)  # type: ignore[arg-type]

    own = SamplingParams(max_tokens=7, temperature=0.5, top_k=9)
    monkeypatch.setattr(LLM, "stream", spy)
    monkeypatch.setattr(LLM, "default_params", lambda self: own)
    assert chat("hello\n", "--temperature", 0.7, "--seed", 1).status == 0
    assert used == [SamplingParams(max_tokens=8, temperature=0.7, top_k=9, seed=1)]


def test_show_config_leaves_sampling_to_the_model(peagle: Peagle) -> None:
    result = peagle("chat", "--target", "org/x", "--show-config", "--top-p", 0.9)
    assert (result.status, result.err) == (0, "")
    shown = json.loads(result.out)
    assert (shown["sampling"]["top_p"], shown["sampling"]["max_tokens"]) == (0.9, 2048)
    assert shown["sampling"]["top_k"] is None and shown["sampling"]["n"] == 1
    assert shown["engine"]["max_num_seqs"] == 1


# ---- mistakes before it starts ----


def test_models_without_a_template(chat: Chat, pair: Pair) -> None:
    result = chat("hello\n", models=("--target", pair.target))
    assert (result.status, result.out) == (2, "")
    assert f"{str(pair.target)!r} has no chat template, so it is no chat model" in result.err
    assert "--chat-template FILE" in result.err and "`peagle generate`" in result.err
    result = chat("hello\n", models=("--no-speculation",))
    assert (result.status, result.out) == (2, "")
    assert "The bundled code model has no chat template" in result.err


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}hi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat-template", "nowhere.jinja"], "--chat-template 'nowhere.jinja' is not a file"),
        (["--chat-template", "chatml"], "--chat-template 'chatml' is not a file. Check the path"),
        (["--chat-template", "{% if %}"], "--chat-template: The chat template does not parse"),
        (["--chat-template", "{{ '' }}"], "--chat-template: The chat template renders"),
        (["--chat-template", "{{ 'x' }}", "--thinking"], "--thinking: thinking is True, and the"),
        (
            ["--chat-template", "{{ 'x' }}<think>", "--no-thinking"],
            "--no-thinking: No thinking was asked for",
        ),
        (["--chat-template", NO_SYSTEM, "--system", "s"], "--system: The chat template cannot"),
        (["--top-p", "2"], "--top-p: top_p is 2.0; expected"),
        (["--regex", "a", "--json-object"], "--json-object and --regex contradict each other"),
        (["--n", "2"], "No such option: --n"),
        (["--max-num-seqs", "2"], "No such option: --max-num-seqs"),
        (["--max-new-tokens", "0"], "--max-new-tokens: max_tokens is 0; expected"),
    ],
)
def test_bad_options(chat: Chat, options: list[str], message: str) -> None:
    result = chat("hello\n", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err and "Traceback" not in result.err


# ---- a terminal ----


class Terminal:
    """A chat in a terminal of its own; what it writes is in `seen`."""

    def __init__(self, *arguments: object, term: str) -> None:
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "peagle", *map(str, arguments)]
            os.execve(sys.executable, command, environment() | {"TERM": term})

    def until(self, mark: str) -> str:
        """Read until it writes `mark`; return what came with it."""
        start, end = len(self.seen), time.monotonic() + 60
        while mark not in self.seen[start:]:
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
        return self.seen[start:]

    def send(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(pair: Pair, template: Path) -> Iterator[Callable[[str], Terminal]]:
    started: list[Terminal] = []

    def start(term: str) -> Terminal:
        models = ("--target", pair.target, "--chat-template", template, "--no-speculation")
        started.append(Terminal("chat", *models, "--ignore-eos", term=term))
        return started[-1]

    yield start
    for one in started:
        os.close(one.fd)


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_interrupts_and_the_end_in_a_terminal(
    terminal: Callable[[str], Terminal], term: str
) -> None:
    chat = terminal(term)
    assert "/help lists the commands" in chat.until("> ")
    chat.send("hello\r")
    chat.until("hello")
    time.sleep(1)
    chat.send("\x03")
    assert "stopped" in chat.until("> ")
    time.sleep(1.5)  # The prompt is there a little before readline listens.
    chat.send("\x03")
    assert "Ctrl-D or /exit leaves." in chat.until("> ")
    chat.send("/undo\r")
    assert "Took back: hello" in chat.until("> ")
    chat.send("\x04")
    assert chat.status() == 0
    assert ("\x1b[2m" in chat.seen) == (term == "xterm")
    assert "Traceback" not in chat.seen
