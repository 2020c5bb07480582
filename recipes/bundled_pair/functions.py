"""Documented functions of a module: where their docstrings end, and stand-alone copies of them."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass

MAX_LINES = 70
MIN_BODY_LINES = 2
MIN_DOCSTRING_CHARS = 40
MAX_HELPERS = 3
_BUILTINS = frozenset(dir(builtins))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class FunctionDocument:
    """A function with the imports and helpers that it needs, shaped like a HumanEval problem.

    `prompt_bytes` bytes of `text` come before the body; `body` is what follows them. `missing`
    counts the names that are still undefined; `plain` says that it needs no package to run.
    """

    name: str
    text: str
    prompt_bytes: int
    body_lines: int
    missing: int
    plain: bool

    @property
    def body(self) -> str:
        return self.text.encode()[self.prompt_bytes :].decode()


def _docstring_end(node: ast.AST) -> int | None:
    """Last line (1-based) of the docstring of a function whose body goes on after that line."""
    if not ast.get_docstring(node, clean=False) or len(node.body) < 2:
        return None
    end = node.body[0].end_lineno
    return end if node.body[1].lineno > end else None


def docstring_ends(text: str, tree: ast.Module) -> list[int]:
    """Byte offsets in `text` just after the docstring line of every documented function."""
    offsets = [0]
    for line in text.split("\n"):
        offsets.append(offsets[-1] + len(line.encode()) + 1)
    ends = [_docstring_end(node) for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    return sorted({offsets[end] for end in ends if end is not None})


class Module:
    """Top-level names of a module: imports, functions and one-line constants."""

    def __init__(self, text: str, tree: ast.Module):
        self.lines = text.split("\n")
        self.imports: dict[str, tuple[str, str]] = {}
        self.helpers: dict[str, ast.stmt] = {}
        self.functions: list[ast.FunctionDef] = []
        for node in tree.body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self.imports[name] = ("", f"import {_spelled(alias)}")
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                self.imports[alias.asname or alias.name] = (module, _spelled(alias))
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            self.functions.append(node)
            self.helpers[node.name] = node
        elif isinstance(node, ast.Assign) and node.lineno == node.end_lineno:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self.helpers[target.id] = node

    def source(self, node: ast.stmt) -> str:
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno])

    def import_lines(self, names: set[str]) -> list[str]:
        """Import statements that bind `names`, those of one module joined."""
        plain, joined = [], {}
        for name, (module, spelled) in self.imports.items():
            if name in names and not module:
                plain.append(spelled)
            elif name in names:
                joined.setdefault(module, []).append(spelled)
        return plain + [f"from {module} import {', '.join(x)}" for module, x in joined.items()]


def _spelled(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _free_names(node: ast.AST) -> set[str]:
    """Names that `node` reads and does not bind itself, builtins aside (scopes are merged)."""
    loaded, bound = set(), set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            (loaded if isinstance(child.ctx, ast.Load) else bound).add(child.id)
        elif isinstance(child, ast.arg):
            bound.add(child.arg)
        elif isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.ExceptHandler)) and child.name:
            bound.add(child.name)
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in child.names}
    return loaded - bound - _BUILTINS


def _needed(module: Module, node: ast.FunctionDef) -> tuple[set[str], list[ast.stmt], int]:
    """(imported names, helper statements, number of names found nowhere) for `node`."""
    imported: set[str] = set()
    helpers: dict[int, ast.stmt] = {}
    missing = 0
    pending = sorted(_free_names(node))
    while pending:
        name = pending.pop()
        helper = module.helpers.get(name)
        if name in module.imports:
            imported.add(name)
        elif helper is None or helper.lineno > node.lineno or len(helpers) == MAX_HELPERS:
            missing += 1
        elif helper.lineno not in helpers and helper is not node:
            helpers[helper.lineno] = helper
            pending += sorted(_free_names(helper))
    return imported, [helpers[line] for line in sorted(helpers)], missing


def _document(module: Module, node: ast.FunctionDef, end: int) -> FunctionDocument:
    """`node`, whose docstring ends in line `end`, after the imports and helpers it needs."""
    imported, helpers, missing = _needed(module, node)
    blocks = ["\n".join(module.import_lines(imported))]
    blocks += [module.source(helper) for helper in helpers]
    blocks.append("\n".join(module.lines[node.lineno - 1 : end]) + "\n")
    prompt = "\n\n\n".join(block for block in blocks if block)
    body = module.lines[end : node.end_lineno]
    roots = {(module.imports[n][0] or module.imports[n][1][7:]) for n in imported}
    return FunctionDocument(
        name=node.name,
        text=prompt + "\n".join(body) + "\n",
        prompt_bytes=len(prompt.encode()),
        body_lines=sum(1 for line in body if line.strip()),
        missing=missing,
        plain=all(re.split(r"[. ]", root)[0] in sys.stdlib_module_names for root in roots),
    )


def function_documents(text: str, tree: ast.Module) -> list[FunctionDocument]:
    """Every documented, undecorated top-level function of at most MAX_LINES with its needs."""
    module = Module(text, tree)
    found = []
    for node in module.functions:
        end = _docstring_end(node)
        if end is None or len(ast.get_docstring(node, clean=False)) < MIN_DOCSTRING_CHARS:
            continue
        document = _document(module, node, end)
        if document.body_lines >= MIN_BODY_LINES and document.text.count("\n") <= MAX_LINES:
            found.append(document)
    return found
