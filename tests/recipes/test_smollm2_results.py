"""The results of SmolLM2: commands that exist, what is skipped, and the tables."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.docs.command_line import check_peagle
from tests.recipes.pretraining import ROOT
from tests.recipes.test_benchmark_pair import write_sweep

FOLDERS = ("recipes/smollm2", "recipes/benchmark_pair", "benchmarks/serving", "benchmarks")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts as modules, by name."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*(str(ROOT / one) for one in FOLDERS), *sys.path])
        names = ("results", "against_vllm", "contenders", "nodes")
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith((str(ROOT / "benchmarks"), str(ROOT / "recipes"))):
            del sys.modules[name]


@pytest.mark.parametrize("small", [False, True])
def test_each_measurement_is_a_command_that_exists(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    plan = scripts.results.Plan(tmp_path, "bundled", "python", small)
    measurements = plan.measurements()
    names = [one.job.name for one in measurements]
    assert len(set(names)) == len(names) and names[0] == "bench-few"
    servers = list[str]()
    for one in measurements:
        _, program, *words = one.job.command
        assert not one.is_done and one.job.least_s < one.job.most_s
        if program == "-m":
            given = check_peagle(words[1:]).params
            assert Path(given["output"]) == one.file.parent
            assert ("--engine" in words) == ("vllm" in one.job.name)
        elif program.endswith("against_vllm.py"):
            monkeypatch.setattr(sys, "argv", ["against_vllm.py", *words])
            args = scripts.against_vllm.parse_args()
            assert args.results == one.file
            servers += args.variants.split(",")
            for name in args.variants.split(","):
                scripts.contenders.Variant.parse(name)
            for load in args.loads.split(","):
                assert str(scripts.against_vllm.Load.parse(load)) == load
        elif program.endswith("nodes.py"):
            given = scripts.nodes.parser().parse_args(words)
            assert given.output == one.file and given.temperature == "0,0.7,1"
            assert given.draft.endswith("/peagle") and given.eagle3.endswith("/eagle3")
        else:
            assert Path(program).is_file() and one.job.name.startswith("first-token")
    assert small or sorted(servers) == sorted(scripts.contenders.REAL_VARIANTS)


def test_what_is_measured_is_kept_and_skipped(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, due = scripts.results, list[list[str]]()

    def run_jobs(jobs: Sequence[Any], places: Any, logs: Path, seconds: float) -> None:
        due.append([job.name for job in jobs])
        write_sweep(tmp_path / "evaluation" / "bench-few", "humaneval", 1)
        (tmp_path / "evaluation" / "bench-alone" / "report.html").touch()
        rows = tmp_path / "evaluation" / "served-best" / "rows.jsonl"
        rows.write_text(json.dumps({"variant": "a"}) + '\n{"variant": "cut')
        first = {"first_token_ms": {"plain": 10.0, "drafting": 11.0}, "first_token_ratio": 1.1}
        first |= {"others": 0, "prompt": 700}
        place = tmp_path / "evaluation" / "first-token-alone" / "first_token.json"
        place.write_text(json.dumps(first))
        ways = {"plain": {"tokens_per_s": 900.4}, "adaptive": {"tokens_per_s": 3100.0}}
        place = tmp_path / "evaluation" / "ways" / "nodes.json"
        found = {"mt_bench": {"0.7": {"by_concurrency": {"1": ways, "4": ways}}}}
        place.write_text(json.dumps({"by_set": found}))
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "run_jobs", run_jobs)
    monkeypatch.setattr(results, "prepare", lambda *_: None)
    monkeypatch.setattr(results, "_served_table", lambda _: "the table of servers")
    monkeypatch.setattr(sys, "argv", ["results.py", "--output", str(tmp_path)])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            results.main()
    first, again = due
    assert set(first) - set(again) == {"bench-alone", "first-token-alone", "ways"}
    found = json.loads((tmp_path / "results.json").read_text())
    assert [one["variant"] for one in found["served"]] == ["a"], "the line that is cut is left out"
    assert {one["tokens_per_s"] for one in found["speed"]} == {100, 200, 300, 400, 800, 1200}
    text = (tmp_path / "tables.md").read_text()
    assert "| peagle | plain |  | 100 | 400 |" in text and "the table of servers" in text
    assert "| adaptive | 3,100 | 3,100 |" in text and "at temperature 0.7**" in text
    assert "| 0 | 700 | 10.0 | 11.0 | 1.10 |" in text
    monkeypatch.setattr(sys, "argv", ["results.py", "--output", str(tmp_path), "--only", "x"])
    with pytest.raises(SystemExit, match="--only names 'x'; there are bench-few, "):
        results.main()


def test_tables(scripts: SimpleNamespace) -> None:
    def speed(engine: str, method: str, k: int, load: int, tokens: float) -> dict[str, Any]:
        names = {"engine": engine, "method": method, "k": k, "set": "humaneval"}
        return {**names, "concurrency": load, "tokens_per_s": tokens, "acceptance_length": 3.0}

    def acceptance(method: str, length: float, before: float | None) -> dict[str, Any]:
        part = {"acceptance_length": length, "acceptance_length_before_loop": before}
        part["loop_share"] = 0.58
        names = {"engine": "peagle", "method": method, "k": 7, "temperature": 0.7}
        return {**names, "sets": {"gsm8k": part}}

    found = {
        "acceptance": [
            acceptance("peagle-tree-w31-n31", 4.5, 3.5),
            acceptance("alone", 3.3, 2.4),
            acceptance("peagle", 3.5, None),
        ],
        "speed": [
            speed("peagle", "peagle-tree-w15-n15", 7, 1, 2600.0),
            speed("vllm", "peagle", 7, 1, 520.0),
            speed("vllm", "eagle3", 3, 1, 800.0),
            speed("peagle", "eagle3", 3, 64, 54000.0),
            speed("peagle", "eagle3-tree-w4-n15", 7, 64, 50000.0),
            speed("vllm", "eagle3", 3, 64, 20000.0),
        ],
        "first_token": {},
        "ways": {},
    }
    for name in ("acceptance", "speed"):
        found[name] = sorted(found[name], key=scripts.results._rank)
    lines = [line for line in scripts.results.tables(found, "").split("\n") if line[:1] == "|"]
    assert lines == [
        "|  | gsm8k |",
        "| --- | --- |",
        "| P-EAGLE, K = 7 | 3.50 |",
        "| P-EAGLE, trees of 31 nodes | 4.50 (3.50) |",
        "| P-EAGLE without its correction, K = 7 | 3.30 (2.40) |",
        "| outputs that loop | 58% |",
        "| engine | drafts | acceptance length | 1 | 64 |",
        "| --- | --- | --- | --- | --- |",
        "| peagle | EAGLE-3, K = 3 | 3.00 |  | 54,000 |",
        "| peagle | EAGLE-3, trees of 15 nodes | 3.00 |  | 50,000 |",
        "| peagle | P-EAGLE, trees of 15 nodes | 3.00 | 2,600 |  |",
        "| vllm | EAGLE-3, K = 3 | 3.00 | 800 | 20,000 |",
        "| vllm | P-EAGLE, K = 7 | 3.00 | 520 |  |",
        "| ratio | best of peagle over best of vLLM |  | 3.25 | 2.70 |",
    ]
