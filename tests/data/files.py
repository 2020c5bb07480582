"""Small files of training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def ids(prompt: list[int], response: list[int]) -> dict[str, list[int]]:
    """A record of token ids."""
    return {"prompt_token_ids": prompt, "response_token_ids": response}


def write(path: Path, *rows: Any) -> Path:
    """A .jsonl file; text is a line as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
