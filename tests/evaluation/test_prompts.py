"""Prompt sets by name: bundled, files, and data sets of a hub on a loopback port."""

import ast
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from peagle.errors import UserError
from peagle.evaluation.prompt_sets import HUB_SETS, PROMPT_SETS, HubSet, choose, load
from peagle.evaluation.prompts import PROMPT_SETS as BUNDLED_SETS
from peagle.evaluation.prompts import (
    Prompt,
    load_prompt_set,
    read_prompts,
)
from tests.fake_hub import FakeHub, message_of, serve, used

SIZES = {"humaneval": 164, "mt_bench": 80, "gsm8k": 200, "heldout_code": 100, "long_reasoning": 20}
SIZES |= {"code_edit": 40, "form_json": 40}
HELD_OUT = {"summarization": 40, "question_answering": 40, "structured_json": 40, "long_output": 20}


@pytest.mark.parametrize("name", BUNDLED_SETS)
def test_bundled_sets(name: str) -> None:
    prompts = load_prompt_set(name)
    assert len(prompts) == (SIZES | HELD_OUT)[name]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.text and prompt.category for prompt in prompts)


@pytest.mark.parametrize("name", HELD_OUT)
def test_sets_from_held_out_text_are_plain_and_short(name: str) -> None:
    prompts = load_prompt_set(name)
    texts = [prompt.text for prompt in prompts]
    assert len(set(texts)) == len(texts)
    # In the bundled model's 2048 tokens there must be room for an answer.
    assert all(200 < len(text) < 3500 for text in texts)
    assert not any(re.search(r"[\w.]@[\w-]+\.(com|org|net)|\x00|\ufffd", text) for text in texts)
    assert len({prompt.category for prompt in prompts}) == 2


def test_long_reasoning_asks_for_five_sums_at_a_time() -> None:
    sums = [prompt.text for prompt in load_prompt_set("gsm8k")]
    for number, prompt in enumerate(load_prompt_set("long_reasoning")):
        assert all(sum_.strip() in prompt.text for sum_ in sums[5 * number :][:5])
        assert len(prompt.text) < 3500


def test_code_edits_show_whole_functions_of_humaneval_that_lack_the_change() -> None:
    given = {p.id.rpartition("/")[2]: p.text.strip("\n") for p in load_prompt_set("humaneval")}
    prompts = load_prompt_set("code_edit")
    kinds = Counter(prompt.category for prompt in prompts)
    assert set(kinds.values()) == {8} and len(kinds) == 5
    assert {prompt.category for prompt in prompts[:5]} == set(kinds), "a few prompts have all kinds"
    numbers = [prompt.id.rpartition("/")[2] for prompt in prompts]
    assert len(set(numbers)) == len(prompts)
    for number, prompt in zip(numbers, prompts, strict=True):
        code, asked = prompt.text.removeprefix("```python\n").split("\n```\n\n")
        function = ast.parse(code).body[-1]
        assert isinstance(function, ast.FunctionDef)
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        old_and_new = re.findall(r"`(\w+)`", asked)
        if prompt.category == "add_docstring":
            assert ast.get_docstring(function) is None and "docstring" in asked
            head = code[: code.index("\n", code.index(f"def {function.name}"))]
            assert given[number].startswith(head)
            continue
        assert code.startswith(given[number].rstrip())
        if prompt.category == "rename_variable":
            old, new = old_and_new
            assert old in names and new not in code
            assert old not in {arg.arg for arg in function.args.args}
        elif prompt.category == "rename_function":
            old, new = old_and_new
            assert old == function.name and new not in code
        elif prompt.category == "annotate":
            assert not function.returns and not any(a.annotation for a in function.args.args)
        else:
            assert prompt.category == "rewrite_docstring" and ast.get_docstring(function)


def test_forms_hold_a_value_of_the_right_kind_for_each_key_asked_for() -> None:
    values = {
        "string": r"\S.*",
        "number": r"\d+(\.\d\d)?",
        "boolean": r"\[x\] yes  \[ \] no|\[ \] yes  \[x\] no",
        "array of strings": r"[^;]+(; [^;]+)+",
        "array of objects": r"\d+ x [^;]+ @ \d+\.\d\d(; \d+ x [^;]+ @ \d+\.\d\d)+",
    }
    prompts = load_prompt_set("form_json")
    assert set(Counter(prompt.category for prompt in prompts).values()) == {8}
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    kinds = set[str]()
    for prompt in prompts:
        form, asked = prompt.text.split("\n\nTurn the form above into")
        fields = re.findall(r'"(\w+)" \((string|number|boolean|array of \w+)', asked)
        assert len(fields) >= 10
        for key, kind in fields:
            label = key.replace("_", " ").capitalize()
            line = rf"^(\| )?{label}( \.+ |: | \| |\n    )({values[kind]})( \|)?$"
            assert len(re.findall(line, form, re.M)) == 1, (prompt.id, key)
            kinds.add(kind)
    assert kinds == set(values)


def test_turns_and_limit() -> None:
    first, second = load_prompt_set("mt_bench", limit=2)
    assert first.id == "mt_bench/81" and len(first.turns) == len(second.turns) == 2
    assert first.text == first.turns[0]
    assert len({prompt.category for prompt in load_prompt_set("mt_bench")}) == 8


@pytest.mark.parametrize(("name", "limit"), [("nothing", None), ("gsm8k", 0), ("gsm8k", -1)])
def test_bad_sets(name: str, limit: int | None) -> None:
    with pytest.raises(UserError):
        load_prompt_set(name, limit)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ['{"id": "a", "category": "c", "turns": ["x", "y"], "more": 1}', "", '{"prompt": "z"}',
             '"q"', ""],
            [Prompt("a", ("x", "y"), "c"), Prompt("3", ("z",)), Prompt("4", ("q",))],
        ),
        (  # Only the first line decides: later ones may look like JSON.
            ["def f():\r", "   ", '{"a": 1}', '"', "  indented "],
            [
                Prompt("1", ("def f():",)),
                Prompt("3", ('{"a": 1}',)),
                Prompt("4", ('"',)),
                Prompt("5", ("  indented ",)),
            ],
        ),
    ],
    ids=["JSON", "text"],
)  # fmt: skip
def test_lines(tmp_path: Path, lines: list[str], expected: list[Prompt]) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("\n".join(lines).encode())
    assert read_prompts(path) == expected


def test_files_with_byte_order_mark_and_odd_separators(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = json.dumps({"id": 7, "prompt": "a\u2028b"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    assert read_prompts(path) == [Prompt("7", ("a\u2028b",))]


pyarrow: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

SPEED = "nvidia/SPEED-Bench"
LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING A SCRIPT"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with serve() as running, used(running.url, tmp_path / "home"):
        yield running


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def publish(hub: FakeHub, repo: str, files: dict[str, bytes]) -> None:
    hub.add(repo).commit({"README.md": b"a data set", **files})


# ---- names ----


def test_bundled_sets_are_those_of_the_package() -> None:
    for name in BUNDLED_SETS:
        assert load(name, 3) == load_prompt_set(name, 3)
    assert load("mt_bench") == load_prompt_set("mt_bench")


def test_a_seed_takes_prompts_from_all_over_the_set() -> None:
    everything = load("gsm8k")
    some = load("gsm8k", 20, seed=1)
    assert some == load("gsm8k", 20, seed=1) != load("gsm8k", 20, seed=2)
    places = sorted(everything.index(prompt) for prompt in some)
    assert len(set(places)) == 20 and places[-1] > 100
    assert load("gsm8k", seed=1)[:20] == some
    assert sorted(load("gsm8k", seed=1), key=lambda p: p.id) == sorted(
        everything, key=lambda p: p.id
    )


def test_unknown_names_tell_the_nearest_and_the_known() -> None:
    message = message_of(lambda: load("human_eval"))
    assert "Did you mean humaneval?" in message
    assert all(name in message for name in PROMPT_SETS)
    assert "Did you mean" not in message_of(lambda: load("zzzzzz"))
    assert "The limit is 0" in message_of(lambda: load("humaneval", 0))


# ---- files ----


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(lines([{"id": "a", "category": "x", "turns": ["q", "r"]}, {"prompt": "z"}]))
    first, second = load(str(path))
    assert (first.id, first.category, first.turns) == ("a", "x", ("q", "r"))
    assert (second.id, second.category, second.turns) == ("2", "", ("z",))
    table = tmp_path / "own.parquet"
    table.write_bytes(parquet([{"prompt": "p", "category": "x"}, {"prompt": "q", "category": "y"}]))
    assert [(p.text, p.category) for p in load(str(table), 1)] == [("p", "x")]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table.write_bytes(parquet([{"messages": [*messages, {"role": "user", "content": "c"}]}]))
    assert load(str(table))[0].turns == ("a", "c")


SYSTEM = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", ["own.jsonl", "own.parquet"])
def test_conversations_keep_their_system_messages_and_tools(tmp_path: Path, name: str) -> None:
    questions = [{"role": "user", "content": text} for text in "ac"]
    answer = {"role": "assistant", "content": "b"}
    rows: list[dict[str, Any]] = [
        {"messages": [*SYSTEM, questions[0], answer, questions[1]], "tools": json.dumps([TOOL])},
        {"conversations": [{"from": "human", "value": "a"}], "system": "s", "category": "x"},
    ]
    rows[0] |= dict.fromkeys(rows[1])  # a table takes its columns from the first row
    path = tmp_path / name
    path.write_bytes(lines(rows) if name.endswith("l") else parquet(rows))
    first, second = load(str(path))
    assert first == Prompt("1", ("a", "c"), "", tuple(SYSTEM), (TOOL,))
    assert first.messages == [*SYSTEM, questions[0]]
    assert second == Prompt("2", ("a",), "x", (SYSTEM[0],))


def test_conversations_of_the_hub_keep_them_too(hub: FakeHub) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "system": "s", "tools": [TOOL]}
    publish(hub, "me/chats", {"data/test-00000-of-00001.parquet": parquet([row])})
    assert load("me/chats") == [Prompt("1", ("a",), "", (SYSTEM[0],), (TOOL,))]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "x"}], "line 1: there is no message of the user."),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not text: .*'image_url'"),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "tool", "content": "c"},
            ],
            "line 1 has results of tools",
        ),
    ],
)
def test_conversations_that_are_no_prompts(
    tmp_path: Path, messages: list[Any], message: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(lines([{"messages": messages}]))
    assert re.search(message, message_of(lambda: load(str(path))))


def test_files_that_are_no_prompts(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "it is empty" in message_of(lambda: load(str(empty)))
    table = tmp_path / "empty.parquet"
    pq.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), table)
    assert "is empty" in message_of(lambda: load(str(table)))
    assert "is not there" in message_of(lambda: load(str(tmp_path / "nothing.jsonl")))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "x", "category": 3}')
    assert "line 1: category is 3" in message_of(lambda: load(str(wrong)))


# ---- the hub ----


def test_speed_bench(hub: FakeHub) -> None:
    rows = [
        {"question_id": "c1", "category": "coding", "turns": ["write"], "multiturn": False},
        {"question_id": "m1", "category": "multi", "turns": ["a", "b"], "multiturn": True},
        {"question_id": "l1", "category": "coding", "turns": [LEFT_OUT], "multiturn": False},
    ]
    other = [{"question_id": "t", "category": "low", "turns": ["long"], "multiturn": False}]
    files = {
        "qualitative/test-00000-of-00001.parquet": parquet(rows),
        "throughput_1k/test-00000-of-00001.parquet": parquet(other),
    }
    publish(hub, SPEED, files)
    prompts = load("speed_bench")
    assert [(p.id, p.category, p.turns) for p in prompts] == [
        ("c1", "coding", ("write",)),
        ("m1", "multi", ("a", "b")),
    ]
    assert hub.fetched() == {"test-00000-of-00001.parquet"}
    asked = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert all("/qualitative/" in path for path in asked)
    assert [p.id for p in load(f"{SPEED}:throughput_1k")] == ["t"]
    assert "several configs: qualitative, throughput_1k" in message_of(lambda: load(SPEED))


def test_a_set_whose_prompts_are_all_left_out(hub: FakeHub) -> None:
    rows = [{"question_id": "l", "category": "c", "turns": [LEFT_OUT]}]
    publish(hub, SPEED, {"qualitative/test-00000-of-00001.parquet": parquet(rows)})
    assert "All 1 prompts" in message_of(lambda: load("speed_bench"))


def test_named_sets_make_their_prompts(hub: FakeHub) -> None:
    mbpp = {"task_id": 11, "text": "Write f.", "code": "", "test_list": ["assert f(1)", "assert g"]}
    publish(hub, "google-research-datasets/mbpp", {
        "full/test-00000-of-00001.parquet": parquet([mbpp]),
        "full/train-00000-of-00001.parquet": parquet([{**mbpp, "task_id": 601}]),
        "sanitized/test-00000-of-00001.parquet": parquet([{"prompt": "no"}]),
    })  # fmt: skip
    (prompt,) = load("mbpp")
    assert prompt.id == "11"
    assert prompt.text.startswith("Write f.") and prompt.text.endswith("assert f(1)\nassert g\n")
    publish(hub, "HuggingFaceH4/MATH-500", {
        "test.jsonl": lines([{"problem": "2+2", "subject": "Algebra", "unique_id": "t/1"}])
    })  # fmt: skip
    (prompt,) = load("math500")
    assert (prompt.id, prompt.text, prompt.category) == ("t/1", "2+2", "Algebra")
    publish(hub, "abisee/cnn_dailymail", {
        "3.0.0/test-00000-of-00001.parquet": parquet([{"article": "News.", "id": "x"}]),
        "2.0.0/test-00000-of-00001.parquet": parquet([{"article": "Old.", "id": "y"}]),
    })  # fmt: skip
    assert load("cnn_dailymail")[0].text.startswith("News.\n\nSummarize")
    rows = [{"instruction": "Do", "input": "this"}, {"instruction": "Go", "input": ""}]
    publish(hub, "tatsu-lab/alpaca", {"data/train-00000-of-00001-a1b2.parquet": parquet(rows)})
    assert [p.text for p in load("alpaca")] == ["Do\n\nthis", "Go"]


def test_any_data_set(hub: FakeHub) -> None:
    rows = [{"body": "b", "question": "q"}]
    publish(hub, "org/set", {"data/validation-00000-of-00001.parquet": parquet(rows)})
    assert load("org/set")[0].text == "q"
    assert load("org/set", prompt_column="body")[0].text == "b"
    assert load("org/set::validation")[0].text == "q"
    message = message_of(lambda: load("org/set", prompt_column="nothing"))
    assert "no column 'nothing'; it has body, question" in message and "--prompt-column" in message
    message = message_of(lambda: load("org/set::test"))
    assert "no such config or split; it has data/validation-00000-of-00001.parquet" in message
    assert "has no revision 'old'" in message_of(lambda: load("org/set@old"))


def test_what_was_fetched_needs_no_hub(hub: FakeHub) -> None:
    publish(hub, "org/set", {"test.jsonl": lines([{"prompt": "p"}])})
    assert load("org/set")[0].text == "p"
    shard = "data/test-0000{}-of-00002.parquet"
    names = [shard.format(i) for i in range(2)]
    publish(hub, "org/two", {name: parquet([{"prompt": name}]) for name in names})
    assert len(load("org/two")) == 2
    hub.status = 500
    assert load("org/set")[0].text == "p"
    assert [prompt.text for prompt in load("org/two")] == names
    next(Path(constants.HF_HUB_CACHE).rglob(Path(names[1]).name)).unlink()
    assert "is not in the cache" in message_of(lambda: load("org/two"))


def test_without_a_network_the_sets_that_need_none_are_told(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = message_of(lambda: load("speed_bench"))
    assert "is not in the cache" in message
    assert all(name in message for name in BUNDLED_SETS)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert "need no network" in message_of(lambda: load("mbpp"))


def test_data_sets_that_are_closed_or_not_there(hub: FakeHub) -> None:
    assert "'org/nothing' is neither a file here nor a data set" in message_of(
        lambda: load("org/nothing")
    )
    publish(hub, "org/gated", {"test.jsonl": lines([{"prompt": "p"}])})
    hub.models["org/gated"].gated = True
    assert "is gated" in message_of(lambda: load("org/gated"))
    publish(hub, "org/scripts", {"data.py": b"print()"})
    assert "no .parquet or .jsonl file" in message_of(lambda: load("org/scripts"))


@pytest.mark.parametrize(
    ("names", "config", "split", "expected"),
    [
        (["test.jsonl", "train.jsonl"], "", "", ["test.jsonl"]),
        (["train.jsonl"], "", "", ["train.jsonl"]),
        (["questions.jsonl"], "", "", ["questions.jsonl"]),
        (["a/test/0000.parquet", "b/test/0000.parquet"], "b", "test", ["b/test/0000.parquet"]),
        (["test.jsonl", "data/test-0-of-1.parquet"], "", "test", ["data/test-0-of-1.parquet"]),
        (
            ["c/test-00001-of-00002.parquet", "c/test-00000-of-00002.parquet"],
            "c",
            "test",
            ["c/test-00000-of-00002.parquet", "c/test-00001-of-00002.parquet"],
        ),
        (["data/testing-0-of-1.parquet", "data/test-0-of-1.parquet"], "", "test",
         ["data/test-0-of-1.parquet"]),
    ],
)  # fmt: skip
def test_choose(names: list[str], config: str, split: str, expected: list[str]) -> None:
    assert choose(names, HubSet("org/set", config, split)) == expected


def test_every_named_set_has_a_repository() -> None:
    assert not set(HUB_SETS) & set(BUNDLED_SETS)
    assert all(wanted.repo.count("/") == 1 and wanted.split for wanted in HUB_SETS.values())
    with pytest.raises(UserError):
        choose([], HUB_SETS["mbpp"])
