"""Prompt sets by name: those in the package, files, and data sets of the Hugging Face hub.

Parquet and JSON Lines files of the hub are fetched into its cache and read; no code of a data set
runs.
"""

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from peagle.config.checks import near_names
from peagle.data.readers import Dropped, Record, dialogue_of, is_folder, read_records
from peagle.errors import UserError
from peagle.evaluation.prompts import PROMPT_SETS as BUNDLED_SETS
from peagle.evaluation.prompts import Prompt, check_limit, load_prompt_set, read_prompts

Row = Mapping[str, Any]

# The usual columns of the prompt: with conversations, and with text.
_CONVERSATIONS = ("turns", "messages", "conversations")
_TEXT_COLUMNS = ("prompt", "question", "instruction", "problem", "query", "text")
_BESIDE_MESSAGES = ("system", "system_prompt", "tools", "functions")
_ID_COLUMNS = ("id", "question_id", "task_id", "unique_id")
_SPLITS = ("test", "validation", "train")
_SUFFIXES = (".parquet", ".jsonl")
# SPEED-Bench's text in place of a prompt that it may not distribute.
_WITHHELD_TEXT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True, slots=True)
class HubSet:
    """The place of the prompts in a data set of the hub."""

    repo: str  # "owner/name"
    config: str = ""  # "" for the only one
    split: str = ""  # "" for the first of test, validation and train
    revision: str = "main"  # branch, tag or commit
    prompt: str = ""  # column with text, turns or messages; "" for the first of the usual names
    category: str = "category"  # column with the category
    text: Callable[[Row], str] | None = None  # makes the prompt from several columns

    def __str__(self) -> str:
        return repr(":".join([self.repo, self.config, self.split]).rstrip(":"))


def _mbpp(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return f"{row['text']} The function must pass these tests:\n\n{tests}\n"


def _cnn(row: Row) -> str:
    return f"{row['article']}\n\nSummarize the article above in three sentences."


def _alpaca(row: Row) -> str:
    return "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)


HUB_SETS = {
    "speed_bench": HubSet("nvidia/SPEED-Bench", "qualitative", "test", prompt="turns"),
    "mbpp": HubSet("google-research-datasets/mbpp", "full", "test", text=_mbpp),
    "math500": HubSet("HuggingFaceH4/MATH-500", "", "test", prompt="problem", category="subject"),
    "cnn_dailymail": HubSet("abisee/cnn_dailymail", "3.0.0", "test", text=_cnn),
    "alpaca": HubSet("tatsu-lab/alpaca", "", "train", text=_alpaca),
}


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
        seed: seed of a random choice from the whole set, in random order; None takes the first
            prompts.
        prompt_column: column with the prompts of a hub data set, if its name is not a usual one.

    Raises:
        UserError: there is no such set (the message names the nearest), it is empty or not
            readable, the limit is below 1, or the hub cannot be reached (the message names the sets
            that need no network).
    """
    check_limit(limit)
    # Prompts from all over a set can be chosen only after the whole set was read.
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
        return _read_hub_set(HUB_SETS[name])
    path = Path(name)
    if (path.suffix == ".parquet" and path.exists()) or is_folder(path) or _has_messages(path):
        # Tables and conversations have the formats of training data.
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
        return _read_hub_set(HubSet(repo, config, split, revision or "main", prompt_column))
    near = near_names(name.lower(), PROMPT_SETS, 2, 0.5)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"No prompt set {name!r}.{meant} There are {known}.")


def _has_messages(path: Path) -> bool:
    """Return whether the first line of a JSON Lines file is a conversation in messages."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and ("messages" in row or "conversations" in row)


# ---- the hub ----


def _read_hub_set(wanted: HubSet) -> Iterator[Prompt]:
    """Read the prompts of a data set of the hub, file by file.

    Raises:
        UserError: the hub cannot be reached or refuses, or the data set has no such config, split
            or column; the message says what there is.
    """
    left_out = read = 0
    for file in _fetch(wanted):
        for record in read_records(file):
            prompt = _hub_prompt(record, wanted)
            if any(_WITHHELD_TEXT in turn for turn in prompt.turns):
                left_out += 1
            else:
                read += 1
                yield prompt
    if left_out and not read:
        raise UserError(
            f"All {left_out} prompts of {wanted} are left out there for their licences. Put "
            "them together with the script that its page names, and give the JSON Lines file."
        )


def prompt_of(record: Record) -> Prompt:
    """Return the prompt in a record of training data.

    Raises:
        UserError: the record has no prompt, is malformed, or holds results of tools.
    """
    dialogue, category = dialogue_of(record), record.data.get("category")
    if isinstance(dialogue, Dropped):
        details = dialogue.detail and f": {dialogue.detail}"
        raise UserError(f"{record.where}: {dialogue.reason}{details}.")
    turns = tuple(turn for turn in dialogue.turns if isinstance(turn, str))
    if len(turns) < len(dialogue.turns):
        raise UserError(
            f"{record.where} has results of tools, or system messages between its turns; the "
            "turns of a prompt set are texts of the user. Leave this record out."
        )
    category = category if isinstance(category, str) else ""
    return Prompt(dialogue.id, turns, category, dialogue.system, dialogue.tools)


def _hub_prompt(record: Record, wanted: HubSet) -> Prompt:
    row = record.data
    ids = (row[name] for name in _ID_COLUMNS if isinstance(row.get(name), str | int))
    usual = (*_CONVERSATIONS, *_TEXT_COLUMNS)
    column = wanted.prompt or next((name for name in usual if name in row), "prompt")
    try:
        value = wanted.text(row) if wanted.text else row[column]
    except KeyError as error:
        has = ", ".join(sorted(map(str, row))) or "none"
        raise UserError(
            f"{wanted} has no column {error}; it has {has}. Name the one with the prompt by "
            "--prompt-column."
        ) from None
    kind = "prompt"
    if isinstance(value, list):
        kind = "conversations" if column == "conversations" else "messages"
        kind = "turns" if all(isinstance(one, str) for one in value) else kind
    id = next(ids, "")
    data = {"id": record.number if id == "" else id, kind: value}
    data["category"] = row.get(wanted.category)
    if kind in ("messages", "conversations"):
        data |= {name: row[name] for name in _BESIDE_MESSAGES if name in row}
    return prompt_of(replace(record, data=data))


def choose(names: Sequence[str], wanted: HubSet) -> list[str]:
    """Return the files of a config and split, among all files of a data set.

    The usual layouts: CONFIG/SPLIT-00000-of-00001.parquet, data/SPLIT-*.parquet, SPLIT.jsonl,
    CONFIG/SPLIT/0000.parquet. Parquet goes before JSON Lines.

    Raises:
        UserError: there is no such file; the message names the files of the data set.
    """
    files = sorted(name for name in names if PurePosixPath(name).suffix in _SUFFIXES)
    suffix = next((one for one in _SUFFIXES if any(name.endswith(one) for name in files)), "")
    files = [name for name in files if name.endswith(suffix)]
    config = [name for name in files if not wanted.config or _has_config(name, wanted.config)]
    for split in [wanted.split] if wanted.split else [*_SPLITS, ""]:
        if found := [name for name in config if _has_split(name, split)]:
            folders = sorted({str(PurePosixPath(name).parent) for name in found})
            if len(folders) > 1 and not wanted.config:
                raise UserError(
                    f"{wanted.repo!r} has several configs: {', '.join(folders[:20])}. Name one: "
                    f"{wanted.repo}:CONFIG."
                )
            return found
    there = f"it has {', '.join(files[:12])}{', ...' if len(files) > 12 else ''}"
    if not files:
        there = "it has no .parquet or .jsonl file. Bring it into one, and give that file"
    raise UserError(f"{wanted}: the data set has no such config or split; {there}.")


def _has_config(name: str, config: str) -> bool:
    folder = PurePosixPath(name).parent
    return config in folder.parts or config == str(folder)


def _has_split(name: str, split: str) -> bool:
    path = PurePosixPath(name)
    stem = path.name.removesuffix(path.suffix)
    return not split or stem == split or stem.startswith(f"{split}-") or split in path.parts[:-1]


def _fetch(wanted: HubSet) -> list[Path]:
    """Fetch the files into the hub's cache; files that are there already need no network.

    Raises:
        UserError: the hub does not give them; the message says why.
    """
    # Imported late: naming the sets must be quick.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HTTPError

    from peagle.models.hub import hub_url, no_telemetry, progress_bars, require_connection

    hub = hub_url()
    place: dict[str, Any] = {"repo_type": "dataset", "revision": wanted.revision}
    with no_telemetry():
        try:
            require_connection(hub)
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            info = HfApi(endpoint=hub).dataset_info(
                wanted.repo, revision=wanted.revision, timeout=timeout
            )
            chosen = choose([file.rfilename for file in info.siblings or []], wanted)
            with progress_bars(shown=os.isatty(2)):
                folder = snapshot_download(
                    wanted.repo, endpoint=hub, allow_patterns=chosen, **place
                )
            return [Path(folder) / name for name in chosen]
        except UserError:
            raise
        except (HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            if cached := _cached(wanted, Path(constants.HF_HUB_CACHE)):
                return cached
            raise UserError(_explain(wanted, hub, error)) from None


def _cached(wanted: HubSet, cache: Path) -> list[Path]:
    """Return the files from the cache if an earlier run fetched all of them, else none."""
    storage = cache / f"datasets--{wanted.repo.replace('/', '--')}"
    ref = storage / "refs" / wanted.revision
    folder = storage / "snapshots" / (ref.read_text() if ref.is_file() else wanted.revision)
    names = [one.relative_to(folder).as_posix() for one in folder.rglob("*.*")]
    try:
        chosen = choose(names, wanted)
    except UserError:
        return []
    number = re.search(r"-of-(\d+)", chosen[0])
    return [folder / name for name in chosen] if not number or int(number[1]) == len(chosen) else []


def _explain(wanted: HubSet, hub: str, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{hub}/datasets/{wanted.repo}"
    if isinstance(error, GatedRepoError):
        return (
            f"{wanted} is gated. Ask for access at {page}, then set HF_TOKEN to a token of "
            "the account that has it."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{wanted} has no revision {wanted.revision!r}; see {page}/tree/main."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{wanted.repo!r} is neither a file here nor a data set that {hub} shows. Check the "
            "spelling; if it is private, set HF_TOKEN to a token that may read it."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"{wanted} is not in the cache, and {hub} does not give it: {reason}. These sets "
        f"need no network: {', '.join(BUNDLED_SETS)}; nor does a file of prompts."
    )
