"""How long a head was trained, as the train.json beside it says."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Fewer optimizer steps than this have not made a good head of a real model yet.
FEW_STEPS = 1000
_NAME, _TRAINED_FOLDER = "train.json", "head"


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The length of a training.

    Attributes:
        steps: optimizer steps done.
        planned: optimizer steps asked for; None where that is not recorded.
        tokens: tokens that went through the head; None where that is not recorded.
        stopped_early: the training ended before its plan because validation did not improve.
        continues: the training began with a whole head of the same kind, so that the steps come on
            top of that head's.
    """

    steps: int
    planned: int | None = None
    tokens: int | None = None
    stopped_early: bool = False
    continues: bool = False

    @classmethod
    def beside(cls, head: str | Path) -> TrainingRecord | None:
        """Read the record in a head's folder, or above it where `peagle train` left the head.

        A record that cannot be read, and that of another kind of head, count as none.
        """
        folder = Path(head).resolve()
        path = folder / _NAME
        if not path.is_file() and folder.name == _TRAINED_FOLDER:
            path = folder.parent / _NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            planned = data.get("config", {}).get("optimizer", {}).get("steps")
        except (OSError, ValueError, AttributeError):
            return None
        steps = _count(data.get("steps"))
        if steps is None:
            return None
        early = data.get("stop_reason") == "patience"
        start = data.get("warm_start")
        continues = isinstance(start, dict) and start.get("fresh") == []
        return cls(steps, _count(planned), _count(data.get("tokens")), early, continues)

    @property
    def is_little(self) -> bool:
        """Whether the head cannot be judged yet: few steps, or less than half of the plan."""
        unfinished = self.planned is not None and 2 * self.steps < self.planned
        few = self.steps < FEW_STEPS and not self.continues
        return few or (unfinished and not self.stopped_early)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        of = f" of {self.planned:,}" if self.planned not in (None, self.steps) else ""
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        return f"{self.steps:,}{of} steps{tokens}"


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
