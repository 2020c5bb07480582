"""Heads of the tiny target, made once for the folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.engines import PaddedTorchAttention


@pytest.fixture
def graphs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as graphs on a CPU too, where the engine would not.

    No prompt waits for others: when it would depends on the speed of the machine.
    """
    monkeypatch.setattr("peagle.engine.gathering.Gathering.waits", lambda *_: False)
    monkeypatch.setattr(
        "peagle.engine.engine_plan.runs_as_graphs", lambda *parts: not parts[1].enforce_eager
    )


@pytest.fixture
def torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps attend by torch where Triton is interpreted: its kernel takes most of a step.

    For tests of what surrounds attention; `tests/kernels` and each file's own test of a step hold
    the kernel.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        for module in ("decode_step", "mixed_pass"):
            monkeypatch.setattr(
                f"peagle.engine.step.{module}.TritonAttention", PaddedTorchAttention
            )


@pytest.fixture(scope="session")
def heads(head_folders: Callable[..., Path]) -> dict[bool, Path]:
    """A P-EAGLE head (True) and an EAGLE-3 head (False)."""
    return {parallel: head_folders(parallel=parallel) for parallel in (True, False)}
