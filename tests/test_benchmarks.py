"""The throughput benchmark on the tiny shape: its output, its refusals, its measurements."""

import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from peagle import LLM
from peagle.bundled import BUNDLED_EAGLE3
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.engine import LLMEngine
from peagle.engine.stats import GraphTimes
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPT = FOLDER / "throughput.py"
if not SCRIPT.is_file():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)


@pytest.fixture(scope="module")
def throughput() -> Iterator[ModuleType]:
    """The script as a module."""
    before = set(sys.modules)
    scripts = {path.stem: str(path) for path in FOLDER.glob("*.py")}
    others = [name for name in before & set(scripts) if sys.modules[name].__file__ != scripts[name]]
    assert not others, "another module has the name of a script"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import throughput  # type: ignore[import-not-found]

        yield throughput
    for name in set(scripts) & set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def run(
    throughput: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """run(options) -> (exit status, stdout, stderr), in this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*options: str) -> tuple[Any, str, str]:
        words = ["--shape", "tiny", "--device", "cpu", "--prompt", "6", *options]
        monkeypatch.setattr(sys, "argv", ["throughput.py", *words])
        status: Any = 0
        try:
            throughput.run_guarded(throughput.main)
        except SystemExit as ended:
            status = ended.code
        stdout, stderr = capsys.readouterr()
        return status, stdout, stderr

    return run


def result_of(stdout: str) -> dict[str, Any]:
    """The RESULT line, of which there is one; NaN and Infinity are no JSON."""
    (line,) = (line for line in stdout.splitlines() if line.startswith("RESULT"))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line.removeprefix("RESULT "), parse_constant=refuse)


# ---- what it prints ----

CONCURRENCY, OUT, REPEATS, K, LENGTH = (2, 16), 200, 2, 3, 2.5


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_result_of_a_run(run: Any, method: str) -> None:
    options = ["--method", method, "--k", str(K), "--al", str(LENGTH), "--prompt", "8"]
    status, stdout, stderr = run(
        *options, "--conc", "2,16", "--out", str(OUT), "--repeats", str(REPEATS)
    )
    assert status == 0, stderr
    result = result_of(stdout)
    drafts = method != "none"
    expected = {
        "synthetic": True,
        "shape": "tiny",
        "method": method,
        "k": K if drafts else 0,
        "al_set": LENGTH if drafts else 1.0,
        "prompt": 8,
        "out": OUT,
    }
    assert {name: result[name] for name in expected} == expected
    assert {"commit", "device", "torch"} <= result["environment"].keys()
    assert result["first_token_s"] > 0
    for name in ("tps", "runs", "step_ms"):
        assert list(result[name]) == ["2", "16"]
    for concurrency, speed in result["tps"].items():
        runs = result["runs"][concurrency]
        assert len(runs) == REPEATS
        assert min(runs) <= speed <= max(runs) and min(runs) > 0
    # Every line that bears a figure says that it is made up.
    cells = [line for line in stdout.splitlines() if "tps" in line]
    assert len(cells) == len(CONCURRENCY) + 1
    assert all("synthetic" in line for line in cells)
    if drafts:
        assert abs(result["al"] - LENGTH) < acceptance_error(num_tokens=REPEATS * 18 * OUT) < 0.1
    else:
        assert result["al"] == 1.0


def acceptance_error(num_tokens: int) -> float:
    """Four standard errors of the mean acceptance length over so many tokens.

    A step accepts a drafts with P(a >= i) = p^i, hence E[a^2] = sum of (2i - 1) p^i.
    """
    p = next(x / 1e4 for x in range(10_001) if sum((x / 1e4) ** i for i in range(K + 1)) >= LENGTH)
    mean = sum(p**i for i in range(1, K + 1))
    variance = sum((2 * i - 1) * p**i for i in range(1, K + 1)) - mean**2
    return 4 * math.sqrt(variance / (num_tokens / LENGTH))


def test_a_mix_of_rules(run: Any) -> None:
    mix = SCRIPT.parent / "mix.json"
    options = ["--method", "peagle", "--k", "3", "--al", "2", "--conc", "3", "--out", "8"]
    status, stdout, stderr = run(*options, "--repeats", "1", "--mix", str(mix))
    assert status == 0, stderr
    result = result_of(stdout)
    assert result["mix"] == json.loads(mix.read_text())
    assert result["tps"]["3"] > 0 and result["al"] > 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_experts_of_a_published_format(run: Any) -> None:
    options = ["--method", "peagle", "--k", "3", "--al", "2", "--conc", "1", "--out", "3"]
    status, stdout, stderr = run("--shape", "tiny-experts", *options, "--repeats", "1")
    assert status == 0, stderr
    result = result_of(stdout)
    assert result["shape"] == "tiny-experts" and result["tps"]["1"] > 0
    assert 1 < result["al"] <= 4


@pytest.mark.parametrize("k", [1, 3, 7, MAX_SPECULATIVE_TOKENS])
def test_rates_add_up_to_the_acceptance_length(throughput: ModuleType, k: int) -> None:
    for length in (1.0, 1.5, (k + 2) / 2, k + 1):
        rates = throughput.acceptance_rates(length, k)
        assert len(rates) == k
        assert 1 + sum(rates) == pytest.approx(length, abs=1e-6)
        assert all(0 <= later <= rate <= 1 for rate, later in pairwise(rates))
        if rates[0] > 0.1:
            steps = [later / rate for rate, later in pairwise(rates)]
            assert steps == pytest.approx([rates[0]] * (k - 1)), "a constant probability"


def test_speed_is_new_tokens_over_their_time(
    throughput: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    now = 7.0

    def generate(llm: Any, count: int, prompt: int, out: int, *rest: Any, **params: Any) -> int:
        nonlocal now
        now += [1.0, 0.5, 0.25, 0.125][len(calls)]
        calls.append(out)
        llm.stats = SimpleNamespace(num_steps=llm.stats.num_steps + 50, step_times={})
        return 100

    monkeypatch.setattr(throughput, "generate", generate)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))
    llm = SimpleNamespace(stats=SimpleNamespace(num_steps=0, step_times={}))
    args = SimpleNamespace(
        temperature=0.0,
        prompt=4,
        out=64,
        repeats=3,
        profile=None,
        shape="tiny",
        method="none",
        shares=[],
    )
    cell = throughput.measure(llm, 4, args)
    assert calls == [16, 64, 64, 64], "one to warm up, which does not count"
    assert cell["runs"] == [200, 400, 800]
    assert cell["tps"] == 400, "the median"
    assert cell["step_ms"] == {"whole": pytest.approx(875 / 150, abs=0.001)}


def test_parts_of_a_step_are_those_of_the_time_between(throughput: ModuleType) -> None:
    early = GraphTimes(num_steps=10, target=1.0, verify=0.5, draft=0.25)
    late = GraphTimes(num_steps=30, target=3.0, verify=0.9, draft=0.45)
    before = SimpleNamespace(num_steps=5, step_times={4: early, 1: early})
    after = SimpleNamespace(
        num_steps=99, step_times={4: late, 1: early, 8: replace(early, target=2.0)}
    )
    # Of 20 steps with 4 rows and 10 with 8: 3 + 1 = 4 s of target, and so on; the rest is 0.65 s.
    parts = throughput.split(before, after, seconds=6.0)
    assert parts == {
        "target": pytest.approx(4000 / 30, abs=0.001),
        "verify": pytest.approx(900 / 30, abs=0.001),
        "draft": pytest.approx(450 / 30, abs=0.001),
        "other": pytest.approx(650 / 30, abs=0.001),
        "full_target": 200.0,
        "full_verify": 50.0,
        "full_draft": 25.0,
    }


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--conc 4,0", "--conc is [4, 0]; expected numbers of at least 1"),
        ("--method peagle --k 3 --al 4.5", "--al is 4.5; expected 1 to 4"),
        ("--method peagle --al nan", "--al is nan; expected 1 to 8"),
        ("--al much", "argument --al: invalid float value: 'much'"),
        ("--method peagle --k 0", "--k is 0; expected 1 to 64"),
        ("--method eagle3 --k 65 --al 2", "--k is 65; expected 1 to 64"),
        ("--k several", "argument --k: invalid int value: 'several'"),
        ("--prompt 0", "--prompt is 0; expected at least 1"),
        ("--out 0", "--out is 0; expected at least 1"),
        ("--repeats 0", "--repeats is 0; expected at least 1"),
        ("--prompt 1000 --out 100", "make 1100 tokens with the last drafts; expected at most 1024"),
        ("--max-model-len 30 --out 25", "make 31 tokens with the last drafts; expected at most 30"),
        ("--method peagle --prompt 1000 --out 20", "make 1027 tokens"),
        ("--temperature -1", "temperature is -1.0; expected"),
        ("--device moon", "device is 'moon'"),
        ("--dtype float7", "argument --dtype: invalid choice: 'float7'"),
        ("--method medusa", "argument --method: invalid choice: 'medusa'"),
        ("--shape huge", "argument --shape: invalid choice: 'huge'"),
    ],
)
def test_mistakes_are_named(run: Any, options: str, message: str) -> None:
    status, stdout, stderr = run(*options.split())
    assert status == 2
    assert message in stderr
    assert "Traceback" not in stderr
    assert "RESULT" not in stdout


@pytest.mark.usefixtures("throughput")  # its folder is searched for what the scripts share
def test_the_hosts_share_of_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = FOLDER / "host_step.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--sequences", "3", "--steps", "4"])
    runpy.run_path(str(script), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert 3 <= found["tokens_a_step"] <= 3 * 8, "every sequence has a token, or K + 1"
    assert 0 < found["step_us"] < 1e6


@pytest.mark.parametrize("words", ["throughput.py", "nodes.py", "schedule.py x"])
def test_a_mistake_ends_the_process_with_status_2(words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *words.split(), "--conc", "1,x"],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr == "error: --conc is '1,x'; expected numbers, like 1,4,16.\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [], "nothing was made for it"


def test_no_card(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    status, _, stderr = run("--device", "cuda")
    assert status == 2
    assert stderr.startswith("error: device is 'cuda', which torch does not have here")
    status, _, stderr = run("--profile", "kernels.txt")
    assert status == 2
    assert stderr.startswith("error: --profile is 'kernels.txt'; it needs a GPU")


@pytest.mark.parametrize("name", ["peagle-shapes", "peagle-shapes/tiny"])
def test_a_temporary_folder_that_cannot_be_written(run: Any, tmp_path: Path, name: str) -> None:
    # A file in its place: permissions do not stop root, as whom tests run in containers.
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    status, stdout, stderr = run("--conc", "1")
    assert status == 2
    assert stderr.startswith("error: No folder for temporary models: ")
    assert str(tmp_path / "peagle-shapes") in stderr and "Set TMPDIR" in stderr
    assert "RESULT" not in stdout


# ---- whom it measures ----


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_all_work_is_done_by_generate_of_the_users_llm(
    run: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """No step of an engine and no pass of a model happens outside `LLM.generate`."""
    within: list[LLM] = []
    calls: list[LLM] = []
    done: Counter[tuple[str, bool]] = Counter()
    num_tokens = 0
    generate = LLM.generate

    def watched(self: LLM, *args: Any, **options: Any) -> Any:
        nonlocal num_tokens
        calls.append(self)
        within.append(self)
        try:
            outputs = generate(self, *args, **options)
        finally:
            within.pop()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counting(self: Any, *args: Any, **options: Any) -> Any:
            done[f"{owner.__name__}.{name}", bool(within)] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(owner, name, counting)

    monkeypatch.setattr("peagle.llm.LLM.generate", watched)
    watch(LLMEngine, "step")
    watch(TargetModel, "forward")
    watch(Drafter, "forward")
    options = ["--conc", "1,3", "--out", "20", "--repeats", "2", "--k", "3", "--al", "2"]
    status, stdout, stderr = run("--method", method, *options)
    assert status == 0, stderr
    # Twice at the start; at each concurrency once to warm up and twice measured; always one LLM.
    assert len(calls) == 2 + 2 * (1 + 2)
    assert len(set(map(id, calls))) == 1
    passes = {"LLMEngine.step", "TargetModel.forward"}
    passes |= set() if method == "none" else {"Drafter.forward"}
    assert {name for name, _ in done} == passes
    assert all(inside for _, inside in done), f"outside of generate: {done}"
    stats = calls[0].stats
    assert done["LLMEngine.step", True] == stats.num_steps
    assert num_tokens == stats.num_output_tokens > 20 * 2 * 4
    assert result_of(stdout)["al"] == round(stats.speculation.acceptance_length, 3)


# ---- checkpoints ----


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            names |= set(reader.keys())
    return names


@pytest.mark.usefixtures("throughput")
@pytest.mark.filterwarnings("ignore:The target is quantised")
@pytest.mark.parametrize("format", ["plain", "fp8", "mxfp4"])
def test_checkpoints_have_the_published_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    import checkpoints  # type: ignore[import-not-found]
    import shapes  # type: ignore[import-not-found]

    shape = replace(shapes.SHAPES["tiny-experts"], format=format)
    if format == "mxfp4":
        sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        shape = replace(shape, model_type="gpt_oss", config=sizes)
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 100_000)
    cpu = torch.device("cpu")
    checkpoints.write_checkpoint(shape, tmp_path / "ours", torch.float32, cpu)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    target = TargetModel.load(tmp_path / "ours", dtype=torch.float32)
    assert target.quantization == (None if format == "plain" else format)
    target.model.save_pretrained(tmp_path / "plain")
    expected, found = names_in(tmp_path / "plain"), names_in(tmp_path / "ours")
    if format == "mxfp4":
        packed = {name for name in expected if name.endswith(("gate_up_proj", "down_proj"))}
        assert len(packed) == 4
        expected -= packed
        expected |= {f"{name}_{last}" for name in packed for last in ("blocks", "scales")}
    scales = {name for name in found if name.endswith("_scale_inv")}
    assert found - scales == expected
    assert bool(scales) == (format == "fp8")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    kept = written.get("quantization_config", {}).get("modules_to_not_convert", [])
    routers = {f"model.layers.{i}.mlp.gate" for i in range(shape.config["num_hidden_layers"])}
    assert (set(kept) >= routers) == (format == "fp8"), "engines would read routers as FP8"


@pytest.mark.usefixtures("throughput")
def test_the_peer_counts_tokens_and_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import throughput_vllm as peer  # type: ignore[import-not-found]

    assert peer.distinct(np.array([[1, 2, 3], [1, 5, 3], [4, 5, 3]])) == [2, 2, 1]
    experts = np.array([[[[0, 1], [2, 3]]], [[[0, 1], [3, 4]]]])  # [sequences, steps, layers, 2]
    assert peer.distinct_experts(experts) == {"mean": 2.5, "by_layer": [2.0, 3.0]}
    monkeypatch.setattr(sys, "argv", ["throughput_vllm.py", "--checkpoint", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        peer.run_guarded(peer.main)
    assert "has no config.json: write it by throughput.py" in capsys.readouterr().err


def test_a_shape_can_be_quantised(run: Any) -> None:
    options = ["--conc", "1", "--out", "4", "--repeats", "1", "--quantization", "int8"]
    status, stdout, _ = run(*options, "--kv-cache-dtype", "fp8")
    found = result_of(stdout)
    assert status == 0 and found["quantization"] == "int8" and found["kv_cache_dtype"] == "fp8"


def test_a_checkpoint_is_written_once(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    options = ["--checkpoint", str(folder), "--conc", "1", "--out", "4", "--repeats", "1"]
    written: list[int] = []
    for _ in range(2):
        status, stdout, _ = run(*options, "--method", "peagle", "--k", "3", "--al", "2")
        assert status == 0 and result_of(stdout)["method"] == "peagle"
        written.append((folder / "config.json").stat().st_mtime_ns)
    assert written[0] == written[1]
    assert (tmp_path / "model-peagle" / "config.json").is_file()


def test_step_price_compares_the_three_prices_of_a_mixture() -> None:
    command = [sys.executable, FOLDER / "step_price.py", "--threads", "1", "--device", "cpu"]
    command += ["--k", "1,3", "--batch-sizes", "1,2,3", "--context", "8", "--steps", "2"]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["off_by"]) == {"tokens", "experts, even routing", "experts, counted"}
    assert {len(result["cells"]), *(one["step"]["cells"] for one in result["off_by"].values())} == {
        *(9, 3)
    }
    cells = {(one["batch"], one["k"]): one for one in result["cells"]}
    assert cells[1, 0]["experts"] == 2 <= cells[1, 3]["experts"] < cells[3, 3]["experts"] <= 4
    assert cells[1, 3]["experts_even"] == 3.8  # 4 (1 - (1 - 2 / 4) ** 4)


def test_nodes_are_measured_beside_both_heads_and_without_loops() -> None:
    command = [sys.executable, FOLDER / "nodes.py", "--threads", "1", "--conc", "1"]
    command += ["--nodes", "5", "--repeats", "1", "--max-new-tokens", "16", "--set", "gsm8k"]
    command += ["--prompts", "2"]
    command += ["--eagle3", str(BUNDLED_EAGLE3), "--ways", "chain,eagle3,n,eagle3-n", "--cut-loops"]
    command += ["--temperature", "0,1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    cold, hot = (result["by_set"]["gsm8k"][one] for one in ("0", "1"))
    for found in (cold["by_concurrency"]["1"], cold["before_loops"]["1"]):
        assert found.keys() == {"plain", "chain K=7", "eagle3 K=7", "n=5", "eagle3-n n=5"}
        lengths = {name: one["acceptance_length"] for name, one in found.items()}
        assert lengths["plain"] == 1 < min(lengths[way] for way in lengths if way != "plain")
        assert hot["by_concurrency"]["1"]["n=5"]["acceptance_length"] < lengths["n=5"]
        assert found["n=5"]["nodes_a_step"] > 4


# ---- where a step goes ----

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"
)


@pytest.fixture
def roofline(throughput: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; the fixture it needs finds what the scripts share."""
    monkeypatch.syspath_prepend(FOLDER / "kernels")
    import bench_roofline  # type: ignore[import-not-found]

    return bench_roofline


@interpreted
@pytest.mark.slow
def test_layers_of_a_step_have_floors_and_candidates() -> None:
    command = [sys.executable, FOLDER / "kernels" / "bench_roofline.py", "--device", "cpu"]
    command += ["--shape", "tiny-experts", "--tokens", "3", "--context", "32", "--queries", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["model"], row["layer"]): row for row in result["rows"]}
    assert len(rows) == 12 + 9
    for row in rows.values():
        assert row["ours_us"] > 0 and row["floor_us"] == max(row["bytes_us"], row["bf16_us"])
        assert row["over_floor"] == pytest.approx(row["ours_us"] / row["floor_us"])
        assert row["binds"] in ("bytes", "flops", "FP8")
    qkv = rows["target", "q/k/v"]
    assert qkv["bytes"] == 128 * 128 + 4 + 2 * 3 * (128 + 128)  # the weight, its scale, x and out
    assert qkv["flops"] == 2 * 3 * 128 * 128 and qkv["per_step"] == 3
    up = rows["target", "experts gate-up"]
    assert up["bytes"] == 3 * (256 * 128 + 2 * 4) + 2 * (3 * 128 + 6 * 128)
    for row in (up, rows["target", "experts down"]):
        assert row["unavailable"]["gluon"] == "needs a card of compute capability 9.0"
    assert qkv["unavailable"] == {"scaled_mm": "block scales need a card"}
    whole = rows["target", "experts whole"]
    assert [one["name"] for one in whole["candidates"]] == ["FP8 activations"]
    assert not whole["unavailable"] and 0 < whole["candidates"][0]["error"] < 2**-3
    assert set(rows["target", "o"]["unavailable"].values()) == {"64 is no multiple of 128"}
    assert result["touched"]["3"]["timed"] == 3 and result["touched"]["3"]["even"] == 3.5
    assert result["steps"]["3"]["target"]["ours"] == pytest.approx(
        sum(
            row["per_step"] * row["ours_us"] / 1e3
            for row in rows.values()
            if row["model"] == "target"
        )
    )


def test_experts_of_a_checkpoint_are_counted(
    roofline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.evaluation.test_touched_experts import save_mixture

    save_mixture(tmp_path, "qwen3_moe", max_position_embeddings=2048)
    monkeypatch.setattr(roofline, "COUNTED_SEQUENCES", 2)
    monkeypatch.setattr(roofline, "COUNTED_STEPS", 4)
    setting = roofline.Setting(torch.device("cpu"), context=32, queries=2, rotated_bytes=0)
    counted, note = roofline.count_touched(str(tmp_path), [1, 2, 4, 6], setting)
    assert counted.keys() == {1, 2, 4}, "six tokens are three sequences"
    assert counted[1] == 2 <= counted[2] <= counted[4] <= 4 and "2 sequences" in note


def test_passes_of_one_row_are_joined(roofline: ModuleType) -> None:
    passes = [
        roofline.DecodePass((1, 1), torch.arange(6).view(1, 2, 3) + 10 * step) for step in (0, 1)
    ]
    joined = roofline.join_passes(passes)
    assert joined.num_rows == (2, 2)
    rows = [[0, 1, 2], [10, 11, 12], [3, 4, 5], [13, 14, 15]]
    assert joined.experts_LTC.tolist() == [rows]
