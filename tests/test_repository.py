"""Promises of the repository as a whole: light start-up, safe loading, a small portable tree."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from browsing import opened_pages

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
MAX_TREE_BYTES = 40 * 10**6


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a source; several tests look at each."""
    return list(ast.walk(ast.parse(source)))


# ---- start-up ----

# Runs `code` where importing any of `banned` fails and is reported on stderr, even if it is caught.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {banned!r}:
            print("BLOCKED", name, file=sys.stderr)
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Blocker())
{code}
"""
RUN_HELP = "sys.argv = ['peagle', '--help']\nfrom peagle.cli.main import main\nmain()"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter that finds the package in src/."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        # Python keeps the bytecode of what it imports.
        env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_imports_nothing_heavy():
    banned = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"}
    banned |= {"triton", "scipy", "fastapi", "vllm"}
    result = run_python(BLOCKER.format(banned=banned, code=RUN_HELP))
    assert result.returncode == 0, result.stderr
    assert "BLOCKED" not in result.stderr
    assert "generate" in result.stdout


@pytest.mark.slow
def test_llm_imports_no_more_than_torch_and_transformers_themselves():
    """Without triton. Their parts are imported with a model: imports are most of a start."""
    code = "import torch, transformers\nbefore = set(sys.modules)\nfrom peagle import LLM\n"
    code += "print(*set(sys.modules) - before)"
    result = run_python(BLOCKER.format(banned={"triton"}, code=code))
    packages = {name.partition(".")[0] for name in result.stdout.split()}
    assert "peagle" in packages, result.stderr
    assert packages - sys.stdlib_module_names <= {"peagle", "safetensors", "tokenizers"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_targets_keep_bytecode_where_the_environment_forbids_it():
    """Packages are installed uncompiled: each process would spend its first half minute on that."""
    said = shlex.join([sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"])
    command = ["make", "--silent", "-C", str(ROOT), f"--eval=show: ; @{said}", "show"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.check_output(command, env=environment, text=True).strip() == "False"


# ---- the browser of the tests of web pages ----


@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("1", "failed")])
def test_without_a_chromium_tests_of_pages_say_so(monkeypatch, tmp_path, required, outcome):
    pytest.importorskip("playwright")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PEAGLE_REQUIRE_BROWSER", required)
    kind = {"skipped": pytest.skip.Exception, "failed": pytest.fail.Exception}[outcome]
    with pytest.raises(kind, match=r"no Chromium starts.*tools/setup_browser\.sh"), opened_pages():
        pass


def test_ci_requires_a_browser():
    assert 'PEAGLE_REQUIRE_BROWSER: "1"' in (ROOT / ".github/workflows/ci.yml").read_text()
    assert "setup_browser.sh" in (ROOT / "Makefile").read_text()


# ---- straight functions ----

MAX_LINES = 110
# Their arithmetic reads straight down; ruff (C901) leaves these out too.
LONG_FOLDER = SOURCE / "peagle" / "kernels"


def lengths(source: str) -> Iterator[tuple[str, int]]:
    """Yield each function and its lines: from `def` to the last one, the signature included.

    Decorators and the docstring do not count; a function inside counts for both.
    """
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0], node.end_lineno or node.lineno
            lines = last - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, lines


def test_functions_fit_a_reader():
    files = sorted((SOURCE / "peagle").rglob("*.py"))
    long = {
        f"{path.relative_to(ROOT)}: {name}": lines
        for path in files
        if not path.is_relative_to(LONG_FOLDER)
        for name, lines in lengths(path.read_text())
        if lines > MAX_LINES
    }
    assert not long


def test_lines_of_functions_are_counted():
    source = """
        @decorator
        def outer(
            a: int,
        ) -> int:
            '''Two lines
            of text.'''
            async def inner(): return 1

            return a
    """
    assert dict(lengths(textwrap.dedent(source))) == {"outer": 6, "inner": 1}


# ---- the tree ----


def repository_files() -> list[Path]:
    """The files git tracks or would track; skips the test where there is no git checkout."""
    # safe.directory: in CI containers the checkout often belongs to another user.
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command = ["git", "-c", f"safe.directory={ROOT}", *listing]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if result.returncode != 0:
        pytest.skip(f"no git checkout: {result.stderr.strip()}")
    paths = (ROOT / name for name in result.stdout.split("\0") if name)
    return sorted({path for path in paths if path.is_file()})


def test_tree_is_small():
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in repository_files()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_TREE_BYTES, f"largest files: {largest}"


def test_scripts_of_recipes_shadow_no_package():
    names = {path.stem for path in (ROOT / "recipes").rglob("*.py")}
    assert not names & {*packages_distributions(), *sys.stdlib_module_names}


# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATHS = ["/" + tail for tail in ("work/", "opt/wheels", "opt/pypi", "tmp/dev", "tmp/bash_")]


def machine_paths_in(text: str) -> list[str]:
    """Lines of `text` that name a folder of somebody's machine, as 'line number: line'."""
    pattern = re.compile(r"(?<![\w.*-])(?:" + "|".join(map(re.escape, MACHINE_PATHS)) + ")")
    lines = enumerate(text.splitlines(), start=1)
    return [f"{number}: {line.strip()[:100]}" for number, line in lines if pattern.search(line)]


def test_no_machine_paths():
    found = {}
    for path in repository_files():
        try:
            lines = machine_paths_in(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    assert found == {}


def test_machine_path_check_works():
    assert machine_paths_in("fine\ncd " + MACHINE_PATHS[0] + "main\n") == [
        "2: cd " + MACHINE_PATHS[0] + "main"
    ]
    assert machine_paths_in("docs/work/plan.md and ../work/x and network/work") == []


def test_nothing_of_the_shared_folder_ships():
    assert [p for p in repository_files() if p.is_relative_to(ROOT / "shared")] == []


# ---- safe loading ----

PICKLE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.jit.load", "torch.hub.load", "torch.serialization.load"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{head}.{node.attr}" if (head := dotted(node.value)) else ""
    return ""


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def unsafe_loading(source: str) -> Iterator[str]:
    """Yield the parts of `source` that could run code out of a checkpoint, as 'line: what'."""
    for node in nodes_of(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        for name in names:
            if name.partition(".")[0] in PICKLE_MODULES or name in UNSAFE_CALLS:
                yield f"{node.lineno}: {name}"
                break
        switches: list[tuple[str | None, ast.AST]] = []
        if isinstance(node, ast.Call):
            switches = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
            switches = list(zip(keys, node.values, strict=True))
        elif isinstance(node, ast.AnnAssign):
            switches = [(dotted(node.target), node.value)] if node.value else []
        elif isinstance(node, ast.Assign):
            switches = [(dotted(target), node.value) for target in node.targets]
        for name, value in switches:
            if name in ("trust_remote_code", "allow_pickle") and is_true(value):
                yield f"{value.lineno}: {name}=True"


def test_source_loads_no_pickles_and_no_remote_code():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if problems := list(unsafe_loading(path.read_text())):
            found[path.relative_to(ROOT).as_posix()] = problems
    assert found == {}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\ntorch.load('x')", "torch.load"),
        ("load = torch.load", "torch.load"),
        ("from torch import load", "torch.load"),
        ("def f():\n    import pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("f(trust_remote_code=True)", "trust_remote_code=True"),
        ("options = {'trust_remote_code': True}", "trust_remote_code=True"),
        ("class C:\n    trust_remote_code: bool = True", "trust_remote_code=True"),
        ("np.load('x', allow_pickle=True)", "allow_pickle=True"),
    ],
)
def test_unsafe_loading_is_found(source, what):
    (problem,) = unsafe_loading(source)
    assert problem.endswith(what)


def test_safe_loading_passes():
    source = "from safetensors.torch import load_file\nf(trust_remote_code=False)\n'torch.load'\n"
    assert list(unsafe_loading(source)) == []


# ---- docstrings ----

# A function says what it does ("Return ...", "Draw ..."), a class what it is ("The ...").
VAGUE = {"Of", "As", "Whether", "What", "That", "Those", "Where", "See"}
SHORTEST_DOCSTRING = 19


def vague_docstrings(source: str) -> list[str]:
    """Return the docstrings of functions and classes in `source` that do not name the thing."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text is None:
                continue
            vague = VAGUE if isinstance(node, ast.ClassDef) else VAGUE | {"The"}
            if re.split(r"\W", text, maxsplit=1)[0] in vague or len(text) < SHORTEST_DOCSTRING:
                found.append(f"{node.name}, line {node.lineno}: {text.splitlines()[0]}")
    return found


def test_docstrings_name_the_thing():
    package = SOURCE / "peagle"
    found = [
        f"{path.relative_to(package).as_posix()}: {one}"
        for path in sorted(package.rglob("*.py"))
        for one in vague_docstrings(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "docstring",
    [
        "Of all steps; validation and saving are left out.",
        "As `PreparedPaged`, in one launch.",
        "Whether the head keeps both of its ends.",
        "The fastest backend of a device.",
        "Undo `_to_tiles`.",
    ],
)
def test_vague_docstrings_are_found(docstring):
    for head in ("def", "async def"):
        source = f'class Steps:\n    {head} hours(self):\n        """{docstring}"""\n'
        assert vague_docstrings(source) == [f"hours, line 2: {docstring}"]


def test_nouns_describe_classes_alone():
    assert vague_docstrings('class Built:\n    """What a run makes."""\n')
    assert not vague_docstrings('class Built:\n    """The head that a run makes."""\n')


# ---- tests assert something ----


def is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(raised, ast.Name) and raised.id == "AssertionError"
    name = dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Assert) or name.startswith(("raises", "warns", "fail", "assert_"))


def unasserting_tests(files: dict[str, str]) -> list[str]:
    """Return the tests in some files that neither assert nor use a helper or fixture that does.

    A name is looked up in its own file, in the one it is imported from, or in each conftest.py.
    """
    imported = dict[str, dict[str, str]]()
    used = dict[tuple[str, str], set[str]]()
    asserting = set[tuple[str, str]]()
    for file, source in files.items():
        nodes = nodes_of(source)
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        imported[file] = {
            a.name: Path(i.module.replace(".", "/")).name for i in imports for a in i.names
        }
        for part in nodes:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside, names = list(ast.walk(part)), used.setdefault((file, part.name), set())
                names |= {node.id for node in inside if isinstance(node, ast.Name)}
                names |= {node.arg for node in inside if isinstance(node, ast.arg)}
                if any(map(is_assertion, inside)):
                    asserting.add((file, part.name))
    while True:
        shared = {(Path(file).stem, name) for file, name in asserting}
        found = {
            (file, part)
            for (file, part), names in used.items()
            for name in names
            if (file, name) in asserting
            or ((file, name) not in used and (imported[file].get(name, "conftest"), name) in shared)
        }
        if found <= asserting:
            rest = used.keys() - asserting
            return sorted(f"{file}: {name}" for file, name in rest if name.startswith("test_"))
        asserting |= found


@pytest.mark.slow
def test_every_test_asserts_something():
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert unasserting_tests(files) == []


def test_tests_without_an_assertion_are_found():
    helpers = """
        def check(x): assert x
        def call(x): return x
        def go(x): check(x)
        def run(x): check(x)
        class Host:
            def look(self): raise AssertionError("no")
    """
    fixtures = """
        @pytest.fixture
        def idle(engine):
            yield
            assert engine.is_idle
    """
    tests = """
        from helpers import Host, go
        def call(x): return x
        def test_nothing(): call(1)
        def test_run(): run = subprocess.run([], check=True)
        def test_own(): assert call(1)
        def test_error():
            with pytest.raises(ValueError): call(1)
        def test_helper(): go(1)
        def test_host(): Host().look()
        def test_fixture(idle): call(1)
        def test_close(): torch.testing.assert_close(1, 1)
    """
    files = {"helpers.py": helpers, "conftest.py": fixtures, "test_x.py": tests}
    files = {file: textwrap.dedent(source) for file, source in files.items()}
    assert unasserting_tests(files) == [
        "test_x.py: test_nothing",
        "test_x.py: test_run",
    ]


# ---- agreement of files ----


def test_versions_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    result = run_python("import peagle\nprint(peagle.__version__)")
    assert result.stdout.strip() == declared, result.stderr


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    missing = {}
    for page in pages:
        # In code only: `make test` or a line of a code block; prose may "make sure".
        text = page.read_text()
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        commands = re.findall(r"(?:^|[`;&|$]) *make((?: +[\w=./-]+)+)", code, re.MULTILINE)
        words = {word for command in commands for word in command.split() if "=" not in word}
        if unknown := words - targets:
            missing[page.name] = sorted(unknown)
    assert missing == {}


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflow_pins_its_actions():
    for workflow in WORKFLOWS:
        uses = re.findall(r"uses: *(.+)", workflow.read_text())
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action


# Jobs that may do more than read; this one runs no code of the repository.
MAY_WRITE = {("docs.yml", "publish"): {"pages": "write", "id-token": "write"}}


def test_the_site_is_published_from_main_alone():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.ref == 'refs/heads/main'" and publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])
    (uploaded,) = (step for step in jobs["build"]["steps"] if "upload" in step.get("uses", ""))
    assert uploaded["if"] == publish["if"]
    assert any(step.get("run") == "make docs" for step in jobs["build"]["steps"])
    (command,) = re.findall(r"^\t.* mkdocs build(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert command == " --strict"  # with --quiet no warning would count


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_well_formed_and_may_only_read(workflow):
    yaml = pytest.importorskip("yaml")
    read = yaml.safe_load(workflow.read_text())
    assert read["name"] == workflow.stem
    # YAML takes the key `on` for a truth value.
    assert set(read) == {"name", True, "permissions", "concurrency", "jobs"}
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        assert job["timeout-minutes"]
        assert job.get("permissions", {}) == MAY_WRITE.get((workflow.name, name), {})
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    # Every package that a workflow installs has a version.
    for package in re.findall(r"pip install (.+)|apt-get download (.+)", workflow.read_text()):
        assert re.fullmatch(r"'?[\w-]+==?[\d.*]+'?", "".join(package)), package


def test_dependencies_are_audited():
    """pip-audit without a resolver takes exact versions only, and misses what is not named."""
    yaml = pytest.importorskip("yaml")
    audit = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    assert {"constraints.txt", "pyproject.toml"} <= set(audit[True]["pull_request"]["paths"])
    assert audit[True]["schedule"]
    (command,) = [step["run"] for step in audit["jobs"]["pip-audit"]["steps"] if "run" in step]
    assert "--strict" in command and "--requirement constraints.txt" in command
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for line in lines:
        assert not line or line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.+]+", line), line
