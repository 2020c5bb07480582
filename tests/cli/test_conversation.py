"""Turns and slash commands of a conversation, on a tiny model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams
from peagle.chat import split_thinking
from peagle.cli.conversation import Conversation, LocalModel
from peagle.errors import UserError
from peagle.thinking import ThinkingSplitter
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


# ---- turns ----------------------------------------------------------------------------------


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


# ---- slash commands -------------------------------------------------------------------------


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


# ---- thinking -------------------------------------------------------------------------------


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
