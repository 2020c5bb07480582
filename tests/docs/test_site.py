"""The documentation site: its generated pages, its links, and the pages that name the code."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import typer

import peagle
from docs_site import repository_address, site_page, write_site
from peagle.backends.vllm.checks import _OWN_FLAGS
from peagle.cli.main import COMMANDS, app
from peagle.cli.settings import SECTIONS
from peagle.engine.outputs import RequestOutput
from peagle.training.config import TrainConfig
from tests.docs.pages import ROOT

if not (ROOT / "README.md").is_file():
    pytest.skip("a source archive has no pages", allow_module_level=True)


@cache
def sources() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "src" / "peagle").rglob("*.py"))]


@cache
def words() -> set[str]:
    return {word for source in sources() for word in re.findall(r"\w+", source)}


@cache
def nodes() -> list[ast.AST]:
    return [node for source in sources() for node in ast.walk(ast.parse(source))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("site") / "pages"
    write_site(folder, "https://forge.example/owner/name")
    found = folder.rglob("*.md")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


# ---- references from the source ----


def commands(command: Any, path: str) -> list[tuple[str, Any]]:
    command = getattr(command, "load", lambda: command)()
    below = getattr(command, "commands", {}).items()
    return [(path, command), *(pair for name, c in below for pair in commands(c, f"{path} {name}"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_reference(name: str, pages: dict[str, str]) -> None:
    page = pages[f"reference/commands/{name}.md"]
    root: Any = typer.main.get_command(app)
    for path, command in commands(root.commands[name], f"peagle {name}"):
        text = re.split(rf"^#+ {path}$", page, flags=re.MULTILINE)[1]
        rows = re.split(r"^#+ peagle", text, flags=re.MULTILINE)[0]
        for option in command.params:
            if option.param_type_name == "option":
                for word in (*option.opts, *option.secondary_opts):
                    assert re.search(rf"^\| `[^`]*{word}[ ,`]", rows, re.MULTILINE), (path, word)
        assert getattr(command, "examples", "").strip() in rows
    assert f"[`peagle {name}`]({name}.md)" in pages["reference/commands/index.md"]


def rows(page: str, heading: str) -> dict[str, str]:
    """The rows of the tables below a heading by the key in their first cell."""
    text = page.partition(f"## [{heading}]\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))


def test_every_key_is_in_the_reference_with_a_text(pages: dict[str, str]) -> None:
    found: dict[str, Any] = {
        f"training.{name}": (rows(pages["reference/training.md"], name), section.model_fields)
        for name, field in TrainConfig.model_fields.items()
        if hasattr(section := field.annotation, "model_fields")
    }
    for name, cls in SECTIONS.items():
        names = [field.name for field in fields(cls)]
        found[name] = (rows(pages["reference/settings.md"], name), names)
    assert len(found) == 10
    for key, (keys, names) in found.items():
        assert set(names) <= set(keys), key
        assert all(len(re.findall(r"\w+", text)) >= 2 for text in keys.values()), key
    assert rows(pages["reference/training.md"], "data")["train"].startswith("`required`")
    assert rows(pages["reference/settings.md"], "server")["port"].startswith("`8000`")


def test_every_variable_is_in_the_reference(pages: dict[str, str]) -> None:
    page = pages["reference/environment.md"]
    listed = set(re.findall(r"^\| `(PEAGLE_\w+)`", page, re.MULTILINE))
    read = {
        node.value
        for node in nodes()
        if isinstance(node, ast.Constant) and re.fullmatch(r"PEAGLE_[A-Z_]+", str(node.value))
    }
    engine = {f"PEAGLE_{field.name.upper()}" for field in fields(SECTIONS["engine"])}
    assert listed == read | engine | {"PEAGLE_TARGET", "PEAGLE_REVISION"}


def test_everything_exported_is_in_the_python_reference(pages: dict[str, str]) -> None:
    names = re.findall(r"^::: (\S+)$", pages["reference/api.md"], re.MULTILINE)
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert found.__module__ == module and found.__doc__
    exported = {name for name in peagle.__all__ if name != "__version__"}
    assert exported <= {name.rpartition(".")[2] for name in names}


def test_references_load_no_torch() -> None:
    code = "import sys, reference_pages as r; r.reference_pages(); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tools'}"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"False\n"


# ---- links and navigation ----


def test_the_navigation_names_every_page(pages: dict[str, str]) -> None:
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(pages)


def test_links_out_of_the_pages_lead_into_the_repository(pages: dict[str, str]) -> None:
    outside = [
        text for text in pages.values() if re.search(r"(?<!!)\]\((\.\./)*(src|recipes)/", text)
    ]
    assert outside == []
    everything = "\n".join(pages.values())
    found = re.findall(r"\(https://forge\.example/owner/name/(blob|tree)/main/([^)#]+)", everything)
    assert found
    for kind, path in found:
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()


def test_without_an_address_the_path_stands_in_place_of_a_link() -> None:
    text = (
        "See [the recipe](../recipes/quickstart.toml), [serving](serving.md) and [x](https://x.y)."
    )
    assert site_page(text, ROOT / "docs", None) == (
        "See the recipe (`recipes/quickstart.toml`), [serving](serving.md) and [x](https://x.y)."
    )


def test_code_of_a_page_stays_as_it_is() -> None:
    text = "```sh gpu\necho [a](../missing)\n```\n\n```sh\nb\n```"
    assert site_page(text, ROOT / "docs", None) == text.replace("sh gpu", "sh")


def test_a_link_to_no_file_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"missing\.md"):
        site_page("[x](missing.md)", ROOT / "docs", None)


def test_the_address_is_that_of_the_running_workflow() -> None:
    variables = {"GITHUB_SERVER_URL": "https://forge.example", "GITHUB_REPOSITORY": "owner/name"}
    assert repository_address(variables) == "https://forge.example/owner/name"
    assert repository_address({}) is None


# ---- problems ----

PROBLEMS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "problems.md").read_text(), re.MULTILINE)


@cache
def messages() -> set[str]:
    """The texts of src, with … for what is filled in."""

    def text(node: ast.expr) -> str:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        return "".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts)  # type: ignore[misc]

    return {
        text(node)
        for node in nodes()
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_quoted_message_is_one_of_the_source(problem: str) -> None:
    assert any(problem in message for message in messages())


def test_there_are_problems() -> None:
    assert len(PROBLEMS) >= 30 and not any("no such message" in message for message in messages())


# ---- glossary and coming from ----

GLOSSARY = [
    line.strip("|").split("|")
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]


@pytest.mark.parametrize("row", GLOSSARY, ids=lambda row: row[0].strip())
def test_names_of_the_glossary_are_in_the_code(row: list[str]) -> None:
    term, meaning, names, *avoided = row
    assert term.strip() and meaning.strip().endswith(".")
    for column, is_there in ((names, True), ("".join(avoided), False)):
        for name in re.findall(r"`(\w+)`", column):
            assert (name in words()) == is_there, name


COMING = (ROOT / "docs" / "coming-from.md").read_text()
TABLES = re.findall(r"^\| (.+) \| (.+) \|\n\|---\|---\|\n((?:\|.*\n)+)", COMING, re.MULTILINE)


def test_tables_of_flags_name_options_that_exist() -> None:
    root: Any = typer.main.get_command(app)
    num_flags = 0
    for _, ours, body in TABLES:
        if command := re.fullmatch(r"`peagle (\w+)`", ours):
            options = {
                word
                for option in root.commands[command[1]].load().params
                for word in (*option.opts, *option.secondary_opts)
            }
            for line in body.splitlines():
                for flag in re.findall(r"`(--?[a-z][\w-]*)", line.split(" | ")[1]):
                    assert flag in options, line
                    num_flags += 1
    assert num_flags > 45


def test_flags_of_vllm_are_those_that_the_code_knows() -> None:
    (body,) = (body for theirs, _, body in TABLES if theirs == "flag of vLLM")
    pairs = re.findall(r"^\| `(--[\w-]+)` \| `(-[\w-]+)`", body, re.MULTILINE)
    known = [theirs for theirs, ours in pairs if theirs in _OWN_FLAGS]
    assert len(known) >= 10
    assert [(theirs, ours) for theirs, ours in pairs if _OWN_FLAGS.get(theirs, ours) != ours] == []


def test_tables_of_calls_name_arguments_that_exist() -> None:
    engine = [field.name for field in fields(SECTIONS["engine"])]
    arguments = {
        "LLM": {*inspect.signature(peagle.LLM).parameters, *engine},
        "SamplingParams": {*inspect.signature(peagle.SamplingParams).parameters},
        "SpeculativeConfig": {*inspect.signature(peagle.SpeculativeConfig).parameters},
    }
    classes = {**vars(peagle), "RequestOutput": RequestOutput}
    num_calls = 0
    for _, ours, body in TABLES:
        cells = [line.split(" | ", 1)[1] for line in body.splitlines()] if ours == "peagle" else []
        for cell in cells:
            for name, given in re.findall(r"`(\w+)\(([^`]*)\)`", cell):
                assert set(re.findall(r"(\w+)=", given)) <= arguments[name], cell
                num_calls += 1
            for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)`", cell):
                assert hasattr(classes.get(name) or getattr(peagle, name), attribute), cell
    assert num_calls > 15
