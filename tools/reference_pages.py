"""Pages of the site that are made from the source: commands, files of settings, variables, API.

`reference_pages()` returns the text of each page by its name. A command's page is read from the
command line, a key's text from the docstring of its class. Nothing here loads torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

import typer

from peagle.cli.main import COMMANDS, app
from peagle.cli.settings import SECTIONS
from peagle.config import EngineConfig
from peagle.config.speculative import CandidateTrees
from peagle.training.config import TrainConfig

# Variables that are no field of a configuration: name, and what it is for.
VARIABLES = {
    "PEAGLE_TARGET": "The target model: a folder, a hub id, or the name of a bundled model.",
    "PEAGLE_REVISION": "Branch, tag or commit of the target on the hub.",
    "PEAGLE_SPECULATIVE_CONFIG": "The speculative configuration in vLLM's form, a JSON object.",
    "PEAGLE_SAMPLING": "The table [sampling] as a JSON object.",
    "PEAGLE_SERVER": "The table [server] as a JSON object.",
    "PEAGLE_ADMIN_KEY": "Admin key of the server that `peagle adapt --serve` hands a head to.",
    "PEAGLE_API_KEY": "The key that a server asks for, and the key that a client sends.",
    "PEAGLE_CACHE": "Folder of compiled code; ~/.cache/peagle without it.",
    "PEAGLE_CATALOG": "File of catalog entries of your own, in place of "
    "~/.config/peagle/catalog.toml.",
    "PEAGLE_COMMIT": "Commit that results name, for a copy of the source without its history.",
    "PEAGLE_VLLM": "1 lets vLLM draft with a head's correction, in vLLM's own processes.",
    "PEAGLE_VLLM_PYTHON": "Python of the environment that has vLLM.",
    "PEAGLE_VLLM_GUARD": "Rules that `peagle serve --engine vllm` hands to vLLM's process.",
    "PEAGLE_CLOUDWATCH_INTERVAL": "Seconds between two lines of metrics, with `--sagemaker`.",
    "PEAGLE_ENDPOINT_NAME": "Name of the endpoint in CloudWatch's metrics.",
    "PEAGLE_VARIANT_NAME": "Name of the endpoint's variant in CloudWatch's metrics.",
}
# The API: what `peagle` exports, and what its calls return.
OUTPUTS = ("peagle.llm.ChatOutput", "peagle.engine.outputs.RequestOutput")
OUTPUTS += ("peagle.engine.outputs.StreamChunk", "peagle.engine.stats.SpeculationStats")
OUTPUTS += ("peagle.engine.stats.EngineStats", "peagle.kernels.sampling.logprobs.TokenLogprobs")
API = {
    "Generate text": ("peagle.llm.LLM", "peagle.async_llm.AsyncLLM"),
    "Configure": (
        "peagle.config.sampling.SamplingParams",
        "peagle.config.structured.StructuredOutput",
        "peagle.config.sampling.StructuredOutputsParams",
        "peagle.config.speculative.SpeculativeConfig",
        "peagle.config.speculative.CandidateTrees",
        "peagle.config.engine.EngineConfig",
    ),
    "Outputs": OUTPUTS,
    "Errors": ("peagle.errors.UserError", "peagle.errors.CheckpointError"),
}


def reference_pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path below the pages of the site."""
    pages = {f"reference/commands/{name}.md": command_page(name) for name in COMMANDS}
    return pages | {
        "reference/commands/index.md": commands_index(),
        "reference/training.md": training_page(),
        "reference/settings.md": settings_page(),
        "reference/environment.md": environment_page(),
        "reference/api.md": api_page(),
    }


# ---- commands ----


def commands_index() -> str:
    """Return the page that lists the commands."""
    lines = ["# Commands", "", "| command | |", "|---|---|"]
    lines += [f"| [`peagle {name}`]({name}.md) | {text} |" for name, text in COMMANDS.items()]
    return "\n".join(lines) + "\n"


def command_page(name: str) -> str:
    """Return the page of a command of `peagle`, with the commands below it."""
    root: Any = typer.main.get_command(app)
    return _command(root.commands[name].load(), f"peagle {name}", 1)


def _command(command: Any, path: str, level: int) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    title = f"{'#' * level} {path}"
    parts = [title, f"```text\n{path} {usage}\n```", inspect.cleandoc(command.help)]
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        is_argument = one.param_type_name == "argument"
        title = one.rich_help_panel or ("Arguments" if is_argument else "Options")
        panels.setdefault(title, []).append(one)
    for title, options in panels.items():
        records = [one.get_help_record(context) for one in options]
        rows = [_row(f"`{names}`", _plain(text)) for names, text in filter(None, records)]
        parts.append("\n".join([f"**{title}**", "", "| | |", "|---|---|", *rows]))
    if examples := getattr(command, "examples", "") or _examples(path):
        parts.append(f"**Examples**\n\n```text\n{examples.strip()}\n```")
    for name, below in getattr(command, "commands", {}).items():
        loaded = getattr(below, "load", lambda one=below: one)()
        parts.append(_command(loaded, f"{path} {name}", level + 1).rstrip())
    return "\n\n".join(parts) + "\n"


def _examples(path: str) -> str:
    """Return the examples that close the help page of a command of `peagle`."""
    module = import_module(f"peagle.cli.{path.split()[1].replace('-', '_')}")
    return getattr(module, "EXAMPLES", "") if len(path.split()) == 2 else ""


def _row(*cells: str) -> str:
    """Return a row of a table; the cells are one line each."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


# ---- files of settings ----

_ATTRIBUTE = re.compile(r"^([\w, ]+): (.*)$")


def attribute_texts(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says of each attribute; several may share a text."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        text = line.removeprefix("    ")
        if line.strip() and not text.startswith(" ") and (match := _ATTRIBUTE.match(text)):
            names = [name.strip() for name in match[1].split(",")]
            text = match[2]
        for name in names:
            found[name] = f"{found.get(name, '')} {text.strip()}".strip()
    return found


def _table(cls: type, without: Iterable[str] = ()) -> str:
    """Return the table of the keys of a class: name, default, text."""
    texts, rows = attribute_texts(cls), ["| key | default | |", "|---|---|---|"]
    for name, default in defaults(cls).items():
        if name not in without:
            rows.append(_row(f"`{name}`", f"`{default}`", _plain(texts.get(name, ""))))
    return "\n".join(rows)


def defaults(cls: type) -> dict[str, str]:
    """Return the keys of a table with their defaults, as a file writes them."""
    if is_dataclass(cls):
        given = {field.name: field.default for field in fields(cls)}
    else:
        of_model: dict[str, Any] = vars(cls)["__pydantic_fields__"]
        given = {
            name: MISSING if field.is_required() else field.default
            for name, field in of_model.items()
        }
    return {name: _toml(value) for name, value in given.items()}


def _toml(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def _plain(text: str) -> str:
    """Return a text whose angle brackets and stars Markdown leaves alone."""
    return re.sub(r"(`[^`]*`)|([<*])", lambda m: m[1] or f"\\{m[2]}", text)


def training_page() -> str:
    """Return the page of the file of `peagle train`."""
    sections = {
        name: field.annotation
        for name, field in TrainConfig.model_fields.items()
        if inspect.isclass(field.annotation) and hasattr(field.annotation, "model_fields")
    }
    parts = [
        "# The file of a training run",
        "`peagle train FILE` reads a TOML file with these keys. `--set SECTION.KEY=VALUE` goes "
        "over it. Relative paths are relative to the folder of the file. Unknown keys are refused. "
        "[Training](../training.md) says which of them matter.",
        _table(TrainConfig, without=sections),
    ]
    for name, cls in sections.items():
        parts += [f"## [{name}]", _first_words(cls), _table(cls)]
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """Return the page of the file that `--config` names."""
    parts = [
        "# The file of settings",
        "`--config FILE` of `peagle serve`, `generate`, `chat` and others names a TOML file with "
        "`format_version`, `target`, `revision` and these tables. "
        "[Variables](environment.md) go over the file, flags over both; `--show-config` prints "
        "what results. Python takes the same names: `EngineConfig` as arguments of `LLM`, and "
        "the classes `SpeculativeConfig` and `SamplingParams`.",
    ]
    for name, cls in SECTIONS.items():
        parts += [f"## [{name}]", _first_words(cls), _table(cls)]
        if name == "speculative":
            parts += ["### [speculative.parallel_drafting_spec]", _first_words(CandidateTrees)]
            parts += [_table(CandidateTrees)]
    return "\n\n".join(parts) + "\n"


def _first_words(cls: type) -> str:
    """Return what the docstring of a class says before its lists."""
    text = re.split(r"\n\n?(?=Attributes:|Raises:)", inspect.cleandoc(cls.__doc__ or ""))[0]
    return _plain(text)


def environment_page() -> str:
    """Return the page of environment variables."""
    rows = [_row(f"`{name}`", _plain(text)) for name, text in VARIABLES.items()]
    engine = [
        _row(f"`PEAGLE_{name.upper()}`", f"`{name}` of [[engine]](settings.md#engine)")
        for name in defaults(EngineConfig)
    ]
    parts = [
        "# Environment variables",
        "An empty variable counts as none. Flags of the command line go over variables, and "
        "variables over the [file of settings](settings.md).",
        "\n".join(["| variable | |", "|---|---|", *rows, *engine]),
        "With `--sagemaker`, the variables `SM_VLLM_*` of SageMaker's vLLM container are read too "
        "([deploy](../deploy.md)).",
    ]
    return "\n\n".join(parts) + "\n"


# ---- API ----


def api_page() -> str:
    """Return the page of the Python API; mkdocstrings fills in the docstrings."""
    parts = [
        "# Python",
        "`from peagle import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, EngineConfig` gives "
        "the names below. [Getting started](../getting-started.md) uses them.",
    ]
    for title, names in API.items():
        parts += [f"## {title}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"
