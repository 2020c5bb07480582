"""A published table of P-EAGLE beside what this machine measures.

    python recipes/published/show.py speed
    python recipes/published/show.py concurrency --synthetic
    python recipes/published/show.py acceptance --target bundled --engine peagle

`figures.toml` has the published figures. `peagle bench` or `peagle eval` measures ours, on the
published weights or on those that are named. With --synthetic `benchmarks/throughput.py` does, on
random weights of the published shape and at the published acceptance lengths: speeds are real
then, what the head accepts is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED
from peagle.cli.tables import text_table
from peagle.engine.placement import resolve_device
from peagle.errors import UserError
from peagle.evaluation.prompt_sets import load
from peagle.evaluation.report import write_report
from peagle.evaluation.report.text import method_name, set_name
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import best_k_cell, summarize
from peagle.models.checkpoint.files import write_json
from peagle.models.loading import resolve_model
from peagle.results import (
    ACCEPTANCE,
    THROUGHPUT,
    AcceptanceResults,
    AnyDocument,
    Cell,
    Document,
    RunFigures,
    ThroughputResults,
    read_document,
)

HERE = Path(__file__).resolve().parent
THROUGHPUT_SCRIPT = HERE.parents[1] / "benchmarks" / "throughput.py"
TABLES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "figures.toml").read_text("utf-8"))
CODE_OF_SPEED_BENCH = "speed_bench_code"
# Repeats of one configuration differ by a few percent, and so do prompts and templates.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours; `missing` says why there is none of ours."""

    figure: str
    published: str
    ours: str = ""
    holds: bool = False
    missing: str = ""

    @property
    def is_asked(self) -> bool:
        return self.ours != "-" or bool(self.missing)

    def verdict(self, *, is_comparable: bool) -> str:
        if self.missing:
            return "not to be had"
        if not is_comparable:
            return ""
        return "reproduced" if self.holds else "missed"


def row(figure: str, published: float, ours: float | None, missing: str, digits: int = 2) -> Row:
    """A figure that is reproduced where ours is at most 5% lower."""
    shown = f"{published:,.{digits}f}"
    if ours is None:
        return Row(figure, shown, "-", missing=missing)
    return Row(figure, shown, f"{ours:,.{digits}f}", holds=ours >= (1 - TOLERANCE) * published)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a figure is not there: a set that cannot be loaded, or a head that was not named.

    "" where nobody asked for the figure.
    """

    sets: dict[str, str]
    has_eagle3: bool

    def __call__(self, method: str, name: str) -> str:
        if method == "eagle3" and not self.has_eagle3:
            return "no published EAGLE-3 head is known here; name one with --eagle3"
        return self.sets.get(name, "")


# ---- rows ----


def speed_rows(table: dict[str, Any], file: ThroughputResults, missing: Missing) -> Iterator[Row]:
    """Tokens per second of each method at its best K, and P-EAGLE's over plain decoding."""
    for name, methods in table["tokens_per_s"].items():
        for method, published in methods.items():
            own = _cells(file, method, name, 1)
            ours = best_k_cell(own).speed if own else None
            figure = f"{set_title(name)}: {method_name(method)}, tokens/s"
            yield row(figure, published, ours, missing(method, name), 0)
    for name, published in table["over_plain"].items():
        own = _cells(file, "peagle", name, 1)
        ours = best_k_cell(own).speed_up_over_plain if own else None
        figure = f"{set_title(name)}: P-EAGLE over plain decoding"
        yield row(figure, published, ours, missing("peagle", name))


def concurrency_rows(
    table: dict[str, Any], file: ThroughputResults, missing: Missing
) -> Iterator[Row]:
    """Speed over EAGLE-3 by set and requests in flight, and the best K of both heads."""
    for name, every in table["over_eagle3"].items():
        for load_, published in zip(table["concurrency"], every, strict=True):
            own = _cells(file, "peagle", name, load_)
            ours = best_k_cell(own).speed_up_over_eagle3 if own else None
            figure = f"{set_title(name)}, {load_} in flight"
            yield row(figure, published, ours, missing("eagle3", name))
    for method, k in table["best_k"].items():
        for name in table["over_eagle3"]:
            best = [b for b in file.best_k if (b.method, set_of(b.set)) == (method, name)]
            ours = ", ".join(f"{one.k} at {one.concurrency}" for one in best)
            figure = f"{set_title(name)}: best K of {method_name(method)}"
            holds = all(k in one.tied_k for one in best)
            yield Row(figure, str(k), ours or "-", holds, "" if best else missing(method, name))


def acceptance_rows(
    table: dict[str, Any], file: AcceptanceResults, missing: Missing
) -> Iterator[Row]:
    """Acceptance length by set, method and K."""
    lengths = {
        (entry.method, entry.k, set_of(name)): piece.length
        for entry in file.entries
        for name, piece in entry.by_set.items()
    }
    for name, methods in table["lengths"].items():
        for method, every in methods.items():
            for k, published in zip(table["ks"], every, strict=True):
                figure = f"{set_title(name)}: {method_name(method)}, K = {k}"
                ours = lengths.get((method, k, name))
                yield row(figure, published, ours, missing(method, name))


ROWS = {"speed": speed_rows, "concurrency": concurrency_rows, "acceptance": acceptance_rows}


def _cells(file: ThroughputResults, method: str, name: str, concurrency: int) -> list[Cell]:
    return [
        one
        for one in file.cells
        if (one.method, set_of(one.set), one.concurrency) == (method, name, concurrency)
    ]


def set_of(given: str) -> str:
    """The name of a set in figures.toml, of what `peagle` was given."""
    return Path(given).stem if given.endswith(".jsonl") else given


def set_title(name: str) -> str:
    return "SPEED-Bench code" if name == CODE_OF_SPEED_BENCH else set_name(name)


# ---- measuring ----


def find_sets(names: Sequence[str], speed_bench: str, folder: Path) -> tuple[list[str], Missing]:
    """The sets that can be loaded, as `peagle` takes them, and why the others cannot."""
    found, missing = [], {}
    for name in names:
        try:
            if name != CODE_OF_SPEED_BENCH:
                found.append(name)
                continue
            code = [one for one in load(speed_bench) if one.category.lower().startswith("cod")]
            if not code:
                raise UserError(f"{speed_bench!r} has no prompts of a category of code.")
        except UserError as error:
            missing[name] = str(error)
            continue
        file = folder / f"{name}.jsonl"
        lines = [{"id": one.id, "category": one.category, "turns": one.turns} for one in code]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        found.append(str(file))
    return found, Missing(missing, has_eagle3=True)


def find_weights(table: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Options that name the models, all of which are here or could be fetched.

    Raises:
        UserError: some are not; the message names all of them, where they are from, and what can be
            shown without.
    """
    if args.target == BUNDLED:
        return ["--target", BUNDLED]
    target, draft = args.target or table["target"], args.draft or table["draft"]
    if args.target and not args.draft:
        raise UserError(f"--target is {args.target!r}; name a P-EAGLE head of it with --draft.")
    named = {"--target": target, "--draft": draft}
    named |= {"--eagle3": args.eagle3} if args.eagle3 else {}
    absent = []
    for option, name in named.items():
        try:
            resolve_model(name, role="target" if option == "--target" else "draft")
        except UserError as error:
            absent.append(f"  {option} {name}: {error}")
    if absent:
        raise UserError(
            "weights are missing:\n" + "\n".join(absent) + "\n"
            "A hub id NAME is at https://huggingface.co/NAME: config.json, *.safetensors and, of a "
            "target, the tokenizer's files. Fetch them with `hf download NAME`, or name folders "
            "that hold them.\n"
            "Without them this table can be shown with\n"
            "  --target bundled   the bundled pair: other models, real acceptance\n"
            + (
                "  --synthetic        random weights of the published shape on this card: real "
                "speed, synthetic acceptance"
                if "shape" in table
                else "and in no other way: what random weights accept says nothing."
            )
        )
    return [word for pair in named.items() for word in pair]


def measure(name: str, args: argparse.Namespace) -> tuple[Document, Missing]:
    """What `peagle bench` or `peagle eval` finds, of the published models or those named."""
    table = TABLES[name]
    models = find_weights(table, args)
    sets, missing = find_sets(args.set.split(","), args.speed_bench, args.output)
    if not sets:
        raise UserError(f"no set can be loaded: {' '.join(missing.sets.values())}")
    command = [*models, "--engine", args.engine, "--set", ",".join(sets), "-k", args.k]
    command += ["--temperature", "0", "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--limit", str(args.limit)] if args.limit else []
    command += ["--output", str(args.output)]
    missing = Missing(missing.sets, has_eagle3="--eagle3" in models or BUNDLED in models)
    if name == "acceptance":
        peagle(["eval", *command, "--no-ngram", *args.further])
        accepted = read_document(args.output / ACCEPTANCE, AcceptanceResults)
        return on_engine(accepted, args.engine, "entries"), missing
    command += ["--concurrency", args.concurrency, "--turns", "all"]
    peagle(["bench", *command, *args.further])
    measured = read_document(args.output / THROUGHPUT, ThroughputResults)
    return on_engine(measured, args.engine, "cells", "best_k"), missing


def on_engine(file: AnyDocument, engine: str, *lists: str) -> AnyDocument:
    """The results of one engine, of a file that may hold those of two."""
    return file.model_copy(
        update={
            name: [one for one in getattr(file, name) if one.engine == engine] for name in lists
        }
    )


def peagle(arguments: Sequence[str]) -> None:
    """Run a command of peagle, whose tables do not mix with ours."""
    verb, *options = arguments
    command = [sys.executable, "-m", "peagle", verb, "--format", "json", *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"peagle {verb} failed; its message is above.")


def measure_synthetic(name: str, args: argparse.Namespace) -> tuple[Document, Missing]:
    """Speeds of random weights of the published shape at the published acceptance lengths.

    `benchmarks/throughput.py` runs for plain decoding, and for each head, K and set.
    """
    table, lengths = TABLES[name], TABLES["acceptance"]["lengths"]
    if "shape" not in table:
        raise UserError("--synthetic sets the acceptance length; it cannot measure one.")
    if args.shape is None and resolve_device("auto").type != "cuda":
        raise UserError(
            f"--synthetic fills the shape {table['shape']!r} with weights, which needs a GPU; name "
            "a small one with --shape, like tiny, or show --target bundled."
        )
    shape = args.shape or table["shape"]
    measured: dict[SweepPoint, list[RunFigures]] = {}
    ran: dict[str, Any] = {}
    runs = [("plain", 0, 1.0, args.set.split(","))]
    for set_, methods in lengths.items():
        for method, every in methods.items():
            ks = zip(TABLES["acceptance"]["ks"], every, strict=True)
            runs += [(method, k, al, [set_]) for k, al in ks if set_ in args.set.split(",")]
    for method, k, al, sets in runs:
        command = ["--shape", shape, "--method", "none" if method == "plain" else method]
        command += ["--k", str(k or 1), "--al", str(al), "--conc", args.concurrency]
        ran = throughput([*command, *args.further])
        for concurrency, speeds in ran["runs"].items():
            for set_ in sets:
                point = SweepPoint(method, shape, "peagle", k, int(concurrency), set_)
                measured[point] = [
                    RunFigures(output_tokens_per_s=one, acceptance_length=ran["al"])
                    for one in speeds
                ]
    results = summarize(
        measured,
        None,
        provenance={
            "command": " ".join(["python", *sys.argv]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": ran["environment"],
            "target": f"{shape}, random weights",
            "synthetic": True,
        },
        settings={"prompt tokens": ran["prompt"], "output tokens": ran["out"], "objective": None},
    )
    write_json(args.output / THROUGHPUT, results.to_json())
    write_report(args.output)
    return results, Missing({}, has_eagle3=True)


def throughput(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark of a shape; return its result."""
    command = [sys.executable, str(THROUGHPUT_SCRIPT), *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if ran.returncode or not found:
        raise UserError(f"{THROUGHPUT_SCRIPT.name} failed; its message is above.")
    return json.loads(found[-1].removeprefix("RESULT "))


# ---- the table ----


def text(name: str, results: Document, rows: Sequence[Row], engine: str) -> str:
    """The table, below what both sides were measured with."""
    table, provenance = TABLES[name], results.provenance
    device = provenance.environment.get("device") or "unknown"
    card = f"{provenance.environment.get('cpu')} (no GPU)" if device == "cpu" else device
    acceptance = "real"
    if results.is_synthetic:
        acceptance = f"synthetic, at the published lengths of {TABLES['acceptance']['model']}"
    ours = ", ".join(filter(None, [provenance.target, provenance.dtype, card, engine]))
    others = differences(name, results)
    body = [
        [one.figure, one.published, one.ours, one.verdict(is_comparable=not others)] for one in rows
    ]
    reasons = dict.fromkeys(one.missing for one in rows if one.missing)
    return "\n".join(
        [
            table["title"],
            f"published: {table['model']}, {table['card']}, vLLM, acceptance real",
            f"           {table['source']}",
            f"ours:      {ours}, acceptance {acceptance}",
            text_table(["", "published", "ours", ""], body),
            *(f"no verdict: {other}" for other in others),
            *(f"not to be had: {reason}" for reason in reasons),
        ]
    )


def differences(name: str, results: Document) -> list[str]:
    """Return what makes a verdict on a table impossible: other models, or another machine.

    The machine does not decide what a head accepts.
    """
    table, provenance = TABLES[name], results.provenance
    found = []
    if provenance.target != table["target"]:
        found.append(f"ours is of {provenance.target}, the published figures of {table['target']}")
    device = provenance.environment.get("device") or "unknown"
    if name != "acceptance" and table["card"] not in device:
        found.append(f"ours is of the device {device!r}, the published figures of {table['card']}")
    if results.is_synthetic:
        found.append("the acceptance of ours is synthetic")
    return found


def asked(table: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """The table with the figures of some of its sets."""
    by_set = ("tokens_per_s", "over_plain", "over_eagle3", "lengths")
    return table | {
        key: {name: value for name, value in table[key].items() if name in sets}
        for key in by_set
        if key in table
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Behind -- stand options of peagle bench or eval, or, with --synthetic, of "
        "benchmarks/throughput.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=TABLES)
    models = parser.add_argument_group("models")
    models.add_argument("--target", help="folder or hub id, or bundled (default: as published)")
    models.add_argument("--draft", help="a P-EAGLE head (default: as published)")
    models.add_argument("--eagle3", help="an EAGLE-3 head (none is known here)")
    models.add_argument("--engine", choices=("vllm", "peagle"), default="vllm")
    models.add_argument("--synthetic", action="store_true", help="random weights, no head's drafts")
    models.add_argument("--shape", help="with --synthetic: another shape (benchmarks/shapes.py)")
    load_ = parser.add_argument_group("load")
    load_.add_argument("--set", help="some of the published sets (default: all of the table)")
    load_.add_argument("--speed-bench", default="speed_bench", help="its prompts as a file")
    load_.add_argument("-k", help="draft tokens per step, a list (default: as published)")
    load_.add_argument("--concurrency", help="requests in flight, a list (default: as published)")
    load_.add_argument("--limit", type=int, help="prompts of each set (default: all)")
    load_.add_argument("--max-new-tokens", type=int, default=2048, help="(2048)")
    parser.add_argument("--output", type=Path, help="(out/published/TABLE)")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.further = words[end + 1 :]
    table = TABLES[args.table]
    args.set = args.set or ",".join(table["sets"])
    args.k = args.k or ",".join(map(str, table["ks"]))
    args.concurrency = args.concurrency or ",".join(map(str, table.get("concurrency", [1])))
    args.output = args.output or Path("out", "published", args.table)
    if unknown := set(args.set.split(",")) - set(table["sets"]):
        parser.error(f"--set is {args.set!r}; {unknown.pop()!r} is none of {table['sets']}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        results, missing = (measure_synthetic if args.synthetic else measure)(args.table, args)
        table = asked(TABLES[args.table], args.set.split(","))
        rows = [one for one in ROWS[args.table](table, results, missing) if one.is_asked]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(text(args.table, results, rows, "peagle" if args.synthetic else args.engine))


if __name__ == "__main__":
    main()
