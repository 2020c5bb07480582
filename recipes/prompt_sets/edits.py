"""Changes to ask for in functions of HumanEval: names, annotations, docstrings."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

CODE_CHARACTERS = (250, 900)
BODY_CHARACTERS = 100  # without the docstring, at least: there must be something to keep
USES = 3  # of a variable that is renamed, at least
ASK = "```python\n{code}\n```\n\n{change} Keep all else as it is. Answer with the whole function."

# Returns the code to show and the change to ask for; None where the change does not fit.
Change = Callable[[str, ast.FunctionDef], tuple[str, str] | None]


def rename_variable(code: str, function: ast.FunctionDef) -> tuple[str, str] | None:
    """Another name for the local variable that is used most."""
    parameters = {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    local = {node.id for node in names if isinstance(node.ctx, ast.Store)} - parameters
    uses = Counter(node.id for node in names if node.id in local)
    old, count = max(uses.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    new = f"{old}_value"
    if count < USES or new in code:
        return None
    return code, f"Rename the variable `{old}` to `{new}`."


def rename_function(code: str, function: ast.FunctionDef) -> tuple[str, str]:
    """Another name for the function, in the examples of its docstring too."""
    return (
        code,
        f"Rename the function `{function.name}` to `{function.name}_v2` wherever it stands.",
    )


def annotate(code: str, function: ast.FunctionDef) -> tuple[str, str] | None:
    """Annotations for a function that has none."""
    args = function.args
    if function.returns or any(arg.annotation for arg in [*args.args, *args.kwonlyargs]):
        return None
    return code, "Add type annotations to the parameters and to the return value."


def add_docstring(code: str, function: ast.FunctionDef) -> tuple[str, str]:
    """A docstring for a function, which is shown without its own."""
    docstring, lines = function.body[0], code.split("\n")
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines), "Add a docstring that says in one sentence what the function returns."


def rewrite_docstring(code: str, function: ast.FunctionDef) -> tuple[str, str]:
    """A shorter docstring."""
    del function
    return code, "Replace the docstring by one sentence."


CHANGES: tuple[Change, ...] = (
    rename_variable,
    rename_function,
    annotate,
    add_docstring,
    rewrite_docstring,
)


def edits(problems: Iterable[dict], count: int) -> list[tuple[str, str, str]]:
    """(number of the problem, kind of change, prompt), `count` of each kind, kinds in turn.

    Every function is asked about once. Their order is fixed and random.
    """
    found: dict[str, list[tuple[str, str, str]]] = {change.__name__: [] for change in CHANGES}
    left = sorted(problems, key=lambda one: hashlib.sha256(one["id"].encode()).digest())
    for change in CHANGES:
        kind, used = change.__name__, set[str]()
        for problem in left:
            code = (problem["turns"][0] + problem["canonical_solution"]).strip("\n")
            function = _only_function(code)
            if function is None or len(found[kind]) == count:
                continue
            if (asked := change(code, function)) is not None:
                used.add(problem["id"])
                number = problem["id"].rpartition("/")[2]
                shown, wanted = asked
                found[kind].append((number, kind, ASK.format(code=shown, change=wanted)))
        left = [problem for problem in left if problem["id"] not in used]
        if len(found[kind]) < count:
            raise ValueError(f"{len(found[kind])} functions for {kind}, {count} wanted")
    return [one for turn in zip(*found.values(), strict=True) for one in turn]


def _only_function(code: str) -> ast.FunctionDef | None:
    """The function of a code that has no other, a docstring, and a fit length."""
    body = ast.parse(code).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    low, high = CODE_CHARACTERS
    if len(functions) != 1 or functions[0] is not body[-1] or not low <= len(code) <= high:
        return None
    function = functions[0]
    if ast.get_docstring(function) is None:
        return None
    rest = code.split("\n")[function.body[0].end_lineno :]
    return function if len("\n".join(rest)) >= BODY_CHARACTERS else None
