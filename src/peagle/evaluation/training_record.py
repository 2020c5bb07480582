"""The length of a head's training, read from the train.json beside it."""

import json
from pathlib import Path
from typing import Any

from peagle.models.head_json import RECORD_NAME
from peagle.results import TrainingRecord

_TRAINED_FOLDER = "head"


def read_training_record(head: str | Path) -> TrainingRecord | None:
    """Read the record in a head's folder, or above it where `peagle train` leaves it.

    Returns:
        None without a readable record.
    """
    folder = Path(head).resolve()
    path = folder / RECORD_NAME
    if not path.is_file() and folder.name == _TRAINED_FOLDER:
        path = folder.parent / RECORD_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        planned = data.get("config", {}).get("optimizer", {}).get("steps")
    except (OSError, ValueError, AttributeError):
        return None
    steps = _count(data.get("steps"))
    if steps is None:
        return None
    start = data.get("warm_start")
    return TrainingRecord(
        steps=steps,
        planned=_count(planned),
        tokens=_count(data.get("tokens")),
        stopped_early=data.get("stop_reason") == "patience",
        continues=isinstance(start, dict) and start.get("fresh") == [],
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
