"""A saved head, fresh for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from tests.conftest import make_drafter


@pytest.fixture
def head(target: TargetModel, tmp_path: Path) -> Path:
    """A saved P-EAGLE head of the tiny Llama."""
    folder = tmp_path / "head"
    save_drafter(folder, make_drafter(target), fingerprint=TargetFingerprint.of(target))
    return folder
