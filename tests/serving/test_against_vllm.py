"""The comparison with vLLM: its requests, its command lines, its table, and a run on the CPU.

vLLM is not here: a STAND-IN takes the place of its client. It reads the same command line, sends
real requests to a real `peagle serve`, and writes a file with the same fields.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.fake_vllm import install
from peagle.backends.vllm.installation import VllmInstallation
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.chat import render_chat
from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.target import load_tokenizer
from tests.docs.command_line import check_peagle

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "serving"
SCRIPT = FOLDER / "against_vllm.py"
if not SCRIPT.is_file():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)

# Written by the client of vLLM 0.26.0 against `peagle serve` on a CPU.
RECORDED = ROOT / "tests" / "fixtures" / "vllm_0_26_bench_serve.json"
# The options of vllm/benchmarks/serve.py and its data sets that 0.26 and 0.32 both have.
CLIENT = """
import asyncio, json, os, time
from urllib.request import Request, urlopen
from concurrent.futures import ThreadPoolExecutor

def add_cli_args(parser):
    for name in ("base-url", "model", "tokenizer", "dataset-name", "dataset-path", "result-dir",
                 "result-filename", "percentile-metrics", "metric-percentiles"):
        parser.add_argument("--" + name, required=True)
    for name in ("custom-output-len", "num-prompts", "ready-check-timeout-sec", "max-concurrency",
                 "seed"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--request-rate", type=float, default=float("inf"))
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--goodput", nargs="+")
    parser.add_argument("--ignore-eos", action="store_true")
    for name in ("skip-chat-template", "disable-shuffle", "disable-tqdm", "save-result"):
        parser.add_argument("--" + name, action="store_true", required=True)

def send(args, request):
    body = {"model": args.model, "prompt": request["prompt"], "repetition_penalty": 1.0,
            "max_tokens": request["output_tokens"], "logprobs": None, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": args.ignore_eos,
            "temperature": args.temperature}
    asked = Request(args.base_url + "/v1/completions", json.dumps(body).encode(),
                    {"Content-Type": "application/json"})
    usage = {}
    with urlopen(asked) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage

def main(args):
    print("a stand-in of vLLM's client")
    if os.environ.get("STAND_IN") == "ends":
        raise SystemExit("out of memory")
    with open(args.dataset_path) as file:
        made = [json.loads(line) for line in file]
    assert len(made) == args.num_prompts and args.custom_output_len == -1
    with ThreadPoolExecutor(args.max_concurrency or 8) as pool:
        usages = list(pool.map(lambda one: send(args, one), made))
    figures = dict.fromkeys(("duration", "request_throughput", "output_throughput"), 2.5)
    figures["request_goodput"] = 1.0 if args.goodput == ["ttft:500", "tpot:20"] else None
    figures |= {f"p{p}_{metric}_ms": 1.0 for p in args.metric_percentiles.split(",")
                for metric in args.percentile_metrics.split(",")}
    figures |= {"completed": len(usages), "failed": 0,
                "total_input_tokens": sum(one["prompt_tokens"] for one in usages),
                "total_output_tokens": sum(one["completion_tokens"] for one in usages)}
    with open(os.path.join(args.result_dir, args.result_filename), "w") as file:
        json.dump(figures, file)
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts as modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        names = ("against_vllm", "contenders", "traffic", "comparison")
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python with a package called vllm that has the stand-in's client."""
    folder = tmp_path_factory.mktemp("vllm")
    python = install(folder, "0.26.0")
    for path, text in (("vllm/benchmarks/serve.py", CLIENT), ("pandas/__init__.py", "")):
        (folder / "site" / path).parent.mkdir(exist_ok=True)
        (folder / "site" / path).write_text(text)
    return python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair, arranged as `prepare` does it."""
    folder = tmp_path_factory.mktemp("pair")
    for name, source in (
        *(("target", BUNDLED_TARGET), ("peagle", BUNDLED_PEAGLE), ("eagle3", BUNDLED_EAGLE3)),
    ):
        (folder / name).symlink_to(source)
    return folder


@pytest.fixture(scope="module")
def pair(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair with its prompts, as `prepare --pair` writes it."""
    folder = tmp_path_factory.mktemp("real")
    assert scripts.against_vllm.prepare(prepare_arguments(scripts, folder)) == 0
    return folder


def prepare_arguments(scripts: SimpleNamespace, folder: Path) -> Namespace:
    return arguments(scripts, "prepare", "--model", folder, "--pair", "bundled")


def start(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def arguments(scripts: SimpleNamespace, *words: object) -> Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["against_vllm.py", *map(str, words)])
        return scripts.against_vllm.parse_args()


# ---- requests ----


def test_a_word_is_a_token_of_the_tokenizer_folder(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.syspath_prepend(FOLDER.parent)
    import shapes  # type: ignore[import-not-found]

    size = shapes.SHAPES["qwen3-8b"].config["vocab_size"]
    shapes.make_tokenizer(size).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size == 151_936
    for made in scripts.traffic.random_requests("100/7", 3, size, seed=0):
        ids = tokenizer(made["prompt"]).input_ids
        assert len(ids) == 100 and min(ids) > 0, "0 is what is not in the vocabulary"
        assert made["output_tokens"] == 7


def test_requests_are_those_of_their_seed(scripts: SimpleNamespace) -> None:
    requests = scripts.traffic.random_requests
    made = requests("sharegpt", 400, 1000, 0)
    assert made == requests("sharegpt", 400, 1000, 0) and made[:9] == requests(
        "sharegpt", 9, 1000, 0
    )
    assert made[:9] != requests("sharegpt", 9, 1000, 1)
    low, high = scripts.traffic.SHAREGPT_BOUNDS
    lengths = [(len(one["prompt"].split()), one["output_tokens"]) for one in made]
    assert all(low <= length <= high for pair in lengths for length in pair)
    for side, mean in enumerate(scripts.traffic.SHAREGPT_MEANS):
        found = sum(pair[side] for pair in lengths) / len(lengths)
        assert 0.7 * mean < found < 1.1 * mean, "the upper bound cuts long ones"


def test_loads(scripts: SimpleNamespace) -> None:
    load = scripts.traffic.Load
    assert load.parse("128/256:c16") == load("128/256", concurrency=16)
    assert load.parse("sharegpt:r0.5") == load("sharegpt", share=0.5)
    for text in (*scripts.against_vllm.LOADS, *scripts.against_vllm.REAL_LOADS):
        assert str(load.parse(text)) == text
    args = Namespace(rounds=4, seconds=30.0, least_requests=None)
    counts = {"128/256:c1": 8, "128/256:c16": 64, "sharegpt:r0.5": 150}
    counts |= {"prompts:c1": 48, "prompts:c64": 256}
    assert {x: scripts.traffic.num_requests(load.parse(x), 5.0, args) for x in counts} == counts


def test_a_real_pair_is_written_once(scripts: SimpleNamespace, pair: Path) -> None:
    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in pair.glob("*/*")}

    written = files()
    assert scripts.against_vllm.prepare(prepare_arguments(scripts, pair)) == 0
    assert files() == written and not list(pair.glob("*.part"))
    for name, source in (
        *(("target", BUNDLED_TARGET), ("peagle", BUNDLED_PEAGLE), ("eagle3", BUNDLED_EAGLE3)),
    ):
        for file in source.iterdir():
            assert (pair / name / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="holds a real pair; take another folder"):
        scripts.against_vllm.prepare(arguments(scripts, "prepare", "--model", pair))


def test_real_prompts_are_those_of_a_chat(scripts: SimpleNamespace, pair: Path) -> None:
    """The text that the client sends is tokenised as `peagle bench` tokenises its messages."""
    sent = scripts.traffic.real_requests(pair, 250)
    humaneval, mt_bench = (load_prompt_set(name) for name in ("humaneval", "mt_bench"))
    first = [{"prompt": one.text, "output_tokens": 256} for one in (humaneval[0], mt_bench[0])]
    assert sent[:2] == sent[244:246] == first, "without a chat template, as text"
    assert {one["prompt"] for one in sent} == {one.text for one in (*humaneval, *mt_bench)}
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    texts = scripts.against_vllm.real_prompts(tokenizer)
    assert len(texts) == 244
    for text, one in zip(texts, (humaneval[0], mt_bench[0]), strict=False):
        assert tokenizer(text).input_ids == render_chat(tokenizer, one.messages)


# ---- command lines ----


@pytest.mark.parametrize("kind", ["random", "real"])
def test_both_servers_are_asked_for_the_same(
    scripts: SimpleNamespace, model: Path, pair: Path, kind: str
) -> None:
    """Our command line takes ours; a configuration that both have is the same, key by key."""
    against = scripts.contenders
    args = arguments(scripts, "run", "--model", model if kind == "random" else pair)
    installation = VllmInstallation(Path("python"), "0.26.0")
    random_ones = (*against.VARIANTS, "peagle/k3", "peagle/k5", "peagle/eagle3-k3")
    real_ones = (*against.REAL_VARIANTS, "vllm/k7-alone", "vllm/by-load")
    for name in random_ones if kind == "random" else real_ones:
        variant = against.Variant.parse(name)
        if variant.side == "peagle":
            words, _ = against.peagle_command(variant, args, 8123)
            assert words[1:3] == ["-m", "peagle"]
            options = check_peagle(words[3:]).params
            assert options["port"] == 8123 and options["served_model_name"] == "model"
            config = options["speculative_config"]
            assert (config is None) == (variant.k == 0) == bool(options["no_speculation"])
            if config:
                found = SpeculativeConfig.parse(config)
                scheduled = found.num_speculative_tokens_per_batch_size
                assert bool(scheduled) == variant.is_scheduled
                assert (found.synthetic_acceptance_rates is None) == (kind == "real")
                assert found.correction != name.endswith("-alone")
                if name == "peagle/tree15":
                    assert found.parallel_drafting_spec is not None
                    shape = CandidateTrees.parse(found.parallel_drafting_spec)
                    assert shape == CandidateTrees(15, 7, 15)
                else:
                    assert found.parallel_drafting_spec is None
                    assert found.k == variant.k
            continue
        words, variables = against.vllm_command(variant, args, 8123, installation)
        options = {key: words[words.index(key) + 1] for key in words if key.startswith("--")}
        assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
        assert options["--max-num-seqs"] == "128" and options["--max-model-len"] == "8192"
        assert "--no-enable-prefix-caching" in words and "--middleware" not in words
        assert options["--served-model-name"] == "model" and options["--port"] == "8123"
        config = json.loads(options.get("--speculative-config", "null"))
        ours = against.speculation(variant, args)
        parallel = {"parallel_drafting": True} if variant.head == "peagle" else {}
        left_out = {"correction"}  # the plugin's variable says it
        assert config == (ours and {k: v for k, v in ours.items() if k not in left_out} | parallel)
        if variant.head == "peagle":
            assert variables["PEAGLE_VLLM"] == ("0" if name.endswith("-alone") else "1")
        if config:
            assert ("synthetic_acceptance_rates" in config) == (kind == "random")
        assert ("VLLM_USE_V2_MODEL_RUNNER" in variables) == bool(parallel)


def test_a_head_has_the_same_rates_at_every_k(scripts: SimpleNamespace, model: Path) -> None:
    against = scripts.contenders
    args = arguments(scripts, "run", "--model", model, "--al", "3.94", "--eagle3-al", "2.65")

    def rates(name: str) -> list[float]:
        config = against.speculation(against.Variant.parse(name), args)
        return config["synthetic_acceptance_rates"]

    assert 1 + sum(rates("vllm/k7")) == pytest.approx(3.94)
    assert rates("vllm/k3") == rates("vllm/k7")[:3] == rates("peagle/k7")[:3]
    assert rates("peagle/by-load") == rates("peagle/k7")
    assert 1 + sum(rates("vllm/eagle3-k3")) == pytest.approx(2.65)


def test_a_window_is_of_our_heads_alone(scripts: SimpleNamespace, model: Path) -> None:
    against = scripts.contenders
    args = arguments(scripts, "run", "--model", model, "--draft-window", "256")
    found = {
        name: (against.speculation(against.Variant.parse(name), args) or {}).get("draft_window")
        for name in ("peagle/by-load", "peagle/k7", "peagle/plain", "vllm/k7")
    }
    assert found == {
        **dict.fromkeys(("peagle/plain", "vllm/k7")),
        **dict.fromkeys(("peagle/by-load", "peagle/k7"), 256),
    }


# ---- results ----


def row(variant: str, load: str, speed: float, **more: Any) -> dict[str, Any]:
    mix, _, end = load.partition(":")
    times = {f"p{p}_{m}_ms": float(p) for m in ("ttft", "itl", "tpot", "e2el") for p in (50, 99)}
    counts = {"request_throughput": speed / 100, "request_goodput": 1.5, "failed": 0}
    return {
        "variant": variant,
        "load": load,
        "mix": mix,
        "concurrency": int(end[1:]) if end[0] == "c" else None,
        "rate": None,
        "tokens_a_step": None,
        "result": {"output_throughput": speed, **counts, **times},
        "goodput": ["ttft:500", "tpot:20"],
        "server": variant.split("/")[0],
        "model": "qwen3-8b",
        "environment": {"device": "card A", "commit": "abc"},
        **more,
    }


ROWS = [
    row("vllm/k3", "128/256:c1", 400.0, tokens_a_step=2.86),
    row("vllm/plain", "128/256:c1", 100.0),
    row("peagle/k7", "128/256:c1", 500.0, tokens_a_step=3.94),
    row("peagle/k7", "128/256:c16", 900.0),
    row("vllm/k3", "sharegpt:r0.5", 50.0, rate=2.0),
    row("peagle/k7", "sharegpt:r0.5", 51.0, rate=2.0),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_a_file_of_vllms_client_is_read(scripts: SimpleNamespace, tmp_path: Path) -> None:
    read = scripts.comparison.read_client_result
    found, written = read(RECORDED), json.loads(RECORDED.read_text())
    assert found.items() <= written.items() and len(found) == 16
    assert found["completed"] == 8 and found["total_output_tokens"] == 48
    del written["p99_itl_ms"]
    (tmp_path / "less.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="has no p99_itl_ms"):
        read(tmp_path / "less.json")
    with pytest.raises(UserError, match="is not readable"):
        read(tmp_path / "none.json")


def test_one_table_and_one_picture(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    files = [write(tmp_path / "a.jsonl", ROWS[:3]), write(tmp_path / "b.jsonl", ROWS[3:])]
    plot = tmp_path / "plot.svg"
    monkeypatch.setattr(sys, "argv", ["x", "table", *map(str, files), "--plot", str(plot)])
    assert scripts.against_vllm.main() == 0
    every, _, best = capsys.readouterr().out.rpartition("\n\n")
    assert best.splitlines()[2:] == ["| 128/256:c1 | peagle/k7 | 500 | vllm/k3 | 400 | 1.25 |"]
    head, _, *lines = every.splitlines()
    assert "SYNTHETIC" in head and "card A" in head and "TTFT at most 500 ms" in head
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [line[:4] for line in cells] == [
        ["128/256:c1", "vllm/k3", "400", "1.00"],
        ["128/256:c1", "vllm/plain", "100", "0.25"],
        ["128/256:c1", "peagle/k7", "500", "1.25"],
        ["128/256:c16", "peagle/k7", "900", ""],
        ["sharegpt:r0.5 (2 a second)", "vllm/k3", "50", ""],
        ["sharegpt:r0.5 (2 a second)", "peagle/k7", "51", ""],
    ]
    times = ["50.0", "99.0", "50.00", "99.00", "50.00", "99.00"]
    assert cells[2][4:] == ["1.50", *times, "3.94", "0"]
    text = plot.read_text()
    assert "SYNTHETIC" in text
    assert all(word in text for word in ("128/256", "sharegpt", "TTFT p99, ms", "peagle/k7"))


def test_real_text_and_random_weights_have_no_table_together(scripts: SimpleNamespace) -> None:
    real = [row("peagle/tree15", "prompts:c4", 50.0), row("vllm/k3", "prompts:c4", 20.0)]
    text = scripts.comparison.table(real)
    assert "SYNTHETIC" not in text and "real acceptance" in text
    assert "| prompts:c4 | peagle/tree15 | 50 | vllm/k3 | 20 | 2.50 |" in text
    with pytest.raises(UserError, match="of real text and of random weights"):
        scripts.comparison.table([*real, *ROWS])


def test_arrivals_follow_vllms_closed_loop(scripts: SimpleNamespace) -> None:
    arrivals = scripts.comparison.arrivals
    closed = [row("vllm/k3", "9/9:c1", 400.0), row("vllm/k3", "9/9:c64", 700.0)]
    closed += [row("peagle/k7", "9/9:c64", 900.0), row("vllm/k3", "8/8:c64", 800.0)]
    assert arrivals(closed, "9/9:r0.5", "9/9", 0.5, None) == 3.5
    assert arrivals(closed, "9/9:r0.5", "9/9", 0.5, 20.0) == 10.0
    fixed = [row("vllm/k3", "9/9:r0.5", 1.0, rate=3.0)]
    assert arrivals(closed + fixed, "9/9:r0.5", "9/9", 0.5, None) == 3.0
    with pytest.raises(UserError, match=r"run a vLLM server with 7/7:cN first"):
        arrivals(closed, "7/7:r0.5", "7/7", 0.5, None)


# ---- runs ----


@pytest.mark.slow
def test_a_model_is_prepared_once(scripts: SimpleNamespace, tmp_path: Path) -> None:
    words = ("prepare", "--model", tmp_path / "tiny", "--shape", "tiny", "--device", "cpu")

    def prepared() -> dict[Path, int]:
        assert scripts.against_vllm.prepare(arguments(scripts, *words)) == 0
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}

    files = prepared()
    assert prepared() == files
    names = {path.relative_to(tmp_path / "tiny").as_posix() for path in files}
    assert {"target/tokenizer.json", "peagle/config.json", "eagle3/model.safetensors"} <= names


@pytest.mark.slow
def test_a_run_on_the_cpu(stand_in: Path, model: Path, tmp_path: Path) -> None:
    """`peagle serve` is real, vLLM's client is a stand-in."""
    results = tmp_path / "results.jsonl"
    words = [
        *("run", "--model", model, "--vllm-python", stand_in, "--results", results),
        *("--logs", tmp_path / "logs", "--variants", "peagle/k3", "--saturation", "8"),
        *("--loads", "2/5:r0.5,2/6:c2", "--rounds", "2", "--seconds", "2"),
        *("--max-num-seqs", "4", "--max-model-len", "256"),
        *("--peagle-args", "--device cpu --threads 1"),
    ]
    done = start(*words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(one["load"], one["rate"]) for one in rows] == [("2/6:c2", None), ("2/5:r0.5", 4.0)]
    for one, tokens in zip(rows, (6, 5)):
        assert one["result"]["completed"] == 8
        assert one["result"]["total_output_tokens"] == 8 * tokens
        assert 1 <= one["tokens_a_step"] <= 4, "read from the server's counters"
        assert one["variant"] == "peagle/k3" and "peagle serve" in one["command"]
        assert {"device", "commit"} <= one["environment"].keys()
    assert "stand-in" in (tmp_path / "logs" / "client.log").read_text()
    again = start(*words)
    assert again.returncode == 0 and again.stdout == "", "all of it is there already"
    shown = start("table", results)
    assert shown.returncode == 0 and shown.stdout.count("| peagle/k3 |") == 2


@pytest.mark.slow
def test_a_run_of_a_real_pair(stand_in: Path, pair: Path, tmp_path: Path) -> None:
    """The drafts are those of the head: an output is longer than its steps, and ends with EOS."""
    results = tmp_path / "results.jsonl"
    words = [
        *("run", "--model", pair, "--vllm-python", stand_in, "--results", results),
        *("--logs", tmp_path / "logs", "--variants", "peagle/tree15"),
        *("--loads", "prompts:c2", "--rounds", "1", "--least-requests", "4"),
        *("--max-num-seqs", "4", "--max-model-len", "1024"),
        *("--peagle-args", "--device cpu --threads 1"),
    ]
    done = start(*words)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert found["variant"] == "peagle/tree15" and found["result"]["completed"] == 4
    assert found["result"]["total_output_tokens"] < 4 * 256, "an output ends with its text"
    assert found["tokens_a_step"] > 4
    shown = start("table", results)
    assert shown.returncode == 0 and "real acceptance" in shown.stdout


def test_a_server_that_does_not_start(stand_in: Path, model: Path, tmp_path: Path) -> None:
    words = ["run", "--model", model, "--vllm-python", stand_in, "--logs", tmp_path / "logs"]
    words += ["--variants", "vllm/plain", "--loads", "2/2:c1", "--results", tmp_path / "r.jsonl"]
    done = start(*words, FAKE_VLLM="crash")
    assert done.returncode == 1
    log = tmp_path / "logs" / "vllm-plain.log"
    assert done.stderr == f"error: vllm/plain: it is not ready; {log} says why\n"
    assert not (tmp_path / "r.jsonl").exists()


def test_a_run_that_is_cut_off_leaves_no_server(
    stand_in: Path, model: Path, tmp_path: Path
) -> None:
    words = ["run", "--model", model, "--vllm-python", stand_in, "--logs", tmp_path / "logs"]
    words += ["--variants", "vllm/plain", "--loads", "2/2:c1", "--results", tmp_path / "r.jsonl"]
    # The stand-in's server cannot do without the guard.
    words += ["--vllm-args", "--middleware peagle.serving.vllm_guard.Guard"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAKE_VLLM_LOAD_S": "3600"},
        stdout=subprocess.DEVNULL,
    )
    log = tmp_path / "logs" / "vllm-plain.log"
    try:
        end = time.monotonic() + 240
        while not (log.exists() and "ready" in log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(120) == 143
    finally:
        process.kill()
    assert log.read_text().splitlines()[-2:] == ["asked to end", "ended in order"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--variants sglang/k3", "No server 'sglang/k3'; there are vllm/k3, vllm/k5"),
        ("--variants vllm/tree15", "No server 'vllm/tree15'"),
        ("--variants peagle/eagle3-k3-alone", "No server 'peagle/eagle3-k3-alone'"),
        ("--variants peagle/tree15", "The server peagle/tree15 needs a real pair; run prepare"),
        ("--loads prompts:c4", "The load is 'prompts:c4', and --model holds random weights"),
        ("--model PAIR --loads 9/9:c1", "--model holds a real pair; take prompts:cN or"),
        ("--least-requests 0", "--least-requests is 0; expected more than 0"),
        ("--loads 128:c4", "The load is '128:c4'; expected MIX:cN"),
        ("--loads sharegpt:r0", "The load is 'sharegpt:r0'"),
        ("--model nowhere", "--model is 'nowhere', without target; run prepare first."),
        ("--vllm-python PYTHON", "--vllm-python is 'PYTHON', which has no vLLM"),
        ("--vllm-python BARE", "has no pandas, which its client reads requests with"),
        ("--variants peagle/k3 --loads 9/9:r0.5", "The load 9/9:r0.5 needs vLLM's saturation"),
        ("--results OTHER", "has results of 'card A', and this is 'cpu': times of two cards"),
        ("--results RECORDED", "Line 1 of"),
        ("--goodput itl:3", "--goodput is 'itl:3'; expected limits in ms"),
        ("--rounds 0", "--rounds is 0; expected more than 0"),
        ("--al 9", "--al is 9.0; expected 1 to 8"),
    ],
)
def test_mistakes_are_named(
    scripts: SimpleNamespace,
    stand_in: Path,
    model: Path,
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    message: str,
) -> None:
    names = {
        "PYTHON": sys.executable,
        "OTHER": str(write(tmp_path / "other.jsonl", ROWS)),
        "RECORDED": str(RECORDED),
        "PAIR": str(pair),
        "BARE": str(tmp_path / "bare" / "bin" / "python"),
    }
    if "BARE" in words:
        install(tmp_path / "bare", "0.26.0")
        pandas = tmp_path / "bare" / "site" / "pandas"
        pandas.mkdir()
        (pandas / "__init__.py").write_text("raise ImportError")
    for name, value in names.items():
        words, message = words.replace(name, value), message.replace(name, value)
    given = ["run", "--model", str(model), "--vllm-python", str(stand_in), *words.split()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts.against_vllm.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["against_vllm.py", *given])
    with pytest.raises(UserError) as error:
        scripts.against_vllm.main()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_mistake_ends_the_process_with_status_2(tmp_path: Path) -> None:
    done = start("table", tmp_path / "none.jsonl")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: The results ") and done.stderr.count("\n") == 1
    cards = [ROWS[0], {**ROWS[1], "environment": {"device": "card B", "commit": "abc"}}]
    done = start("table", write(tmp_path / "two.jsonl", cards))
    assert done.returncode == 2 and "has results of 'card B'" in done.stderr


def test_a_client_that_ends_is_told(
    scripts: SimpleNamespace,
    stand_in: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAND_IN", "ends")
    traffic, log = scripts.traffic, tmp_path / "client.log"
    args = arguments(scripts, "run", "--model", model)
    made = traffic.random_requests("2/2", 1, 512, 0)
    with traffic.Client(VllmInstallation(stand_in, "0.26.0"), log) as client:
        for _ in range(2):  # then its pipe is broken
            with pytest.raises(UserError, match=r"vLLM's client ended; .*client\.log says why"):
                client.bench(traffic.Load("2/2", concurrency=1), None, made, "http://x", args)
    assert "out of memory" in log.read_text()
