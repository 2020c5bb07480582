"""Prompt sets by name: those in the package, files, and data sets of the Hugging Face hub."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from peagle.data.readers import read_records
from peagle.data.tables import is_folder
from peagle.errors import UserError
from peagle.evaluation.hub_sets import HUB_SETS, HubSet, prompt_of, read_hub_set
from peagle.evaluation.prompts import PROMPT_SETS as BUNDLED_SETS
from peagle.evaluation.prompts import Prompt, check_limit, load_prompt_set, read_prompts

PROMPT_SETS = (*BUNDLED_SETS, *HUB_SETS)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?(?::[\w.-]*){0,2}")
_FILES = (".jsonl", ".parquet", ".txt", ".json")


def load(
    name: str, limit: int | None = None, seed: int | None = None, *, prompt_column: str = ""
) -> list[Prompt]:
    """Load the prompts of a set.

    Args:
        name: one of PROMPT_SETS; a file (.jsonl, .parquet, anything else is read line by line), a
            folder of data, "-" for standard input; or a data set of the hub,
            owner/name[@revision][:config][:split]. A file named like a set is ./NAME.
        limit: number of prompts to take; None takes all.
        seed: take them from all over the set, in a random order that depends on it; None takes
            the first ones.
        prompt_column: of a data set of the hub, where it is not one of the usual names.

    Raises:
        UserError: there is no such set (the message names the nearest), it is empty or not
            readable, the limit is below 1, or the hub cannot be reached (the message names the sets
            that need no network).
    """
    check_limit(limit)
    # To take some from all over a set, all of it must be seen.
    prompts = list(islice(_prompts(name, prompt_column), limit if seed is None else None))
    if not prompts:
        raise UserError(f"The prompt set {name!r} is empty; expected at least one prompt.")
    if seed is not None:
        random.Random(seed).shuffle(prompts)
    return prompts[:limit]


def _prompts(name: str, prompt_column: str) -> Iterator[Prompt]:
    if name in BUNDLED_SETS:
        return iter(load_prompt_set(name))
    if name in HUB_SETS:
        return read_hub_set(HUB_SETS[name])
    path = Path(name)
    if (path.suffix == ".parquet" and path.exists()) or is_folder(path):
        # Tables and conversations are read as training data is.
        return (prompt_of(record) for record in read_records(path))
    if name == "-" or path.exists():
        return iter(read_prompts(path))
    known = (
        f"{', '.join(BUNDLED_SETS)} (in the package), {', '.join(HUB_SETS)} (from the hub), a file "
        "of prompts, or owner/name[:config][:split] of the hub"
    )
    if name.startswith((".", "/", "~")) or path.suffix in _FILES:
        raise UserError(
            f"The prompt file {name!r} is not there. Expected a file, or a set: {known}."
        )
    if _HUB_ID.fullmatch(name):
        place, _, rest = name.partition(":")
        repo, _, revision = place.partition("@")
        config, _, split = rest.partition(":")
        return read_hub_set(HubSet(repo, config, split, revision or "main", prompt_column))
    near = difflib.get_close_matches(name.lower(), PROMPT_SETS, 2, 0.5)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"No prompt set {name!r}.{meant} There are {known}.")
