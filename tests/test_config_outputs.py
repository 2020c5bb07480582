"""Outputs that cannot be written are refused before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.config import require_writable_file, require_writable_folder
from peagle.errors import UserError


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "below"):
        assert require_writable_folder(folder, "The output") == folder
        assert require_writable_file(folder / "a.jsonl", "The output") == folder / "a.jsonl"
    assert list(tmp_path.iterdir()) == []


def test_a_relative_output_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert require_writable_folder("out", "The output") == Path("out")
    assert require_writable_file("a.jsonl", "The output") == Path("a.jsonl")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for folder in (file, file / "below", Path("/proc/below"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"^The output '.*' cannot be written: "):
            require_writable_folder(folder, "The output")
    with pytest.raises(UserError, match=r"^The folder of the output '.*' cannot be written: "):
        require_writable_file(file / "a.jsonl", "The output")
    with pytest.raises(UserError, match="is a folder; expected the name of a file"):
        require_writable_file(tmp_path, "The output")
