"""Settings of commands from flags, variables, files and defaults; models by revision."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED, FOLDERS
from peagle.cli.generate import _in_order
from peagle.cli.groups import OutputFormat
from peagle.evaluation.prompts import Prompt
from tests.cli.conftest import DEFAULTS, Pair, Peagle, Result, environment, without_defaults
from tests.fake_hub import FakeHub, read_folder, serve, used
from tests.fake_hub import environment as hub_environment

CONFIG = """
format_version = 1
target = "org/file"
revision = "v1"

[engine]
dtype = "float32"
max_num_seqs = 8
seed = 3

[speculative]
model = "org/file-head"
revision = "h1"
num_speculative_tokens = 5

[sampling]
temperature = 0.5
stop_token_ids = [7]
"""
JSON_CONFIG = '{"method": "eagle3", "model": "org/json-head", "num_speculative_tokens": 2}'


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PEAGLE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "peagle.toml"
    path.write_text(CONFIG)
    return path


def settings(result: Result) -> dict[str, Any]:
    """Values by dotted key, of what `--show-config` printed; without nulls and defaults."""
    assert (result.status, result.err) == (0, "")
    found: dict[str, Any] = {}
    for name, value in json.loads(result.out).items():
        if name in DEFAULTS and value is not None:
            changed = without_defaults(name, value)
            found |= {f"{name}.{key}": one for key, one in changed.items()}
        elif name not in ("format_version", "decided"):
            found[name] = value
    return {key: value for key, value in found.items() if value is not None}


# ---- layers ----


def test_the_higher_layer_wins(peagle: Peagle, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("PEAGLE_DTYPE", "float64")
    monkeypatch.setenv("PEAGLE_KV_CACHE_GIB", "0.5")
    monkeypatch.setenv("PEAGLE_KV_CACHE_DTYPE", "fp8")
    call = ("generate", "--config", file, "--show-config", "--dtype", "auto", "-k", 3)
    assert settings(peagle(*call, "--max-new-tokens", 9)) == {
        "target": "org/file",
        "revision": "v1",
        "speculative.method": "eagle3",
        "speculative.model": "org/file-head",
        "speculative.revision": "h1",
        "speculative.num_speculative_tokens": 3,
        "engine.max_num_seqs": 4,
        "engine.kv_cache_dtype": "fp8",
        "engine.kv_cache_gib": 0.5,
        "engine.seed": 3,
        "sampling.max_tokens": 9,
        "sampling.temperature": 0.5,
        "sampling.stop_token_ids": [7],
    }


def test_every_setting_is_shown_with_the_default_of_its_configuration(peagle: Peagle) -> None:
    result = peagle("generate", "--target", "org/x", "--method", "ngram", "--show-config")
    data = json.loads(result.out)
    assert set(data) == {"format_version", "target", "revision", "decided", *DEFAULTS}
    for name, config in DEFAULTS.items():
        expected = json.loads(json.dumps(asdict(config)))
        shown = {"sampling": "logit_bias", "speculative": "corrections"}
        expected |= {shown[name]: {}} if name in shown else {}
        assert data[name] == expected


def test_the_help_of_serve_shows_its_own_defaults(peagle: Peagle) -> None:
    engine = json.loads(peagle("serve", "--show-config").out)["engine"]
    page = " ".join(peagle("serve", "--help").out.replace("│", " ").split())
    for name in ("max_num_seqs", "max_itl_ms"):
        shown = page.partition(f"--{name.replace('_', '-')} <")[2].partition("[default: (")[2]
        assert float(shown.partition(")")[0]) == engine[name]


def test_a_whole_speculative_configuration_leaves_nothing_of_another(
    peagle: Peagle, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speculative(*flags: object) -> dict[str, Any]:
        found = settings(peagle("generate", "--config", file, "--show-config", *flags))
        keys = [key for key in found if key.startswith("speculative")]
        return {key.partition(".")[2]: found[key] for key in keys}

    monkeypatch.setenv("PEAGLE_SPECULATIVE_CONFIG", JSON_CONFIG)
    whole = {"method": "eagle3", "model": "org/json-head", "num_speculative_tokens": 2}
    assert speculative() == whole
    one = {"num_speculative_tokens": 4}
    assert speculative("-k", 4) == whole | one
    flag = '{"model": "org/flag-head", "draft_sample_method": "probabilistic"}'
    assert speculative("--speculative-config", flag) == {
        "method": "eagle3",
        "model": "org/flag-head",
        "draft_sampling": "probabilistic",
    }
    assert speculative("--no-speculation") == {}


def test_a_name_takes_its_revision_along(
    peagle: Peagle, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*flags: object) -> list[Any]:
        result = settings(peagle("generate", "--config", file, "--show-config", *flags))
        keys = ("target", "revision", "speculative.model", "speculative.revision")
        return [result.get(key) for key in keys]

    assert found() == ["org/file", "v1", "org/file-head", "h1"]
    assert found("--target", "org/x") == ["org/x", None, "org/file-head", "h1"]
    both = ("--revision", "v2", "--draft-revision", "h2")
    assert found(*both) == ["org/file", "v2", "org/file-head", "h2"]
    assert found("--draft", "org/y") == ["org/file", "v1", "org/y", None]
    assert found("--method", "ngram") == ["org/file", "v1", None, None]
    monkeypatch.setenv("PEAGLE_TARGET", "org/z")
    assert found() == ["org/z", None, "org/file-head", "h1"]
    monkeypatch.setenv("PEAGLE_REVISION", "12")
    assert found() == ["org/z", "12", "org/file-head", "h1"]


def test_paths_in_a_file_are_relative_to_it(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "head").mkdir(parents=True)
    path = tmp_path / "models" / "peagle.toml"
    path.write_text('target = "./org/target"\nspeculative.model = "head"')
    found = settings(peagle("generate", "--config", path, "--show-config"))
    assert Path(found["target"]) == tmp_path / "models" / "org" / "target"
    assert Path(found["speculative.model"]) == tmp_path / "models" / "head"
    monkeypatch.chdir(path.parent)
    found = settings(peagle("generate", "--config", "peagle.toml", "--show-config"))
    assert found["target"].startswith("./"), "a hub id otherwise"
    monkeypatch.undo()
    path.write_text('speculative = { model = "head", corrections = { sql = "head", web = "/w" } }')
    call = ("serve", "--config", path, "--show-config")
    corrections = {"sql": str(path.parent / "head"), "web": "/w"}
    assert settings(peagle(*call))["speculative.corrections"] == corrections
    given = ("--correction", "a=b", "--correction", "c=d=e")
    found = settings(peagle(*call, *given))
    assert found["speculative.corrections"] == {"a": "b", "c": "d=e"}
    result = peagle("serve", "--correction", "sql")
    assert (result.status, "--correction: 'sql' is not NAME=PATH" in result.err) == (2, True)


def test_the_bundled_pair_is_the_default(
    peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FOLDERS["target"], BUNDLED, pair.target)
    monkeypatch.setitem(FOLDERS["draft"], BUNDLED, pair.peagle)
    data = json.loads(peagle("generate", "--show-config").out)
    assert data["target"] == str(pair.target)
    assert data["speculative"]["model"] == str(pair.peagle)
    data = json.loads(peagle("generate", "--show-config", "-k", 3).out)
    assert data["speculative"]["model"] == str(pair.peagle)
    data = json.loads(peagle("generate", "--show-config", "--target", "org/x").out)
    assert data["speculative"] is None


def test_foreign_and_empty_variables_are_left_alone(
    peagle: Peagle, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings(peagle("generate", "--config", file, "--show-config"))
    # The first two as Kubernetes sets them beside a service called peagle.
    for name in ("PEAGLE_PORT", "PEAGLE_SERVICE_HOST", "PEAGLE_COMMIT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    for name in ("PEAGLE_DTYPE", "PEAGLE_TARGET", "PEAGLE_SPECULATIVE_CONFIG"):
        monkeypatch.setenv(name, "")
    assert settings(peagle("generate", "--config", file, "--show-config")) == before


def test_show_config_says_what_is_decided(peagle: Peagle, pair: Pair) -> None:
    def decided(*options: object) -> dict[str, Any]:
        result = peagle("generate", *options, "--device", "cpu", "--show-config")
        return json.loads(result.out)["decided"]

    llm = LLM(str(pair.target), speculative_config={"model": str(pair.peagle)}, device="cpu")
    found = decided("--target", pair.target, "--draft", pair.peagle)
    assert found == {
        "device": "cpu",
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "num_speculative_tokens": llm.engine.speculative.k,
        "parallel_drafting_spec": None,
        "threads": torch.get_num_threads(),
        "max_model_len": llm.engine.max_model_len,
    }
    given = ("--target", "org/x", "--dtype", "bfloat16", "--threads", 3, "--max-model-len", 64)
    assert decided(*given) == {
        **{"device": "cpu", "dtype": "bfloat16", "num_speculative_tokens": 0},
        **{"parallel_drafting_spec": None, "threads": 3, "max_model_len": 64},
    }
    shape = {"num_parallel_trees": 4, "prediction_depth": 2, "max_nodes": 9}
    trees = ("--target", pair.target, "--draft", pair.peagle, "--parallel-drafting-spec")
    assert decided(*trees, json.dumps(shape))["parallel_drafting_spec"] == shape
    assert decided(*trees, "auto")["parallel_drafting_spec"] is None, "a CPU has no graphs"


def test_show_config_asks_no_hub(peagle: Peagle, hub: FakeHub, file: Path) -> None:
    result = peagle("generate", "--show-config", "--config", file)
    shown = json.loads(result.out)
    assert shown["target"] == "org/file" and shown["decided"]["max_model_len"] is None
    assert hub.requests == []


def test_a_run_uses_what_is_shown(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f"target = {str(pair.target)!r}\n"
        f"speculative = {{ model = {str(pair.peagle)!r}, num_speculative_tokens = 2 }}\n"
        "engine.max_model_len = 64\n"
        "sampling = { max_tokens = 5, ignore_eos = true, temperature = 1.0, seed = 4 }\n"
    )
    monkeypatch.setenv("PEAGLE_DTYPE", "float64")
    call = ("generate", "--config", path, "--prompt", "def f(x):", "--format", "json")
    result = peagle(*call)
    assert result.status == 0, result.err
    assert "at K=2, temperature 1, float64" in result.err
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=4)
    expected = LLM(pair.target, dtype="float64").generate("def f(x):", params)[0]
    assert json.loads(result.out)["token_ids"] == expected.token_ids
    result = peagle("generate", "--config", path, "--prompt", "x" * 65)
    assert (result.status, result.out) == (2, "")
    assert "expected at most 63" in result.err


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"target = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"format_version = 2", "format_version is 2, newer than this peagle reads (1). Upgrade"),
        (b"format_version = 0", "format_version is 0; expected a whole number"),
        (b'format_version = "1"', "format_version is '1'; expected a whole number"),
        (b"format_version = true", "format_version is True; expected a whole number"),
        (b'model = "x"', "unknown key 'model'; known: format_version, target, revision, [engine]"),
        (b"[serving]\nport = 1", "unknown key 'serving'"),
        (b"[engine]\ndtpye = 1", "[engine]: unknown key 'dtpye'; known: block_size, device, dtype"),
        (b"[engine]\ndtpye = 1", "Did you mean 'dtype'?"),
        (b"[sampling]\ntempereture = 1", "Did you mean 'temperature'?"),
        (b"[server]\nprot = 1", "Did you mean 'port'?"),
        (b"[enigne]\ndtype = 1", "Did you mean 'engine'?"),
        (b'tagret = "x"', "Did you mean 'target'?"),
        (b"[engine]\ntemperature = 1", "Did you mean 'sampling.temperature'?"),
        (b"max_num_seqs = 1", "Did you mean 'engine.max_num_seqs'?"),
        (b"[speculative]\nmodle = 'x'", "Did you mean 'model'?"),
        (b"[sampling]\ntop = 1", "[sampling]: unknown key 'top'; known: "),
        (b"[speculative]\nk = 1", "[speculative]: Unknown key 'k' in the speculative"),
        (
            b"[speculative.parallel_drafting_spec]\ntrees = 4",
            "[speculative]: parallel_drafting_spec has the unknown key 'trees'; expected an object",
        ),
        (b"engine = 5", "engine is 5; expected a table, [engine]"),
        (b"target = 5", "target is 5; expected text"),
        (b'target = ""', "target is ''; expected text"),
        (b"speculative.model = 5", "speculative.model is 5; expected text"),
        (b"[engine]\nmax_num_seqs = 0", "peagle.toml [engine]: max_num_seqs is 0; expected"),
        (b'[engine]\nblock_size = "16"', "peagle.toml [engine]: block_size is '16'; expected"),
        (b"[sampling]\ntop_p = 2", "peagle.toml [sampling]: top_p is 2; expected"),
        (b"[sampling]\nstop_token_ids = 5", "stop_token_ids is 5"),
        (b"[speculative]\nnum_speculative_tokens = 5", "peagle.toml [speculative] was given, but"),
    ],
)
def test_bad_files(peagle: Peagle, tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "peagle.toml"
    path.write_bytes(text)
    target = [] if b"target" in text else ["--target", "org/x"]
    for last in (["--show-config"], ["--prompt", "x"]):
        result = peagle("generate", "--config", path, *target, *last)
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("peagle: error: ")
        assert str(path) in result.err and message in result.err


def test_a_file_that_is_not_there(peagle: Peagle, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no.toml", "No such file"), (tmp_path, "Is a directory")):
        result = peagle("generate", "--config", path, "--show-config")
        assert (result.status, result.out) == (2, "")
        assert f"--config {str(path)!r} is not readable: {why}" in result.err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PEAGLE_MAX_NUM_SEQS", "many", "PEAGLE_MAX_NUM_SEQS: max_num_seqs is 'many'; expected"),
        ("PEAGLE_MAX_NUM_SEQS", "4.5", "PEAGLE_MAX_NUM_SEQS: max_num_seqs is 4.5; expected"),
        ("PEAGLE_MAX_NUM_SEQS", "true", "PEAGLE_MAX_NUM_SEQS: max_num_seqs is True; expected"),
        ("PEAGLE_DTYPE", "int4", "PEAGLE_DTYPE: dtype is 'int4'; expected one of"),
        ("PEAGLE_KV_CACHE_GIB", "-1", "PEAGLE_KV_CACHE_GIB: kv_cache_gib is -1; expected"),
        ("PEAGLE_MAX_NUM_SEQ", "4", "PEAGLE_MAX_NUM_SEQ is not known; PEAGLE_MAX_NUM_SEQS is."),
        ("PEAGLE_SPECULATIV_CONFIG", "{}", "PEAGLE_SPECULATIVE_CONFIG is."),
        ("PEAGLE_SPECULATIVE_CONFIG", "eagle3", "PEAGLE_SPECULATIVE_CONFIG: The speculative"),
        ("PEAGLE_SPECULATIVE_CONFIG", "{}", "PEAGLE_SPECULATIVE_CONFIG: model is None; expected"),
        ("PEAGLE_SPECULATIVE_CONFIG", '{"model": "a", "method": "x"}', "_CONFIG: method is 'x'"),
    ],
)
def test_bad_variables(
    peagle: Peagle, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    result = peagle("generate", "--target", "org/x", "--show-config")
    assert (result.status, result.out) == (2, "")
    assert message in result.err


# ---- models from the hub ----


@pytest.fixture
def hub(tmp_path: Path, pair: Pair) -> Iterator[FakeHub]:
    """A hub with the pair at revision v1; "main" of each is not a model."""
    with serve() as hub, used(hub.url, tmp_path / "home"):
        for name in ("target", "peagle", "eagle3"):
            model = hub.add(f"org/{name}")
            model.commit(read_folder(getattr(pair, name)), "v1")
            model.commit({"config.json": b"{}", "model.safetensors": b"nonsense"})
        yield hub


PINNED = ("--target", "org/target", "--revision", "v1", "--draft", "org/peagle")


def test_generate_from_the_hub(
    peagle: Peagle, hub: FakeHub, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("generate", "--prompt", "def f(x):", "--max-new-tokens", 8, "--format", "json")
    expected = json.loads(peagle(*call, *pair.options).out)["token_ids"]
    config = '{"model": "org/peagle", "revision": "v1"}'
    for models in (
        (*PINNED, "--draft-revision", "v1"),
        ("--target", "org/target@v1", "--draft", "org/eagle3@v1"),
        ("--target", "org/target@v1", "--speculative-config", config),
    ):
        result = peagle(*call, *models)
        assert result.status == 0, result.err
        assert json.loads(result.out)["token_ids"] == expected
        assert json.loads(result.out)["num_drafts"] > 0
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert peagle(*call, *PINNED, "--draft-revision", "v1").status == 0
    assert hub.requests == []


def test_demo_from_the_hub(peagle: Peagle, hub: FakeHub) -> None:
    call = ("demo", "--limit", 1, "--max-new-tokens", 4, "--format", "json", *PINNED)
    result = peagle(*call, "--draft-revision", "v1", "--eagle3", "org/eagle3@v1")
    assert result.status == 0, result.err
    names = [method["name"] for method in json.loads(result.out)["methods"]]
    assert names == ["plain", "EAGLE-3", "P-EAGLE", "P-EAGLE tree"]
    result = peagle(*call, "--draft-revision", "v9")
    assert (result.status, result.out) == (2, "")
    assert "The draft head 'org/peagle' has no revision 'v9'" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "org/ghost"], "The target model 'org/ghost' is neither a folder here nor"),
        (["--target", "org/target", "--revision", "v9"], "has no revision 'v9'"),
        (["--target", "org/target"], "is cut or damaged"),
        ([*PINNED, "--draft-revision", "v9"], "The draft head 'org/peagle' has no revision 'v9'"),
        ([*PINNED], "is cut or damaged"),
        (["--target", ".", "--revision", "v1"], "revision is 'v1', but the target model '.' is"),
        (
            ["--target", "org/target@v1", "--draft-revision", "v1"],
            "--draft-revision was given, but",
        ),
        (
            ["--speculative-config", "{}", "--draft-revision", "v1"],
            "--speculative-config and --draft-revision contradict each other",
        ),
    ],
)
def test_bad_models(peagle: Peagle, hub: FakeHub, options: list[str], message: str) -> None:
    result = peagle("generate", "--prompt", "x", *options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_a_process_of_its_own_respects_the_variables_of_the_hub(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.models["org/target"].private = hub.models["org/peagle"].gated = True
    code = (
        "from peagle.models.loading import resolve_model\n"
        "for name, role in (('target', 'target'), ('peagle', 'draft')):\n"
        "    print(resolve_model(f'org/{name}', 'v1', role=role))"
    )
    variables = {**environment(), **hub_environment(hub.url, tmp_path / "own")}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=variables | more, capture_output=True, text=True)

    result = run(HF_TOKEN=hub.token)
    assert (result.returncode, result.stderr) == (0, ""), "and no progress bars"
    for folder in result.stdout.splitlines():
        assert Path(folder).is_relative_to(tmp_path / "own" / "hub")
    hub.requests.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == result.stdout
    assert hub.requests == []


SCHEMA = "{}"


def shown(result: Result, section: str = "sampling") -> dict[str, Any]:
    """Values that are not defaults."""
    assert (result.status, result.err) == (0, "")
    return without_defaults(section, json.loads(result.out)[section])


# ---- what is set ----


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--typical-p", "0.9"], "typical_p", 0.9),
        (["--repetition-penalty", "1.2"], "repetition_penalty", 1.2),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "1"], "frequency_penalty", 1.0),
        (["--min-tokens", "4"], "min_tokens", 4),
        (["--logprobs", "0"], "logprobs", 0),
        (["--prompt-logprobs", "3"], "prompt_logprobs", 3),
        (["--stop-token-id", "7", "--stop-token-id", "9"], "stop_token_ids", [7, 9]),
        (["--allowed-token-id", "7"], "allowed_token_ids", [7]),
        (["--bad-word", "a", "--bad-word", "b c"], "bad_words", ["a", "b c"]),
        (["--ignore-eos"], "ignore_eos", True),
        (
            ["--logit-bias", '{"42": -5, "7": "-inf", "8": -Infinity}'],
            "logit_bias",
            {"42": -5.0, "7": "-inf", "8": "-inf"},
        ),
        (["--json-object"], "structured_output", {"kind": "json", "source": "", "compact": False}),
        (
            ["--json-schema", SCHEMA],
            "structured_output",
            {"kind": "json_schema", "source": SCHEMA, "compact": False},
        ),
        (
            ["--regex", "[0-9]+"],
            "structured_output",
            {"kind": "regex", "source": "[0-9]+", "compact": False},
        ),
    ],
)
def test_a_flag_sets_its_parameter(peagle: Peagle, flags: list[str], key: str, value: Any) -> None:
    result = peagle("generate", "--target", "org/x", "--show-config", *flags)
    assert shown(result) == {key: value}


def test_a_number_of_outputs(peagle: Peagle) -> None:
    call = ("generate", "--target", "org/x", "--show-config", "--n", 3, "--temperature", 1)
    assert shown(peagle(*call)) == {"n": 3, "temperature": 1.0}


def test_structures_from_files(peagle: Peagle, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(SCHEMA)
    grammar.write_text('root ::= "yes" | "no"')
    call = ("generate", "--target", "org/x", "--show-config")
    for flag, file, kind in (
        ("--json-schema", schema, "json_schema"),
        ("--ebnf", grammar, "ebnf"),
    ):
        value = {"kind": kind, "source": file.read_text(), "compact": False}
        assert shown(peagle(*call, flag, file)) == {"structured_output": value}


def test_engine_and_draft_flags(peagle: Peagle) -> None:
    call = ("generate", "--target", "org/x", "--draft", "org/h", "--show-config")
    sizes = ("--max-model-len", 64, "--max-num-batched-tokens", 32, "--kv-cache-gib", 0.5)
    sizes += ("--gpu-memory-utilization", 0.6)
    result = peagle(*call, *sizes, "--no-prefix-caching", "--draft-max-len", 48)
    assert shown(result, "engine") == {
        "max_model_len": 64,
        "max_num_batched_tokens": 32,
        "kv_cache_gib": 0.5,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
    }
    assert shown(result, "speculative")["max_model_len"] == 48


def test_a_server_bounds_inter_token_latency_by_itself(peagle: Peagle) -> None:
    call = ("serve", "org/x", "--no-speculation", "--show-config")
    assert shown(peagle(*call), "engine") == {"max_num_seqs": 32, "max_itl_ms": 100.0}
    assert shown(peagle(*call, "--max-itl-ms", 30), "engine")["max_itl_ms"] == 30.0
    assert "max_itl_ms" not in shown(peagle(*call, "--max-itl-ms", 0), "engine"), "0 is the default"
    result = peagle("serve", "org/x", "--max-itl-ms", -1)
    assert result.status == 2
    assert "--max-itl-ms: max_itl_ms is -1.0; expected a number of at least 0" in result.err


def test_a_limit_of_one_head_is_not_that_of_another(peagle: Peagle, tmp_path: Path) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text('target = "org/x"\nspeculative = { model = "org/h", max_model_len = 9 }')
    call = ("generate", "--config", path, "--show-config")
    assert shown(peagle(*call), "speculative")["max_model_len"] == 9
    assert "max_model_len" not in shown(peagle(*call, "--draft", "org/i"), "speculative")
    assert "max_model_len" not in shown(peagle(*call, "--method", "ngram"), "speculative")


def test_a_file_and_a_variable_set_them_too(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text(
        'target = "org/x"\n'
        "[engine]\nenable_prefix_caching = true\nmax_num_batched_tokens = 99\n"
        "[sampling]\nmin_p = 0.2\n"
        "logit_bias = { 42 = -5, 43 = -inf }\n"
        'structured_output = { kind = "json_schema", source = {} }\n'
    )
    call = ("generate", "--config", path, "--show-config")
    in_file = {
        "min_p": 0.2,
        "logit_bias": {"42": -5.0, "43": "-inf"},
        "structured_output": {"kind": "json_schema", "source": SCHEMA, "compact": False},
    }
    assert shown(peagle(*call)) == in_file
    variable = '{"min_p": 0.3, "structured_output": {"kind": "json"}, "logit_bias": {"1": 2}}'
    monkeypatch.setenv("PEAGLE_SAMPLING", variable)
    monkeypatch.setenv("PEAGLE_ENABLE_PREFIX_CACHING", "false")
    expected = in_file | {
        "min_p": 0.3,
        "logit_bias": {"1": 2.0},
        "structured_output": {"kind": "regex", "source": "a+", "compact": False},
    }
    result = peagle(*call, "--regex", "a+")
    assert shown(result) == expected
    assert shown(result, "engine") == {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 99,
    }


# ---- several outputs ----


class Output:
    """A finished output."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_json(self) -> dict[str, str]:
        return {"text": self.text}


class Chunk:
    """The last chunk of an output."""

    def __init__(self, index: int, output_index: int) -> None:
        self.index, self.output_index = index, output_index
        self.output = Output(f"{index}{output_index}")


@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_outputs_are_printed_in_order(
    capsys: pytest.CaptureFixture[str], output_format: OutputFormat
) -> None:
    show = _in_order([Prompt("p", ("x",)), Prompt("q", ("y",))], 2, output_format)
    for index, output_index in ((1, 1), (0, 1), (0, 0), (1, 0)):
        show(Chunk(index, output_index))  # type: ignore[arg-type]
        if (index, output_index) == (0, 1):
            assert capsys.readouterr().out == "", "the first one is not there yet"
    expected = [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
    out = capsys.readouterr().out
    texts = dict(zip(expected, ("00", "01", "10", "11"), strict=True))
    if output_format is OutputFormat.TEXT:
        assert out == "".join(f"=== {id} #{i}\n{texts[id, i]}\n" for id, i in expected)
    else:
        records = [json.loads(line) for line in out.splitlines()]
        assert records == [{"id": id, "index": i, "text": texts[id, i]} for id, i in expected]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-p", "2"], "--min-p: min_p is 2.0; expected a number from 0 to 1"),
        (["--typical-p", "0"], "--typical-p: typical_p is 0.0; expected"),
        (["--repetition-penalty", "0"], "--repetition-penalty: repetition_penalty is 0.0"),
        (["--presence-penalty", "3"], "--presence-penalty: presence_penalty is 3.0; expected a"),
        (["--frequency-penalty", "nan"], "--frequency-penalty: frequency_penalty is nan"),
        (["--min-tokens", "-1"], "--min-tokens: min_tokens is -1; expected"),
        (["--min-tokens", "200"], "--min-tokens: min_tokens is 200 and max_tokens 128"),
        (["--logprobs", "21"], "--logprobs: logprobs is 21; expected a whole number from 0 to 20"),
        (["--prompt-logprobs", "-1"], "--prompt-logprobs: prompt_logprobs is -1; expected"),
        (["--n", "0"], "--n: n is 0; expected"),
        (["--n", "2"], "--n: n is 2 and temperature 0: greedy outputs are all the same"),
        (["--stop-token-id", "-1"], "--stop-token-id: stop_token_ids is -1; expected"),
        (["--stop-token-id", "end"], "--stop-token-id"),
        (["--allowed-token-id", "-1"], "--allowed-token-id: allowed_token_ids is -1; expected"),
        (["--bad-word", ""], "--bad-word: bad_words is ''; expected texts that are not empty"),
        (["--parallel-drafting-spec", "Auto"], "'Auto' is not a JSON object; expected one, like"),
        (["--logit-bias", "42"], "--logit-bias: '42' is not a JSON object; expected one, like"),
        (["--logit-bias", "{42: 1}"], "--logit-bias: '{42: 1}' is not a JSON object"),
        (["--logit-bias", '{"a": 1}'], "logit_bias has the key 'a'; expected token ids, like '42'"),
        (["--logit-bias", '{"42": "x"}'], "--logit-bias: logit_bias is 'x'; expected finite"),
        (["--json-schema", "{"], "--json-schema: json_schema is not JSON"),
        (["--json-schema", "none.json"], "--json-schema: the file 'none.json' is not readable: No"),
        (["--ebnf", "none.gbnf"], "--ebnf: the file 'none.gbnf' is not readable: No such file"),
        (["--regex", ""], "--regex: regex is ''; expected text that is not empty"),
        (["--regex", "a", "--json-object"], "--json-object and --regex contradict each other"),
        (["--ebnf", "a", "--json-schema", "{}"], "--json-schema and"),
        (["--regex", "a", "--ignore-eos"], "structured_output and ignore_eos were both given"),
        (["--regex", "a", "--min-tokens", "2"], "structured_output and min_tokens 2 were both"),
        (["--regex", "a", "--bad-word", "b"], "structured_output and bad_words ('b',) were both"),
        (["--max-model-len", "0"], "--max-model-len: max_model_len is 0; expected"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens: max_num_batched_tokens is"),
        (
            ["--kv-cache-dtype", "fp4"],
            "--kv-cache-dtype: kv_cache_dtype is 'fp4'; expected one of auto, fp8",
        ),
        (["--kv-cache-gib", "0"], "--kv-cache-gib: kv_cache_gib is 0.0; expected a number above"),
        (["--draft-max-len", "9"], "--draft-max-len was given, but no draft head for"),
        (
            ["--method", "ngram", "--draft-max-len", "9"],
            "--draft-max-len: max_model_len is 9; expected no max_model_len with method",
        ),
        (["--method", "ngram", "--no-correction"], "--no-correction: correction is False"),
        (
            ["--draft", "h", "--draft-window", "-1"],
            "--draft-window: draft_window is -1; expected a whole number, 0 for no window, or none",
        ),
        (
            ["--draft", "h", "--draft-max-len", "0"],
            "--draft-max-len: max_model_len is 0; expected a whole number of at least 1",
        ),
    ],
)
def test_bad_flags(peagle: Peagle, flags: list[str], message: str) -> None:
    result = peagle("generate", "--target", "org/x", "--prompt", "x", *flags)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.startswith("peagle: error: ") and "Traceback" not in result.err


def test_a_stop_list_of_thousands(peagle: Peagle) -> None:
    stops = [part for number in range(3000) for part in ("--stop", str(number))]
    result = peagle("generate", "--target", "org/x", "--prompt", "x", *stops)
    assert (result.status, result.out) == (2, "")
    assert "--stop: stop is '3000 strings'; expected at most 64" in result.err
    assert len(result.err) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("structured_output = 'json'", "structured_output is 'json'; expected a table with kind"),
        ("structured_output = { source = 'x' }", "expected a table with kind and source"),
        ("structured_output = { kind = 'x' }", "structured output kind is 'x'; expected one of"),
        ("structured_output = { kind = 'json', source = 'x' }", "source is 'x'; expected none"),
        ("logit_bias = { a = 1 }", "logit_bias has the key 'a'"),
        ("logit_bias = 5", "logit_bias is 5; expected a mapping"),
        ("min_p = 2", "min_p is 2"),
    ],
)
def test_bad_files_and_variables(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    path = tmp_path / "peagle.toml"
    path.write_text(f'target = "org/x"\n[sampling]\n{text}')
    result = peagle("generate", "--config", path, "--prompt", "x")
    assert (result.status, result.out) == (2, "")
    assert message in result.err and f"{path} [sampling]: " in result.err
    for value in ("[]", "{", '{"top": 1}', '{"min_p": "x"}'):
        monkeypatch.setenv("PEAGLE_SAMPLING", value)
        result = peagle("generate", "--target", "org/x", "--prompt", "x")
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("peagle: error: PEAGLE_SAMPLING: ")


def test_log_probabilities_want_json(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--max-new-tokens", 2, "--logprobs", 1)
    assert "see them with --format json" in peagle(*call).err
    assert "--format json" not in peagle(*call, "--format", "json").err


def test_several_outputs_of_a_prompt(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--max-new-tokens", 4, "--n", 3)
    result = peagle(*call, "--temperature", 1, "--seed", 1)
    assert result.status == 0, result.err
    headings = [line for line in result.out.splitlines() if line.startswith("===")]
    assert headings == ["=== 1 #0", "=== 1 #1", "=== 1 #2"]
    result = peagle(*call, "--temperature", 1, "--seed", 1, "--format", "json")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [(record["id"], record["index"]) for record in records] == [("1", i) for i in range(3)]
    count = sum(len(record["token_ids"]) for record in records)
    assert result.err.startswith(f"{count} tokens in ")
