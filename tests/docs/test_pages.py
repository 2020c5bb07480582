"""Every command that a page shows: run as printed, or at least understood."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from peagle.bundled import SMOLLM2_WHEEL
from peagle.cli.demo import print_next_steps
from peagle.cli.main import COMMANDS
from tests.docs.command_line import NotUnderstoodError, check, check_peagle, check_span, complaints
from tests.docs.pages import NEEDS, PAGES, ROOT, Block, blocks, commands, spans
from tests.docs.shell import Servers, Shell
from tests.fetched import why_not

if not (ROOT / "README.md").is_file():
    pytest.skip("a source archive has no pages", allow_module_level=True)

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
RUN = {page: [b for b in SHELL if b.page == page and not b.needs] for page in PAGES}
LANGUAGES = {"sh", "python", "toml", "json", "text", "Dockerfile"}


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.end()


@pytest.fixture
def shell(tmp_path: Path, servers: Servers) -> Iterator[Shell]:
    opened = Shell(tmp_path, servers)
    yield opened
    opened.close()


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def skip_without_model(block: Block) -> None:
    """Skip a test, with the reason, at a block that names smollm2 where that cannot be fetched."""
    if block.names_smollm2 and (reason := why_not(SMOLLM2_WHEEL)):
        pytest.skip(f"{block}: {reason}")


@pytest.mark.parametrize("page", [page for page in PAGES if RUN[page]], ids=page_id)
def test_commands_of_a_page_run_in_order(page: Path, shell: Shell) -> None:
    """A TOML block that begins with the name of a file is that file from there on.

    Where smollm2 cannot be fetched, a page is skipped from the first block on that names it.
    """
    for block in blocks(page):
        if block.language == "toml" and (name := block.text.split()[1:2]):
            if name[0].endswith(".toml;"):
                (shell.folder / name[0].rstrip(";")).write_text(block.text)
        elif block.language == "sh" and not block.needs:
            skip_without_model(block)
            shell.run(block.text)
        elif block.needs == "server":
            (shell.folder / "client.py").write_text(shell.on_its_port(block.text))
            shell.run("python client.py")


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_understood(block: Block) -> None:
    assert complaints(check, commands(block.text)) == []


# Configurations that a page shows, or that a command makes: a file, or what stands behind > or -o.
SHOWN = {b.text.split()[1].rstrip(";") for b in BLOCKS if b.language == "toml"}
MADE = {name for block in SHELL for name in re.findall(r"(?:>|-o) *(\S+\.toml)", block.text)}


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_configurations_of_commands_are_there(block: Block) -> None:
    for words in commands(block.text):
        for name in words[1:]:
            if name.endswith(".toml") and "=" not in name and name not in MADE:
                assert (ROOT / name).is_file() or Path(name).name in SHOWN, f"{block}: {name}"


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.needs], ids=str)
def test_python_of_a_page_runs(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_model(block)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() or "\nassert " in block.text, "it shows no result"


@pytest.mark.parametrize("block", [b for b in PYTHON if b.needs], ids=str)
def test_python_that_cannot_run_here_compiles(block: Block) -> None:
    assert compile(block.text, str(block), "exec").co_names


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_in_sentences_exist(page: Path) -> None:
    assert complaints(check_span, spans(page)) == []


INSTALLS = sorted(
    {tuple(words) for block in SHELL for words in commands(block.text) if words[0] == "pip"}
    | {tuple(shlex.split(span)) for page in PAGES for span in spans(page, "pip install")}
)
FROM_CLONE = [words for words in INSTALLS if words[2].startswith(".")]


@pytest.mark.parametrize("words", INSTALLS, ids=" ".join)
def test_install_lines_are_understood(words: tuple[str, ...]) -> None:
    assert complaints(check, [list(words)]) == []


def test_install_lines_install_from_a_clone() -> None:
    """pip itself resolves the longest one here: what it would install is peagle with the extras."""
    pytest.importorskip("hatchling")
    words = max(FROM_CLONE, key=lambda words: len(words[2]))
    offline = ("--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    pip = [sys.executable, "-m", "pip", *words[1:], *offline, "--report", "-"]
    result = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)["install"]
    assert found["metadata"]["name"] == "peagle" and found["is_direct"]
    pytest.importorskip("pip", "23.1", reason="older ones do not report extras")
    assert found["requested_extras"] == sorted(words[2].strip(".[]").split(","))


READ_TOO = ("CHANGELOG.md", "examples/*.py", "benchmarks/**/*.py", "deploy/*")


@pytest.mark.parametrize(
    "file", [*PAGES, *(file for glob in READ_TOO for file in ROOT.glob(glob))], ids=page_id
)
def test_nothing_installs_peagle_from_an_index(file: Path) -> None:
    """No index has it: an install line names a clone or a wheel."""
    assert FROM_INDEX.findall(file.read_text()) == []


FROM_INDEX = re.compile(r"pip3? install [^\n`#;&]*(?<![\w./-])peagle(?![\w-]).*")


@pytest.mark.parametrize(
    ("line", "is_from_index"),
    [
        ("pip install peagle", True),
        ("pip install 'peagle[serve]'", True),
        ('RUN pip install ray && /opt/peagle/bin/pip install -U "peagle==0.1"', True),
        ("pip install '.[serve]'  # then peagle serve", False),
        ("/opt/peagle/bin/pip install /tmp/peagle-*.whl", False),
    ],
)
def test_an_install_from_an_index_is_found(line: str, is_from_index: bool) -> None:
    assert bool(FROM_INDEX.search(line)) == is_from_index


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_are_understood(name: str) -> None:
    for text in examples(name):
        lines = [line for line in text.splitlines() if line.startswith("  ")]
        shown = [words for words in commands("\n".join(lines)) if "peagle" in words]
        assert complaints(check, [words[words.index("peagle") :] for words in shown]) == []


def examples(name: str) -> list[str]:
    """The examples of a command's help page and of the commands below it."""
    name = name.replace("-", "_")
    module = import_module(f"peagle.cli.{name}")
    found = [module.EXAMPLES] if hasattr(module, "EXAMPLES") else []

    def visit(command: object) -> None:
        found.append(getattr(command, "examples", ""))
        for below in getattr(command, "commands", {}).values():
            visit(below)

    if isinstance(group := getattr(module, name), typer.Typer):
        visit(typer.main.get_command(group))
    return [text for text in found if text]


def test_next_steps_of_the_demo_are_understood() -> None:
    screen = StringIO()
    print_next_steps(Console(file=screen, width=40))
    _, *lines = screen.getvalue().strip().splitlines()
    assert len(lines) > 2
    for words in commands("\n".join(lines)):
        assert Path(words[0]).name == "peagle" or words[1:3] == ["-m", "peagle"]
        check_peagle(words[words.index("peagle") + 1 if "-m" in words else 1 :])


def test_every_block_names_its_language_and_its_needs() -> None:
    """A block without a language would be seen by no test here, one of unknown needs never run."""
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    assert {block.needs for block in BLOCKS} <= {"", *NEEDS}


@pytest.mark.parametrize(
    "words",
    [
        ["peagle", "evaluate"],
        ["peagle", "eval", "--no-such-option"],
        ["peagle", "deploy", "sagemaker", "destroy", "NAME"],
        ["peagle", "train"],
        ["python", "benchmarks/no_such_script.py"],
        ["python", "benchmarks/throughput.py", "--no-such-option"],
        ["make", "no-such-target"],
        ["pip", "install", "peagle"],
        ["pip", "install", "peagle[serve]"],
        ["pip", "install", ".[no-such-extra]"],
        ["no-such-program"],
    ],
    ids=" ".join,
)
def test_what_does_not_exist_is_found(words: list[str]) -> None:
    with pytest.raises(NotUnderstoodError):
        check(words)


@pytest.mark.parametrize("span", ["peagle evaluate", "peagle eval --no-such-option 3"])
def test_what_does_not_exist_is_found_in_sentences(span: str) -> None:
    with pytest.raises(NotUnderstoodError):
        check_span(span)


@pytest.mark.parametrize(
    ("text", "names_it"),
    [
        ("peagle serve smollm2 --port 8000", True),
        ("peagle eval --draft smollm2-eagle3", True),
        ('llm = LLM("smollm2")', True),
        ("make demo MODEL=smollm2", True),
        ("python recipes/smollm2/make.py build/smollm2", False),
        ("peagle convert model.gguf ./smollm2 --format hf", False),
    ],
)
def test_blocks_that_name_the_chat_model_are_found(text: str, names_it: bool) -> None:
    assert Block(PAGES[0], 1, "sh", "", text).names_smollm2 == names_it


def test_a_page_without_the_chat_model_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "why_not", lambda wanted: f"no {wanted.model} here")
    with pytest.raises(pytest.skip.Exception, match=r"README\.md:7: no smollm2 here"):
        skip_without_model(Block(ROOT / "README.md", 7, "sh", "", "peagle demo smollm2"))
    skip_without_model(Block(ROOT / "README.md", 7, "sh", "", "peagle demo"))


def test_a_command_that_fails_is_found(shell: Shell) -> None:
    with pytest.raises(AssertionError, match="is not there"):
        shell.run("peagle generate --target ./missing --prompt x")


def test_the_shell_runs_commands_as_printed(shell: Shell) -> None:
    """Pipes, files, comments, folders and exit statuses are the shell's own."""
    written = shell.run(
        "source .venv/bin/activate   # once\n"
        "peagle catalog --format json > models.json && cd examples\n"
        "python -c 'import json; print(len(json.load(open(\"../models.json\"))) > 0)'\n"
        "! peagle generate --target ./missing --prompt x || echo wrong\n"
    )
    assert "True" in written
    assert "wrong" not in written


def test_parsing_runs_nothing() -> None:
    assert check_peagle(["deploy", "sagemaker", "create", "gpt-oss-20b"]).info_name == "create"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for target in LINK.findall(page.read_text()):
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and heading not in headings(file)):
            dead.append(target)
    assert dead == []


LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


# What a reader goes through from the front page; the lab book stands beside it.
READING_PATH = [page for page in PAGES if "lab" not in page.parts]
MOST_LINES = 250
COMMIT = re.compile(r"`(?=[a-f]*\d)[0-9a-f]{7,40}`")


@pytest.mark.parametrize("page", READING_PATH, ids=page_id)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES, "split it by what a reader wants to do"


@pytest.mark.parametrize("page", READING_PATH, ids=page_id)
def test_commits_stand_in_captions(page: Path) -> None:
    assert commits_in_prose(page.read_text()) == []


def commits_in_prose(text: str) -> list[str]:
    """The paragraphs that name a commit and are neither a table's caption nor begin a section."""
    # A blank line, a heading, the first row of a table and a fence each end a paragraph.
    text = re.sub(r"^```.*?^```$", "```", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.MULTILINE)
    parts = ["", *re.split(r"\n\s*\n", text.strip()), ""]
    return [
        part
        for before, part, after in zip(parts, parts[1:], parts[2:], strict=False)
        if COMMIT.search(part)
        and (part.startswith(("|", "- ")) or not (before.startswith("#") or after.startswith("|")))
    ]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_give_results_and_not_what_was_asked_of_the_project(page: Path) -> None:
    assert ASKED.findall(" ".join(page.read_text().split())) == []


ASKED = re.compile(r"\b[Aa]sked:?(?: is| are| was| were| under| for)* \d.{9}|\b[Tt]he aim\b.{9}")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("1.35 times (asked 1.25) as long", True),
        ("Asked were 1.05 and 1.12: reached", True),
        ("1.02, and the aim was 1.03 there", True),
        ("17 outputs, of which clients asked for many", False),
    ],
)
def test_what_was_asked_of_the_project_is_found(text: str, is_found: bool) -> None:
    assert bool(ASKED.search(text)) == is_found


CAPTION = "One H100, commit `0a1b2c3`:"


@pytest.mark.parametrize(
    ("text", "is_prose"),
    [
        (f"Text.\n\n{CAPTION}\n\n| a |\n|---|", False),
        (f"## Speed\n\n{CAPTION}\n\nText.", False),
        (f"## Speed\n{CAPTION}", False),
        ("Text, `decade` and `facade12345g`.", False),
        (f"Text.\n\n{CAPTION}\n\nText.", True),
        (f"## Speed\n\nText.\n\n- {CAPTION}\n", True),
        ("Text.\n\n| a |\n|---|\n| `0a1b2c3` |\n", True),
    ],
)
def test_commits_in_prose_are_found(text: str, is_prose: bool) -> None:
    assert bool(commits_in_prose(text)) == is_prose


def headings(page: Path) -> set[str]:
    """The anchors of a page, as a forge makes them."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", lines, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}
