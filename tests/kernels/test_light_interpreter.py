"""The lightened interpreter computes what Triton's own does, bit by bit, and refuses the same."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

from triton.runtime import interpreter

from tests.kernels.interpreted import run


@pytest.mark.slow
def test_operations_on_all_types_are_those_of_the_interpreter() -> None:
    assert interpreter.is_light  # type: ignore[attr-defined]
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = json.loads(done.stdout)
    found = json.loads(json.dumps(run()))
    assert len(wanted) > 10_000 and found.keys() == wanted.keys()
    wrong = [name for name in wanted if found[name] != wanted[name]]
    assert not wrong, f"{wrong[:20]}: {found[wrong[0]]} in place of {wanted[wrong[0]]}"
