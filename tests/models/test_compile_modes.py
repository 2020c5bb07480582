"""How a compile mode is chosen, and what becomes of the choice on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.models.compile_modes import (
    AUTOTUNED,
    MODES,
    Mode,
    ModeStore,
    cache_folder,
    choose_mode,
    keep_compiled_code,
    time_call,
)


def chooser(store: ModeStore, **changes: Any) -> tuple[Callable[[], Mode], list[Mode]]:
    """Chooses for one key; the second is the list of what was measured."""
    measured: list[Mode] = []

    def measure(mode: Mode) -> float:
        measured.append(mode)
        return 2.0 if mode == "default" else 1.0

    options: dict[str, Any] = {
        "shapes": ["Layer", ("weight", (3, 4))],
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "measure": measure,
        "store": store,
        "bucket": 8,
        **changes,
    }
    bucket = options.pop("bucket")
    return lambda: choose_mode(bucket, **options), measured


def test_a_choice_is_measured_once(tmp_path: Path) -> None:
    for _ in range(2):  # a second process reads what the first has written
        choose, measured = chooser(ModeStore(tmp_path / "modes"))
        assert choose() == AUTOTUNED
    assert measured == []
    (file,) = (tmp_path / "modes").iterdir()  # and nothing half written beside it
    kept = json.loads(file.read_text())
    assert kept["seconds"] == {"default": 2.0, AUTOTUNED: 1.0}
    assert kept["key"]["torch"] == torch.__version__
    assert kept["key"]["bucket"] == 8


@pytest.mark.parametrize(
    "changes",
    [{"bucket": 9}, {"shapes": ["Layer", ("weight", (4, 3))]}, {"dtype": torch.float32}],
    ids=str,
)
def test_other_layers_are_measured_anew(tmp_path: Path, changes: dict[str, Any]) -> None:
    chooser(ModeStore(tmp_path))[0]()
    choose, measured = chooser(ModeStore(tmp_path), **changes)
    choose()
    assert measured == list(MODES)


def test_other_versions_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser(ModeStore(tmp_path))[0]()
    for name in ("_triton_version", "_device_name"):
        monkeypatch.setattr(f"peagle.models.compile_modes.{name}", lambda *_: "another")
        choose, measured = chooser(ModeStore(tmp_path))
        choose()
        assert measured == list(MODES)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_tie_is_decided_for_the_default(tmp_path: Path) -> None:
    choose, _ = chooser(ModeStore(tmp_path), measure=lambda m: 1.0 if m == AUTOTUNED else 1.005)
    assert choose() == "default"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"format_version": 2}', '{"format_version": 1, "key": {}}'],
)
def test_broken_files_are_ignored_with_a_note(tmp_path: Path, text: str) -> None:
    chooser(ModeStore(tmp_path))[0]()
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    choose, measured = chooser(ModeStore(tmp_path))
    with pytest.warns(UserWarning, match=f"{file.name}' is ignored"):
        assert choose() == AUTOTUNED
    assert measured == list(MODES)
    assert chooser(ModeStore(tmp_path))[0]() == AUTOTUNED  # without a note


def test_an_unknown_mode_in_a_file_is_ignored(tmp_path: Path) -> None:
    chooser(ModeStore(tmp_path))[0]()
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "mode": "reckless"}))
    with pytest.warns(UserWarning, match="'reckless'"):
        assert chooser(ModeStore(tmp_path))[0]() == AUTOTUNED


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="is not kept"):
        assert chooser(ModeStore(tmp_path / "file" / "modes"))[0]() == AUTOTUNED
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is not kept"):
        keep_compiled_code()


def test_compiled_code_is_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        monkeypatch.setenv(variable, "/elsewhere")
        keep_compiled_code()
        assert os.environ[variable] == "/elsewhere", "the user's word counts"
        monkeypatch.delenv(variable)
        keep_compiled_code()
        assert os.environ[variable] == str(tmp_path / name)


def test_a_default_of_the_libraries_is_nobodys_word(tmp_path: Path) -> None:
    """Importing Inductor sets its variable, which must not look like the user's choice."""
    code = (
        "import os, torch._inductor.config\n"
        "from peagle.models.compile_modes import keep_compiled_code\n"
        "keep_compiled_code()\n"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'], os.environ['TRITON_CACHE_DIR'])"
    )
    kept = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    env = {name: value for name, value in os.environ.items() if name not in kept}
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PEAGLE_CACHE": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "inductor"), str(tmp_path / "triton")]


def test_where_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("PEAGLE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "peagle"


def test_timing_counts_seconds() -> None:
    calls: list[int] = []
    assert 0 < time_call(lambda: calls.append(0), torch.device("cpu"), repeats=3) < 0.1
    assert len(calls) == 4
