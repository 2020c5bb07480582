"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET

ROOT = Path(__file__).resolve().parent.parent
OF_A_SERVER = ROOT / "examples" / "openai_client.py"
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {OF_A_SERVER})
BUNDLED = [BUNDLED_TARGET, BUNDLED_PEAGLE, BUNDLED_EAGLE3]


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_the_bundled_target_and_its_heads_are_there() -> None:
    assert all((folder / "config.json").is_file() for folder in BUNDLED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    assert "acceptance length" in run(example)


@pytest.mark.slow
def test_example_of_a_client_runs() -> None:
    pytest.importorskip("openai")
    from serving.live import running

    with running("--threads", 1) as server:
        printed = run(OF_A_SERVER, f"{server.url}/v1")
    assert printed.count("acceptance length") == 2
    assert "--- the texts are equal" in printed


def run(example: Path, *arguments: str) -> str:
    """What an example prints."""
    result = subprocess.run(
        [sys.executable, str(example), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
