"""`peagle bench` on a tiny pair and on servers from a script."""

import copy
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.evaluation import sweep as sweeping
from peagle.evaluation.decoding import Request, Run
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.journal import BENCH_LOG
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.report import charts
from peagle.evaluation.timing import figures_of
from tests.cli.conftest import Pair, Peagle
from tests.evaluation.fake_endpoint import NUM_TOKENS, TEXT, Script, endpoint, metrics

SIZES: tuple[object, ...] = ("--limit", 2, "--max-new-tokens", 20, "--concurrency", "1,2")


@pytest.fixture
def short(tmp_path: Path) -> tuple[object, ...]:
    """Options of a sweep that takes a moment."""
    file = tmp_path / "short.jsonl"
    file.write_text('"def f(x):"\n"import"\n')
    return "--set", file, "--max-new-tokens", 8, "--concurrency", "1,2", "--repeats", 2


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PEAGLE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    with endpoint(Script(metrics=metrics(0), counts=True)) as url:
        yield url


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_whole_table(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    short: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (*pair.options, "--eagle3", pair.eagle3, *short, "-k", "2,3", "--output", tmp_path)
    given = ("bench", *command, "--objective", "itl=1000s@p50", "--ignore-eos")
    done = peagle(*given)
    assert done.status == 0, done.err
    assert "short.jsonl, 2 prompts, medians of 2 runs" in done.out
    told = [line for line in done.err.splitlines() if "warm-up" in line]
    engines = ("plain", "eagle3 K=2", "eagle3 K=3", "peagle K=2", "peagle K=3")
    assert {line.partition(": ")[2].partition(": ")[2].partition(";")[0] for line in told} == {
        f"{name} on peagle, concurrency {load}" for name in engines for load in (1, 2)
    }
    assert told[0].startswith("peagle: warm-up 1 of 10: ")
    assert told[0].endswith("; it writes 16 tokens for each request in flight")
    assert "warm-up 6 of 10: " in told[5] and "; the one before took 0:0" in told[5]
    assert "goodput of peagle K=3 on " in done.out
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert result["format_version"] == 1
    assert result["settings"]["objective"] == {"ttft_ms": None, "itl_ms": 1e6, "percentile": 50}
    assert result["provenance"]["target"] == str(pair.target)
    keys = {(c["method"], c["k"], c["concurrency"]): c for c in result["cells"]}
    arms = [("plain", 0), *((name, k) for name in ("peagle", "eagle3") for k in (2, 3))]
    assert set(keys) == {(*arm, c) for arm in arms for c in (1, 2)}
    for (method, _, concurrency), cell in keys.items():
        sent = 2 if concurrency == 1 else 3 * concurrency
        assert len(cell["repeats"]) == 2 and cell["median"]["num_tokens"] == sent * 8
        assert (cell["median"]["acceptance_length"] is None) == (method == "plain")
        assert cell["speed_up_over_plain"] > 0 and cell["meets_objective"]
    assert (tmp_path / "report.html").is_file() and (tmp_path / "results.json").is_file()
    assert (tmp_path / "throughput.png").is_file() == charts.can_draw()
    # Again: nothing is measured anew.
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    again = peagle(*given, "--format", "json")
    assert again.status == 0 and "20 measurements are there already" in again.err
    assert json.loads(again.out)["cells"] == result["cells"]


@pytest.mark.slow
def test_several_sets_have_a_pivot(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    sizes = ("--limit", 1, "--max-new-tokens", 6, "--concurrency", 1, "--repeats", 1, "-k", "1,2")
    command = ("bench", *pair.options, *sizes, "--output", tmp_path)
    done = peagle(*command, "--set", "humaneval,gsm8k")
    assert done.status == 0, done.err
    cells = json.loads((tmp_path / "throughput.json").read_text())["cells"]
    _, table = done.out.split("acceptance length and speed-up by set\n")
    shown = [line.split() for line in table.splitlines()[1:4]]
    assert [line[:2] for line in shown] == [["plain", "-"], ["peagle", "1"], ["peagle", "2"]]
    for line, arm in zip(shown, (("plain", 0), ("peagle", 1), ("peagle", 2)), strict=True):
        own = [cell for cell in cells if (cell["method"], cell["k"]) == arm]
        assert [cell["set"] for cell in own] == ["humaneval", "gsm8k"]
        assert line[3::2] == [f"{cell['speed_up_over_plain']:.2f}" for cell in own]
    assert (tmp_path / "pivot.csv").is_file()
    done = peagle("bench", *pair.options, *sizes, "--set", "humaneval")
    assert done.status == 0 and "by set" not in done.out


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["1", "all"])
def test_turns_of_conversations(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str
) -> None:
    """Figures of the second turns, from what the engine was asked and answered."""
    runs: list[tuple[list[Request], Run]] = []
    run = EngineBackend.run

    def watching(self: Any, requests: Any, *rest: Any) -> Any:
        done = run(self, requests, *rest)
        runs.append((list(requests), copy.deepcopy(done)))
        return done

    monkeypatch.setattr(EngineBackend, "run", watching)
    few = ("--set", "mt_bench", "--limit", 2, "--max-new-tokens", 6, "--concurrency", 1, "-k", 2)
    command = ("bench", *pair.options, *few, "--warm-up", 0, "--repeats", 1, "--turns", turns)
    done = peagle(*command, "--no-chat-template", "--output", tmp_path)
    assert done.status == 0, done.err
    name = "mt_bench (first turn)" if turns == "1" else "mt_bench (both turns)"
    assert done.out.startswith(f"{name}, 2 prompts, one run\n")
    result = json.loads((tmp_path / "throughput.json").read_text())
    number = 1 if turns == "1" else 2
    assert result["turns"] == {"mt_bench": {"sent": number, "most": 2}}
    assert len(runs) == 2 * number
    prompts = load_prompt_set("mt_bench", 2)
    for arm, cell in enumerate(result["cells"]):
        passes = runs[arm * number : (arm + 1) * number]
        answers = [answer for _, one in passes for answer in one.answers]
        seconds = sum(one.seconds for _, one in passes)
        median = cell["median"]
        assert (cell["set"], median["num_requests"]) == ("mt_bench", 2 * number)
        assert median["num_tokens"] == sum(len(answer.token_ids or []) for answer in answers)
        assert median["output_tokens_per_s"] == pytest.approx(median["num_tokens"] / seconds)
        drafts = [one.counters.num_drafts for _, one in passes if one.counters]
        accepted = [one.counters.num_accepted_tokens for _, one in passes if one.counters]
        if cell["k"]:
            length = 1 + sum(accepted) / sum(drafts)
            assert median["acceptance_length"] == pytest.approx(length)
        for prompt, answer, request in zip(
            prompts, passes[0][1].answers, passes[-1][0], strict=True
        ):
            first, second = prompt.turns
            wanted = first if turns == "1" else f"{first}{answer.text}\n\n{second}"
            assert request.prompt == wanted
    other = peagle(*command[:-1], "2" if turns == "1" else "1", "--output", tmp_path)
    assert other.status == 2 and "was made with turns of mt_bench" in other.err


def test_turns_at_a_chat_server(peagle: Peagle) -> None:
    script = Script()
    with endpoint(script) as url:
        few = ("--set", "mt_bench", "--limit", 1, "--concurrency", 1, "--repeats", 1)
        done = peagle("bench", "--endpoint", f"x={url}", *few, "--warm-up", 0, "--turns", "all")
    assert done.status == 0, done.err
    (prompt,) = load_prompt_set("mt_bench", 1)
    first = {"role": "user", "content": prompt.turns[0]}
    assert [body["messages"] for body in script.bodies[-2:]] == [
        [first],
        [
            first,
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": prompt.turns[1]},
        ],
    ]


@pytest.mark.slow
def test_the_cost_of_serving(
    peagle: Peagle, pair: Pair, tmp_path: Path, short: tuple[object, ...]
) -> None:
    """A price measures nothing anew."""
    command = ("bench", *pair.options, *short, "-k", "1,2", "--output", tmp_path)
    done = peagle(*command)
    assert done.status == 0 and "instances" not in done.out, done.err
    before = json.loads((tmp_path / "throughput.json").read_text())
    assert "serving-cost" not in (tmp_path / "report.html").read_text()
    done = peagle(*command, "--price-per-hour", "4.50", "--requests-per-second", "1e4")
    assert done.status == 0 and "12 measurements are there already" in done.err
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert (result["price_per_hour"], result["requests_per_second"]) == (4.5, 1e4)
    for cell, old in zip(result["cells"], before["cells"], strict=True):
        assert cell["median"] == old["median"] and old["cost_per_million_tokens"] is None
        tokens_per_hour = cell["median"]["output_tokens_per_s"] * 3600
        assert cell["cost_per_million_tokens"] * tokens_per_hour / 1e6 == pytest.approx(4.5)
        served = cell["instances"] * cell["median"]["requests_per_s"]
        assert served - cell["median"]["requests_per_s"] < 1e4 <= served
    title = "a million output tokens at 4.5 an hour, and instances for 10000 requests/s; "
    _, table = done.out.split(title + "each method with its best K\n")
    lines = [line.split() for line in table.splitlines()[1:5]]
    assert [(line[0], line[3]) for line in lines] == [
        *(("plain", "1"), ("peagle", "1"), ("plain", "2"), ("peagle", "2")),
    ]
    rows = list(csv.DictReader((tmp_path / "throughput.csv").open()))
    assert [int(row["instances"]) for row in rows] == [c["instances"] for c in result["cells"]]
    assert 'id="serving-cost"' in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_experts_of_a_mixture(
    peagle: Peagle, mixture_pair: Pair, pair: Pair, tmp_path: Path, short: tuple[object, ...]
) -> None:
    command = (*mixture_pair.options, *short, "-k", 2, "--output", tmp_path)
    done = peagle("bench", *command)
    assert done.status == 0, done.err
    cells = json.loads((tmp_path / "throughput.json").read_text())["cells"]
    touched = {(c["method"], c["concurrency"]): c["experts"] for c in cells}
    means = {key: sum(one["per_layer"]) / 4 for key, one in touched.items()}
    assert means["plain", 1] == 2 < means["plain", 2] <= means["peagle", 2] <= 6
    assert all(one["num_experts"] == 6 and one["num_steps"] > 0 for one in touched.values())
    assert done.out.splitlines()[1].endswith("experts")
    assert f"{means['peagle', 2]:.1f}/6" in done.out
    rows = list(csv.DictReader((tmp_path / "throughput.csv").open()))
    assert [float(row["experts_touched"]) for row in rows] == pytest.approx(list(means.values()))
    assert {row["num_experts"] for row in rows} == {"6"}
    page = (tmp_path / "report.html").read_text()
    assert "Experts touched per layer" in page and f"{means['plain', 2]:.1f} of 6" in page
    few = (*short, "-k", 2, "--concurrency", 1, "--repeats", 1)
    dense = peagle("bench", *pair.options, *few, "--output", tmp_path / "dense")
    assert dense.status == 0 and "experts" not in dense.out.splitlines()[1]
    columns = (tmp_path / "dense" / "throughput.csv").read_text().splitlines()[0]
    assert "linearity" in columns and "experts" not in columns
    assert "Experts touched" not in (tmp_path / "dense" / "report.html").read_text()
    cells = json.loads((tmp_path / "dense" / "throughput.json").read_text())["cells"]
    assert all(cell["experts"] is None for cell in cells)


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    short: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0

    def cut(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise KeyboardInterrupt
        return figures_of(*arguments)

    command = ("bench", *pair.options, *short, "-k", 2, "--output", tmp_path)
    monkeypatch.setattr(sweeping, "figures_of", cut)
    done = peagle(*command)
    assert done.status == 130 and "2 measurements are kept in" in done.err
    done = peagle(*command)
    assert done.status == 0 and "2 measurements are there already" in done.err
    assert made == 3 + 6
    done = peagle(*command, "--method", "ngram")
    assert done.status == 0 and "8 measurements are there already" in done.err
    done = peagle(*command, "--temperature", 1)
    assert done.status == 2
    assert "made with temperature 0.0, not 1.0" in done.err and "another --output" in done.err


def test_servers_alone(peagle: Peagle, server: str) -> None:
    with endpoint(Script(usage="last")) as other:
        ends = ("--endpoint", f"eagle3={server}", "--endpoint", f"plain={other}/v1")
        done = peagle(
            "bench", *ends, "--model", "plain=other", *SIZES, "--repeats", 2, "--format", "json"
        )
    assert done.status == 0, done.err
    result = json.loads(done.out)
    assert result["provenance"]["target"] == "m, other"
    drafted, plain = result["cells"][0], result["cells"][2]
    assert (drafted["k"], drafted["engine"], plain["k"]) == (4, server, 0)
    assert drafted["median"]["num_tokens"] == 2 * NUM_TOKENS
    assert drafted["median"]["acceptance_length"] == pytest.approx(1 + 3 / 3)
    assert drafted["speed_up_over_plain"] > 0 and plain["median"]["acceptance_length"] is None
    assert f"{other}/v1 has no page /metrics" in done.err
    assert f"{other}/v1 does not tell the tokens of a chunk" in done.err


def test_methods_of_all_kinds(
    peagle: Peagle, pair: Pair, server: str, short: tuple[object, ...]
) -> None:
    few = (*short, "-k", 2, "--concurrency", 1, "--format", "json")
    more = ("--method", "ngram", "--method", f"other={pair.peagle}")
    done = peagle("bench", *pair.options, *more, "--endpoint", f"theirs={server}", *few)
    assert done.status == 0, done.err
    found = {cell["method"]: cell["source"] for cell in json.loads(done.out)["cells"]}
    assert found == {
        **{"plain": "", "peagle": str(pair.peagle), "other": str(pair.peagle)},
        **{"ngram": "", "theirs": ""},
    }
    done = peagle("bench", *pair.options, "--endpoint", f"peagle={server}", *few)
    assert done.status == 2 and "give the endpoint another name" in done.err


@pytest.mark.slow
def test_a_window_of_the_head(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """It is a part of what a sweep is of: one that goes on must have the same."""
    some = (*pair.options, *SIZES, "--repeats", 1, "-k", 2, "--concurrency", 1)
    done = peagle("bench", *some, "--draft-window", 8, "--output", tmp_path)
    assert done.status == 0, done.err
    done = peagle("bench", *some, "--draft-window", 9, "--output", tmp_path)
    assert done.status == 2 and "Give the same settings to go on with it" in done.err
    assert '"draft_window": 8' in (tmp_path / BENCH_LOG).read_text()


@pytest.mark.slow
def test_drawn_chains_are_a_part_of_a_sweep(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """They lead the trees of the P-EAGLE head; chains, and other heads' trees, go without."""
    some = (*pair.options, *SIZES, "--repeats", 1, "-k", 2, "--concurrency", 1, "--temperature", 1)
    some = (*some, "--parallel-drafting-spec", '{"max_nodes": 3}', "--output", tmp_path)
    done = peagle("bench", *some, "--drawn-chains-from", 0.5)
    assert done.status == 0, done.err
    done = peagle("bench", *some, "--drawn-chains-from", "never")
    assert done.status == 2 and "Give the same settings to go on with it" in done.err
    assert '"drawn_chains_from": 0.5' in (tmp_path / BENCH_LOG).read_text()


def test_what_a_chat_server_is_sent(peagle: Peagle) -> None:
    script = Script()
    with endpoint(script) as url:
        more = ("--no-thinking", "--extra-body", '{"top_k": 20}')
        done = peagle("bench", "--endpoint", f"x={url}", *SIZES, "--repeats", 1, *more)
    assert done.status == 0, done.err
    body = script.bodies[-1]
    assert body["messages"][0]["role"] == "user" and body["max_tokens"] == 20
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["top_k"] == 20


def test_failing_requests_are_told(peagle: Peagle, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"fine"\n"bad [fail]"\n')
    with endpoint(Script()) as url:
        some = ("--set", tmp_path / "prompts.jsonl", "--concurrency", 2, "--repeats", 1)
        done = peagle("bench", "--endpoint", f"x={url}", *some)
    assert done.status == 0 and "a request failed: 500: planned" in done.err
    header, row = done.out.splitlines()[1:3]
    assert header.split()[-1] == "errors" and row.split()[-1] == "3"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-k", "3,x"), "-k is '3,x'; expected whole numbers"),
        (("--concurrency", "0"), "--concurrency is '0'"),
        (("--repeats", 0), "--repeats is 0; expected at least 1"),
        (("--set", "humanevil"), "Did you mean humaneval"),
        (("--set", "humaneval,"), "--set is 'humaneval,'"),
        (("--objective", "500"), "The objective is '500'"),
        (("--endpoint", "http://127.0.0.1:1"), "--endpoint: 'http://127.0.0.1:1' is not NAME=URL"),
        (("--endpoint", "x=u", "--endpoint", "x=v"), "'x=v' gives the name 'x' again"),
        (("--model", "x="), "--model: 'x=' is not NAME=MODEL"),
        (("--endpoint", "x=http://127.0.0.1:1"), "No server answers at http://127.0.0.1:1"),
        (("--model", "x=y"), "there is no such one"),
        (("--model", "org/x"), "name a model here with --target org/x"),
        (("--no-chat-template", "--thinking"), "no thinking mode"),
        (("--extra-body", "[]"), "is not a JSON object"),
        (("--extra-body", '{"top_k": 20}'), "which has no effect without a server; add --endpoint"),
        (("--extra-body", "{}"), "--extra-body is {}, which has no effect without a server"),
        (("--turns", "0"), "--turns is '0'; expected a whole number of at least 1, or all"),
        (("--turns", "both"), "--turns is 'both'; expected a whole number"),
        (("--set", "mt_bench", "--turns", 3), "no prompt of 'mt_bench' has more than 2 turns"),
        (("--price-per-hour", "$4.50"), "--price-per-hour is '$4.50'; expected a number above 0"),
        (("--price-per-hour", "0"), "--price-per-hour is '0'; expected a number above 0"),
        (("--price-per-hour", "nan"), "without a unit. Give one like 4.50."),
        (("--price-per-hour", "1e7"), "at most 1,000,000"),
        (("--requests-per-second", "-3"), "--requests-per-second is '-3'; expected a number"),
        (("--requests-per-second", "inf"), "Give one like 20."),
        (("--draft-window", -1), "draft_window is -1; expected a whole number, 0 for no"),
        (("--drawn-chains-from", 0.5), "no trees of a P-EAGLE head are measured"),
        (
            ("--draft-window", 9, "--engine", "vllm"),
            "the windows of a head from its config",
        ),
        (("--target", "./nowhere"), "nowhere"),
    ],
)
def test_mistakes(peagle: Peagle, options: tuple[object, ...], told: str) -> None:
    done = peagle("bench", *options)
    assert done.status == 2 and told in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_a_mix_of_requests(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """By engines here, and at a server, whose requests have the fields."""
    mix = tmp_path / "mix.json"
    entries = [
        {"every": 2, "sampling": {"repetition_penalty": 1.1}},
        {"every": 4, "sampling": {"logprobs": 2}},
        {"every": 4, "sampling": {"structured_output": {"kind": "regex", "source": "a+"}}},
    ]
    mix.write_text(json.dumps(entries))
    script = Script(metrics=metrics(0), counts=True)
    sizes = ("--limit", 4, "--max-new-tokens", 6, "--concurrency", 2, "--repeats", 1, "-k", 2)
    with endpoint(script) as url:
        command = (*pair.options, *sizes, "--endpoint", f"other={url}", "--mix", mix)
        done = peagle("bench", *command, "--set", "humaneval", "--output", tmp_path / "out")
    assert done.status == 0, done.err
    assert "a request failed" not in done.err
    result = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert result["settings"]["mix"] == entries
    assert all(one["errors"] == 0 for cell in result["cells"] for one in cell["repeats"])
    asked = [
        {name for name in ("repetition_penalty", "logprobs", "response_format") if name in body}
        for body in script.bodies[-6:]
    ]
    # Of each four: a penalty, log-probabilities, a penalty and a structure, and nothing.
    assert sorted(map(sorted, asked)) == [
        [],
        ["logprobs"],
        ["logprobs"],
        ["repetition_penalty"],
        ["repetition_penalty"],
        ["repetition_penalty", "response_format"],
    ]
    mix.write_text('[{"every": 2, "sampling": {"penalty": 1.1}}]')
    done = peagle("bench", *pair.options, *sizes, "--mix", mix)
    assert done.status == 2
    assert "--mix: entry 1: sampling has 'penalty'; expected some of max_tokens" in done.err
