"""The rules of the prompt sets: edits and forms, and prompts about other packages."""

import gzip
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from peagle.data.readers import table_files

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "prompt_sets"
STORED = ROOT / "src" / "peagle" / "bundled" / "prompts"
SENTENCE = "The value of each element of {} is read once and is kept for all later calls of it. "
MODULE = '''"""{prose}"""


def {name}(first, second):
    """Return the sum.

    {prose}

    Parameters
    ----------
    first : int
        The number to begin with.
    second : int
        The number to add to it, which may be negative.
    """
    return first + second
'''


def load(name: str) -> Any:
    """A module of the recipe, which finds its neighbours as when it is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPE))
        return importlib.import_module(name)


make, edits = load("make"), load("edits")
del sys.modules["make"]  # other recipes have a script of this name


def problem(number: int, signature: str, body: str, docstring: str = "Do it.") -> dict[str, Any]:
    """A line of HumanEval whose function is long enough for an edit."""
    text = f'\n\ndef {signature}:\n    """{docstring}\n    {"word " * 40}\n    """\n'
    return {"id": f"HumanEval/{number}", "turns": [text], "canonical_solution": body}


def test_forms_and_problems_give_the_stored_lines(tmp_path: Path) -> None:
    texts = [row["turns"][0] for row in make.read_jsonl(STORED / "gsm8k.jsonl.gz")]
    made = {"form_json": make.form_rows(), "long_reasoning": make.reasoning_rows(texts)}
    for name, rows in made.items():
        stored = STORED / f"{name}.jsonl.gz"
        make.write_jsonl(tmp_path / stored.name, rows)
        lines = gzip.decompress((tmp_path / stored.name).read_bytes())
        assert lines == gzip.decompress(stored.read_bytes())


def test_a_stored_set_with_the_same_lines_is_left_alone(tmp_path: Path) -> None:
    path, rows = tmp_path / "set.jsonl.gz", [{"id": "a", "turns": ["\u00e4"]}]
    other_zlib = gzip.compress('{"id": "a", "turns": ["\u00e4"]}\n'.encode(), 1, mtime=7)
    path.write_bytes(other_zlib)
    make.write_jsonl(path, rows)
    assert path.read_bytes() == other_zlib
    make.write_jsonl(path, [*rows, *rows])
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 2


def test_a_change_is_asked_for_where_it_fits() -> None:
    body = (
        "    total = 0\n    for item in items:\n        total += item\n    return total\n"
        + " " * 40
    )
    first, second = [
        edits._only_function((one["turns"][0] + one["canonical_solution"]).strip("\n"))
        for one in (
            problem(1, "add(items)", body + "\n    # the end"),
            problem(2, "add(items: list) -> int", body.replace("item", "total_value") + "\n    #"),
        )
    ]
    assert first is not None and second is not None
    code = "def add(items):\n    return items"
    assert (
        edits.rename_variable("total", first)[1] == "Rename the variable `total` to `total_value`."
    )
    assert edits.rename_variable("total total_value", second) is None, "the new name is taken"
    assert edits.annotate(code, first) is not None
    assert edits.annotate(code, second) is None, "it has annotations"


def test_functions_that_no_edit_fits_are_left_out() -> None:
    long = "    total = [item for item in items]\n" * 4 + "    return total\n"
    two = "def other():\n    pass\n\n\n"
    fit = problem(1, "add(items)", long)
    short = problem(2, "add(items)", "    return items\n")
    crowded = {**problem(3, "add(items)", long), "turns": [two + fit["turns"][0]]}
    bare = {**fit, "turns": ["def add(items):\n" + "    items = items + items\n" * 12]}
    whole = [one["turns"][0] + one["canonical_solution"] for one in (fit, short, crowded, bare)]
    found = [edits._only_function(code.strip("\n")) is not None for code in whole]
    assert found == [True, False, False, False]
    with pytest.raises(ValueError, match="0 functions for rename_variable, 2 wanted"):
        edits.edits([short, crowded, bare], 2)


def test_each_function_is_asked_about_once() -> None:
    body = "    total = 0\n    for item in items:\n        total += item\n    return total\n"
    body += "    # no more than this is done with what is given\n"
    made = edits.edits([problem(number, f"add{number}(items)", body) for number in range(12)], 2)
    assert [kind for _, kind, _ in made] == [change.__name__ for change in edits.CHANGES] * 2
    assert len({number for number, _, _ in made}) == 10
    for number, kind, prompt in made:
        shown = prompt.split("```")[1]
        assert f"def add{number}(items):" in shown and "total += item" in shown
        assert ("Do it." in shown) == (kind != "add_docstring")


def write_wheel(folder: Path, package: str, module: str, name: str) -> None:
    """A wheel with a documented module and a documented function."""
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{package}/{module}.py", MODULE.format(prose=SENTENCE.format(name) * 6, name=name)
        )


def test_each_passage_of_packages_that_measure_nothing_is_asked_about_once(tmp_path: Path) -> None:
    for package, module, name in (
        ("first", "sums", "join"),
        ("second", "totals", "total"),
        ("arrow", "times", "shift"),  # of the prompt sets: it measures
    ):
        write_wheel(tmp_path, package, module, name)
    with zipfile.ZipFile(tmp_path / "broken-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("broken/module.py", "def (")
    output = tmp_path / "prompts.jsonl"
    words = ["--packages", tmp_path, "--count", "9", "--output", output]
    script = RECIPE / "many.py"
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "broken-1.0-py3-none-any.whl is left out" in done.stderr
    prompts = [json.loads(line)["prompt"] for line in output.read_text().splitlines()]
    assert f"{len(prompts)} prompts in" in done.stdout
    # A module has prose to summarise; a function has parameters to ask for too.
    assert len(prompts) == 4 == len(set(prompts))
    assert sum("Summarize the text above" in one for one in prompts) >= 2
    assert any("Question: " in one or "as one JSON object" in one for one in prompts)
    assert not any("shift" in one for one in prompts)
    assert table_files(output)
