"""What is imported before anything runs, which is most of the time that a start takes."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.conftest import environment

_CODE = """
import sys, torch, transformers
before = set(sys.modules)
from peagle import LLM
for name in sorted(set(sys.modules) - before):
    print(name)
"""


def test_llm_imports_no_more_than_torch_and_transformers_themselves() -> None:
    process = [sys.executable, "-c", _CODE]
    result = subprocess.run(process, env=environment(), capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in result.stdout.split()}
    assert "peagle" in packages
    # No torch.* and transformers.* either: their parts are imported when a model is loaded.
    assert packages - sys.stdlib_module_names <= {"peagle", "safetensors", "tokenizers"}
