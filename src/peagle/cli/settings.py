"""Layers of settings: flags over environment over a TOML file over the configurations' defaults."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.bundled import Role, expand_bundled
from peagle.cli import values
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig, speculative_keys
from peagle.errors import UserError
from peagle.serving.config import ServerConfig

FORMAT_VERSION = 1
SPECULATIVE_VARIABLE = "PEAGLE_SPECULATIVE_CONFIG"
# Sections of which a variable holds all that is set, as a JSON object.
_TABLE_VARIABLES = {"sampling": "PEAGLE_SAMPLING", "server": "PEAGLE_SERVER"}
SECTIONS: dict[str, Any] = {
    "engine": EngineConfig,
    "speculative": SpeculativeConfig,
    "sampling": SamplingParams,
    "server": ServerConfig,
}
_NAMES = ("target", "revision")
_ROLES: dict[str, Role] = {"target": "target", "speculative.model": "draft"}
_OTHER_VARIABLES = ("PEAGLE_API_KEY", "PEAGLE_CACHE", "PEAGLE_VLLM_PYTHON")  # read elsewhere


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was given: a flag, a variable, or a table of a file."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Layer:
    """What one place gives.

    Attributes:
        settings: by dotted key: "target", "revision", "engine.dtype", "speculative.model", ...
        replaces: beginnings of keys that lower layers lose: a name takes its revision along, a
            whole speculative configuration leaves nothing of another one.
    """

    settings: dict[str, Setting]
    replaces: tuple[str, ...] = ()


class Settings:
    """What the layers amount to; the lowest comes first."""

    def __init__(self, *layers: Layer) -> None:
        self._settings: dict[str, Setting] = {}
        for layer in layers:
            self.put(layer)

    def put(self, layer: Layer) -> None:
        """Put a layer over what is there."""
        kept = {k: v for k, v in self._settings.items() if not k.startswith(layer.replaces)}
        self._settings = kept | layer.settings

    def value(self, key: str) -> Any:
        """The value at a dotted key, None where no layer has one."""
        return self._settings[key].value if key in self._settings else None

    def source(self, key: str) -> str:
        """The place that gave the value at a dotted key, "default" where no layer has one."""
        return self._settings[key].source if key in self._settings else "default"

    def section(self, name: str) -> dict[str, Any]:
        """The values that the layers give for a section."""
        parts = ((key.partition("."), setting) for key, setting in self._settings.items())
        return {key: setting.value for (section, _, key), setting in parts if section == name}

    def build(self, name: str, base: Any = None) -> Any:
        """The configuration of a section.

        Args:
            name: of the section.
            base: gives the values that no layer has; None takes the configuration's defaults.

        Raises:
            UserError: a value is not usable; the message names the place that gave it.
        """
        try:
            given = self.section(name)
            return SECTIONS[name](**given) if base is None else replace(base, **given)
        except UserError as error:
            # Messages about a value begin with the field's name.
            source = self.source(f"{name}.{str(error).partition(' ')[0]}")
            raise UserError(str(error) if source == "default" else f"{source}: {error}") from None


def speculative_layer(source: str, name: str) -> Layer:
    """A whole speculative configuration in vLLM's form.

    Raises:
        UserError: it is not one; the message begins with `name`.
    """
    try:
        keys = speculative_keys(source)
        SpeculativeConfig(**keys)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    settings = {f"speculative.{key}": Setting(value, name) for key, value in keys.items()}
    return Layer(settings, ("speculative.",))


def environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    """PEAGLE_TARGET, PEAGLE_REVISION, PEAGLE_<ENGINE OPTION>, and three with a JSON object.

    These are PEAGLE_SPECULATIVE_CONFIG, in vLLM's form, and PEAGLE_SAMPLING and PEAGLE_SERVER, as
    a file's tables.

    Other variables of that beginning are left alone (Kubernetes sets PEAGLE_PORT and the like
    where a service is called peagle), unless they look like a misspelt one. An empty variable
    counts as none.

    Raises:
        UserError: a misspelt variable or an unusable value.
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
        if variable.startswith("PEAGLE_") and (near := get_close_matches(variable, known, 1, 0.9)):
            raise UserError(
                f"The variable {variable} is not known; {near[0]} is. Rename or unset it."
            )
    layers = [Layer(settings, ("revision",) if "target" in settings else ())]
    if text := environ.get(SPECULATIVE_VARIABLE):
        layers.append(speculative_layer(text, SPECULATIVE_VARIABLE))
    for section, variable in _TABLE_VARIABLES.items():
        if text := environ.get(variable):
            table = _variable_table(section, variable, text)
            layers.append(Layer({f"{section}.{k}": Setting(v, variable) for k, v in table.items()}))
    return layers


def _variable_table(section: str, variable: str, text: str) -> dict[str, Any]:
    try:
        return _fitting(section, values.json_object(text, '{"temperature": 0.7}'))
    except UserError as error:
        raise UserError(f"{variable}: {error}") from None


def _number(text: str) -> Any:
    """A number or null; other text stays as it is, for the configuration to refuse."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def file_layer(path: Path) -> Layer:
    """A TOML file: format_version, target, revision, and a table for each of SECTIONS.

    A name that starts with "." or is found beside the file is a path relative to it; "bundled" is
    the bundled model.

    Raises:
        UserError: not readable, not TOML, of a newer format, or with a key that is not known.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {str(path)!r} is not readable: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {str(path)!r} is not TOML: {error}.") from None
    _check_format(data.pop("format_version", FORMAT_VERSION), path)
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
        # Not a Path, which would make a hub id of "./owner/name".
        beside = os.path.join(path.parent, value)
        if value.startswith(".") or os.path.exists(beside):
            settings[key] = Setting(beside, source)
    return Layer(settings)


def _check_format(version: object, path: Path) -> None:
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: format_version is {version!r}; expected a whole number from 1.")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version is {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Upgrade peagle."
        )


def _table(path: Path, name: str, table: object) -> dict[str, Any]:
    """The keys of one table, all of them known."""
    known = ["format_version", *_NAMES, *(f"[{section}]" for section in SECTIONS)]
    if name not in SECTIONS:
        raise UserError(f"{path}: unknown key {name!r}; known: {', '.join(known)}.")
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} is {table!r}; expected a table, [{name}].")
    try:
        return speculative_keys(table) if name == "speculative" else _fitting(name, table)
    except UserError as error:
        raise UserError(f"{path} [{name}]: {error}") from None


def _fitting(section: str, table: dict[str, Any]) -> dict[str, Any]:
    """The values of a section's table as its configuration takes them."""
    known = sorted(field.name for field in fields(SECTIONS[section]))
    if unknown := sorted(table.keys() - set(known)):
        raise UserError(f"unknown key {unknown[0]!r}; known: {', '.join(known)}.")
    return values.sampling(table) if section == "sampling" else table
