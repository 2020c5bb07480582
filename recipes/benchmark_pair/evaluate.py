"""Acceptance and throughput of the benchmark model: what is measured, and one report of it all.

Each measurement is a `peagle` command in a process and a folder of its own, one on each GPU at a
time; `merge` puts what they found into one folder.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jobs import Job

from peagle.cli.harness import provenance
from peagle.evaluation.journal import BENCH_LOG
from peagle.evaluation.report import write_report
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.models.checkpoint.files import write_json
from peagle.results import AcceptanceResults, EntryKey, RunFigures, read_document

BENCHMARKS, NODES_FILE = Path(__file__).parents[2] / "benchmarks", "nodes.json"
HEADS = ("peagle", "eagle3", "eagle3_4l", "peagle_8l")
LARGEST_FILE = 16 * 2**20
_SHARED = ("max_new_tokens", "ignore_eos", "temperature", "top_k", "top_p", "seed", "warm_up")
_SHARED += ("chat_template", "thinking", "extra_body")


def measurements(work: Path, *, small: bool) -> list[Job]:
    """The commands, the most important ones first."""
    counts = "1,2" if small else "1,4,16,64"

    def bench(name: str, heads: Sequence[str], sets: str, k: str, *arguments: str) -> Job:
        given = [*_methods(work, heads), "--set", sets, "-k", "3" if small else k, *arguments]
        given += ["--repeats", "2" if small else "3", "--limit", "2" if small else "48"]
        given += ["--max-new-tokens", "16" if small else "256", "--temperature", "0"]
        return _peagle(work, "bench", name, given)

    def evaluation(name: str, heads: Sequence[str], k: str, *arguments: str) -> Job:
        given = ["--no-ngram", *_methods(work, heads), "-k", "3" if small else k, *arguments]
        given += ["--set", "humaneval,mt_bench,gsm8k,heldout_code"]
        given += ["--limit", "2" if small else "164", "--concurrency", "2" if small else "64"]
        return _peagle(work, "eval", name, [*given, "--max-new-tokens", "16" if small else "512"])

    def trees(nodes: int) -> list[str]:
        sizes = {"num_parallel_trees": min(nodes, 16), "prediction_depth": 3 if small else 7}
        return ["--parallel-drafting-spec", json.dumps(sizes | {"max_nodes": nodes})]

    both, few = ("peagle", "eagle3"), "summarization,question_answering,structured_json"
    few += ",code_edit,form_json,long_output"
    jobs = [
        _nodes(work, "humaneval", small=small),
        bench("bench-humaneval", both, "humaneval", "3,5,7", "--concurrency", counts, *trees(15)),
        evaluation("eval-tree16", ["tree16"], "7", *trees(16)),
        evaluation("eval-tree32", ["tree32"], "7", *trees(32)),
        evaluation("eval-greedy", both, "3,5,7"),
        evaluation("eval-eagle3-trees", ["eagle3"], "7", *trees(16)),
        *(
            evaluation(f"{name}-greedy", ["peagle"], "7", "--quantization", name)
            for name in ("fp8", "int8", "int4")
        ),
        bench("workloads", both, f"{few},mt_bench", "7", "--concurrency", "4", "--turns", "all"),
        evaluation("eval-alone", ["alone"], "7"),
    ]
    if deeper := [head for head in HEADS[2:] if Path(_head(work, head)).exists()]:
        jobs.append(evaluation("eval-layers", deeper, "7"))
    return [
        *jobs,
        _nodes(work, "mt_bench", small=small),
        evaluation("eval-sampled", both, "7", "--temperature", "1"),
        bench("bench-mt_bench", both, "mt_bench", "3,5,7", "--concurrency", counts),
    ]


def tuning(work: Path, *, small: bool) -> Job:
    """`peagle tune`, which reads a step's cost and wants the machine to itself."""
    ks, sizes = ("1,3", "1,2") if small else ("1,3,5,7", "1,2,4,8,16,32,64")
    arguments = ["--draft", _head(work, "peagle"), "-k", ks, "--batch-sizes", sizes]
    arguments += ["--limit", "2" if small else "32"]
    arguments += ["--max-new-tokens", "16"] if small else []
    return _peagle(work, "tune", "tune", arguments)


def _nodes(work: Path, prompts: str, *, small: bool) -> Job:
    """`benchmarks/nodes.py`: chains, trees and nodes by load, whole outputs and without loops."""
    command = [sys.executable, str(BENCHMARKS / "nodes.py"), "--set", prompts]
    command += ["--target", str(work / "target")]
    command += ["--draft", _head(work, "peagle"), "--eagle3", _head(work, "eagle3")]
    command += ["--cut-loops", "--ways", "chain,eagle3,n,adaptive"]
    command += ["--depth", "3" if small else "7", "--nodes", "3" if small else "7,15,31"]
    command += ["--chains", "3" if small else "3,7", "--prompts", "4" if small else "12"]
    command += ["--conc", "1" if small else "1,4,16,64", "--repeats", "1" if small else "3"]
    command += ["--max-new-tokens", "16" if small else "256"]
    folder = _found(work, f"nodes-{prompts}")
    # What is interrupted is lost.
    least_s = 0 if prompts == "humaneval" else 240
    return Job(f"nodes-{prompts}", (*command, "--output", str(folder / NODES_FILE)), least_s)


def _peagle(work: Path, verb: str, name: str, arguments: Sequence[str]) -> Job:
    command = [sys.executable, "-m", "peagle", verb, "--target", str(work / "target")]
    return Job(name, (*command, *arguments, "--output", str(_found(work, name))))


def _methods(work: Path, names: Sequence[str]) -> list[str]:
    """Heads by name: of P-EAGLE with its correction but for `alone`, `treeN` with trees."""
    folders = {name: "peagle" if name.startswith("tree") else name for name in names}
    return [f"--method={name}={_head(work, folder)}" for name, folder in folders.items()]


def _head(work: Path, name: str) -> str:
    return str(work / name / "head")


def _found(work: Path, name: str) -> Path:
    return work / "evaluation" / name


def is_done(work: Path, job: Job) -> bool:
    """Whether a measurement is whole: its report, or its only file, is written last."""
    return any((_found(work, job.name) / name).exists() for name in ("report.html", NODES_FILE))


# ---- one report ----


def merge(work: Path) -> Path:
    """Put what the measurements found, whole or not, into one folder with one report.

    Returns:
        the folder.

    Raises:
        SystemExit: nothing was measured.
        ValueError: two measurements are of different targets or settings.
    """
    folders = sorted(path for path in (work / "evaluation").glob("*") if path.is_dir())
    report = work / "report"
    report.mkdir(parents=True, exist_ok=True)
    acceptance = [f / "acceptance.json" for f in folders if f.name.startswith("eval-")]
    found = [read_document(p, AcceptanceResults).to_json() for p in acceptance if p.exists()]
    if found:
        write_json(report / "acceptance.json", merged_acceptance(found))
    logs = [folder / BENCH_LOG for folder in folders if folder.name.startswith("bench-")]
    if logs := [path for path in logs if path.exists()]:
        sweeps = [_read_sweep(path) for path in logs]
        if any(records for _, records in sweeps):
            write_json(report / "throughput.json", merged_throughput(sweeps, _provenance(folders)))
    tuned = work / "evaluation" / "tune" / "tune.json"
    if tuned.exists():
        shutil.copy(tuned, report / tuned.name)
    if not any(report.glob("*.json")):
        raise SystemExit(f"nothing was measured yet in {work / 'evaluation'}")
    write_report(report)
    return report


def merged_acceptance(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One acceptance.json of several, which differ in their entries alone; each entry once."""
    first = found[0]
    for other in found[1:]:
        _check_same("settings", first["settings"], other["settings"])
    entries: dict[tuple[Any, ...], Any] = {}
    for entry in (entry for one in found for entry in one["entries"]):
        entries.setdefault(tuple(entry.get(name) for name in EntryKey.model_fields), entry)
    who = first["provenance"] | {"command": _commands(one["provenance"] for one in found)}
    return {**first, "provenance": who, "entries": list(entries.values())}


Records = list[tuple[SweepPoint, int, dict[str, Any]]]


def _read_sweep(path: Path) -> tuple[dict[str, Any], Records]:
    """Settings and measurements of a sweep, whose last line may be cut."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    head, *lines = map(json.loads, whole.split("\n"))
    pairs = [(line["key"], line["value"]) for line in lines]
    return head["settings"], [
        (SweepPoint(**key["cell"]), key["repeat"], value) for key, value in pairs
    ]


def merged_throughput(
    sweeps: Sequence[tuple[dict[str, Any], Records]], who: dict[str, Any]
) -> dict[str, Any]:
    """One throughput.json of several sweeps, interrupted ones among them.

    Args:
        sweeps: settings and measurements of each; they differ in sets and concurrency.
        who: provenance of the whole.
    """
    measured: dict[SweepPoint, list[RunFigures]] = {}
    shared = {name: sweeps[0][0].get(name) for name in _SHARED}
    sets: dict[str, int] = {}
    for settings, records in sweeps:
        _check_same("settings", shared, {name: settings.get(name) for name in _SHARED})
        sets |= settings["sets"]
        for cell, _, figures in sorted(records, key=lambda record: record[1]):
            measured.setdefault(cell, []).append(RunFigures.model_validate(figures))
    settings = {
        **shared,
        "sets": {name: sets[name] for name in sets if any(c.set == name for c in measured)},
        "concurrency": sorted({cell.concurrency for cell in measured}),
        "repeats": max(map(len, measured.values())),
        "objective": None,
    }
    return summarize(measured, None, provenance=who, settings=settings).to_json()


def _provenance(folders: Sequence[Path]) -> dict[str, Any]:
    """Of the sweeps that came to their end; where there is none, of the machine as it is now."""
    paths = [folder / "throughput.json" for folder in folders]
    found = [json.loads(path.read_text())["provenance"] for path in paths if path.exists()]
    if not found:
        settings, _ = _read_sweep(next(f / BENCH_LOG for f in folders if (f / BENCH_LOG).exists()))
        return provenance(settings["target"], settings["dtype"])
    return found[0] | {"command": _commands(found)}


def _commands(found: Iterable[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(one["command"] for one in found))


def _check_same(what: str, one: Any, other: Any) -> None:
    if one != other:
        names = [name for name in one if one[name] != other.get(name)]
        raise ValueError(
            f"two measurements differ in their {what}: {names[0]} is {one[names[0]]!r} and "
            f"{other.get(names[0])!r}; expected the same in all. Measure one of them anew."
        )


# ---- what is carried home ----


def pack(work: Path, out: Path) -> list[Path]:
    """The report, and an archive of pictures and records, each file small enough to be carried."""
    report = work / "report"
    out.mkdir(parents=True, exist_ok=True)
    names = ("report.html", "results.json", "acceptance.csv", "throughput.csv")
    packed = [Path(shutil.copy(report / n, out)) for n in names if (report / n).exists()]
    pictures = sorted(report.glob("*.png"))
    records = [work / name for name in ("target_train.json", "responses.json", "steps.json")]
    records += [work / h / n for h in HEADS for n in ("train.json", "metrics.jsonl")]
    records += [*sorted((work / "logs").glob("*.log")), *sorted(report.glob("*.json"))]
    # What is in no report: other settings, and what was found about nodes.
    apart = ("acceptance.json", "throughput.json", NODES_FILE)
    records += [f for n in apart for f in sorted((work / "evaluation").glob(f"*/{n}"))]
    for name, files in (("pictures", pictures), ("records", records)):
        with tarfile.open(out / f"{name}.tar.xz", "w:xz") as archive:
            for file in files:
                if file.exists():
                    archive.add(file, file.relative_to(work))
        packed.append(out / f"{name}.tar.xz")
    for file in packed:
        if file.stat().st_size > LARGEST_FILE:
            print(f"{file.name} has {file.stat().st_size} bytes, more than can be carried")
    return packed
