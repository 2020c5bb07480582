"""`peagle tune` on a tiny pair: the tables, the JSON object, going on, mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.cli import tune
from peagle.cli.settings import whole_numbers
from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.evaluation.journal import Journal
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import CostPoint, EngineMachine
from peagle.evaluation.tuning.model import Shape
from peagle.evaluation.tuning.tune import Grid, measure_costs, tune_results
from peagle.results import TunedTrees, TuneResults
from tests.cli.conftest import Pair, Peagle
from tests.evaluation.tuning_machines import LENGTHS, RATES, SimulatedMachine, linear

FEW = ("-k", "1-3", "--batch-sizes", "1,2", "--rounds", 1, "--steps", 2, "--context", 16)
SHORT = ("--limit", 2, "--max-new-tokens", 6, "--threads", 1, "--kv-cache-gib", 0.01)


@pytest.fixture
def options(pair: Pair, tmp_path: Path) -> tuple[object, ...]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nimport numpy as np\n")
    return (*pair.options, *FEW, *SHORT, "--set", prompts)


@pytest.mark.slow
def test_results_are_kept_and_not_measured_again(
    peagle: Peagle, options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    result = peagle("tune", *options, "--output", folder, "--format", "json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    assert json.loads((folder / "tune.json").read_text()) == data
    assert "tune" in json.loads((folder / "results.json").read_text())
    assert (folder / "report.html").exists()
    assert data["costs"]["experts"] is None
    assert len(data["predictions"]) == 8
    assert all(one["measured_tokens_per_s"] > 0 for one in data["predictions"])
    assert [list(range(a, b + 1)) for a, b, _ in data["schedule"]][-1][-1] == 2
    assert data["acceptance"]["source"] == "measured"
    assert data["settings"]["k"] == [1, 2, 3]
    assert data["provenance"]["command"].startswith("peagle")
    if (config := data["speculative_config"]["peagle"]) is not None:
        SpeculativeConfig.parse(config)

    def fail(self: EngineMachine, cell: CostPoint) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(EngineMachine, "measure", fail)
    again = peagle("tune", *options, "--output", folder, "--threshold", 0.5)
    assert again.status == 0, again.err
    assert json.loads((folder / "tune.json").read_text())["costs"] == data["costs"]
    for words in ("Acceptance length by K", "Tokens/s by batch size", "K by batch size"):
        assert words in again.out
    other = peagle("tune", *options, "--output", folder, "--context", 17)
    assert other.status == 2
    assert "was made with context 16, not 17" in other.err


@pytest.mark.slow
def test_candidate_trees_are_measured_beside_chains(
    peagle: Peagle, options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*options, "--max-nodes", "2,7", "--output", tmp_path / "out")
    result = peagle("tune", *arguments, "--format", "json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    shapes = [one["parallel_drafting_spec"] for one in data["trees"]]
    assert [shape["max_nodes"] for shape in shapes] == [2, 7]
    for one in data["trees"]:
        assert one["acceptance_length"] >= 1
        assert [batch for batch, _ in one["tokens_per_s"]] == [1, 2]
        assert all(speed > 0 for _, speed in one["tokens_per_s"])
    wins = [batch for one in data["trees"] for batch in one["wins_at"]]
    config = data["speculative_config"].get("peagle_trees")
    assert (config is not None) == bool(wins)

    def fail(self: EngineMachine, batch: int, shape: CandidateTrees) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(EngineMachine, "measure_trees", fail)
    again = peagle("tune", *arguments)
    assert again.status == 0, again.err
    assert "Candidate trees by nodes: acceptance length" in again.out


@pytest.mark.slow
def test_copies_of_the_text_are_told_apart(
    peagle: Peagle, options: tuple[object, ...], tmp_path: Path
) -> None:
    arguments = (*options, "--max-nodes", "7", "--output", tmp_path / "out")
    first, again = (peagle("tune", *arguments, "--format", "json") for _ in range(2))
    assert first.status == again.status == 0, first.err
    (one,), (kept,) = (json.loads(result.out)["trees"] for result in (first, again))
    head, text = one["head_per_pos"], one["text_per_pos"]
    assert len(head) == len(text) and sum(text) > 0, "the head is not trained"
    assert 1 + sum(head) + sum(text) == pytest.approx(one["acceptance_length"])
    assert (kept["head_per_pos"], kept["text_per_pos"]) == (head, text)
    shown = peagle("tune", *arguments).out
    assert "Accepted tokens of 7 nodes by position, drafted by the text alone" in shown


def test_trees_in_the_text() -> None:
    def text(wins_at: list[int]) -> str:
        shape = {"num_parallel_trees": 7, "prediction_depth": 7, "max_nodes": 7}
        one = TunedTrees(
            parallel_drafting_spec=shape,
            acceptance_length=4.2,
            tokens_per_s=[(1, 420.0), (4, 700.0)],
            wins_at=wins_at,
        )
        return tune.tuning_text(simulated_results(trees=lambda chains: [one]))

    won = text([1])
    assert "420*" in won and "700*" not in won and "  4.20" in won
    assert "Trees win at batch sizes 1. For --speculative-config" in won and '"max_nodes": 7' in won
    assert all(len(line) <= 100 for line in won.splitlines() if "{" not in line)
    assert "Chains or no drafts are as fast at every batch size." in text([])


@pytest.mark.slow
def test_a_mixture_is_priced_by_its_experts(
    peagle: Peagle,
    mixture_pair: Pair,
    options: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, given = tmp_path / "out", (*mixture_pair.options, *options[4:])
    result = peagle("tune", *given, "--output", folder)
    assert result.status == 0, result.err
    experts = json.loads((folder / "tune.json").read_text())["costs"]["experts"]
    assert (experts["num_experts"], experts["num_chosen"]) == (6, 2)
    touched = {(batch, k): found for batch, k, found, _ in experts["touched"]}
    assert len(touched) == 2 * 4 and touched[1, 0] == 2 < touched[1, 3] < touched[2, 3] <= 6
    heading = "Distinct experts that a step touches in a layer, measured/under even routing, of 6"
    assert heading in result.out
    assert "Distinct experts that a decode step touches" in (folder / "report.html").read_text()

    def fail(self: EngineMachine) -> Any:
        raise AssertionError("counted again")

    monkeypatch.setattr(EngineMachine, "count_experts", fail)
    again = peagle("tune", *given, "--output", folder)
    assert again.status == 0, again.err
    assert json.loads((folder / "tune.json").read_text())["costs"]["experts"] == experts


@pytest.mark.slow
def test_interrupted(
    peagle: Peagle, options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = EngineMachine.measure
    left = 4

    def interrupted(self: EngineMachine, cell: CostPoint) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return measure(self, cell)

    monkeypatch.setattr(EngineMachine, "measure", interrupted)
    result = peagle("tune", *options, "--output", tmp_path / "out")
    assert result.status == 130
    assert "measurements are kept in" in result.err
    assert not (tmp_path / "out" / "tune.json").exists()
    kept = (tmp_path / "out" / "tune_cells.jsonl").read_text()
    monkeypatch.setattr(EngineMachine, "measure", measure)
    assert peagle("tune", *options, "--output", tmp_path / "out").status == 0
    assert (tmp_path / "out" / "tune_cells.jsonl").read_text().startswith(kept)


@pytest.mark.slow
def test_acceptance_of_a_file(peagle: Peagle, options: tuple[object, ...], tmp_path: Path) -> None:
    entry = {
        "method": "peagle",
        "source": "elsewhere",
        "k": 3,
        "temperature": 0.0,
        "pooled": {
            **{"num_drafts": 9, "num_accepted_tokens": 27, "acceptance_length": 4.0},
            "unconditional": [1.0, 1.0, 1.0],
        },
    }
    file = tmp_path / "acceptance.json"
    data = {"format_version": 1, "provenance": {"target": "t"}, "entries": [entry]}
    file.write_text(json.dumps(data))
    result = peagle("tune", *options, "--acceptance", file, "--format", "json")
    assert result.status == 0, result.err
    data = json.loads(result.out)
    assert data["acceptance"]["source"] == "acceptance.json"
    assert data["acceptance"]["acceptance_length"] == {"1": 2.0, "2": 3.0, "3": 4.0}
    # Whatever this machine is like: four tokens a step in place of one pay on a tiny model.
    assert max(k for _, _, k in data["schedule"]) > 0
    text = tune.tuning_text(TuneResults.model_validate(data))
    for reader in ("peagle", "vllm"):
        assert json.dumps(data["speculative_config"][reader]) in text
    deeper = peagle("tune", *options, "--acceptance", file, "-k", "4")
    assert deeper.status == 2
    assert "K = 4 is not known" in deeper.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-k", "0-3"), "-k is '0-3'; expected whole numbers from 1 to 64"),
        (("-k", "3-1"), "expected whole numbers"),
        (("-k", "65"), "expected whole numbers"),
        (("-k", "all"), "expected whole numbers"),
        (("--batch-sizes", "1,,2"), "--batch-sizes is '1,,2'"),
        (("--target", "./t"), "without --draft"),
        (("--method", "peagle"), "add --acceptance"),
        (("--acceptance", "none"), "'none' is not readable"),
        (("--threshold", "-1"), "--threshold is -1.0"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--max-nodes", "64"), "--max-nodes is '64'; expected whole numbers from 1 to 63"),
        (("--max-nodes", "7", "--acceptance", "."), "--max-nodes and --acceptance were given"),
        (("--set", "humanevil"), "Did you mean humaneval"),
    ],
)
def test_mistakes(peagle: Peagle, options: tuple[str, ...], message: str) -> None:
    result = peagle("tune", *options)
    assert result.status == 2
    assert message in result.err and "Traceback" not in result.err


def simulated_results(
    *, is_parallel: bool = True, slowdown: float = 0.0, **options: Any
) -> TuneResults:
    grid = Grid((1, 4, 16), (1, 3, 7))
    machine = SimulatedMachine(linear, slowdown=slowdown)
    costs = measure_costs(machine.measure, grid, 5, Journal(None, {}))
    return tune_results(
        grid,
        costs,
        AcceptanceByK({len(RATES): RATES}),
        Shape(LENGTHS, is_parallel),
        draft="owner/h",
        threshold=0.03,
        provenance={"target": "owner/t", "dtype": "bfloat16", "environment": {"device": "cpu"}},
        settings={"draft": "owner/h", "context": 256, "temperature": 0.0},
        **options,
    )


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("slowdown", [0.0, 0.5])
def test_text(is_parallel: bool, slowdown: float) -> None:
    results = simulated_results(is_parallel=is_parallel, slowdown=slowdown)
    data, text = results.to_json(), tune.tuning_text(results)
    assert "owner/t with owner/h, bfloat16, cpu, context 256, temperature 0" in text
    assert all(len(line) <= 100 for line in text.splitlines() if "{" not in line)
    assert ("vLLM needs peagle's plugin for it" in text) == is_parallel
    assert ("The machine was busy" in text) == bool(slowdown)
    assert len(data["schedule"]) > 1
    for first, last, k in data["schedule"]:
        assert f"{first if first == last else f'{first} to {last}'}  K = {k}" in text
    check = data["check"]
    assert f"{check['within_10_percent']} of the other {check['num_unfitted']}" in text
    for reader in ("peagle", "vllm", "vllm_single_k") if is_parallel else ("peagle", "vllm"):
        assert json.dumps(data["speculative_config"][reader]) in text
    (best,) = (line for line in text.splitlines() if line.strip().startswith("1 ") and "*" in line)
    speeds = [float(word.rstrip("*").replace(",", "")) for word in best.split()[1:]]
    assert best.split()[1 + speeds.index(max(speeds))].endswith("*")


@pytest.mark.parametrize(
    ("text", "numbers"), [("1-3,5, 8..9", (1, 2, 3, 5, 8, 9)), ("7,7,1", (1, 7))]
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert whole_numbers("-k", text, 64) == numbers


def test_wide_tables_are_cut() -> None:
    columns = [str(n) for n in range(23)]
    lines = tune._table("batch", {"1": columns, "2": columns}, columns)
    assert all(len(line) <= 100 for line in lines)
    assert " ".join(lines).split().count("22") == 3
