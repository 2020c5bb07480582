"""The turns of prompts that a measurement sends, and names of prompt sets that include them.

Files keep the plain name of a set and its turns apart; tables show "mt_bench (both turns)".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt
from peagle.results import AcceptanceResults, Entry, ThroughputResults, Turns


def sent_turns(sets: Mapping[str, Sequence[Prompt]], wanted: int | None = None) -> dict[str, Turns]:
    """Return the turns of each set whose prompts have several; None wants all of them.

    Raises:
        UserError: no prompt of a set has so many turns.
    """
    found: dict[str, Turns] = {}
    for name, prompts in sets.items():
        most = max(len(prompt.turns) for prompt in prompts)
        if wanted is not None and wanted > most:
            has = "one turn" if most == 1 else f"{most} turns"
            raise UserError(
                f"--turns is {wanted}, and no prompt of {name!r} has more than {has}. Give at most "
                f"{most}, or all."
            )
        if most > 1:
            found[name] = Turns(sent=wanted or most, most=most)
    return found


def name_turns(name: str, turns: Mapping[str, Turns]) -> str:
    """Return the name of a set or a category with its turns: "mt_bench (both turns)/math"."""
    for known, own in turns.items():
        if name == known or name.startswith(f"{known}/"):
            return f"{known} ({own}){name[len(known) :]}"
    return name


def entry_with_turns(entry: Entry, turns: Mapping[str, Turns]) -> Entry:
    """Return an entry with the turns in its names of sets and categories."""
    return entry.model_copy(
        update={
            "by_set": _named(entry.by_set, turns),
            "by_category": _named(entry.by_category, turns),
        }
    )


def eval_with_turns(file: AcceptanceResults) -> AcceptanceResults:
    """Return results of `peagle eval` with the turns in names of sets and categories."""
    entries = [entry_with_turns(entry, file.turns) for entry in file.entries]
    return file.model_copy(update={"entries": entries})


def bench_with_turns(file: ThroughputResults) -> ThroughputResults:
    """Return results of `peagle bench` with the turns in names of sets."""

    def renamed(items: Sequence[Any]) -> list[Any]:
        return [one.model_copy(update={"set": name_turns(one.set, file.turns)}) for one in items]

    lists = {name: renamed(getattr(file, name)) for name in ("cells", "best_k", "goodput")}
    return file.model_copy(update=lists)


def _named(slices: Mapping[str, Any], turns: Mapping[str, Turns]) -> dict[str, Any]:
    return {name_turns(name, turns): one for name, one in slices.items()}
