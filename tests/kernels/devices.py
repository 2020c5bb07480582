"""The devices that tests of Triton kernels run on: a CPU by Triton's interpreter, and a card.

Kernels compile for cards that are not there, too.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from peagle.kernels.linear.fp8_linear import fp8_obstacle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
_NO_FP8 = (torch.cuda.is_available() and fp8_obstacle(torch.device("cuda"))) or ""
WITHOUT_FP8 = pytest.mark.skipif(bool(_NO_FP8), reason=_NO_FP8)
FP8_DEVICES = [DEVICES[0], pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_FP8])]


def compile_for_card(which: str) -> dict[str, dict[str, Any]]:
    """Compile the kernels of a kind; return what `tests.kernels.compile_for_card` says of them."""
    found = _compile_all()[which]
    assert not isinstance(found, str), found
    return found


@cache
def _compile_all() -> dict[str, Any]:
    """One process without TRITON_INTERPRET compiles all kinds: imports are most of its time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_for_card"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)
