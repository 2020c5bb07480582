"""Prompts of one kind, as many as are wanted: traffic to adapt a head to."""

from __future__ import annotations

import ast
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random

from forms import ARTICLES, FORMS, NAMES, form

sys.path.append(str(Path(__file__).resolve().parent.parent / "bundled_pair"))

from functions import function_documents

FIRST_FORM = 1000  # the set form_json has the seeds below 8
FUNCTIONS_OF_A_FILE = 16
PROBLEMS = (
    "{name} buys {n} of the article '{thing}' at ${p} each and pays with ${more}. How much change "
    "does {name} get?",
    "A shop sold {n} boxes in the morning and {p} times as many in the afternoon. {r} boxes came "
    "back. How many boxes did the shop sell in the end?",
    "{name} reads {n} pages a day. A book has {total} pages. {name} has read for {half} days. How "
    "many pages are left?",
    "{n} friends share a bill of ${total} and each leaves a tip of ${r}. How much does each pay?",
    "A tank holds {more} litres. {name} pours in {n} buckets of {p} litres. How many litres still "
    "fit into the tank?",
)


def forms() -> Iterator[str]:
    """Yield filled-in forms to turn into JSON, the kinds of forms taking turns."""
    return (form(kind, seed) for seed in count(FIRST_FORM) for kind in FORMS)


def arithmetic() -> Iterator[str]:
    """Yield word problems, the templates taking turns."""
    random = Random(0)
    for number in count():
        n, p, r = random.randint(4, 40), random.randint(3, 30), random.randint(2, 20)
        name, thing = random.choice(NAMES).split()[0], random.choice(ARTICLES)
        made = {"total": n * p, "more": n * p + r, "half": max(1, p // 2)}
        yield PROBLEMS[number % len(PROBLEMS)].format(name=name, thing=thing, n=n, p=p, r=r, **made)


def code() -> Iterator[str]:
    """Yield documented functions of Python's library and torch without their bodies.

    The files are in a random order, so that late functions are of other files than early ones.
    """
    import torch

    away, files = {"site-packages", "dist-packages", "test", "tests"}, list[tuple[str, Path]]()
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent):
        paths = ((file.relative_to(root), file) for file in root.rglob("*.py"))
        files += [(str(path), file) for path, file in paths if not away & set(path.parts)]
    for _, file in Random(0).sample(sorted(files), len(files)):
        try:
            with warnings.catch_warnings(action="ignore"):
                text = file.read_text(encoding="utf-8")
                documents = function_documents(text, ast.parse(text))
        except (ValueError, SyntaxError):
            continue
        for one in documents[:FUNCTIONS_OF_A_FILE]:
            yield one.text.encode()[: one.prompt_bytes].decode()


KINDS = {"forms": forms, "code": code, "arithmetic": arithmetic}


def prompts_of(kind: str, number: int) -> list[str]:
    """Return the first prompts of a kind, each of them once.

    Raises:
        ValueError: there are fewer.
    """
    # A drawn prompt may come again; functions end.
    found = list(dict.fromkeys(islice(KINDS[kind](), 2 * number)))[:number]
    if len(found) < number:
        raise ValueError(f"{number} prompts are wanted; there are {len(found)} of kind {kind}.")
    return found
