"""Options declared once, in groups, and commands whose signatures are composed of them.

typer reads a command's options from its signature. `takes` adds the options of groups to the
command's own parameters, and passes the command the given ones as one mapping. `spread` makes
parameters of the fields of a dataclass.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Self, get_type_hints

import typer

from peagle.cli.settings import SECTIONS, Setting
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command line, as `group` reads it.

    Attributes:
        key: the field of a configuration ("sampling.top_p") or another name ("threads") that it
            sets. Flags of one key exclude each other.
        kind: type of the value; bool is a switch, a list may be given several times.
        name: the option, with its opposite after a slash; "" makes it of the key.
        default: the default on the help page; None takes that of the configuration's field.
        read: function from the typed text to the value.
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
        """Return the name in messages; a switch has its positive name."""
        return self.name.partition("/")[0] or _dashed(self.key)

    @property
    def parameter(self) -> Parameter:
        """Return the parameter of a command's signature from which typer makes this option."""
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
        """Return the typed value as a setting."""
        try:
            return Setting(typed if self.read is None else self.read(typed), self.shown_name)
        except UserError as error:
            raise UserError(f"{self.shown_name}: {error}") from None

    @property
    def shown_default(self) -> str:
        """Return the default on the help page."""
        if self.default is not None:
            return self.default
        section, _, name = self.key.partition(".")
        if self.kind is bool or section not in SECTIONS:
            return ""
        default = next(f.default for f in fields(SECTIONS[section]) if f.name == name)
        return "" if default is None or default == () else str(default)


def _dashed(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


def refuse_idle(context: typer.Context, names: Iterable[str], reason: str, remedy: str) -> None:
    """Refuse options of a command that have no effect, if the user typed one.

    Args:
        names: the parameters, such as "old_share".
        reason: the circumstance, such as "without --old".

    Raises:
        UserError: one was typed.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag, value = _dashed(name), context.params[name]
            raise UserError(
                f"{flag} is {value}, which has no effect {reason}; {remedy}, or leave {flag} out."
            )


Group = tuple[Flag, ...]
_KINDS: dict[str, Any] = {"TEXT": str, "INT": int, "FLOAT": float, "PATH": Path}
_FIRST_LINE = re.compile(
    r"(?:(?P<short>-\w), )?(?P<name>--[\w/-]+)"
    r"(?: (?P<metavar>[A-Z][^ :]*)(?::(?P<kind>[A-Z]+))?)?(?P<repeats> \.\.\.)?"
    r"(?: = (?P<key>[\w.]+))?"
)


def group(
    panel: str,
    text: str,
    *,
    section: str = "",
    read: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Group:
    """Return a group of options of the help page, declared in the form of that page.

    The first line of an option is `-s, --name METAVAR:KIND ... = key`, of which only the name is
    required: no metavar makes a switch, KIND is TEXT unless it is given or is the metavar itself,
    three dots let the option repeat, and the key is the name, in the section, unless it is given.
    The indented lines below are the help, with the default at its end. `read` has functions that
    read values, by option name; a switch --no-x with the key x gives False.
    """
    flags = []
    for option in re.split(r"\n(?=-)", dedent(text).strip()):
        first, *lines = option.splitlines()
        match = _FIRST_LINE.fullmatch(first)
        assert match is not None, first
        name, metavar = match["name"], match["metavar"] or ""
        kind = _KINDS[match["kind"] or (metavar if metavar in _KINDS else "TEXT")]
        kind = list[kind] if match["repeats"] else kind if metavar else bool
        key = name.partition("/")[0].strip("-").replace("-", "_")
        key = match["key"] or (f"{section}.{key}" if section else key)
        own_read = (read or {}).get(name)
        if name.startswith("--no-") and not key.startswith("no_"):
            own_read = _switch_off
        help, _, default = " ".join(map(str.strip, lines)).partition(" [default: ")
        flags.append(
            Flag(
                key,
                kind,
                help,
                name,
                match["short"] or "",
                "" if metavar in _KINDS else metavar,
                default.removesuffix("]") or None,
                own_read,
                panel,
            )
        )
    return tuple(flags)


def _switch_off(_: bool) -> bool:
    return False


def pick_flags(flags: Group, *keys: str) -> Group:
    """Return the flags of a group that set these keys."""
    assert set(keys) <= {flag.key for flag in flags}
    return tuple(flag for flag in flags if flag.key in keys)


class Given(dict[str, Setting]):
    """The settings that the user gave on the command line, by key."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the user gave none."""
        return self[key].value if key in self else default

    @classmethod
    def read(cls, typed: Mapping[Flag, Any]) -> Self:
        """Return the settings that the user typed; None or an empty list counts as not given."""
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
    """Decorate a command so that it takes these options beside its own parameters.

    The command gets the given ones as its first argument, a `Given`.
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


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose last parameter is a dataclass, with an option for each field.

    The field's annotation and default declare the option, as typer reads them.
    """
    *others, last = signature(command, eval_str=True).parameters.values()
    kind, hints = last.annotation, get_type_hints(last.annotation, include_extras=True)

    @wraps(command)
    def run(*given: Any, **values: Any) -> None:
        typed = {one.name: values.pop(one.name) for one in fields(kind)}
        command(*given, **values, **{last.name: kind(**typed)})

    own = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(kind)
    ]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    run.__dict__["__signature__"] = Signature([*others, *own])
    return run
