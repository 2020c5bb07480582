"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BUNDLED = [BUNDLED_TARGET, BUNDLED_PEAGLE, BUNDLED_EAGLE3]


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_the_bundled_target_and_its_heads_are_there() -> None:
    assert all((folder / "config.json").is_file() for folder in BUNDLED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "acceptance length" in result.stdout
