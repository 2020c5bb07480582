"""The catalog: models with P-EAGLE heads and what it takes to deploy them, ours and the user's."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peagle.deploy.catalog_entry import CatalogEntry, memory_by_flags
from peagle.deploy.memory import MemoryNeeded, ModelFacts, facts_of_folder
from peagle.deploy.models import ModelSource
from peagle.errors import UserError

FORMAT_VERSION = 1
VARIABLE = "PEAGLE_CATALOG"
PACKAGED = "the package"
_SHORTEST_PART = 3  # letters of a name that are taken for a hint at it
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

# ---- files ----------------------------------------------------------------------------------


def load_catalog(extra: Sequence[Path] = ()) -> dict[str, CatalogEntry]:
    """All entries by name: the package's, then the user's, later ones in place of earlier ones.

    The user's files: ~/.config/peagle/catalog.toml ($XDG_CONFIG_HOME) where there is one, those of
    $PEAGLE_CATALOG (several as in $PATH), then `extra`.

    Raises:
        UserError: a file that is named is not there, is not TOML, of a newer format, or an entry
            is not understood.
    """
    text = files("peagle.deploy").joinpath("catalog.toml").read_text(encoding="utf-8")
    entries = {entry.name: entry for entry in parse_catalog(text, PACKAGED)}
    for path in [*_user_files(), *extra]:
        for entry in read_catalog(path):
            known = find_name(entry.name, entries)
            old = entries.pop(known) if known else None
            update = {"replaces": old.origin if old else ""}
            entries[entry.name] = entry.model_copy(update=update)
    return entries


def _user_files() -> list[Path]:
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    usual = Path(home).expanduser() / "peagle" / "catalog.toml"
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [*([usual] if usual.is_file() else []), *(Path(n).expanduser() for n in named if n)]


def read_catalog(path: Path) -> list[CatalogEntry]:
    """The entries of a user's file.

    Raises:
        UserError: as `load_catalog`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"The catalog file {str(path)!r} is not readable: {reason}. Check the path, {VARIABLE} "
            "and --catalog."
        ) from None
    return parse_catalog(text, str(path))


def parse_catalog(text: str, origin: str) -> list[CatalogEntry]:
    """The entries of a catalog's TOML; `origin` names it in messages and in the entries.

    Raises:
        UserError: not TOML, a newer format, a key or value that is not understood.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"The catalog {origin!r} is not TOML: {error}. Mend it there; `peagle catalog --help` "
            "shows an entry."
        ) from None
    version = data.pop("format_version", None)
    if type(version) is not int or version < 1:
        found = "missing" if version is None else repr(version)
        raise UserError(
            f"The catalog {origin!r}: format_version is {found}; expected "
            f"format_version = {FORMAT_VERSION} as the first line."
        )
    if version > FORMAT_VERSION:
        raise UserError(
            f"The catalog {origin!r}: format_version is {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Upgrade peagle."
        )
    models = data.pop("models", {})
    if data:
        raise UserError(
            f"The catalog {origin!r}: {next(iter(data))!r} is not a known key; expected "
            "format_version and tables [models.NAME]."
        )
    if not isinstance(models, dict):
        raise UserError(f"The catalog {origin!r}: models is {models!r}; expected [models.NAME].")
    known: dict[str, str] = {}
    for name in models:
        if (same := known.setdefault(name.casefold(), name)) != name:
            raise UserError(
                f"The catalog {origin!r}: [models.{same}] and [models.{name}] are the same name, "
                "since case does not count; rename one of them."
            )
    return [_entry(name, table, origin) for name, table in models.items()]


def _entry(name: str, table: Any, origin: str) -> CatalogEntry:
    where = f"The catalog {origin!r}, [models.{name}]"
    if not isinstance(table, dict):
        raise UserError(f"{where}: it is {table!r}; expected a table.")
    for key in table.keys() & {"target", "draft"}:
        if isinstance(path := table[key], str) and path.startswith((".", "/", "~")):
            beside = Path(origin).parent / Path(path).expanduser()
            table = {**table, key: os.path.abspath(beside)}
    if own := table.keys() & {"name", "origin", "replaces"}:
        raise UserError(f"{where}: {min(own)} is not a known key.")
    try:
        return CatalogEntry.model_validate({**table, "name": name, "origin": origin})
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"])) or "the entry"
    if problem["type"] == "extra_forbidden":
        known = [k for k in CatalogEntry.model_fields if k not in ("name", "origin", "replaces")]
        near = get_close_matches(key, known, 1)
        meant = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}."
        return f"{key} is not a known key.{meant}"
    if problem["type"] == "missing":
        return f"{key} is missing."
    if problem["type"] == "value_error":
        return f"{problem['msg'].removeprefix('Value error, ')}."
    return f"{key} is {problem['input']!r}: {problem['msg']}."


def to_toml(entry: CatalogEntry) -> str:
    """A catalog file with this entry alone; what has its default is left out."""
    values = entry.model_dump(exclude_defaults=True, exclude={"name", "origin", "replaces"})
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    head = [f"format_version = {FORMAT_VERSION}", "", f"[models.{_toml_key(entry.name)}]"]
    return "\n".join([*head, *lines, ""])


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        given = ((key, one) for key, one in value.items() if one is not None)
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml(one)}" for key, one in given) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's numbers, booleans and escapes are TOML's, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- finding --------------------------------------------------------------------------------


def find_name(name: str, entries: dict[str, CatalogEntry]) -> str | None:
    """The entry's name that this one means: in any case, or the target's hub id."""
    wanted = name.casefold()
    for key in reversed(entries):  # of several with one target, the user's
        if wanted in (key.casefold(), entries[key].target.casefold()):
            return key
    return None


def find(name: str, entries: dict[str, CatalogEntry]) -> CatalogEntry:
    """The entry of this name; the target's hub id, and any case, will do.

    Raises:
        UserError: there is none; with the nearest names.
    """
    if (key := find_name(name, entries)) is not None:
        return entries[key]
    near = _nearest(name, entries.values())
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"No model {name!r} in the catalog.{meant} `peagle catalog` lists them: "
        f"{', '.join(entries)}. Models of your own go into a file (`peagle catalog --help`)."
    )


def lookup(name: str, entries: dict[str, CatalogEntry]) -> CatalogEntry | None:
    """The entry of this name, as `find`; None if there is none."""
    key = find_name(name, entries)
    return None if key is None else entries[key]


def _nearest(name: str, entries: Iterable[CatalogEntry]) -> list[str]:
    """At most two names: the most similar, or such that contain what was typed."""
    names = {alias.casefold(): e.name for e in entries for alias in (e.target, e.name)}
    typed = name.casefold()
    near = get_close_matches(typed, names, 2, 0.6)
    if not near and len(typed) >= _SHORTEST_PART:
        near = [alias for alias in names if typed in alias]
    return list(dict.fromkeys(names[alias] for alias in near))[:2]


# ---- memory ---------------------------------------------------------------------------------


# Sizes of a model that is neither here nor in the catalog; None where nobody looks.
ReadSize = Callable[[ModelSource], ModelFacts | None]


def facts_of(
    source: ModelSource, entries: dict[str, CatalogEntry], read_size: ReadSize | None = None
) -> ModelFacts | None:
    """Sizes of a model or a head: of the catalog, of a folder here, or as `read_size` finds them.

    Raises:
        CheckpointError: the folder holds no model.
    """
    if source.kind == "local":
        return facts_of_folder(Path(source.name))
    name = source.name.casefold().rstrip("/")
    for entry in reversed(entries.values()):
        found = None
        if name == entry.target.casefold().rstrip("/"):
            found = entry.target_facts()
        elif entry.draft is not None and name == entry.draft.casefold().rstrip("/"):
            found = entry.draft_facts()
        if found is not None:
            return found
    return read_size(source) if read_size is not None else None


def needed_by(
    target: ModelSource,
    draft: ModelSource | None,
    flags: Mapping[str, str],
    entries: dict[str, CatalogEntry],
    *,
    native: bool = False,
    read_size: ReadSize | None = None,
) -> MemoryNeeded | None:
    """Memory of a target and its head with these flags of vLLM; None where it is not known.

    Raises:
        CheckpointError: a folder holds no model.
    """
    facts = facts_of(target, entries, read_size)
    if facts is None:
        return None
    head = facts_of(draft, entries, read_size) if draft is not None else None
    return memory_by_flags(facts, head, flags, native=native)
