"""Measure SmolLM2 with its heads, here and in vLLM: the figures of the results page, and tables.

    python recipes/smollm2/results.py --output build/smollm2_results --minutes 9.5
    python recipes/smollm2/results.py --output build/trial --pair bundled --small

README.md lists the measurements and says how a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path.append(str(HERE.parent / "benchmark_pair"))

import evaluate  # noqa: E402
from jobs import Job, gpus, run_jobs  # noqa: E402

from peagle.bundled import PAIR_NAMES, SMOLLM2, expand_bundled  # noqa: E402
from peagle.evaluation.prompts import PROMPT_SETS  # noqa: E402
from peagle.results import ACCEPTANCE, THROUGHPUT  # noqa: E402

AGAINST = BENCHMARKS / "serving" / "against_vllm.py"
SPEED_SETS = "humaneval,mt_bench"
LEAST_S = 90.0  # what a command needs to load and to measure something
NODES = (7, 15, 31)
LOADS = "1,4,16,64"
TEMPERATURES = "0,0.7,1"
HEADS = {"target": "target", "draft": "peagle", "eagle3": "eagle3"}  # by nodes.py's options
WAYS = "chain,eagle3,n,never n=15,adaptive,adaptive-chain,default,eagle3-n n=15,eagle3-adaptive"
SERVERS = {
    "served-best": "vllm/eagle3-k3,peagle/tree15,peagle/k7",
    "served-more": "vllm/eagle3-k7,vllm/k7,vllm/plain,"
    "peagle/eagle3-k7,peagle/plain,peagle/k7-alone",
    "served-rest": "vllm/k3,vllm/k5,vllm/eagle3-k5,"
    "peagle/k3,peagle/k5,peagle/eagle3-k3,peagle/eagle3-k5",
}


@dataclass(frozen=True)
class Measurement:
    """A command and what it leaves.

    Attributes:
        job: the command.
        file: is there, with at least `num_lines` lines, when all is measured.
        num_lines: see `file`.
    """

    job: Job
    file: Path
    num_lines: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all is measured."""
        return self.file.exists() and len(_lines(self.file)) >= self.num_lines


@dataclass(frozen=True)
class Plan:
    """What is measured, and where.

    Attributes:
        work: folder of everything.
        pair: name of the pair in the package.
        vllm_python: of vLLM's environment; None looks for it as `peagle` does.
        small: tiny sizes.
    """

    work: Path
    pair: str
    vllm_python: str | None
    small: bool

    @property
    def models(self) -> Path:
        """Folder that `against_vllm.py prepare` writes: target and heads as vLLM loads them."""
        return self.work / self.pair

    @property
    def alone(self) -> Path:
        """Folder of the P-EAGLE head without its correction."""
        return self.work / "alone"

    def measurements(self) -> list[Measurement]:
        """Return all measurements, those that say most first."""
        heads = ["--draft", self.pair, "--eagle3", self.pair]
        alone = [f"--method=alone={self.alone}"]
        ks, k = ("3", "3") if self.small else ("3,5", "7")
        every, above = ("0,1", "1") if self.small else ("0,0.7,1", "0.7,1")
        few, many = ("1", "2") if self.small else ("1,4", "16,64")
        return [
            self._bench("bench-few", 9, few, *heads, *_trees(15), "-k", k),
            self._bench("bench-many", 9, many, *heads, *_trees(15), "-k", k),
            self._ways("ways", 15),
            self._bench("bench-chains-few", 9, few, *heads, "-k", ks),
            self._bench("bench-chains-many", 9, many, *heads, "-k", ks),
            self._vllm("3", 11, *heads),
            *(() if self.small else (self._vllm("7,5", 18, *heads),)),
            self._eval("eval-greedy", 6, *heads, *_trees(15), "-k", k, "--temperature", "0"),
            self._served("served-best", minutes=9),
            *(
                self._eval(f"eval-nodes{n}", 6, *heads, *_trees(n), "-k", k, "--temperature", every)
                for n in NODES
                if n != 15
            ),
            self._first_token("first-token-alone", 0),
            self._eval("eval-sampled", 9, *heads, *_trees(15), "-k", k, "--temperature", above),
            self._eval("eval-chains", 9, *heads, "-k", ks, "--temperature", every),
            self._served("served-more", minutes=12),
            self._first_token("first-token-beside-16", 1 if self.small else 16),
            self._eval("eval-alone", 6, *alone, "-k", f"{ks},{k}", "--temperature", every),
            self._bench("bench-alone", 6, f"{few},{many}", *alone, "-k", k),
            self._served("served-rest", minutes=12),
        ]

    def _eval(self, name: str, minutes: float, *words: str) -> Measurement:
        sets = SPEED_SETS if self.small else ",".join(PROMPT_SETS)
        given = ["--set", sets, "--no-ngram", *words]
        given += self._sizes("2" if self.small else "64")
        return self._peagle("eval", name, minutes, given, "24" if self.small else "512")

    def _bench(
        self, name: str, minutes: float, loads: str, *words: str, repeats: int = 3
    ) -> Measurement:
        given = ["--set", SPEED_SETS, "--turns", "all", *self._sizes(loads)]
        given += ["--repeats", "1" if self.small else str(repeats), *words]
        # Prompts from all over a set, whose categories follow each other.
        given += [] if self.small else ["--limit", "40", "--shuffle-seed", "0"]
        return self._peagle("bench", name, minutes, given, "24" if self.small else "256")

    def _vllm(self, ks: str, minutes: float, *heads: str) -> Measurement:
        given = ["--engine", "vllm", "-k", ks, *heads]
        given += ["--vllm-python", self.vllm_python] if self.vllm_python else []
        name = f"bench-vllm-k{ks.replace(',', '-')}"
        return self._bench(name, minutes, "1" if self.small else LOADS, *given, repeats=2)

    def _sizes(self, loads: str) -> list[str]:
        return ["--concurrency", loads, *(["--limit", "2"] if self.small else [])]

    def _peagle(
        self, verb: str, name: str, minutes: float, words: Sequence[str], tokens: str
    ) -> Measurement:
        output = self._place(name)
        command = [sys.executable, "-m", "peagle", verb, "--target", str(self.models / "target")]
        command += [*words, "--max-new-tokens", tokens, "--output", str(output)]
        return Measurement(_job(name, minutes, command), output / "report.html")

    def _served(self, name: str, minutes: float) -> Measurement:
        variants, loads = SERVERS[name], LOADS
        words = list[str]()
        if self.small:
            variants, loads = ",".join(variants.split(",")[1:2]), "1"
            words = ["--least-requests", "2", "--rounds", "1", "--max-model-len", "1024"]
        words += ["--vllm-python", self.vllm_python] if self.vllm_python else []
        output = self._place(name)
        command = [sys.executable, str(AGAINST), "run", "--model", str(self.models), *words]
        command += ["--variants", variants]
        command += ["--loads", ",".join(f"prompts:c{load}" for load in loads.split(","))]
        command += ["--results", str(output / "rows.jsonl"), "--logs", str(output / "logs")]
        count = len(variants.split(",")) * len(loads.split(","))
        return Measurement(_job(name, minutes, command), output / "rows.jsonl", count)

    def _ways(self, name: str, minutes: float) -> Measurement:
        output = self._place(name) / "nodes.json"
        command = [sys.executable, str(BENCHMARKS / "nodes.py"), "--set", SPEED_SETS]
        command += [f"--{name}={self.models / folder}" for name, folder in HEADS.items()]
        command += ["--temperature", TEMPERATURES, "--chains", "3" if self.small else "7"]
        command += ["--nodes", "3" if self.small else "7,15,31", "--ways", WAYS]
        command += ["--conc", "1" if self.small else LOADS, "--output", str(output)]
        repeats, prompts, tokens = ("1", "2", "24") if self.small else ("3", "8", "128")
        command += ["--repeats", repeats, "--prompts", prompts, "--max-new-tokens", tokens]
        return Measurement(_job(name, minutes, command), output)

    def _first_token(self, name: str, others: int) -> Measurement:
        output = self._place(name) / "first_token.json"
        command = [sys.executable, str(BENCHMARKS / "first_token.py"), "--others", str(others)]
        command += [f"--{name}={self.models / name}" for name in ("target", "peagle")]
        command += ["--prompt", "64" if self.small else "700", "--k", "3" if self.small else "7"]
        command += ["--repeats", "1"] if self.small else []
        return Measurement(_job(name, 4, [*command, "--output", str(output)]), output)

    def _place(self, name: str) -> Path:
        # The folder from which `evaluate.merge` takes what eval and bench found.
        return self.work / "evaluation" / name


def _job(name: str, minutes: float, command: Sequence[str]) -> Job:
    return Job(name, tuple(command), LEAST_S, 60 * minutes)


def _trees(nodes: int) -> list[str]:
    return ["--no-prompt-lookup", "--parallel-drafting-spec", json.dumps({"max_nodes": nodes})]


# ---- what was found ----


def collect(plan: Plan) -> dict[str, Any]:
    """Return the figures of all that is measured, and write the report of eval and bench."""
    found: dict[str, Any] = {"acceptance": [], "speed": [], "served": [], "first_token": {}}
    found["ways"] = {}
    places = plan.work / "evaluation"
    with suppress(SystemExit):  # nothing was measured yet
        evaluate.merge(plan.work)
    for name, file, key, figures in (
        ("acceptance", ACCEPTANCE, "entries", _acceptance),
        ("speed", THROUGHPUT, "cells", _speed),
    ):
        path = plan.work / "report" / file
        if path.is_file():
            document = json.loads(path.read_text(encoding="utf-8"))
            found[name] = sorted(map(figures, document[key]), key=_rank)
            found[f"{name}_made"] = {of: document[of] for of in ("provenance", "settings")}
    for path in sorted(places.glob("served-*/rows.jsonl")):
        found["served"] += map(json.loads, _lines(path))
    if (path := places / "ways" / "nodes.json").is_file():
        found["ways"] = json.loads(path.read_text(encoding="utf-8"))["by_set"]
    for path in sorted(places.glob("*/first_token.json")):
        found["first_token"][path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _acceptance(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("num_requests", "acceptance_length", "acceptance_length_before_loop", "loop_share")
    sets = {"all sets": entry["pooled"], **entry["by_set"]}
    return {
        **{name: entry[name] for name in ("engine", "method", "k", "temperature")},
        "sets": {name: {key: one[key] for key in names} for name, one in sets.items()},
    }


def _speed(cell: dict[str, Any]) -> dict[str, Any]:
    median = cell["median"]
    return {
        **{name: cell[name] for name in ("engine", "method", "k", "set", "concurrency")},
        "tokens_per_s": median["output_tokens_per_s"],
        "least_and_most": cell["spread"]["output_tokens_per_s"],
        "acceptance_length": median["acceptance_length"],
        "ttft_ms": None if (s := median["ttft_s"]["p50"]) is None else 1000 * s,
    }


def tables(found: dict[str, Any], served: str) -> str:
    """Return the tables of what was found, in Markdown; `served` is that of the servers."""
    blocks = list[str]()
    for temperature in sorted({one["temperature"] for one in found["acceptance"]}):
        entries = [one for one in found["acceptance"] if one["temperature"] == temperature]
        blocks += [
            f"**Acceptance length at temperature {temperature:g}**, in brackets before the first "
            "loop of each output; all turns.",
            _acceptance_table(entries),
        ]
    for name in dict.fromkeys(one["set"] for one in found["speed"]):
        cells = [one for one in found["speed"] if one["set"] == name]
        blocks += [
            f"**Output tokens per second on {name}**, greedy, real acceptance, all turns, by the "
            "requests in flight; medians, and the acceptance length.",
            _speed_table(cells),
        ]
    if any(one["engine"] == "vllm" for one in found["speed"]):
        blocks.append(
            "vLLM is bound by its host at this size, so the ratios say little about large models."
        )
    for name, parts in found["ways"].items():
        for temperature, one in parts.items():
            blocks += [
                f"**Output tokens per second on {name} at temperature {temperature}**, first "
                "turns, trees with copies of the text, by the requests in flight; medians.",
                _ways_table(one["by_concurrency"]),
            ]
    if served:
        blocks += ["**Over HTTP**, first turns.", served.strip()]
    if found["first_token"]:
        blocks += [
            "**Milliseconds to the first token**, and the ratio of each repeat's pair.",
            _first_token_table(found["first_token"]),
        ]
    return "\n\n".join(blocks) + "\n"


def _acceptance_table(entries: Sequence[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(name for one in entries for name in one["sets"]))
    rows = [[_label(one), *(_length(one["sets"].get(name)) for name in sets)] for one in entries]
    # All ways to decode give the same greedy outputs, but for near-ties.
    looping = [entries[0]["sets"].get(name, {}).get("loop_share") for name in sets]
    rows.append(["outputs that loop", *("" if x is None else f"{x:.0%}" for x in looping)])
    return _table(["", *sets], rows)


def _length(part: dict[str, Any] | None) -> str:
    if part is None or part["acceptance_length"] is None:
        return ""
    before = part["acceptance_length_before_loop"]
    return f"{part['acceptance_length']:.2f}" + ("" if before is None else f" ({before:.2f})")


def _speed_table(cells: Sequence[dict[str, Any]]) -> str:
    loads = sorted({one["concurrency"] for one in cells})
    ways = dict[tuple[Any, ...], dict[int, dict[str, Any]]]()
    best: dict[int, dict[str, float]] = {load: {"peagle": 0.0, "vllm": 0.0} for load in loads}
    for one in cells:
        load, engine, speed = one["concurrency"], one["engine"], one["tokens_per_s"]
        ways.setdefault((engine, one["method"], one["k"]), {})[load] = one
        best[load][engine] = max(best[load][engine], speed)
    rows = []
    for own in ways.values():
        first = next(iter(own.values()))
        length = first["acceptance_length"]
        speeds = [f"{own[load]['tokens_per_s']:,.0f}" if load in own else "" for load in loads]
        rows.append(
            [first["engine"], _label(first), "" if length is None else f"{length:.2f}", *speeds]
        )
    both = [best[load] for load in loads]
    ratios = [f"{one['peagle'] / one['vllm']:.2f}" if all(one.values()) else "" for one in both]
    rows.append(["ratio", "best of peagle over best of vLLM", "", *ratios])
    return _table(["engine", "drafts", "acceptance length", *map(str, loads)], rows)


def _ways_table(found: dict[str, Any]) -> str:
    ways = list(next(iter(found.values())))
    rows = [[way, *(f"{one[way]['tokens_per_s']:,.0f}" for one in found.values())] for way in ways]
    return _table(["", *found], rows)


def _first_token_table(found: dict[str, Any]) -> str:
    rows = [
        [
            str(one["others"]),
            str(one["prompt"]),
            *(f"{one['first_token_ms'][side]:.1f}" for side in ("plain", "drafting")),
            f"{one['first_token_ratio']:.2f}",
        ]
        for one in found.values()
    ]
    header = ["requests that decode meanwhile", "prompt tokens", "plain", "with drafts", "ratio"]
    return _table(header, rows)


def _label(one: dict[str, Any]) -> str:
    """Return the words for a way to decode."""
    method, k = one["method"], one["k"]
    kinds = {"plain": "plain", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
    kinds |= {"alone": "P-EAGLE without its correction"}
    head, _, tree = method.partition("-tree-")
    if tree:
        return f"{kinds.get(head, head)}, trees of {tree.rpartition('n')[2]} nodes"
    return kinds.get(method, method) + (f", K = {k}" if k else "")


def _rank(one: dict[str, Any]) -> tuple[Any, ...]:
    """Return the place of a way to decode in tables."""
    base, is_tree, nodes = one["method"].partition("-tree-w")
    order = ("plain", "eagle3", "peagle", "alone")
    place = order.index(base) if base in order else len(order)
    return one["engine"], place, bool(is_tree), int(nodes.rpartition("-n")[2] or 0), one["k"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _served_table(plan: Plan) -> str:
    files = sorted(map(str, plan.work.glob("evaluation/served-*/rows.jsonl")))
    if not files:
        return ""
    done = subprocess.run(
        [sys.executable, str(AGAINST), "table", *files], stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _lines(path: Path) -> list[str]:
    """Return the whole lines of a file, whose last one may be cut."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


# ---- the command line ----


def prepare(plan: Plan, target: str | None) -> None:
    """Write the pair as vLLM loads it, and the head without its correction."""
    command = [sys.executable, str(AGAINST), "prepare", "--pair", plan.pair]
    command += ["--model", str(plan.models), *(["--target", target] if target else [])]
    if subprocess.run(command).returncode:
        sys.exit(2)
    if not plan.alone.exists():
        head = expand_bundled(plan.pair, "draft")
        shutil.copytree(head, plan.alone, ignore=shutil.ignore_patterns("correction.st"))


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--output", type=Path, default=Path("build/smollm2_results"))
    options.add_argument("--minutes", type=float, default=60.0, help="of all measurements (60)")
    options.add_argument("--only", help="names of measurements, a list (all)")
    options.add_argument("--pair", choices=PAIR_NAMES, default=SMOLLM2)
    options.add_argument("--target", help="folder of the pair's target (fetched)")
    options.add_argument("--vllm-python", help="python of vLLM's environment (where peagle looks)")
    options.add_argument("--small", action="store_true", help="tiny sizes")
    args = options.parse_args()
    work = args.output.resolve()
    work.mkdir(parents=True, exist_ok=True)
    plan = Plan(work, args.pair, args.vllm_python, args.small)
    every = plan.measurements()
    names = [one.job.name for one in every]
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - set(names):
        sys.exit(f"error: --only names {min(unknown)!r}; there are {', '.join(names)}.")
    prepare(plan, args.target)
    due = [one for one in every if one.job.name in wanted and not one.is_done]
    for one in due:
        one.file.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_jobs([one.job for one in due], gpus(), work / "logs", 60 * args.minutes)
    finally:
        found = collect(plan)
        (work / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text = tables(found, _served_table(plan))
        (work / "tables.md").write_text(text, encoding="utf-8")
        left = [one.job.name for one in every if not one.is_done]
        print(f"{work / 'tables.md'}; not whole: {', '.join(left) or 'none'}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
