"""Options declared once, in groups, and commands whose signatures are composed of them.

typer reads a command's options from its signature. `takes` adds those of some groups to the
parameters that the command has of its own, and hands it what the user gave as one mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from peagle.cli.settings import SECTIONS, Setting
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Flag:
    """One option.

    Attributes:
        key: what it sets: a field of a configuration ("sampling.top_p") or another thing that
            commands look up ("threads"). Flags of one key exclude each other.
        kind: type of what is typed; bool is a switch, a list may be given several times.
        help: for the help page.
        name: as it is typed, with its opposite after a slash; "" makes it of the key.
        short: a short name.
        metavar: stands for the value on the help page; "" names the kind.
        default: what the help page calls the default; None takes that of the configuration's
            field, "" shows none.
        read: makes the value of what was typed.
        panel: where the help page shows it.
    """

    key: str
    kind: Any
    help: str
    name: str = ""
    short: str = ""
    metavar: str = ""
    default: str | None = None
    read: Callable[[Any], Any] | None = None
    panel: str = ""

    @property
    def shown_name(self) -> str:
        """The name in messages, also that of a switch which was turned off."""
        return self.name.partition("/")[0] or _dashed(self.key)

    @property
    def parameter(self) -> Parameter:
        """The parameter of a command's signature that typer makes this option of."""
        option: Any = typer.Option(
            *filter(None, (self.name or _dashed(self.key), self.short)),
            help=self.help,
            metavar=self.metavar or None,
            show_default=self.shown_default or False,
            rich_help_panel=self.panel,
        )
        return Parameter(
            self.shown_name.strip("-").replace("-", "_"),
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.kind | None, option],
        )

    def setting(self, typed: Any) -> Setting:
        """What was typed, as a setting.

        Raises:
            UserError: it cannot be read; the message names this flag.
        """
        try:
            return Setting(typed if self.read is None else self.read(typed), self.shown_name)
        except UserError as error:
            raise UserError(f"{self.shown_name}: {error}") from None

    @property
    def shown_default(self) -> str:
        """The default as the help page has it."""
        if self.default is not None:
            return self.default
        section, _, name = self.key.partition(".")
        if self.kind is bool or section not in SECTIONS:
            return ""
        default = next(f.default for f in fields(SECTIONS[section]) if f.name == name)
        return "" if default is None or default == () else str(default)


def _dashed(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


Group = tuple[Flag, ...]


def group(panel: str, *flags: Flag) -> Group:
    """Flags that stand together on the help page."""
    return tuple(replace(flag, panel=panel) for flag in flags)


def pick(flags: Group, *keys: str) -> Group:
    """Those flags of a group that set these keys, for a command that has not all of them."""
    assert set(keys) <= {flag.key for flag in flags}
    return tuple(flag for flag in flags if flag.key in keys)


class Given(dict[str, Setting]):
    """What the user gave on the command line: settings by key."""

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` where none was given."""
        return self[key].value if key in self else default

    @classmethod
    def read(cls, typed: Mapping[Flag, Any]) -> Given:
        """What was typed for each flag, None (or an empty list) where it was not.

        Raises:
            UserError: a value cannot be read, or two flags set the same.
        """
        given = cls()
        for flag, value in typed.items():
            if value is None or value == []:
                continue
            if flag.key in given:
                raise UserError(
                    f"{given[flag.key].source} and {flag.shown_name} contradict each other; leave "
                    "one of them out."
                )
            given[flag.key] = flag.setting(value)
        return given


def takes(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that it has these options beside those of its own parameters.

    It gets what was given of them as its first argument, a `Given`.
    """
    composed = {flag.parameter.name: flag for flag in flags}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            typed = {flag: values.pop(name) for name, flag in composed.items()}
            command(Given.read(typed), **values)

        _, *own = signature(command, eval_str=True).parameters.values()
        parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        parameters += [flag.parameter for flag in flags]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__dict__["__signature__"] = Signature(parameters)
        return run

    return decorate
