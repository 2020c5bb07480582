"""The examples run as they stand."""

import runpy
import sys
from pathlib import Path

import pytest

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET

ROOT = Path(__file__).resolve().parent.parent
# Run by tests/serving/test_server_openai.py, where there is a server.
OF_A_SERVER = ROOT / "examples" / "openai_client.py"
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {OF_A_SERVER})
BUNDLED = [BUNDLED_TARGET, BUNDLED_PEAGLE, BUNDLED_EAGLE3]


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_the_bundled_target_and_its_heads_are_there() -> None:
    assert all((folder / "config.json").is_file() for folder in BUNDLED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the main program, in this process: importing torch is most of what they would take."""
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "acceptance length" in capsys.readouterr().out
