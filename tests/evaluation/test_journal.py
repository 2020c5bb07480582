import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.evaluation.journal import Journal

SETTINGS: dict[str, Any] = {"target": "t", "max_new_tokens": 64, "seed": None, "k": (1, 2)}
NAME = "journal.jsonl"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@pytest.mark.slow
@given(keys=st.lists(json_values, max_size=5), cut=st.integers(0, 60))
def test_what_is_written_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, keys: list[Any], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "below" / NAME
    journal = Journal(path, SETTINGS)
    for number, key in enumerate(keys):
        journal.add(key, number)
    before = {json.dumps(key, sort_keys=True): n for n, key in enumerate(keys)}
    with path.open("ab") as file:
        file.write(b'{"key": "cut by a loss of power"}'[:cut])
    raw = path.read_bytes()
    again = Journal(path, SETTINGS)
    assert len(again) == len(before)
    assert [again.get(key) for key in keys] == [
        before[json.dumps(key, sort_keys=True)] for key in keys
    ]
    assert path.read_bytes() == raw[: raw.rfind(b"\n") + 1]


def test_without_a_file(tmp_path: Path) -> None:
    journal = Journal(None, SETTINGS)
    journal.add({"b": 1, "a": [2]}, 3)
    assert journal.get({"a": [2], "b": 1}) == 3 and journal.get("a") is None


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({**SETTINGS, "max_new_tokens": 128}, "made with max_new_tokens 64, not 128"),
        ({**SETTINGS, "seed": 1}, "made with seed null, not 1"),
        ({**SETTINGS, "k": [1, 3]}, r"made with k \[1, 2\], not \[1, 3\]"),
        ({**SETTINGS, "more": "x"}, 'made with more null, not "x"'),
        ({"max_new_tokens": 64}, 'made with target "t", not null'),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, others: dict[str, Any], told: str
) -> None:
    Journal(tmp_path / NAME, SETTINGS).add("x", 1)
    assert Journal(tmp_path / NAME, {**SETTINGS, "k": [1, 2]}).get("x") == 1
    with pytest.raises(UserError, match=f"{told}.*another --output"):
        Journal(tmp_path / NAME, others)


def test_an_object_may_get_more_keys(tmp_path: Path) -> None:
    def opened(**heads: str) -> Journal:
        return Journal(tmp_path / NAME, {"heads": heads, "seed": 1}, extensible=("heads",))

    opened(a="1").add("x", 1)
    opened(b="2")
    assert opened(a="1", b="2").get("x") == 1
    for changed in ({"a": "3"}, {"a": "1", "b": "3"}):
        with pytest.raises(UserError, match=r'made with heads \{"a": "1"'):
            opened(**changed)


HEAD = json.dumps({"format_version": 1, "settings": {}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hello\n", "line 1: no line of measurements"),
        ("{}\n", "line 1: no line"),
        ("[1]\n", "line 1: no line"),
        (HEAD + "\n[]\n", "line 2: no line"),
        (HEAD + '\n{"key": 1}\n', "line 2: no line"),
        ('{"format_version": 9, "settings": {}}\n', "has format_version 9"),
    ],
)
def test_files_that_are_no_journal(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=told):
        Journal(tmp_path / NAME, {})
    assert (tmp_path / NAME).read_text() == text


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: .*another --output"):
        Journal(tmp_path / "file" / NAME, {})
