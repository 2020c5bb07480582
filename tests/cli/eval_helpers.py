"""What the tests of `peagle eval` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Result

SMALL = ("--set", "heldout_code", "--limit", 5, "--max-new-tokens", 8, "--concurrency", 3)


def write_prompts(path: Path) -> Path:
    """Six prompts of two turns, in two categories."""
    records = [
        {"id": f"p/{i}", "category": "odd" if i % 2 else "even", "turns": [f"def f{i}(", "More"]}
        for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def entries_of(result: Result) -> list[dict[str, Any]]:
    """The entries of a run that went well."""
    assert result.status == 0, result.err
    return json.loads(result.out)["entries"]
