"""The devices that tests of Triton kernels run on: a CPU by Triton's interpreter, and a card."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
