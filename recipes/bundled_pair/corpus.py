"""Build the text corpus of the bundled code model from pinned, permissively licensed packages.

    python recipes/bundled_pair/corpus.py --shared ../shared

Downloads the wheels of `packages.txt`, keeps the Python files that pass the licence, quality,
duplicate and contamination filters, and writes `docs/{train,val}.jsonl` in training order,
`docs/heldout_candidates.jsonl` and `manifest.json`. The output depends only on the pins, the
interpreter's standard library and the options.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from functions import docstring_ends, function_documents
from licences import Verdict
from ngrams import NgramIndex, line_shingles, stable_hash, word_ngrams
from sources import (
    STDLIB,
    Source,
    clean,
    download,
    is_test,
    looks_written,
    normal_name,
    parse,
    stdlib_source,
    wanted_path,
    wheel_source,
)

HERE = Path(__file__).parent
HELD_OUT = (
    "arrow",
    "boltons",
    "control",
    "humanize",
    "mlxtend",
    "python-docx",
    "textdistance",
    "tornado",
)
PEPS = "python-peps"
PROMPT_SETS = ("humaneval", "mt_bench", "gsm8k")
MAX_SEEN_SHARE = 0.5
# Bytes of further files of a package, beyond its cap, that are searched for functions.
FUNCTION_BYTES = 20_000_000
MIN_HELDOUT_LINES = 5
# What the worker processes look for; set when each starts.
_index: dict[str, NgramIndex] = {}


def load_prompts(folder: Path) -> dict[str, list[dict]]:
    """The evaluation prompt sets, by name."""
    sets = {}
    for name in PROMPT_SETS:
        # Not splitlines(): it also splits at characters that JSON strings may hold as they are.
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        sets[name] = [json.loads(line) for line in lines if line]
    return sets


def evaluation_texts(rows: Iterable[dict]) -> list[str]:
    """Everything in a prompt set that training text must not overlap: prompts, tests, answers."""
    fields = ("test", "canonical_solution", "answer")
    return [t for row in rows for t in [*row["turns"], *(row[f] for f in fields if f in row)]]


def _select(source: Source, cap: int, tests_share: float) -> tuple[list[str], list[str]]:
    """(files kept whole, files read for functions only), in a fixed random order.

    The first take about `cap` bytes, tests limited to their share; the second are the other
    files that are no tests, up to FUNCTION_BYTES.
    """
    files = [(path, size) for path, size in source.files() if wanted_path(path, size)]
    if source.name == STDLIB:
        files = [item for item in files if not is_test(item[0])]
    files.sort(key=lambda item: stable_hash(f"{source.name}/{item[0]}"))
    chosen, budget = [], {True: cap * tests_share, False: cap}
    total = sum(size for path, size in files if not is_test(path))
    budget[True] = min(budget[True], tests_share * total)
    others, spare = [], FUNCTION_BYTES
    for path, size in files:
        if budget[is_test(path)] >= size:
            budget[is_test(path)] -= size
            chosen.append(path)
        elif not is_test(path) and spare >= size:
            spare -= size
            others.append(path)
    return chosen, others


def _start(index: dict[str, NgramIndex]) -> None:
    _index.update(index)


def process(job: tuple[Source, int, float]) -> tuple[Source, list[dict], Counter]:
    """Documents of one distribution: cleaned files, and stand-alone documented functions."""
    source, cap, tests_share = job
    documents, counts = [], Counter()
    whole, others = _select(source, cap, tests_share)
    whole_set = set(whole)
    for path, content in source.read(whole + others):
        text = clean(content)
        tree = parse(text) if text is not None and looks_written(text) else None
        if tree is None:
            counts["dropped_quality"] += 1
            continue
        hits = [name for name, index in _index.items() if index.overlaps(text)]
        counts.update(f"dropped_13gram_{name}" for name in hits)
        if path in whole_set and not hits:
            documents.append(_file_document(source.name, path, text, tree))
        if not is_test(path):
            documents += _function_documents(source.name, path, text, tree, counts)
    return source, documents, counts


def _file_document(package: str, path: str, text: str, tree: ast.Module) -> dict:
    return {
        "package": package,
        "path": path,
        "kind": "file",
        "text": text,
        "ends": docstring_ends(text, tree),
        "keys": line_shingles(text).tolist(),
    }


def _function_documents(
    package: str, path: str, text: str, tree: ast.Module, counts: Counter
) -> list[dict]:
    found = []
    for function in function_documents(text, tree):
        if any(index.overlaps(function.text) for index in _index.values()):
            counts["dropped_13gram_function"] += 1
            continue
        found.append(
            {
                "package": package,
                "path": path,
                "kind": "function",
                "name": function.name,
                "text": function.text,
                "ends": [function.prompt_bytes],
                "body_lines": function.body_lines,
                "missing": function.missing,
                "plain": function.plain and not function.missing,
                "keys": [stable_hash(" ".join(function.body.split()))],
            }
        )
    return found


def pep_documents(path: Path, counts: Counter) -> list[dict]:
    """The texts of the PEP collection, one document each."""
    with lzma.open(path, "rt", encoding="utf-8") as packed:
        text = packed.read()
    documents = []
    for part in re.split(r"\n(?=PEP \d+: )", text):
        if any(index.overlaps(part) for index in _index.values()):
            counts["dropped_13gram_pep"] += 1
            continue
        number = re.match(r"PEP (\d+)", part).group(1)
        documents.append(
            {"package": PEPS, "path": f"pep-{number}", "kind": "text"}
            | {"text": part.strip("\n") + "\n", "ends": []}
        )
    return documents


class Deduplicator:
    """Drops documents whose line shingles or function bodies were mostly seen before."""

    def __init__(self):
        self.seen: dict[str, set[int]] = {"file": set(), "function": set()}

    def keep(self, document: dict) -> bool:
        keys = document.pop("keys")
        seen = self.seen[document["kind"]]
        repeated = sum(key in seen for key in keys)
        if repeated > MAX_SEEN_SHARE * len(keys):
            return False
        seen.update(keys)
        return True


def _body(document: dict) -> str:
    return document["text"].encode()[document["ends"][0] :].decode()


def _scan(text: str) -> list[int]:
    return _index["candidates"].matches(text).tolist()


def heldout_candidates(val: list[dict], train: list[dict], jobs: int) -> list[dict]:
    """Complete held-out functions whose body shares no word 13-gram with a training document."""
    functions = [d for d in val if d["kind"] == "function" and not d["missing"]]
    candidates = [d for d in functions if d["body_lines"] >= MIN_HELDOUT_LINES]
    index = NgramIndex(map(_body, candidates))
    texts = (d["text"] for d in train)
    with Pool(jobs, _start, ({"candidates": index},)) as pool:
        hits = {key for found in pool.imap_unordered(_scan, texts, 64) for key in found}
    return [c for c in candidates if hits.isdisjoint(word_ngrams(_body(c)).tolist())]


def limit_functions(documents: list[dict], share: float) -> list[dict]:
    """Cut the function documents to `share` of the bytes.

    Complete ones go first; those that need nothing but the standard library come twice.
    """
    rest = [d for d in documents if d["kind"] != "function"]
    functions = [d for d in documents if d["kind"] == "function"]
    functions += [d | {"copy": 1} for d in functions if d["plain"]]
    functions.sort(key=lambda d: (d["missing"], _order(d)))
    budget = sum(len(d["text"]) for d in rest) * share / (1 - share)
    kept = []
    for document in functions:
        budget -= len(document["text"])
        if budget < 0:
            break
        kept.append(document)
    return rest + kept


def _order(document: dict) -> int:
    parts = [str(document.get(key)) for key in ("package", "path", "kind", "name", "copy")]
    return stable_hash("/".join(parts) + document["text"])


def write_documents(path: Path, documents: list[dict]) -> None:
    """One JSON object a line, in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(document, ensure_ascii=False) + "\n")


def describe(source: Source, documents: list[dict], counts: Counter) -> dict:
    """The manifest entry of one distribution."""
    files = sorted((d for d in documents if d["kind"] != "function"), key=lambda d: d["path"])
    digest = sha256("\0".join(d["text"] for d in files).encode()).hexdigest()
    entry = {"name": source.name, "version": source.version, "licence": source.verdict.licence}
    return entry | {
        "split": "val" if normal_name(source.name) in HELD_OUT else "train",
        "files": len(files),
        "bytes": sum(len(d["text"].encode()) for d in files),
        "functions": sum(d["kind"] == "function" for d in documents),
        "sha256": digest,
        **{key: counts[key] for key in sorted(counts)},
    }


def build(args: argparse.Namespace) -> dict:
    """Run every stage and return the manifest."""
    clock = time.monotonic()

    def report(message: str) -> None:
        print(f"[{time.monotonic() - clock:6.1f} s] {message}", flush=True)

    wheels = download(args.packages, args.build / "wheels", args.jobs)
    sources = [stdlib_source()] if args.stdlib else []
    sources += [wheel_source(path) for path in wheels]
    accepted = [s for s in sources if s.verdict.accepted]
    report(f"{len(accepted)} of {len(sources)} distributions have an accepted licence")

    prompts = load_prompts(args.shared / "data")
    _start({name: NgramIndex(evaluation_texts(rows)) for name, rows in prompts.items()})
    # Held-out packages first: what training text repeats of them goes from training.
    accepted.sort(key=lambda s: (normal_name(s.name) not in HELD_OUT, normal_name(s.name)))
    jobs = [(source, int(args.cap_mb * 1e6), args.tests_share) for source in accepted]
    split, entries, dedup, total = {"train": [], "val": []}, [], Deduplicator(), Counter()
    with Pool(args.jobs, _start, (_index,)) as pool:
        for source, documents, counts in pool.imap(process, jobs):
            kept = [d for d in documents if dedup.keep(d)]
            counts["dropped_duplicate"] = len(documents) - len(kept)
            entries.append(describe(source, kept, counts))
            split[entries[-1]["split"]] += kept
            total.update(counts)
            report("{name} {version}: {files} files, {bytes} bytes".format(**entries[-1]))
    peps = pep_documents(args.shared / "corpus" / "python_peps.txt.xz", total)
    entries.append(describe(Source(PEPS, "", Verdict(True, "CC0"), args.shared), peps, Counter()))
    split["train"] += peps
    report(f"{len(peps)} PEPs; dropped: {dict(total)}")

    candidates = heldout_candidates(split["val"], split["train"], args.jobs)
    report(f"{len(candidates)} held-out functions share no 13-gram with the training text")
    for name, documents in split.items():
        split[name] = sorted(limit_functions(documents, args.functions_share), key=_order)
        write_documents(args.build / "docs" / f"{name}.jsonl", split[name])
    write_documents(args.build / "docs" / "heldout_candidates.jsonl", candidates)
    report("documents written")
    return manifest(args, sources, entries, split, total)


def manifest(args, sources, entries, split, dropped) -> dict:
    """What went in, what was left out, and why."""
    sizes = {
        name: {
            kind: {
                "documents": sum(d["kind"] == kind for d in documents),
                "bytes": sum(len(d["text"].encode()) for d in documents if d["kind"] == kind),
            }
            for kind in ("file", "function", "text")
        }
        for name, documents in split.items()
    }
    refused = [s for s in sources if not s.verdict.accepted]
    return {
        "format_version": 1,
        "options": {k: getattr(args, k) for k in ("cap_mb", "tests_share", "functions_share")},
        "python": platform.python_version(),
        "sizes": sizes,
        "licences": dict(sorted(Counter(e["licence"] for e in entries).items())),
        "dropped": dict(sorted(dropped.items())),
        "packages": table(sorted(entries, key=lambda e: e["name"].lower())),
        "refused": [
            {"name": s.name, "version": s.version, "reason": s.verdict.reason} for s in refused
        ],
    }


def table(entries: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the names of the facts and then a row for each entry, 0 where it has no such fact."""
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    return [names, *([entry.get(name, 0) for name in names] for entry in entries)]


def one_line_each(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON with a line for each package, without spaces."""
    dumps = partial(json.dumps, separators=(",", ":"))
    lines = []
    for key, value in manifest.items():
        text = dumps(value)
        if key in ("packages", "refused"):
            text = "[\n" + ",\n".join(map(dumps, value)) + "\n]"
        lines.append(f'"{key}":{text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="holds data/ and corpus/")
    parser.add_argument("--build", type=Path, default=Path("build/pair"), help="output folder")
    parser.add_argument("--packages", type=Path, default=HERE / "packages.txt")
    parser.add_argument("--cap-mb", type=float, default=2.0, help="most megabytes per package")
    parser.add_argument("--tests-share", type=float, default=0.08)
    parser.add_argument("--functions-share", type=float, default=0.2)
    parser.add_argument("--stdlib", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = build(args)
    args.manifest.write_text(one_line_each(result))
    print(json.dumps({k: result[k] for k in ("sizes", "licences", "dropped")}, indent=1))


if __name__ == "__main__":
    main()
