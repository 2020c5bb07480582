"""Imports inside peagle point downward only.

Every module has a rank (the table of docs/architecture.md). A module may import modules of a lower
rank, and modules of its own rank in its own folder; imports inside functions count too. No files
import each other in a circle. The files directly in src/peagle are one folder.
`peagle/__init__.py` is the lazy facade: it may import anything, and nothing below imports from it
(`__version__` excepted).
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "peagle"

PAGE = ROOT / "docs" / "architecture.md"

if not PAGE.is_file():
    pytest.skip("a source archive has no pages", allow_module_level=True)

# The page's table is the only one: | rank | `folder/`, `file.py` | ... |
ROWS = re.findall(r"^\| (-?\d+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
RANKS = {
    re.split(r"/|\.py$", name)[0]: int(rank)
    for rank, names in ROWS
    for name in re.findall(r"`([^`]+)`", names)
}
FACADE = "the facade peagle/__init__.py"
FACADE_NAMES_FOR_ALL = {"__version__"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, where it stands, and whether it runs when the module is loaded."""

    name: str
    line: int
    at_load: bool


@cache
def imports_of(source: str, package: str) -> tuple[Import, ...]:
    """All imports in `source`, a module of the dotted `package`, as absolute dotted names.

    `from a.b import c` gives `a.b.c`. `import_module("a.b")` and `__import__("a.b")` with a
    literal name count as imports; those under `if TYPE_CHECKING:` count, but not as run at load.
    """

    def base_of(node: ast.ImportFrom) -> str:
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*parts, *([node.module] if node.module else [])])

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node)
            yield from (Import(f"{base}.{a.name}", node.lineno, at_load) for a in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield Import(str(first.value), node.lineno, at_load)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_load = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_load)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_load)

    return tuple(visit(ast.parse(source), True))


def modules_in(package: Path) -> Iterator[tuple[str, str, tuple[Import, ...]]]:
    """(path relative to the package, top-level name, imports) of every module except the facade."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if relative.as_posix() == "__init__.py":
            continue
        top = relative.parts[0].removesuffix(".py")
        dotted = ".".join([package.name, *relative.parent.parts])
        yield relative.as_posix(), top, imports_of(path.read_text(), dotted)


def unranked(package: Path) -> list[str]:
    """Top-level modules and folders of the package that RANKS does not know."""
    tops = sorted({top for _, top, _ in modules_in(package)} - {"__main__"})
    return [
        f"{top}: unknown, give it a rank in {Path(__file__).name}"
        for top in tops
        if top not in RANKS
    ]


def violations(package: Path) -> list[str]:
    """Every import that does not point downward, as 'file:line text'."""

    def folder(top: str) -> str:
        return top if (package / top).is_dir() else ""

    found = []
    for path, top, imports in modules_in(package):
        if top not in RANKS:
            continue
        for item in imports:
            head, _, rest = item.name.partition(".")
            if head != package.name:
                continue
            target = rest.partition(".")[0]
            where = f"{path}:{item.line} (rank {RANKS[top]}) imports {item.name}"
            if target in RANKS:
                if RANKS[target] > RANKS[top]:
                    found.append(f"{where} of the higher rank {RANKS[target]}")
                elif RANKS[target] == RANKS[top] and folder(target) != folder(top):
                    found.append(f"{where} of the same rank in another folder")
            elif target not in FACADE_NAMES_FOR_ALL:
                found.append(f"{where}, which is not a ranked module: {FACADE} is for users only")
    return found


def circle(package: Path) -> list[str]:
    """Files that import each other in a circle, the first of them again at the end; else none."""
    imports = {
        f"{package.name}.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): i
        for path, _, i in modules_in(package)
    }
    graph: dict[str, set[str]] = {}
    for module, found in imports.items():
        # `a.b.c` is the file c, or a name in the file b.
        named = ((i.name, i.name.rpartition(".")[0]) for i in found)
        files = (next((name for name in names if name in imports), module) for names in named)
        graph[module] = set(files) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


# Modules that are imported lazily themselves.
OF_STEPS = tuple(
    f"engine.step.{name}"
    for name in (
        "copies",
        "decode_rows",
        "decode_step",
        "drawn_drafts",
        "lookup",
        "rules",
        "trees",
        "tree_growth",
    )
)


def is_triton_file(path: str) -> bool:
    is_kernel = path.startswith("kernels/") and path.endswith(("_triton.py", "_gluon.py"))
    return is_kernel or path in [f"{name.replace('.', '/')}.py" for name in OF_STEPS]


def triton_at_load(package: Path) -> list[str]:
    """Imports of triton, or of a `*_triton` or `*_gluon` module, that run when a module is loaded.

    Such imports belong into functions, since triton exists on few machines. Only files named
    `*_triton.py` or `*_gluon.py` in kernels/ and those of OF_STEPS, themselves imported lazily, may
    have them at the top.
    """
    return [
        f"{path}:{item.line} imports {item.name} when it is loaded: move that into a function"
        for path, _, imports in modules_in(package)
        if not is_triton_file(path)
        for item in imports
        if item.at_load
        and (
            item.name.partition(".")[0] == "triton"
            or (
                item.name.startswith(f"{package.name}.")
                and (
                    any(part.endswith(("_triton", "_gluon")) for part in item.name.split("."))
                    or any(f"{package.name}.{name}." in f"{item.name}." for name in OF_STEPS)
                )
            )
        )
    ]


# ---- the package ----


@pytest.mark.slow
def test_there_is_a_package_to_check():
    assert len(list(modules_in(PACKAGE))) >= 1


def test_every_top_level_module_has_a_rank():
    assert unranked(PACKAGE) == []


def test_imports_point_downward():
    assert violations(PACKAGE) == []


def test_no_files_import_each_other():
    assert circle(PACKAGE) == []


def test_triton_is_imported_lazily():
    assert triton_at_load(PACKAGE) == []


# ---- the checker itself ----


def plant(folder: Path, files: dict[str, str]) -> Path:
    """A package named peagle with one innocent file in every ranked place, plus `files`."""
    package = folder / "peagle"
    innocent: dict[str, str] = dict.fromkeys(("config.py", "errors.py", "llm.py"), "")
    for name in RANKS:
        if f"{name}.py" not in innocent:
            innocent[f"{name}/__init__.py"] = ""
    for name, text in {"__init__.py": "", **innocent, **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_a_circle_is_found(tmp_path):
    """Over three files of a folder, one of them named in a function."""
    files = {
        "models/a.py": "from peagle.models.b import x",
        "models/b.py": "from . import c",
        "models/c.py": "def f():\n    import peagle.models.a",
    }
    assert len(circle(plant(tmp_path, files))) == 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models/x.py", "from peagle.engine.sequence import Sequence"),
        ("models/x.py", "import peagle.engine.sequence as s"),
        ("models/x.py", "from peagle import llm"),
        ("models/x.py", "from ..speculation import verification"),
        ("models/deep/x.py", "from ...engine import scheduler"),
        ("models/x.py", "def f():\n    from peagle.training import losses"),
        ("models/x.py", "class C:\n    async def f(self):\n        import peagle.cli.main"),
        ("models/x.py", "try:\n    import peagle.engine\nexcept ImportError:\n    pass"),
        ("models/x.py", "import importlib\nimportlib.import_module('peagle.engine')"),
        ("models/x.py", "if TYPE_CHECKING:\n    from peagle.engine import scheduler"),
        ("engine/x.py", "from peagle.backends import vllm"),
        ("serving/x.py", "from peagle.evaluation import report"),
        ("kernels/x.py", "from peagle.config import EngineConfig"),
        ("config.py", "from peagle.kernels import expand"),
        ("config.py", "from .models import target"),
        ("engine/x.py", "from peagle import LLM"),
        ("cli/x.py", "from peagle import LLM"),
        ("cli/x.py", "import peagle"),
    ],
)
def test_planted_violation_is_found(tmp_path, path, text):
    found = violations(plant(tmp_path, {path: text}))
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")


def test_violations_name_file_line_and_ranks(tmp_path):
    package = plant(tmp_path, {"models/x.py": "import os\n\nfrom peagle.engine import scheduler\n"})
    assert violations(package) == [
        "models/x.py:3 (rank 2) imports peagle.engine.scheduler of the higher rank 4"
    ]


def test_downward_sibling_and_foreign_imports_pass(tmp_path):
    package = plant(
        tmp_path,
        {
            "__init__.py": "def __getattr__(name):\n    from peagle.llm import LLM\n    return LLM",
            "cli/main.py": "from peagle import __version__\nfrom peagle.doctor import parity",
            "engine/a.py": "from peagle.engine import b\nfrom .b import c\nfrom . import b",
            "engine/deep/d.py": "from ..a import x\nfrom ...config import Config",
            "config.py": "from peagle.errors import PeagleError\nfrom .errors import PeagleError",
            "llm.py": "from .engine import core\nimport peagle.backends.vllm",
            "models/x.py": "import torch\nfrom transformers.models import llama\nimport peagle_x",
        },
    )
    assert violations(package) == []
    assert unranked(package) == []


@pytest.mark.parametrize("path", ["utils.py", "utils/strings.py"])
def test_unknown_top_level_module_needs_a_rank(tmp_path, path):
    (problem,) = unranked(plant(tmp_path, {path: ""}))
    assert problem.startswith("utils: unknown, give it a rank")


@pytest.mark.parametrize(
    ("path", "text", "allowed"),
    [
        ("kernels/x.py", "import triton", False),
        ("kernels/x.py", "import triton.language as tl", False),
        (
            "kernels/x.py",
            "try:\n    from triton import jit\nexcept ImportError:\n    jit = None",
            False,
        ),
        ("kernels/x.py", "class C:\n    import triton", False),
        ("attention/x_triton.py", "import triton", False),
        ("kernels/x.py", "from peagle.kernels.y_triton import launch", False),
        ("kernels/x.py", "from . import y_triton", False),
        ("kernels/x.py", "from . import y_gluon", False),
        ("kernels/x.py", "def f():\n    import triton", True),
        ("kernels/x.py", "def f():\n    from .y_triton import launch", True),
        ("kernels/x.py", "if TYPE_CHECKING:\n    import triton", True),
        ("kernels/y_triton.py", "import triton\nimport triton.language as tl", True),
        ("kernels/y_gluon.py", "from triton.experimental import gluon", True),
        ("kernels/x.py", "import tritonclient", True),
    ],
)
def test_triton_rule(tmp_path, path, text, allowed):
    found = triton_at_load(plant(tmp_path, {path: text}))
    assert (found == []) is allowed, found
