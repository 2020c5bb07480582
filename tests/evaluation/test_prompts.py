"""Prompt sets and prompt files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.evaluation.prompts import (
    PROMPT_SETS,
    Prompt,
    load_prompt_set,
    read_prompts,
)

SIZES = {"humaneval": 164, "mt_bench": 80, "gsm8k": 200, "heldout_code": 100}
HELD_OUT = {"summarization": 40, "question_answering": 40, "structured_json": 40, "long_output": 20}


@pytest.mark.parametrize("name", PROMPT_SETS)
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
