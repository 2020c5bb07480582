"""Records as conversations and as what to ask: all spellings of tools, calls, system prompts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.data.readers import (
    AskedConversation,
    DropCounts,
    Dropped,
    Record,
    RecordedConversation,
    UnusableRecord,
    conversation_of,
    dialogue_of,
    read_records,
)
from tests.data.files import write
from tests.data.test_dataset import parquet

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "yes"}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "20"}


def record(**data: Any) -> Record:
    return Record(data, 7, "here")


def read(**data: Any) -> RecordedConversation:
    found = conversation_of(record(**data))
    assert found is not None
    return found


def asked(**data: Any) -> AskedConversation:
    found = dialogue_of(record(**data))
    assert isinstance(found, AskedConversation), found
    return found


def why(**data: Any) -> str:
    found = dialogue_of(record(**data))
    assert isinstance(found, Dropped), found
    return f"{found.reason}: {found.detail}"


# ---- tools and calls ----


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": [FUNCTION]},
        {"tools": json.dumps([FUNCTION])},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"functions": [FUNCTION]},
        {"functions": json.dumps([FUNCTION]), "tools": None},
    ],
)
def test_tools_in_every_spelling(given: dict[str, Any]) -> None:
    assert read(messages=[USER], **given).tools == [TOOL]
    assert asked(messages=[USER], **given).tools == (TOOL,)
    assert asked(prompt="q", **given).tools == (TOOL,)


@pytest.mark.parametrize("given", [None, [], "", "[]", " "])
def test_no_tools(given: Any) -> None:
    assert read(messages=[USER], tools=given).tools == []


def test_tools_are_written_as_a_server_writes_them() -> None:
    """Clients send keys in any order, and nulls for what they leave out."""
    shuffled = {"function": {"strict": None, "parameters": SCHEMA, "name": "f", "description": "d"}}
    (tool,) = read(messages=[USER], tools=[shuffled]).tools
    assert json.dumps(tool) == json.dumps(TOOL)


@pytest.mark.parametrize(
    "given", ["not JSON", "{}", "3", 3, {"f": 1}, [1], [{}], ["x"], [{"function": {"name": None}}]]
)
def test_tools_that_are_none_are_named(given: Any) -> None:
    assert why(messages=[USER], tools=given).startswith("the tools are no list of functions: ")


SHARED = {"from": "human", "value": "q"}


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [USER, CALLING, RESULT]},
        {"messages": [USER, CALLING | {"content": None, "name": None}, RESULT]},
        {"messages": [USER, {"role": "assistant", "tool_calls": json.dumps([CALL])}, RESULT]},
        {
            "messages": [
                USER | {"tool_calls": []},
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "content": "20"},
            ]
        },
        {
            "conversations": [
                SHARED,
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "20"},
            ]
        },
        {
            "conversations": [
                SHARED,
                {"from": "function_call", "value": json.dumps([CALL["function"]])},
                {"from": "tool", "value": "20"},
            ]
        },
    ],
)
def test_calls_in_every_spelling(given: dict[str, Any]) -> None:
    messages = read(**given).messages
    assert [m.get("content") for m in messages] == ["q", None, "20"]
    assert [m.get("tool_calls") for m in messages] == [None, [CALL], None]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("message", "message_of_error"),
    [
        ({"role": "assistant", "tool_calls": "f(x)"}, "the tool calls of a message are no list"),
        ({"role": "assistant", "tool_calls": [1]}, "the tool calls of a message are no list"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "the tool calls of a message are no"),
        ({"role": "assistant", "function_call": "auto"}, "a call has no function"),
        ({"from": "function_call", "value": "f(x)"}, "a call has no function"),
        ({"role": None, "content": "x"}, "a message has no role: the role None"),
        ({"content": "x"}, "a message has no role"),
    ],
)
def test_messages_that_are_none_are_named(message: Any, message_of_error: str) -> None:
    with pytest.raises(UnusableRecord) as error:
        read(messages=[USER, message])
    assert f"{error.value.why.reason}: {error.value.why.detail}".startswith(message_of_error)


# ---- nulls ----


def tool_row(name: str, key: str, **more: Any) -> dict[str, Any]:
    """A row whose objects have keys that those of other rows lack."""
    schema = {"type": "object", "properties": {key: {"enum": ["a", None]}}, "required": [key]}
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    call = {"type": "function", "function": {"name": name, "arguments": {key: [{key: 1}, None]}}}
    parts = [{"type": "text", "text": f"ask {name}"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call], **more},
    ]
    return {"tools": [tool], "messages": messages}


ODD_ROWS = [
    tool_row("f", "x", reasoning_content="hm"),
    tool_row("g", "y", weight=1),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "no tools"}]}]},
]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_the_nulls_of_tables_are_gone_at_every_depth(tmp_path: Path, kind: str) -> None:
    """And nothing else: the rows are those that were written."""
    path = tmp_path / "a.parquet"
    if kind == "parquet":
        parquet(path, ODD_ROWS)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(ODD_ROWS).save_to_disk(path)
    assert [dict(one.data) for one in read_records(path)] == ODD_ROWS


def test_nulls_in_json_are_values(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"default": None, "enum": ["a", None]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    as_lines = write(tmp_path / "a.jsonl", {"tools": [tool], "messages": messages})
    answer = {"role": "assistant", "tool_calls": json.dumps([call])}
    as_text = {"tools": json.dumps([tool]), "messages": [USER, answer]}
    for path in (as_lines, parquet(tmp_path / "b.parquet", [as_text, {"tools": None}])):
        found = conversation_of(next(iter(read_records(path))))
        assert found is not None and found.tools == [tool]
        assert found.messages[1] == {"role": "assistant", "tool_calls": [call]}


def test_json_columns_of_datasets_keep_their_nulls(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no Json")
    tools = [[{"name": "f", "parameters": {"default": None}}]]
    kinds = datasets.Features(tools=datasets.Json(), prompt=datasets.Value("string"))
    made = datasets.Dataset.from_dict({"tools": tools, "prompt": ["p"]}, features=kinds)
    made.save_to_disk(tmp_path / "a")
    assert next(iter(read_records(tmp_path / "a"))).data["tools"] == tools[0]


# ---- system prompts, texts and weights ----

SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_beside_the_turns_counts(name: str) -> None:
    beside = {name: "s"}
    shared = [SHARED, {"from": "gpt", "value": "yes"}]
    assert read(conversations=shared, **beside).messages == [SYSTEM, USER, ANSWER]
    assert read(messages=[USER, ANSWER], **beside).messages == [SYSTEM, USER, ANSWER]
    for form in ({"conversations": shared}, {"prompt": "q"}, {"turns": ["q"]}):
        assert asked(**form, **beside) == AskedConversation("7", ("q",), (SYSTEM,)), form


def test_a_system_message_of_the_conversation_goes_before() -> None:
    for role in ("system", "developer"):
        own = [{"role": role, "content": "own"}, USER]
        assert read(messages=own, system="s").messages == own
    for nothing in (None, ""):
        assert read(messages=[USER], system=nothing).messages == [USER]
    assert "not text" in why(messages=[USER], system=3)


def test_text_parts_are_text() -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "r", "image_url": None}]
    assert read(messages=[USER | {"content": parts}]).messages == [USER | {"content": "q\nr"}]
    assert asked(messages=[USER | {"content": parts}]).turns == ("q\nr",)


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "x"}}], [], {"a": 1}, 3, ["x"]]
)
def test_what_is_no_text_ends_a_conversation_there(content: Any) -> None:
    found = read(messages=[USER, ANSWER, USER | {"content": content}, ANSWER])
    assert found.messages == [USER, ANSWER] and found.rest is not None
    assert found.rest.reason == "the content of a message is not text"
    assert why(messages=[USER | {"content": content}]).startswith(found.rest.reason)


def test_weights_are_beside_the_messages() -> None:
    found = read(messages=[USER, ANSWER | {"weight": 0}, ANSWER | {"weight": None}])
    assert found.messages == [USER, ANSWER, ANSWER] and found.weights == [1, 0, 1]
    found = read(conversations=[SHARED, {"from": "gpt", "value": "yes", "weight": 0}])
    assert found.messages == [USER, ANSWER] and found.weights == [1, 0]


# ---- what is asked ----


def test_results_stay_behind_the_answers_that_they_belong_to() -> None:
    developer = {"role": "developer", "content": "be brief"}
    later = {"role": "user", "content": "r"}
    messages = [SYSTEM, developer, ANSWER, USER, CALLING, RESULT, RESULT, ANSWER, developer, later]
    found = asked(messages=[*messages, CALLING, RESULT, CALLING, RESULT, ANSWER], tools=[TOOL])
    assert found.system == (SYSTEM, developer)
    steps = ((CALLING, RESULT, RESULT), (developer, later), (CALLING, RESULT), (CALLING, RESULT))
    assert found.turns == ("q", *steps) and found.tools == (TOOL,)
    # Calls may be text, and the last one may be without a result.
    written = {"role": "assistant", "content": "<call>f</call>"}
    found = asked(messages=[USER, written, RESULT, ANSWER, later, CALLING])
    assert found.turns == ("q", (written, RESULT), "r")


def test_the_hash_is_of_all_that_is_asked() -> None:
    plain = asked(messages=[USER])
    # As before conversations had tools, so that outputs of then go on.
    assert plain.sha256 == AskedConversation("other", ("q",)).sha256
    assert plain.sha256 == hashlib.sha256(b'[[], ["q"]]').hexdigest()
    others = [asked(messages=[USER], tools=[TOOL]), asked(messages=[USER, CALLING, RESULT])]
    assert len({one.sha256 for one in (plain, *others)}) == 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"text": "q"}, 'there is no prompt: expected {"id", "turns"'),
        ({"prompt": 3}, "there is no prompt"),
        ({"prompt": None}, "there is no prompt"),
        ({"turns": []}, "there is no message of the user"),
        ({"turns": ["q", ""]}, "a message of the user is empty"),
        ({"turns": ["q", 3]}, "there is no prompt"),
        ({"prompt": "q", "id": 1.5}, "the id is neither text nor a whole number: id is 1.5"),
        ({"prompt": "q", "id": True}, "the id is neither"),
        ({"messages": [ANSWER]}, "there is no message of the user"),
        ({"messages": [SYSTEM]}, "there is no message of the user"),
        ({"messages": []}, "there is no message of the user"),
        ({"messages": "x"}, "the messages are no list of objects"),
        ({"messages": [USER | {"content": ""}, ANSWER, USER]}, "a message of the user is empty"),
        ({"messages": [USER | {"content": None}]}, "a message of the user is empty"),
        ({"messages": [USER, RESULT]}, "the result of a tool follows no answer"),
    ],
)
def test_what_cannot_be_asked_says_why(data: dict[str, Any], reason: str) -> None:
    assert why(**data).startswith(reason)


def test_an_id_of_null_is_none() -> None:
    assert asked(id=None, prompt="q").id == "7" and asked(id=3, prompt="q").id == "3"


def test_reasons_are_counted_with_their_first_case() -> None:
    counts = DropCounts()
    for reason, where in (("a", "line 1"), ("b", "line 2"), ("b", "line 3")):
        counts.drop(Dropped(reason, "why" if reason == "b" else ""), where)
    assert counts.reasons() == ["2 × b (first: line 2: why)", "1 × a (first: line 1)"]
