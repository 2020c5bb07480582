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
from peagle.evaluation.report import write_report
from peagle.evaluation.sweep import LOG_NAME, SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.models.checkpoint.files import write_json
from peagle.results import AcceptanceResults, RunFigures, read_document

HEADS = ("peagle", "eagle3", "eagle3_4l", "peagle_8l")
LARGEST_FILE = 16 * 2**20
_SHARED = ("max_new_tokens", "ignore_eos", "temperature", "top_k", "top_p", "seed", "warm_up")
_SHARED += ("chat_template", "thinking", "extra_body")


def measurements(work: Path, *, small: bool) -> list[Job]:
    """The commands, the most important ones first."""

    def bench(name: str, sets: str, concurrency: str, least_s: float) -> Job:
        arguments = ["--draft", _head(work, "peagle"), "--eagle3", _head(work, "eagle3")]
        arguments += ["--set", sets, "--concurrency", "1,2" if small else concurrency]
        arguments += ["-k", "3" if small else "3,5,7", "--repeats", "2" if small else "3"]
        arguments += ["--limit", "2" if small else "48"]
        arguments += ["--max-new-tokens", "16" if small else "256", "--temperature", "0"]
        return _peagle(work, "bench", name, arguments, least_s)

    def evaluation(name: str, heads: Sequence[str], temperature: str, ks: str) -> Job:
        arguments = ["--no-ngram", "--temperature", temperature]
        for head in heads:
            arguments += ["--method", f"{head}={_head(work, head)}"]
        arguments += ["--set", "humaneval,mt_bench,gsm8k,heldout_code"]
        arguments += ["-k", "3" if small else ks, "--limit", "2" if small else "164"]
        arguments += ["--max-new-tokens", "16" if small else "512"]
        arguments += ["--concurrency", "2" if small else "64"]
        return _peagle(work, "eval", name, arguments, 0)

    jobs = [
        bench("bench-humaneval", "humaneval", "1,4,16,64", 0),
        evaluation("eval-greedy", ("peagle", "eagle3"), "0", "3,5,7"),
    ]
    if deeper := [head for head in HEADS[2:] if Path(_head(work, head)).exists()]:
        jobs.append(evaluation("eval-layers", deeper, "0", "7"))
    return [
        *jobs,
        bench("bench-mt_bench", "mt_bench", "1,4,16,64", 0),
        evaluation("eval-sampled", ("peagle", "eagle3"), "1", "7"),
        bench("bench-humaneval-more", "humaneval", "2,8,32", 150),
        bench("bench-heldout_code", "heldout_code", "1,4,16,64", 150),
        bench("bench-gsm8k", "gsm8k", "1,4,16,64", 150),
    ]


def tuning(work: Path, *, small: bool) -> Job:
    """`peagle tune`, which reads a step's cost and wants the machine to itself."""
    ks, sizes = ("1,3", "1,2") if small else ("1,3,5,7", "1,2,4,8,16,32,64")
    arguments = ["--draft", _head(work, "peagle"), "-k", ks, "--batch-sizes", sizes]
    arguments += ["--limit", "2" if small else "32"]
    arguments += ["--max-new-tokens", "16"] if small else []
    return _peagle(work, "tune", "tune", arguments, 0)


def _peagle(work: Path, verb: str, name: str, arguments: Sequence[str], least_s: float) -> Job:
    command = [sys.executable, "-m", "peagle", verb, "--target", str(work / "target")]
    command += [*arguments, "--output", str(_found(work, name))]
    return Job(name, tuple(command), least_s)


def _head(work: Path, name: str) -> str:
    return str(work / name / "head")


def _found(work: Path, name: str) -> Path:
    return work / "evaluation" / name


def is_done(work: Path, job: Job) -> bool:
    """Whether a measurement is whole: its report is written last."""
    return (_found(work, job.name) / "report.html").exists()


# ---- one report -----------------------------------------------------------------------------


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
    logs = [folder / LOG_NAME for folder in folders if folder.name.startswith("bench-")]
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
    """One acceptance.json of several, which differ in their entries alone."""
    first = found[0]
    for other in found[1:]:
        _check_same("settings", first["settings"], other["settings"])
    entries = [entry for one in found for entry in one["entries"]]
    who = first["provenance"] | {"command": _commands(one["provenance"] for one in found)}
    return {**first, "provenance": who, "entries": entries}


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
        settings, _ = _read_sweep(next(f / LOG_NAME for f in folders if (f / LOG_NAME).exists()))
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


# ---- what is carried home -------------------------------------------------------------------


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
