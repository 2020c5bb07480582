"""Heads of the tiny target, made once for the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def graphs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as graphs on a CPU too, where the engine would not."""
    monkeypatch.setattr(
        "peagle.engine.engine.runs_as_graphs", lambda *parts: not parts[1].enforce_eager
    )


@pytest.fixture(scope="session")
def heads(head_folders: Callable[..., Path]) -> dict[bool, Path]:
    """A P-EAGLE head (True) and an EAGLE-3 head (False)."""
    return {parallel: head_folders(parallel=parallel) for parallel in (True, False)}
