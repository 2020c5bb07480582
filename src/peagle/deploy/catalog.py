"""The catalog: models with P-EAGLE heads and what their deployment needs, ours and the user's."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from peagle.config.checks import near_names
from peagle.deploy.deployment import ContainerSource
from peagle.deploy.memory import (
    GIB,
    KvLayers,
    MemoryNeeded,
    ModelFacts,
    facts_of_folder,
    memory_for_flags,
)
from peagle.deploy.models import ModelSource
from peagle.errors import UserError

FORMAT_VERSION = 1
CATALOG_ENV = "PEAGLE_CATALOG"
PACKAGED = "the package"
_SHORTEST_HINT = 3  # letters: a shorter part of a name suggests no entry
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Fields of an entry that are no keys of its table.
_NOT_KEYS = ("name", "origin", "replaces")

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,127}$")]
_Model = Annotated[str, Field(pattern=rf"^({_HUB_ID}|s3://[^\s/]+(/\S*)?|/.*)$")]
_InstanceName = Annotated[str, Field(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")]
_Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
_K = Annotated[int, Field(ge=1, le=64)]
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _variable_text(value: Any) -> Any:
    """Return a TOML value in the form of SM_VLLM_*: text as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


_VariableText = Annotated[str, BeforeValidator(_variable_text)]


class CatalogEntry(BaseModel):
    """A model with its head: the table [models.NAME] of a file.

    Attributes:
        name: name of the table.
        origin: the entry's file, or "the package".
        replaces: the origin of the entry of the same name that this one replaces; "" for none.
        target, draft: hub ids, s3:// prefixes or folders; no draft if none is published by itself.
        num_speculative_tokens: K; None without a draft.
        max_speculative_tokens: the deepest K that the head was trained or published for.
        precision: type of the target's weights.
        parameters_b: parameters of the target, in 10^9.
        weights_gib, draft_weights_gib: sizes of the checkpoints, in GiB.
        kv_layers, draft_kv_layers: shapes of the KV caches.
        instance_types: of SageMaker, the preferred one first.
        vllm_flags: options of vLLM that it needs, without dashes; values as text.
        environment: further variables of the container.
        sources: containers that can serve it, the preferred one first.
        jumpstart_model_id: id of the model in SageMaker JumpStart.
        gated: whether the hub gives out the weights only after its licence was accepted.
        license: the license's name on the hub.
        estimates: keys above whose values are estimates, not published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    origin: str
    replaces: str = ""
    target: _Model
    draft: _Model | None = None
    num_speculative_tokens: _K | None = None
    max_speculative_tokens: _K | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8", "mxfp4", "nvfp4", "int8", "int4"]
    parameters_b: _Size | None = None
    weights_gib: _Size | None = None
    draft_weights_gib: _Size | None = None
    kv_layers: tuple[KvLayers, ...] = ()
    draft_kv_layers: tuple[KvLayers, ...] = ()
    instance_types: tuple[_InstanceName, ...] = Field(min_length=1)
    vllm_flags: dict[_Flag, _VariableText] = Field(default_factory=dict)
    environment: dict[str, _VariableText] = Field(default_factory=dict)
    sources: tuple[ContainerSource, ...] = Field(("managed", "native"), min_length=1)
    jumpstart_model_id: str | None = None
    gated: bool | None = None
    license: str | None = None
    estimates: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        k, deepest = self.num_speculative_tokens, self.max_speculative_tokens
        if self.draft is not None and k is None:
            raise ValueError("there is a draft and no num_speculative_tokens; give K")
        if self.draft is None and k is not None:
            raise ValueError("there is a num_speculative_tokens and no draft; name the head")
        if k is not None and deepest is not None and k > deepest:
            raise ValueError(
                f"num_speculative_tokens is {k}; expected at most max_speculative_tokens, {deepest}"
            )
        if unknown := [key for key in self.estimates if key not in type(self).model_fields]:
            raise ValueError(f"estimates names {unknown[0]!r}, which is no key")
        return self

    @property
    def is_head_in_jumpstart(self) -> bool:
        """Return whether only SageMaker JumpStart has the head: its id is known and no draft."""
        return self.draft is None and self.jumpstart_model_id is not None

    def target_facts(self) -> ModelFacts | None:
        """Return the facts about the target; None if the size of its weights is unknown."""
        return _facts(self.target, self.weights_gib, self.kv_layers, self.precision)

    def draft_facts(self) -> ModelFacts | None:
        """Return the facts about the head; None if the size of its weights is unknown."""
        return _facts(self.draft, self.draft_weights_gib, self.draft_kv_layers, "bf16")

    def memory_needed(self, source: ContainerSource | None = None) -> MemoryNeeded | None:
        """Return the memory with the entry's own flags in a source's container; None if unknown."""
        target = self.target_facts()
        native = (source or self.sources[0]) == "native"
        return target and memory_for_flags(
            target, self.draft_facts(), self.vllm_flags, native=native
        )


def _facts(
    model: str | None, weights_gib: float | None, layers: tuple[KvLayers, ...], precision: str
) -> ModelFacts | None:
    if weights_gib is not None:
        return ModelFacts(int(weights_gib * GIB), precision, layers)
    if model is not None and model.startswith("/") and Path(model).is_dir():
        return facts_of_folder(Path(model))
    return None


# ---- files ----


def load_catalog(extra: Sequence[Path] = ()) -> dict[str, CatalogEntry]:
    """Return all entries by name; the user's replace the package's entries of the same name.

    The user's files are ~/.config/peagle/catalog.toml ($XDG_CONFIG_HOME) if it exists, the files of
    $PEAGLE_CATALOG (separated as in $PATH), then `extra`.

    Raises:
        UserError: a named file does not exist, is not TOML or of a newer format, or an entry is
            malformed.
    """
    text = files("peagle.deploy").joinpath("catalog.toml").read_text(encoding="utf-8")
    entries = {entry.name: entry for entry in parse_catalog(text, PACKAGED)}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    usual = config / "peagle" / "catalog.toml"
    named = [Path(n).expanduser() for n in os.environ.get(CATALOG_ENV, "").split(os.pathsep) if n]
    for path in [*([usual] if usual.is_file() else []), *named, *extra]:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(
                f"The catalog file {str(path)!r} is not readable: {reason}. Check the path, "
                f"{CATALOG_ENV} and --catalog."
            ) from None
        for entry in parse_catalog(text, str(path)):
            old = lookup(entry.name, entries)
            if old is not None:
                del entries[old.name]
            update = {"replaces": old.origin if old else ""}
            entries[entry.name] = entry.model_copy(update=update)
    return entries


def parse_catalog(text: str, origin: str) -> list[CatalogEntry]:
    """Return the entries of a catalog's TOML; `origin` names the file in messages and entries.

    Raises:
        UserError: not TOML, a newer format, or a malformed key or value.
    """
    where = f"The catalog {origin!r}"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"{where} is not TOML: {error}. Mend it there; `peagle catalog --help` shows an entry."
        ) from None
    version = data.pop("format_version", None)
    if type(version) is not int or version < 1:
        found = "missing" if version is None else repr(version)
        raise UserError(
            f"{where}: format_version is {found}; expected format_version = {FORMAT_VERSION} as "
            "the first line."
        )
    if version > FORMAT_VERSION:
        raise UserError(
            f"{where}: format_version is {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Upgrade peagle."
        )
    models = data.pop("models", {})
    if data:
        raise UserError(
            f"{where}: {next(iter(data))!r} is not a known key; expected format_version and tables "
            "[models.NAME]."
        )
    if not isinstance(models, dict):
        raise UserError(f"{where}: models is {models!r}; expected [models.NAME].")
    known: dict[str, str] = {}
    for name in models:
        if (same := known.setdefault(name.casefold(), name)) != name:
            raise UserError(
                f"{where}: [models.{same}] and [models.{name}] are the same name, since case does "
                "not count; rename one of them."
            )
    return [_parse_entry(name, table, origin) for name, table in models.items()]


def _parse_entry(name: str, table: Any, origin: str) -> CatalogEntry:
    where = f"The catalog {origin!r}, [models.{name}]"
    if not isinstance(table, dict):
        raise UserError(f"{where}: it is {table!r}; expected a table.")
    if own := table.keys() & set(_NOT_KEYS):
        raise UserError(f"{where}: {min(own)} is not a known key.")
    for key in table.keys() & {"target", "draft"}:
        if isinstance(path := table[key], str) and path.startswith((".", "/", "~")):
            beside = Path(origin).parent / Path(path).expanduser()
            table = {**table, key: os.path.abspath(beside)}
    try:
        return CatalogEntry.model_validate({**table, "name": name, "origin": origin})
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"])) or "the entry"
    if problem["type"] == "extra_forbidden":
        known = [k for k in CatalogEntry.model_fields if k not in _NOT_KEYS]
        near = near_names(key, known)
        meant = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}."
        return f"{key} is not a known key.{meant}"
    if problem["type"] == "missing":
        return f"{key} is missing."
    if problem["type"] == "value_error":
        return f"{problem['msg'].removeprefix('Value error, ')}."
    return f"{key} is {problem['input']!r}: {problem['msg']}."


def to_toml(entry: CatalogEntry) -> str:
    """Return a catalog file with this entry alone, without the keys that have their default."""
    values = entry.model_dump(exclude_defaults=True, exclude=set(_NOT_KEYS))
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
    # JSON's numbers, booleans and escapes are TOML's, except for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- entries by name ----


def lookup(name: str, entries: dict[str, CatalogEntry]) -> CatalogEntry | None:
    """Return the entry of this name, in any case, or of this target's hub id; None without one."""
    wanted = name.casefold()
    for entry in reversed(entries.values()):  # of several with one target, the user's
        if wanted in (entry.name.casefold(), entry.target.casefold()):
            return entry
    return None


def find(name: str, entries: dict[str, CatalogEntry]) -> CatalogEntry:
    """Return the entry that `lookup` finds.

    Raises:
        UserError: there is none; names the nearest entries.
    """
    if (entry := lookup(name, entries)) is not None:
        return entry
    names = {alias.casefold(): e.name for e in entries.values() for alias in (e.target, e.name)}
    typed = name.casefold()
    near = near_names(typed, names, 2)
    if not near and len(typed) >= _SHORTEST_HINT:
        near = [alias for alias in names if typed in alias]
    hints = list(dict.fromkeys(names[alias] for alias in near))[:2]
    meant = f" Did you mean {' or '.join(hints)}?" if hints else ""
    raise UserError(
        f"No model {name!r} in the catalog.{meant} `peagle catalog` lists them: "
        f"{', '.join(entries)}. Models of your own go into a file (`peagle catalog --help`)."
    )


# Reads the facts of a model that is neither in a folder here nor in the catalog.
ReadFacts = Callable[[ModelSource], ModelFacts | None]


def find_facts(
    source: ModelSource, entries: dict[str, CatalogEntry], read_facts: ReadFacts | None = None
) -> ModelFacts | None:
    """Return facts about a model or a head: of a folder here, of the catalog, or of `read_facts`.

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
    return read_facts(source) if read_facts is not None else None


def needed_by(
    target: ModelSource,
    draft: ModelSource | None,
    flags: Mapping[str, str],
    entries: dict[str, CatalogEntry],
    *,
    native: bool = False,
    read_facts: ReadFacts | None = None,
) -> MemoryNeeded | None:
    """Return the memory of a target and its head with options of vLLM; None if unknown.

    Raises:
        CheckpointError: a folder holds no model.
    """
    facts = find_facts(target, entries, read_facts)
    if facts is None:
        return None
    head = find_facts(draft, entries, read_facts) if draft is not None else None
    return memory_for_flags(facts, head, flags, native=native)
