"""The facts that a checkpoint keeps of its run, read and compared without torch.

A resumed run must have them in common with its checkpoint, but for `optimizer.steps`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.training.config import TrainConfig

STATE_NAME = "state.json"
# Facts of a checkpoint that older versions did not write.
NEW_FACTS = ("data", "target")
# The only fact that a resumed run may change.
_CHANGEABLE_FACT = "optimizer.steps"
# Facts by the keys of the configuration, where those are other ones.
_KEYS = {
    "seed": "run.seed",
    "minutes": "run.minutes",
    "batch_tokens": "data.batch_tokens",
    "sequences": "number of sequences in data.train",
    "warm_start": "weights of head.init",
}
_HASH = re.compile(r"[0-9a-f]{64}")
_SHORT_HASH = 12


def config_facts(config: TrainConfig) -> dict[str, Any]:
    """Return the facts that the configuration alone tells; the data and the target have others."""
    facts: dict[str, Any] = {
        "method": config.method.facts(),
        "head": config.head.facts(),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "seed": config.run.seed,
        "batch_tokens": config.data.batch_tokens,
        "data": config.data.model_dump(include={"max_length", "length_multiple"}),
        "correction": config.correction.facts(),
    }
    # A run that was planned by time may go on by a number of steps.
    if config.run.minutes is not None:
        facts["minutes"] = config.run.minutes
    return facts


def previous_of(folder: Path) -> Path:
    """Return where a checkpoint lies while the next one takes its place in `folder`."""
    return folder.with_name(folder.name + ".old")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the step, the facts and the progress of a checkpoint; empty without a readable one."""
    for place in (folder, previous_of(folder)):
        try:
            record = json.loads((place / STATE_NAME).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            return record
    return {}


def continued(config: TrainConfig) -> TrainConfig:
    """Return a run whose open settings come from the checkpoint in its output folder.

    They are the optimizer, its learning rate, and the steps that `run.minutes` planned.
    """
    before, section = read_record(config.output / "checkpoint").get("optimizer"), config.optimizer
    if not isinstance(before, dict):
        return config
    open_keys = {"name", "learning_rate"} - section.model_fields_set
    open_keys |= {"steps"} if section.steps is None else set()
    update = {key: before[key] for key in open_keys if key in before}
    return config.model_copy(update={"optimizer": section.model_copy(update=update)})


def refuse_earlier_run(checkpoint: Path) -> None:
    """Refuse to begin a run where a checkpoint would be overwritten.

    Raises:
        UserError: there is one.
    """
    if checkpoint.exists() or previous_of(checkpoint).exists():
        raise UserError(
            f"{str(checkpoint)!r} holds an earlier run; continue with --resume or choose "
            "another output."
        )


def require_checkpoint(checkpoint: Path) -> None:
    """Refuse to resume where there is no checkpoint.

    Raises:
        UserError: there is none.
    """
    if not any((place / STATE_NAME).is_file() for place in (checkpoint, previous_of(checkpoint))):
        raise UserError(
            f"There is no checkpoint to resume from in {str(checkpoint)!r}; run without --resume."
        )


def require_steps_left(checkpoint: Path, step: int, steps: int | None) -> None:
    """Refuse a number of steps that the checkpoint is beyond; None is not known yet.

    Raises:
        UserError: it is.
    """
    if steps is not None and step > steps:
        raise UserError(
            f"optimizer.steps is {steps}, but the checkpoint {str(checkpoint)!r} is of step "
            f"{step}; expected at least that many."
        )


def require_same_facts(folder: Path, record: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse facts that differ from the record of a checkpoint.

    Args:
        folder: the checkpoint, for the message.
        record: the checkpoint's facts. Of an older version it may lack the facts in `NEW_FACTS`.
        facts: facts of the run that goes on; others of the record are not compared.

    Raises:
        UserError: naming each key that differs with both values.
    """
    now = {name: fact for name, fact in facts.items() if name in record or name not in NEW_FACTS}
    before = {name: record.get(name) for name in now}
    changes = [
        f"{_KEYS.get(key.partition('.')[0], key)} {shown(old)} (now {shown(new)})"
        for key, old, new in _differences(before, now)
        if key != _CHANGEABLE_FACT
    ]
    if changes:
        raise UserError(
            f"The checkpoint {str(folder)!r} was made with {', '.join(changes)}. To resume, "
            f"restore what it was made with; only {_CHANGEABLE_FACT} may change. Or start anew in "
            "another output folder, where head.init may name the head of this run."
        )


def shown(fact: object) -> str:
    """Return a fact as messages show it; of a hash the first digits tell enough."""
    if isinstance(fact, str) and _HASH.fullmatch(fact):
        return f"SHA-256 {fact[:_SHORT_HASH]}..."
    return repr(fact)


def _differences(
    before: object, now: object, key: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield keys ("optimizer.steps") whose values differ, with the values; None: none is there."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield key, before, now
        return
    for name in sorted(before.keys() | now.keys()):
        yield from _differences(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
