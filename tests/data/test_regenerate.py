"""Prompts to responses: order, resuming, seeds, and the two who answer."""

import fcntl
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.chat import render_chat
from peagle.cli.data_regenerate import call_finder
from peagle.config.structured import StructuredOutput
from peagle.data.dataset import ResponseDataset
from peagle.data.readers import AskedConversation, Dropped, Record, dialogue_of, read_side
from peagle.data.regenerate import (
    Answerer,
    Ask,
    EndpointAnswerer,
    Failure,
    LocalAnswerer,
    Patience,
    RegeneratedAnswer,
    RegenerateProgress,
    regenerate,
    seed_of,
)
from peagle.data.samples import Sample, SampleMaker
from peagle.engine.detokenizer import split_output
from peagle.errors import UserError
from tests.conftest import VOCAB_SIZE, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
HURRY = Patience(retries=3, first_wait_s=0.01, timeout_s=10.0)


class Parrot:
    """Says what it was asked, newest question first; some questions fail, or stop it."""

    is_chat = True

    def __init__(self, *, fails: tuple[str, ...] = (), stops_at: str = "", chat: bool = True):
        self.asked: list[tuple[str, int]] = []
        self.fails, self.stops_at, self.is_chat = fails, stops_at, chat

    def answers(
        self, take: Callable[[], Ask | None]
    ) -> Iterator[tuple[Ask, RegeneratedAnswer | Failure]]:
        under_way: list[Ask] = []
        while True:
            while len(under_way) < 3 and (ask := take()) is not None:
                under_way.append(ask)
            if not under_way:
                return
            ask = under_way.pop()
            question = ask.messages[-1]["content"]
            if question == self.stops_at:
                raise KeyboardInterrupt
            self.asked.append((ask.dialogue.id, ask.turn))
            if question in self.fails:
                yield ask, Failure("it is dumb.")
                continue
            reason = "length" if question.startswith("long") else "stop"
            at = "" if ask.temperature is None else f" at {ask.temperature}"
            yield ask, RegeneratedAnswer(f"{question}! {ask.seed}{at}", reason, "hm", 3)


def ask_all(
    output: Path, dialogues: list[AskedConversation], answerer: Answerer, **options: Any
) -> RegenerateProgress:
    return regenerate(dialogues, answerer, output, {"model": "m", **options}, {"who": "test"})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_turn(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {(line["id"], line["turn"]): line for line in lines(path)}


DIALOGUES = [
    AskedConversation("a", ("one", "two", "three")),
    AskedConversation("b", ("four",), ({"role": "system", "content": "be kind"},)),
    AskedConversation("c", ("long five", "six")),
    AskedConversation("d", ("seven", "eight")),
]
MANY = [AskedConversation(str(i), (f"say {i}", f"and {i}")) for i in range(300)]
EVERY_TURN = {("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("d", 1), ("d", 2)}


def test_turns_follow_each_other_without_reasoning(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "out.jsonl"
    progress = ask_all(path, DIALOGUES, Parrot())
    found = by_turn(path)
    assert set(found) == EVERY_TURN and len(lines(path)) == 7, "nothing after the cut answer"
    assert (progress.prompts, progress.answers, progress.cut, progress.tokens) == (4, 7, 1, 21)
    messages = found["a", 3]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in messages[::2]] == ["one", "two", "three"]
    assert messages[1]["content"] == found["a", 1]["messages"][1]["content"]
    assert ["reasoning_content" in m for m in messages] == [False] * 5 + [True]
    assert found["b", 1]["messages"][0] == {"role": "system", "content": "be kind"}
    side = read_side(path)
    assert side["options"] == {"model": "m"} and side["who"] == "test" and side["answers"] == 7
    assert len(side["output_sha256"]) == 64


def test_seeds_depend_on_the_conversation_alone(tmp_path: Path) -> None:
    ask_all(tmp_path / "a.jsonl", DIALOGUES, Parrot())
    ask_all(tmp_path / "b.jsonl", DIALOGUES[::-1], Parrot())
    assert by_turn(tmp_path / "a.jsonl") == by_turn(tmp_path / "b.jsonl")
    seeds = [line["seed"] for line in lines(tmp_path / "a.jsonl")]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    question = [{"role": "user", "content": "one"}]
    assert seed_of(0, question) == by_turn(tmp_path / "a.jsonl")["a", 1]["seed"]
    assert seed_of(1, question) != seed_of(0, question)


@pytest.mark.parametrize("stops_at", ["one", "two", "four", "long five", "seven", "eight"])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, stops_at: str) -> None:
    path = tmp_path / "out.jsonl"
    first = Parrot(stops_at=stops_at)
    with pytest.raises(KeyboardInterrupt):
        ask_all(path, DIALOGUES, first)
    there = len(lines(path))
    assert there == len(first.asked) < 7
    second = Parrot()
    progress = ask_all(path, DIALOGUES, second)
    assert (progress.resumed, progress.answers) == (there, 7 - there)
    assert not set(first.asked) & set(second.asked), "nothing is asked twice"
    whole = tmp_path / "whole.jsonl"
    ask_all(whole, DIALOGUES, Parrot())
    assert by_turn(path) == by_turn(whole) and len(lines(path)) == 7
    third = Parrot()
    ask_all(path, DIALOGUES, third)
    assert third.asked == []


def regenerate_at(
    output: Path, *temperatures: float, stops_at: str = ""
) -> tuple[RegenerateProgress, Parrot]:
    parrot = Parrot(stops_at=stops_at)
    dialogues = [*DIALOGUES, *MANY[:2]]
    return regenerate(dialogues, parrot, output, {}, {}, temperatures=temperatures), parrot


def test_each_conversation_is_asked_at_one_of_the_temperatures(tmp_path: Path) -> None:
    both, alone = tmp_path / "both.jsonl", [tmp_path / "0.jsonl", tmp_path / "0.7.jsonl"]
    progress, _ = regenerate_at(both, 0.0, 0.7)
    for path, at in zip(alone, (0.0, 0.7), strict=True):
        regenerate_at(path, at)
    assert len(lines(both)) == 11 and (progress.prompts, progress.answers) == (6, 11)
    assert progress.waited_for == 0 and progress.cut == 1 and by_turn(both).keys() >= EVERY_TURN
    found = {at: [one for one in lines(both) if one["temperature"] == at] for at in (0.0, 0.7)}
    for path, at in zip(alone, (0.0, 0.7), strict=True):
        assert found[at]
        assert all(by_turn(path)[one["id"], one["turn"]] == one for one in found[at])
    assert not {one["id"] for one in found[0.0]} & {one["id"] for one in found[0.7]}
    side = read_side(both)
    assert side["answers"] == 11 and side["by_temperature"] == [
        {"temperature": at, "answers": len(found[at])} for at in (0.0, 0.7)
    ]
    # Neither the other prompts of the file nor their order counts.
    again, parrot = tmp_path / "again.jsonl", Parrot()
    regenerate(DIALOGUES[:0:-1], parrot, again, {}, {}, temperatures=(0.0, 0.7))
    assert all(by_turn(both)[key] == line for key, line in by_turn(again).items())


def test_the_temperatures_share_the_conversations(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    regenerate(MANY, Parrot(), path, {}, {}, temperatures=(0.0, 0.7, 1.0))
    assert all(150 < one["answers"] < 250 for one in read_side(path)["by_temperature"])


@pytest.mark.parametrize("stops_at", ["one", "two", "four", "long five", "seven", "eight"])
def test_an_interrupted_run_at_two_temperatures_goes_on(tmp_path: Path, stops_at: str) -> None:
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate_at(path, 0.0, 0.7, stops_at=stops_at)
    there = len(lines(path))
    assert there < 11
    progress, _ = regenerate_at(path, 0.0, 0.7)
    assert (progress.resumed, progress.answers) == (there, 11 - there)
    regenerate_at(whole, 0.0, 0.7)
    assert sorted(map(str, lines(path))) == sorted(map(str, lines(whole)))
    assert {**read_side(path), "output_sha256": ""} == {**read_side(whole), "output_sha256": ""}
    assert regenerate_at(path, 0.0, 0.7)[1].asked == []


def test_a_half_written_line_is_removed_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ask_all(path, DIALOGUES, Parrot())
    whole = path.read_bytes()
    wanted = by_turn(path)
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for size in range(last + 1, len(whole), 37):
        path.write_bytes(whole[:size])
        again = Parrot()
        ask_all(path, DIALOGUES, again)
        assert len(again.asked) == 1 and by_turn(path) == wanted and path.read_bytes() == whole


def test_failures_leave_their_prompts_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    progress = ask_all(path, DIALOGUES, Parrot(fails=("two", "four")))
    assert progress.failures == {"a": "it is dumb.", "b": "it is dumb."}
    assert set(by_turn(path)) == EVERY_TURN - {("a", 2), ("a", 3), ("b", 1)}
    second = Parrot()
    ask_all(path, DIALOGUES, second)
    assert set(second.asked) == {("a", 1), ("a", 2), ("b", 0)}
    assert set(by_turn(path)) == EVERY_TURN


def test_equal_prompts_are_asked_once(tmp_path: Path) -> None:
    parrot = Parrot()
    twice = [
        AskedConversation("x", ("one",)),
        AskedConversation("y", ("one",)),
        AskedConversation("z", ("one", "two")),
    ]
    progress = ask_all(tmp_path / "out.jsonl", twice, parrot)
    assert (progress.prompts, progress.duplicates) == (2, 1)
    assert sorted(parrot.asked) == [("x", 0), ("z", 0), ("z", 1)]


def test_completions_are_of_the_first_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ask_all(path, DIALOGUES[:1], Parrot(chat=False))
    (line,) = lines(path)
    assert line["prompt"] == "one" and line["response"].startswith("one!")
    again = Parrot(chat=False)
    ask_all(path, DIALOGUES[:1], again)
    assert again.asked == []


def test_another_run_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ask_all(path, DIALOGUES, Parrot())
    before = path.read_bytes()
    with pytest.raises(UserError, match="begun with model 'm', now it is 'n'"):
        ask_all(path, DIALOGUES, Parrot(), model="n")
    with pytest.raises(UserError, match="another prompt under the id 'a'"):
        ask_all(path, [AskedConversation("a", ("other",))], Parrot())
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another process"):
            ask_all(path, DIALOGUES, Parrot())
    assert path.read_bytes() == before and read_side(path)["answers"] == 7
    path.write_bytes(b'{"foreign": 1}\n' + before)
    with pytest.raises(UserError, match="line 1 is none that"):
        ask_all(path, DIALOGUES, Parrot())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"prompt": "q"}, AskedConversation("7", ("q",))),
        ({"id": 3, "turns": ["q", "r"]}, AskedConversation("3", ("q", "r"))),
        (
            {
                "id": "x",
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "old"},
                    {"role": "user", "content": "r"},
                ],
            },
            AskedConversation("x", ("q", "r"), ({"role": "system", "content": "s"},)),
        ),
    ],
)
def test_prompts_in_every_form(data: dict, expected: AskedConversation) -> None:
    assert dialogue_of(Record(data, 7, "here")) == expected


# ---- tools ----

TOOL = {"type": "function", "function": {"name": "f"}}
RECORDED = {"name": "f", "arguments": {"x": "é"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": RECORDED}]}
RESULT = {"role": "tool", "content": "20"}


class Caller(Parrot):
    """Calls a tool where the question says so."""

    def answers(
        self, take: Callable[[], Ask | None]
    ) -> Iterator[tuple[Ask, RegeneratedAnswer | Failure]]:
        for ask, answer in super().answers(take):
            assert isinstance(answer, RegeneratedAnswer)
            if "call" in ask.messages[-1]["content"]:
                answer = replace(answer, text="", tool_calls=[{"function": {"name": "f"}}])
            yield ask, answer


def asked_with_results(id: str, *questions: str) -> AskedConversation:
    """Each question, and then a result of the call that the file has."""
    turns: list[Any] = []
    for question in questions:
        turns += [question, (CALLING | {"reasoning_content": "old"}, RESULT)]
    return AskedConversation(id, tuple(turns), (), (TOOL,))


def test_results_stand_behind_the_call_of_the_file(tmp_path: Path) -> None:
    """Whatever the target answered, cut off or with a call of its own."""
    path = tmp_path / "out.jsonl"
    dialogue = asked_with_results("a", "long one", "call two")
    progress = ask_all(path, [dialogue], Caller())
    found = by_turn(path)
    assert set(found) == {("a", turn) for turn in (1, 2, 3, 4)} and progress.ended_by_calls == 0
    assert all(line["tools"] == [TOOL] for line in found.values())
    first, second = ({"role": "user", "content": text} for text in ("long one", "call two"))
    answers = {turn: found["a", turn]["messages"][-1] for turn in (1, 2, 3, 4)}
    without = {k: v for k, v in answers[2].items() if k != "reasoning_content"}
    asked = [found["a", turn]["messages"][:-1] for turn in (1, 2, 3, 4)]
    before = [first, CALLING, RESULT, without, second]
    assert asked == [[first], [first, CALLING, RESULT], before, [*before, CALLING, RESULT]]
    assert answers[3]["tool_calls"] == [{"function": {"name": "f"}}]
    again = Caller()
    assert ask_all(path, [dialogue], again).resumed == 4 and again.asked == []


def test_a_call_without_a_result_ends_its_dialogue(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    many = [
        AskedConversation("a", ("call one", "two"), (), (TOOL,)),
        AskedConversation("b", ("one", "call two"), (), (TOOL,)),
    ]
    progress = ask_all(path, many, Caller())
    assert set(by_turn(path)) == {("a", 1), ("b", 1), ("b", 2)}
    assert progress.ended_by_calls == 1, "b had no further turn"
    again = Caller()
    ask_all(path, many, again)
    assert again.asked == []


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    given = [
        Dropped("there is no prompt", "line 1"),
        AskedConversation("a", ("one",)),
        AskedConversation("a", ("two",)),
        Dropped("there is no prompt", "line 4"),
        AskedConversation("b", ("one",)),
    ]
    progress = regenerate(given, Parrot(), path, {}, {})
    assert (progress.prompts, progress.duplicates, progress.answers) == (1, 1, 1)
    assert progress.dropped == {"there is no prompt": 2, "a different prompt before has its id": 1}
    assert progress.details["there is no prompt"] == "line 1"


# ---- by an engine in this process ----

PARAMS = SamplingParams(max_tokens=8, temperature=1.0)


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(target_folder, dtype="float64", max_num_seqs=4)


@pytest.mark.slow
def test_local_answers_are_those_of_the_engine_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    many = [AskedConversation(str(i), (f"say {i}", "more")) for i in range(13)]
    answerer = LocalAnswerer(llm, PARAMS, is_chat=True, chat_template=TEMPLATE)
    progress = ask_all(path, many, answerer)
    assert progress.failures == {} and not llm.requests.has_unfinished
    for line in lines(path):
        asked = line["messages"][:-1]
        prompt = render_chat(llm.tokenizer, asked, chat_template=TEMPLATE)
        assert line["prompt_token_ids"] == prompt and line["seed"] == seed_of(0, asked)
        alone = SamplingParams(max_tokens=8, temperature=1.0, seed=line["seed"])
        (output,) = llm.generate([prompt], alone)
        assert line["response_token_ids"] == output.token_ids
        assert line["messages"][-1]["content"] == output.text
    again = tmp_path / "again.jsonl"
    ask_all(again, many[::-1], answerer)
    assert by_turn(again) == by_turn(path)


def test_each_temperature_has_the_answers_of_a_run_of_its_own(llm: LLM, tmp_path: Path) -> None:
    some = [AskedConversation(str(i), (f"say {i}",)) for i in range(5)]
    both, answerer = tmp_path / "both.jsonl", LocalAnswerer(llm, PARAMS, is_chat=False)
    regenerate(some, answerer, both, {}, {}, temperatures=(0.0, 0.7))
    assert len(lines(both)) == 5
    for at in (0.0, 0.7):
        path = tmp_path / f"{at}.jsonl"
        alone = LocalAnswerer(llm, replace(PARAMS, temperature=at), is_chat=False)
        ask_all(path, some, alone)
        found = {one["id"]: one for one in lines(both) if one["temperature"] == at}
        wanted = {one["id"]: {**one, "temperature": at} for one in lines(path)}
        assert found and all(wanted[name] == one for name, one in found.items())


def test_local_answers_train_as_they_are(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answerer = LocalAnswerer(llm, params, is_chat=False)
    ask_all(path, [AskedConversation(str(i), (f"say {i}",)) for i in range(3)], answerer)
    dataset = ResponseDataset.load(path, byte_tokenizer(), VOCAB_SIZE, 64)
    wanted = [t for line in lines(path) for t in line["prompt_token_ids"]]
    assert len(dataset) == 3 and len(dataset.tokens) == len(wanted) + 3 * 8


def test_open_thinking_is_kept_apart(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    answerer = LocalAnswerer(llm, PARAMS, is_chat=True, chat_template=TEMPLATE, thinking=True)
    ask_all(path, [AskedConversation("a", ("hello",))], answerer)
    (line,) = lines(path)
    assert line["messages"][-1]["content"] == "", "cut off within its reasoning"
    assert line["prompt_token_ids"][-7:] == byte_tokenizer().encode("<think>")


def test_prompts_without_room_fail_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    answerer = LocalAnswerer(llm, PARAMS, is_chat=False)
    progress = ask_all(
        path, [AskedConversation("long", ("x" * 300,)), AskedConversation("b", ("y",))], answerer
    )
    assert list(progress.failures) == ["long"] and [one["id"] for one in lines(path)] == ["b"]
    with pytest.raises(UserError, match="n is 2"):
        LocalAnswerer(llm, SamplingParams(n=2, temperature=1.0), is_chat=False)
    with pytest.raises(UserError, match="thinking"):
        LocalAnswerer(llm, PARAMS, is_chat=True, chat_template="{{ messages }}", thinking=True)


# Short, for a context of 256 tokens; brackets are no JSON for a template without calls.
CALLS = (
    "{% for t in tools or [] %}<call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WRITTEN = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.slow
def test_local_calls_are_found_in_the_answer(llm: LLM, tmp_path: Path) -> None:
    forced = StructuredOutput.regex(re.escape(WRITTEN))
    params = SamplingParams(max_tokens=80, structured_output=forced)
    answerer = LocalAnswerer(
        llm,
        params,
        is_chat=True,
        chat_template=CALLS,
        call_finder=call_finder(llm.tokenizer, CALLS),
    )
    path, tools = tmp_path / "out.jsonl", (TOOL,)
    turns = ("q", (CALLING, RESULT), "r")
    many = [AskedConversation("a", turns, (), tools), AskedConversation("b", turns)]
    progress = ask_all(path, many, answerer)
    found = by_turn(path)
    assert progress.failures == {} and progress.ended_by_calls == 1
    assert set(found) == {("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3)}
    for (id, turn), line in found.items():
        call = '<assistant><tool_call>{"name": "f", "arguments": {"x": "é"}}<tool>20'
        parts = ["<user>q", call, f"<assistant>{WRITTEN}<user>r"][:turn]
        said = "<call>f" * (id == "a") + "".join(parts)
        assert line["prompt_token_ids"] == llm.tokenizer.encode(f"{said}<assistant>")
        response = llm.tokenizer.encode(WRITTEN)
        assert line["response_token_ids"][: len(response)] == response
        answer = line["messages"][-1]
        if id == "b":
            assert answer == {"role": "assistant", "content": WRITTEN}, "no tools, no calls"
            continue
        function = {"name": "f", "arguments": '{"x": 1}'}
        call = {"id": "call00001", "type": "function", "function": function}
        assert answer == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert line["finish_reason"] == "tool_calls"


MISTRAL = "{% for t in tools or [] %}[AVAILABLE_TOOLS]{% endfor %}[TOOL_CALLS]"
HARMONY = "{% for t in tools or [] %}{{ t }}{% endfor %}<|start|><|channel|><|message|>"


@pytest.mark.parametrize(
    ("template", "written", "reasoning", "content"),
    [
        (MISTRAL, 'so[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "", "so"),
        (
            HARMONY,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
            "hm",
            None,
        ),
    ],
)
def test_calls_between_special_tokens(
    template: str, written: str, reasoning: str, content: str | None
) -> None:
    """These tokens have no text, so that a parser finds nothing without their names."""
    tokenizer = byte_tokenizer()
    names = re.findall(r"<\|\w+\|>|\[\w+\]", template + written)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(names))})
    finder = call_finder(tokenizer, template)
    ids = tokenizer.encode(written)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = split_output(tokenizer, text, ids, template, opened=False, markers=finder.markers)
    assert found[0] == reasoning
    other, calls = finder.find(found[1], [TOOL])
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert other == content and [call["function"] for call in calls] == [function]


# ---- by an endpoint ----


class Endpoint:
    """A server that answers questions with what they are, or with what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.script: dict[str, list[Any]] = {}  # by question: statuses, replies or "drop"
        self.delay_s, self.at_once, self.most_at_once = 0.0, 0, 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "first"}, {"id": "second"}]})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                outer.reply(self, json.loads(raw))

            def _send(self, status: int, value: Any, headers: Any = ()) -> None:
                raw = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers:
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, handler: Any, body: dict[str, Any]) -> None:
        question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with self._lock:
            self.seen.append((handler.path, dict(handler.headers), body))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            script = self.script.get(question)
            told = script.pop(0) if script else None
        time.sleep(self.delay_s)
        with self._lock:
            self.at_once -= 1
        if told == "drop":
            handler.connection.close()
        elif isinstance(told, int):
            wait = [("Retry-After", "0")] if told == 429 else []
            handler._send(told, {"error": {"message": f"told to say {told}"}}, wait)
        elif told is not None:
            handler._send(200, told)
        elif "prompt" in body:
            choice = {"text": f" re {question}", "finish_reason": "length"}
            handler._send(200, {"choices": [choice], "usage": {"completion_tokens": 4}})
        else:
            message = {"content": f"re {question}", "reasoning_content": "hm"}
            choice = {"message": message, "finish_reason": "stop"}
            handler._send(200, {"choices": [choice], "usage": {"completion_tokens": 5}})


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.server.shutdown()
    server.server.server_close()


def answerer_of(endpoint: Endpoint, **options: Any) -> EndpointAnswerer:
    options = {"model": "tiny", "fields": {"temperature": 0.5}, "patience": HURRY, **options}
    return EndpointAnswerer(endpoint.url, **options)


def test_an_endpoint_is_asked_as_openai_has_it(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ask_all(path, DIALOGUES[:1], answerer_of(endpoint, key="secret"))
    assert [where for where, _, _ in endpoint.seen] == ["/v1/chat/completions"] * 3
    _, headers, body = endpoint.seen[1]
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "temperature": 0.5,
        "model": "tiny",
        "seed": seed_of(0, body["messages"]),
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "re one"},
            {"role": "user", "content": "two"},
        ],
    }
    last = by_turn(path)["a", 3]["messages"][-1]
    assert last == {"role": "assistant", "content": "re three", "reasoning_content": "hm"}


def test_an_endpoint_is_asked_at_several_temperatures(endpoint: Endpoint, tmp_path: Path) -> None:
    path, answerer = tmp_path / "out.jsonl", answerer_of(endpoint)
    regenerate(MANY[:8], answerer, path, {}, {}, temperatures=(0.0, 0.7))
    asked = sorted(body["temperature"] for _, _, body in endpoint.seen)
    assert {*asked} == {0.0, 0.7} and asked == sorted(line["temperature"] for line in lines(path))


def test_an_endpoint_gets_tools_and_gives_calls(endpoint: Endpoint, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    reply = {"content": None, "tool_calls": [call]}
    told = {"choices": [{"message": reply, "finish_reason": "tool_calls"}]}
    endpoint.script["call it"] = [told, told]
    path = tmp_path / "out.jsonl"
    one = asked_with_results("a", "call it")
    other = AskedConversation("b", ("call it", "two"), (), (TOOL,))
    progress = ask_all(path, [one, other], answerer_of(endpoint, concurrency=1))
    assert progress.failures == {} and progress.ended_by_calls == 1
    bodies = [body for _, _, body in endpoint.seen]
    assert [body["tools"] for body in bodies] == [[TOOL]] * 3
    recorded = {"function": {"name": "f", "arguments": '{"x": "é"}'}}
    (after,) = (body["messages"] for body in bodies if len(body["messages"]) > 1)
    assert after == [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": "", "tool_calls": [recorded]},
        RESULT,
    ]
    found = by_turn(path)
    assert found["a", 1]["messages"][-1]["tool_calls"] == [call]
    # What prepare makes of it: a sample of each answer, behind the prompt with the tools.
    maker = SampleMaker(byte_tokenizer(), (0,), chat_template=CALLS)
    (sample,) = maker.samples(Record(found["a", 1], 1, ""))
    assert isinstance(sample, Sample)
    encode = byte_tokenizer().encode
    assert sample.prompt == encode("<call>f<user>call it<assistant>")
    assert sample.response == encode('<tool_call>{"name": "f", "arguments": {"x": 1}}')
    assert [*maker.samples(Record(found["b", 1], 1, ""))] == [sample]


@pytest.mark.parametrize("calls", ["f", ["f"], 3])
def test_calls_of_an_endpoint_that_are_none(endpoint: Endpoint, tmp_path: Path, calls: Any) -> None:
    endpoint.script["four"] = [{"choices": [{"message": {"content": "x", "tool_calls": calls}}]}]
    with pytest.raises(UserError, match="is not OpenAI's interface"):
        ask_all(tmp_path / "out.jsonl", DIALOGUES[1:2], answerer_of(endpoint))


def test_completions_of_an_endpoint_and_its_first_model(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    one = EndpointAnswerer(f"{endpoint.url}/v1/", None, {}, is_chat=False, patience=HURRY)
    progress = ask_all(path, DIALOGUES[:1], one)
    (where, headers, body) = endpoint.seen[0]
    assert where == "/v1/completions" and "Authorization" not in headers
    assert (body["model"], body["prompt"]) == ("first", "one")
    assert lines(path)[0]["response"] == " re one" and progress.cut == 1 and progress.tokens == 4


@pytest.mark.slow
def test_questions_go_side_by_side(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.delay_s = 0.05
    many = [AskedConversation(str(i), (f"q{i}",)) for i in range(24)]
    progress = ask_all(tmp_path / "out.jsonl", many, answerer_of(endpoint, concurrency=8))
    assert progress.answers == 24 and 4 <= endpoint.most_at_once <= 8
    with pytest.raises(UserError, match="--concurrency is 0"):
        answerer_of(endpoint, concurrency=0)


@pytest.mark.parametrize("failure", [429, 500, 503, 408, "drop"])
def test_passing_failures_are_tried_again(endpoint: Endpoint, tmp_path: Path, failure: Any) -> None:
    endpoint.script["four"] = [failure] * 3
    progress = ask_all(tmp_path / "out.jsonl", DIALOGUES[1:2], answerer_of(endpoint))
    assert progress.failures == {} and len(endpoint.seen) == 4
    assert len({body["seed"] for _, _, body in endpoint.seen}) == 1


@pytest.mark.parametrize(("failure", "tries"), [(500, 4), (400, 1)])
def test_lasting_failures_are_of_their_prompt(
    endpoint: Endpoint, tmp_path: Path, failure: int, tries: int
) -> None:
    endpoint.script["one"] = [failure] * 9
    progress = ask_all(tmp_path / "out.jsonl", DIALOGUES[:2], answerer_of(endpoint))
    assert list(progress.failures) == ["a"] and progress.answers == 1
    assert f"told to say {failure}" in progress.failures["a"]
    asked = [body["messages"][-1]["content"] for _, _, body in endpoint.seen]
    assert asked.count("one") == tries


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (401, "refused the key .*PEAGLE_API_KEY"),
        (404, "--endpoint or --target"),
        ({"choices": []}, "is not OpenAI's interface"),
        ({"choices": [{"message": {"content": 3}}]}, "is not OpenAI's interface"),
        (b"<html>", "is not OpenAI's interface"),
    ],
)
def test_what_would_fail_for_all_ends_the_run(
    endpoint: Endpoint, tmp_path: Path, told: Any, message: str
) -> None:
    path = tmp_path / "out.jsonl"
    ask_all(path, DIALOGUES[:1], answerer_of(endpoint))
    endpoint.script["four"] = [told]
    with pytest.raises(UserError, match=message):
        ask_all(path, DIALOGUES[:2], answerer_of(endpoint))
    assert len(lines(path)) == 3, "what was there is kept"
    assert ask_all(path, DIALOGUES[:2], answerer_of(endpoint)).answers == 1


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
    one = EndpointAnswerer(f"http://127.0.0.1:{port}", "m", {}, patience=HURRY)
    with pytest.raises(UserError, match=r"cannot be reached: .*\(4 tries\)"):
        ask_all(tmp_path / "out.jsonl", DIALOGUES, one)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x?y"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match="--endpoint is"):
        EndpointAnswerer(url, "m", {})


def test_waits_grow_and_heed_the_server() -> None:
    patience = Patience(first_wait_s=1.0)
    assert [patience.wait_s(n, None) for n in (1, 2, 3, 9)] == [1, 2, 4, 60]
    assert patience.wait_s(1, "7") == 7 and patience.wait_s(2, "later") == 2
    assert patience.wait_s(1, "9999") == 60
