"""`peagle catalog`: what it lists, and that it needs neither torch nor boto3 for it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.cli.catalog import EXAMPLES
from peagle.deploy.catalog import load_catalog, parse_catalog
from tests.cli.conftest import Peagle, environment


@pytest.fixture(autouse=True)
def _no_files_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def example() -> str:
    """The catalog file of the help page."""
    lines = EXAMPLES.partition("# models.toml\n")[2].splitlines()
    return "\n".join(line.removeprefix("  ") for line in lines)


def test_the_list_names_all_models(peagle: Peagle) -> None:
    result = peagle("catalog")
    assert result.status == 0 and result.err == ""
    rows = [line.split() for line in result.out.splitlines() if not line.startswith(" ")][1:]
    assert [row[:4] for row in rows] == [
        ["gpt-oss-120b", "5", "mxfp4", "ml.g7e.2xlarge"],
        ["gpt-oss-20b", "7", "mxfp4", "ml.g7e.2xlarge"],
        ["qwen3-coder-30b-a3b-instruct", "7", "fp8", "ml.g7e.2xlarge"],
        ["qwen3-coder-30b-a3b-instruct-bf16", "7", "bf16", "ml.g7e.2xlarge"],
        ["qwen3-8b", "7", "bf16", "ml.g7e.2xlarge"],
        ["gemma-4-31b-it", "-", "bf16", "ml.g7e.2xlarge"],
    ]
    assert [float(row[4]) for row in rows] == [67.7, 19.4, 36.3, 64.1, 25.8, 76.3]
    assert "openai/gpt-oss-20b + amazon/GPT-OSS-20B-P-EAGLE" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_one_model_with_its_commands(peagle: Peagle) -> None:
    result = peagle("catalog", "openai/GPT-OSS-20b")
    assert result.status == 0
    assert result.out.startswith("gpt-oss-20b\n")
    for said in (
        "amazon/GPT-OSS-20B-P-EAGLE (~3.4 GiB)",
        "7, the deepest is 10",
        "19.4 GiB of one GPU: weights 12.8 GiB",
        "19.9 GiB of one GPU: weights 12.8 GiB",
        "KV cache: 48 KiB of the target, ~8 KiB of the head",
        "\n  peagle deploy sagemaker create gpt-oss-20b --role ROLE_ARN\n",
        "\n  peagle serve --engine vllm --target openai/gpt-oss-20b --draft "
        "amazon/GPT-OSS-20B-P-EAGLE -k 7 --max-model-len 32768\n",
    ):
        assert said in result.out


def test_a_head_that_only_jumpstart_has(peagle: Peagle) -> None:
    result = peagle("catalog", "gemma-4-31b-it")
    assert "google/gemma-4-31B-it (bf16, ~58.2 GiB)" in result.out
    assert "a head of your own, or JumpStart's" in result.out
    assert "  sources    managed, native\n" in result.out
    assert "create gemma-4-31b-it --role ROLE_ARN --draft HEAD\n" in result.out
    assert result.out.endswith("deploy huggingface-vlm-gemma-4-31b-it in SageMaker Studio.\n")


def test_json(peagle: Peagle) -> None:
    found = json.loads(peagle("catalog", "--format", "json").out)
    assert [entry["name"] for entry in found] == list(load_catalog())
    one = json.loads(peagle("catalog", "gpt-oss-20b", "--format", "json").out)
    assert one == found[1]
    parts = one["memory_gib"]
    assert parts.pop("per_gpu") == pytest.approx(sum(parts.values()), abs=0.02)
    assert one["memory_for"]["max_model_len"] == 32768
    # 2 · 24 layers · 8 heads · 64 values · 2 bytes, and 4 layers of the head
    assert one["kv_bytes_per_token"] == {"target": 49_152, "draft": 8192}
    assert [shlex.split(line)[0] for line in one["commands"]] == ["peagle"] * 3


def test_toml_of_an_entry_is_a_catalog(peagle: Peagle, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(peagle("catalog", "gpt-oss-20b", "--format", "toml").out)
    (entry,) = parse_catalog(file.read_text(), str(file))
    assert entry.model_copy(update={"origin": "the package"}) == load_catalog()["gpt-oss-20b"]
    result = peagle("catalog", "--catalog", file)
    assert "GiB  (in place of the entry of the package)" in result.out
    shown = peagle("catalog", "gpt-oss-20b", "--catalog", file).out
    assert f"{file}, in place of" in shown and f"--role ROLE_ARN --catalog {file}\n" in shown


def test_the_example_of_the_help_page_is_a_catalog(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(example())
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    result = peagle("catalog", "my-model")
    assert result.status == 0
    # 15.3 of weights, 36 · 8 · 128 · 2 · 2 · 16384 bytes of KV cache, 2 of reserve
    assert "19.5 GiB of one GPU" in result.out
    assert f"--draft {tmp_path / 'head'} -k 5 --max-model-len 16384" in result.out


def test_the_commands_it_prints_are_understood(peagle: Peagle, tmp_path: Path) -> None:
    file = tmp_path / "my models.toml"
    file.write_text(example().replace('"./head"', '"me/head"'))
    for name in ("gpt-oss-120b", "qwen3-coder-30b-a3b-instruct", "gemma-4-31b-it", "my-model"):
        listed = json.loads(peagle("catalog", name, "--catalog", file, "--format", "json").out)
        create, engine, native = (shlex.split(line)[1:] for line in listed["commands"])
        role = "arn:aws:iam::123456789012:role/x"
        stand_ins = {"create": "plan", "ROLE_ARN": role, "HEAD": "me/head"}
        arguments = [stand_ins.get(word, word) for word in create]
        planned = peagle(*arguments, "--region", "us-east-1")
        assert planned.status == 0, planned.err
        calls = json.loads(planned.out)["calls"]
        (change,) = (c["parameters"] for c in calls if c["operation"] == "CreateChangeSet")
        model = change["TemplateBody"]["Resources"]["Model"]["Properties"]
        variables = model["PrimaryContainer"]["Environment"]
        config = json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"])
        assert config["model"] == (listed["draft"] or "me/head")
        shown = peagle(*native, "--show-config")
        assert shown.status == 0, shown.err
        settings = json.loads(shown.out)
        assert settings["target"] == listed["target"]
        length = settings["engine"]["max_model_len"]
        assert length == int(listed["vllm_flags"]["max-model-len"])
        assert [word for word in engine if word not in ("--engine", "vllm")] == native


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt-os-20b"], "Did you mean gpt-oss-20b or gpt-oss-120b?"),
        (["--format", "toml"], "--format toml prints one entry; name one"),
        (["--catalog", "none.toml"], "'none.toml' is not readable: No such file"),
        (["--format", "yaml"], "'yaml' is not one of"),
    ],
)
def test_mistakes(peagle: Peagle, arguments: list[str], said: str) -> None:
    result = peagle("catalog", *arguments)
    assert (result.status, result.out) == (2, "")
    assert said in result.err and "Traceback" not in result.err


def test_names_in_a_file_cannot_steer_the_terminal(peagle: Peagle, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(example().replace("vllm_flags = {", 'vllm_flags = { x = "\\u001b[2J",'))
    result = peagle("catalog", "my-model", "--catalog", file)
    assert result.status == 0 and "\x1b" not in result.out


def test_needs_neither_torch_nor_boto3() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'boto3', 'botocore'): sys.modules[name] = None\n"
        "from peagle.cli.main import run; sys.exit(run(['catalog', 'gpt-oss-20b']))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert result.returncode == 0, result.stderr
