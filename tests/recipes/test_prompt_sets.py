"""Prompts by the rules of the prompt sets, made of the documentation of other packages."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from peagle.data.readers import table_files

ROOT = Path(__file__).parents[2]
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
    script = ROOT / "recipes" / "prompt_sets" / "many.py"
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
