"""Layers of settings: flags over environment over a TOML file over the configurations' defaults."""

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from peagle.bundled import Role, expand_bundled
from peagle.config import (
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
    speculative_keys,
)
from peagle.config.checks import did_you_mean, named_values, near_names, unique_keys
from peagle.config.speculative import AUTO
from peagle.errors import UserError
from peagle.serving.config import ServerConfig

FORMAT_VERSION = 1
SPECULATIVE_VARIABLE = "PEAGLE_SPECULATIVE_CONFIG"
# Sections whose values one variable holds as a JSON object.
_TABLE_VARIABLES = {"sampling": "PEAGLE_SAMPLING", "server": "PEAGLE_SERVER"}
SECTIONS: dict[str, Any] = {
    "engine": EngineConfig,
    "speculative": SpeculativeConfig,
    "sampling": SamplingParams,
    "server": ServerConfig,
}
_NAMES = ("target", "revision")
_ROLES: dict[str, Role] = {"target": "target", "speculative.model": "draft"}
_MAX_NUMBER = 1_000_000
# Read elsewhere.
_OTHER_VARIABLES = "PEAGLE_ADMIN_KEY", "PEAGLE_API_KEY", "PEAGLE_CACHE", "PEAGLE_VLLM_PYTHON"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the flag, variable or table of a file that gave it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one place, like a file or the environment.

    Attributes:
        settings: values by dotted key: "target", "engine.dtype", "speculative.model", ...
        replaces: prefixes of keys that this layer removes from lower layers: a target removes its
            revision, a whole speculative configuration removes another one.
    """

    settings: dict[str, Setting]
    replaces: tuple[str, ...] = ()


class Settings:
    """Merged layers; the lowest comes first."""

    def __init__(self, *layers: Layer) -> None:
        self._settings: dict[str, Setting] = {}
        for layer in layers:
            self.put(layer)

    def put(self, layer: Layer) -> None:
        """Put a layer over the present settings."""
        kept = {k: v for k, v in self._settings.items() if not k.startswith(layer.replaces)}
        self._settings = kept | layer.settings

    def value(self, key: str) -> Any:
        """Return the value at a dotted key; None if no layer gives one."""
        return self._settings[key].value if key in self._settings else None

    def source(self, key: str) -> str:
        """Return the place that gave the value at a dotted key, or "default"."""
        return self._settings[key].source if key in self._settings else "default"

    def section(self, name: str) -> dict[str, Any]:
        """Return the given values of a section."""
        parts = ((key.partition("."), setting) for key, setting in self._settings.items())
        return {key: setting.value for (section, _, key), setting in parts if section == name}

    def build(self, name: str, base: Any = None) -> Any:
        """Return the configuration of a section; `base` has the values that no layer gives."""
        try:
            given = self.section(name)
            return SECTIONS[name](**given) if base is None else replace(base, **given)
        except UserError as error:
            # Messages about a value begin with the field's name.
            source = self.source(f"{name}.{str(error).partition(' ')[0]}")
            raise UserError(str(error) if source == "default" else f"{source}: {error}") from None


def speculative_layer(source: str, name: str) -> Layer:
    """Return the layer of a whole speculative configuration in vLLM's form."""
    try:
        keys = speculative_keys(source)
        SpeculativeConfig(**keys)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    settings = {f"speculative.{key}": Setting(value, name) for key, value in keys.items()}
    return Layer(settings, ("speculative.",))


def environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    """Read PEAGLE_TARGET, PEAGLE_REVISION, PEAGLE_<ENGINE OPTION>, and three JSON objects.

    These are PEAGLE_SPECULATIVE_CONFIG, in vLLM's form, and PEAGLE_SAMPLING and PEAGLE_SERVER, as a
    file's tables. Other variables that begin with PEAGLE_ are ignored (Kubernetes sets PEAGLE_PORT
    and the like for a service called peagle), unless they look like a misspelt one. An empty
    variable counts as none.
    """
    settings: dict[str, Setting] = {}
    keys = {f"PEAGLE_{name.upper()}": name for name in _NAMES}
    keys |= {f"PEAGLE_{f.name.upper()}": f"engine.{f.name}" for f in fields(EngineConfig)}
    words = {"engine.dtype", "engine.device", *_NAMES}
    for variable, key in keys.items():
        if text := environ.get(variable):
            value = text if key in words else _number(text)
            settings[key] = Setting(value, variable)
    known = [*keys, SPECULATIVE_VARIABLE, *_TABLE_VARIABLES.values(), *_OTHER_VARIABLES]
    for variable in environ.keys() - set(known):
        if variable.startswith("PEAGLE_") and (near := near_names(variable, known, 1, 0.9)):
            raise UserError(
                f"The variable {variable} is not known; {near[0]} is. Rename or unset it."
            )
    layers = [Layer(settings, ("revision",) if "target" in settings else ())]
    if text := environ.get(SPECULATIVE_VARIABLE):
        layers.append(speculative_layer(text, SPECULATIVE_VARIABLE))
    for section, variable in _TABLE_VARIABLES.items():
        if text := environ.get(variable):
            try:
                table = _fitting(section, json_object(text, '{"temperature": 0.7}'))
            except UserError as error:
                raise UserError(f"{variable}: {error}") from None
            layers.append(Layer({f"{section}.{k}": Setting(v, variable) for k, v in table.items()}))
    return layers


def _number(text: str) -> Any:
    """Read a number or null; other text stays for the configuration to refuse."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def file_layer(path: Path) -> Layer:
    """Read a TOML file: format_version, target, revision, and a table for each of SECTIONS.

    A name that starts with "." or is found beside the file is a path relative to it; "bundled" is
    the bundled model.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {str(path)!r} is not readable: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {str(path)!r} is not TOML: {error}.") from None
    version = data.pop("format_version", FORMAT_VERSION)
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: format_version is {version!r}; expected a whole number from 1.")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version is {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Upgrade peagle."
        )
    settings: dict[str, Setting] = {}
    for key, value in data.items():
        if key in _NAMES:
            settings[key] = Setting(value, str(path))
            continue
        for name, one in _table(path, key, value).items():
            settings[f"{key}.{name}"] = Setting(one, f"{path} [{key}]")
    for key in settings.keys() & {*_ROLES, "revision"}:
        value, source = settings[key].value, settings[key].source
        if not isinstance(value, str) or not value:
            raise UserError(f"{source}: {key} is {value!r}; expected text.")
        if key == "revision" or expand_bundled(value, _ROLES[key]) != value:
            continue
        settings[key] = Setting(_beside(path, value), source)
    key = "speculative.corrections"
    if key in settings and isinstance(named := settings[key].value, dict):
        found = {name: _beside(path, str(value)) for name, value in named.items()}
        settings[key] = Setting(found, settings[key].source)
    return Layer(settings)


def _beside(file: Path, name: str) -> str:
    """Return the path of a name that a file means relative to itself, else the name."""
    # No Path here: it would turn "./owner/name" into a hub id.
    beside = os.path.join(file.parent, name)
    return beside if name.startswith(".") or os.path.exists(beside) else name


def _table(path: Path, name: str, table: object) -> dict[str, Any]:
    """Return the values of a table; refuse unknown keys."""
    known = ["format_version", *_NAMES, *(f"[{section}]" for section in SECTIONS)]
    if name not in SECTIONS:
        meant = did_you_mean(name, [*_keys(), *SECTIONS, "format_version"])
        raise UserError(f"{path}: unknown key {name!r}; known: {', '.join(known)}.{meant}")
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} is {table!r}; expected a table, [{name}].")
    try:
        return speculative_keys(table) if name == "speculative" else _fitting(name, table)
    except UserError as error:
        raise UserError(f"{path} [{name}]: {error}") from None


def _keys() -> list[str]:
    """Return the keys of a file, with their tables."""
    of_tables = (f"{name}.{one.name}" for name, kind in SECTIONS.items() for one in fields(kind))
    return [*_NAMES, *of_tables]


def _fitting(section: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a section's table in the form of its configuration."""
    known = sorted(field.name for field in fields(SECTIONS[section]))
    if unknown := sorted(table.keys() - set(known)):
        name = unknown[0]
        meant = did_you_mean(name, known) or did_you_mean(name, _keys())
        raise UserError(f"unknown key {name!r}; known: {', '.join(known)}.{meant}")
    return sampling_values(table) if section == "sampling" else table


def json_object(text: str, example: str, or_word: str | None = None) -> dict[str, Any]:
    """Read the JSON text of an object; the error shows the example, and a word that goes too."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys("The JSON object"))
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        also = "" if or_word is None else f", or {or_word}"
        raise UserError(f"{text!r} is not a JSON object; expected one, like '{example}'{also}.")
    return value


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a function that reads one of these words."""

    def read(word: str) -> str:
        if word not in allowed:
            raise UserError(f"{word!r} is not known; expected {' or '.join(allowed)}.")
        return word

    return read


def whole_numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    """Read numbers and ranges between commas, like 1-4,8; return them ascending, each once."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:(?:-|\.\.)\s*(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= most:
            raise UserError(
                f"{flag} is {text!r}; expected whole numbers from 1 to {most}, like 1-4,8."
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def positive_number(flag: str, text: str | None, example: str) -> float | None:
    """Read a number above 0, at most a million; None if none is given."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_NUMBER:
        raise UserError(
            f"{flag} is {text!r}; expected a number above 0 and at most {_MAX_NUMBER:,}, without a "
            f"unit. Give one like {example}."
        )
    return value


def read_logit_bias(text: str) -> dict[int, Any]:
    """Read biases by token id from JSON text."""
    return logit_bias(json_object(text, '{"42": -5}'))


def read_pairs(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Read names with a path each, NAME=PATH."""
    return tuple(named_values(texts, "NAME=PATH", "sql=heads/sql").items())


def read_temperatures(text: str) -> tuple[float, ...]:
    """Read different temperatures, like 0,0.7, in the order in which they are given."""
    try:
        temperatures = tuple(dict.fromkeys(map(float, text.split(","))))
    except ValueError:
        raise UserError(f"temperature is {text!r}; expected numbers like 0,0.7.") from None
    for one in temperatures:
        SamplingParams(temperature=one)
    return temperatures


def read_drawn_from(text: str) -> float | str:
    """Read the temperature from which drawn chains lead trees; other text stays as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def read_trees(text: str) -> dict[str, Any] | str:
    """Read the shape of candidate trees from JSON text, or "auto"."""
    if text == AUTO:
        return text
    example = '{"num_parallel_trees": 8, "prediction_depth": 7, "max_nodes": 16}'
    return json_object(text, example, or_word=AUTO)


def logit_bias(pairs: Mapping[str, Any]) -> dict[int, Any]:
    """Read biases from a table whose token ids are text, as in JSON and TOML."""
    if wrong := [key for key in pairs if not str(key).isdecimal()]:
        raise UserError(f"logit_bias has the key {wrong[0]!r}; expected token ids, like '42'.")
    return {int(key): -math.inf if value == "-inf" else value for key, value in pairs.items()}


def structure(kind: str) -> Callable[[Any], StructuredOutput]:
    """Return a function that reads the source of a structure of this kind.

    A schema is JSON text or the name of a file with JSON, a grammar the name of a file.
    """

    def read(text: Any) -> StructuredOutput:
        if kind == "json":
            return StructuredOutput.json_object()
        is_file = kind == "ebnf" or (kind == "json_schema" and not text.lstrip().startswith("{"))
        return StructuredOutput(kind, _content(text) if is_file else text)  # type: ignore[arg-type]

    return read


def _content(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"the file {file!r} is not readable: {reason}. Check the path.") from None


def sampling_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a [sampling] table in the form of SamplingParams."""
    values = dict(table)
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = logit_bias(bias)
    if (shape := values.get("structured_output")) is not None:
        if not isinstance(shape, Mapping) or not {"kind"} <= set(shape) <= {"kind", "source"}:
            raise UserError(
                f"structured_output is {shape!r}; expected a table with kind and source, like "
                '{ kind = "regex", source = "[0-9]+" }.'
            )
        values["structured_output"] = StructuredOutput(**shape)
    return values


def as_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration in the form that a user writes in JSON."""
    bias = {str(k): "-inf" if v == -math.inf else v for k, v in values.get("logit_bias", ())}
    written = {"logit_bias": bias, "corrections": dict(values.get("corrections", ()))}
    return {name: written.get(name, value) for name, value in values.items()}
