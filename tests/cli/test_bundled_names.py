"""`bundled` names the models that ship, in every command, in files, in variables and in Python."""

import json
import shutil
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from peagle import LLM, SamplingParams, bundled
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET, expand_bundled
from peagle.cli import data_prepare, serve
from peagle.cli.flags import Given
from peagle.cli.settings import Setting
from peagle.cli.setup import Setup
from peagle.config import SpeculativeConfig
from peagle.deploy.models import source_of
from peagle.errors import UserError
from peagle.models.loading import resolve_model, with_local_head
from peagle.serving.config import ServerConfig
from peagle.training.config import TrainConfig
from tests.cli.conftest import Pair, Peagle

SHORT = ["--prompt", "def f(x):", "--max-new-tokens", 8, "--threads", 1]


def shown(peagle: Peagle, *arguments: object) -> dict[str, Any]:
    result = peagle("generate", "--prompt", "x", *arguments, "--show-config")
    assert result.status == 0, result.err
    return json.loads(result.out)


@pytest.mark.parametrize(
    ("name", "role", "folder"),
    [
        ("bundled", "target", BUNDLED_TARGET),
        ("bundled", "draft", BUNDLED_PEAGLE),
        ("bundled", "eagle3", BUNDLED_EAGLE3),
        ("bundled-eagle3", "draft", BUNDLED_EAGLE3),
    ],
)
def test_a_name_is_the_model_that_ships(name: str, role: Any, folder: Path) -> None:
    assert expand_bundled(name, role) == str(folder)
    assert resolve_model(name, role=role) == folder


def test_the_name_wins_over_a_folder_of_that_name(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(target_folder, tmp_path / "bundled")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("bundled") == BUNDLED_TARGET
    assert resolve_model("./bundled") == Path("bundled")
    assert resolve_model(Path("bundled")) == Path("bundled")
    assert source_of("bundled").name == str(BUNDLED_TARGET)
    assert source_of("./bundled").name == str(tmp_path / "bundled")
    assert data_prepare.load_tokenizer_of("bundled")[0] == BUNDLED_TARGET


def test_llm_takes_the_names() -> None:
    greedy = SamplingParams(max_tokens=8)
    expected = LLM().generate("def f(x):", greedy)[0]
    llm = LLM("bundled", speculative_config={"model": "bundled", "num_speculative_tokens": 3})
    output = llm.generate("def f(x):", greedy)[0]
    assert output.token_ids == expected.token_ids
    assert output.stats.num_drafts > 0
    eagle3 = with_local_head(SpeculativeConfig(model="bundled-eagle3"))
    assert eagle3.model == str(BUNDLED_EAGLE3)


def test_the_named_target_has_its_head_as_the_default_has(peagle: Peagle) -> None:
    default, named = shown(peagle), shown(peagle, "--target", "bundled")
    assert named["target"] == str(BUNDLED_TARGET)
    assert named["speculative"] == default["speculative"]
    plain, drafted = (
        peagle("generate", *SHORT, *more)
        for more in (
            ["--no-speculation"],
            ["--target", "bundled", "--draft", "bundled-eagle3", "-k", 3],
        )
    )
    assert plain.status == drafted.status == 0
    assert plain.out == drafted.out


def test_a_target_of_ones_own_refuses_the_bundled_head(peagle: Peagle, pair: Pair) -> None:
    result = peagle("generate", *SHORT, "--target", pair.target, "--draft", "bundled")
    assert result.status == 2
    assert str(BUNDLED_PEAGLE) in result.err


def test_variables_and_files_take_the_names(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair.target, tmp_path / "bundled")
    file = tmp_path / "run.toml"
    for name, folder in (("bundled", BUNDLED_TARGET), ("./bundled", tmp_path / "./bundled")):
        file.write_text(f'target = "{name}"\n[speculative]\nmodel = "bundled"\n')
        found = shown(peagle, "--config", file)
        assert Path(found["target"]) == Path(folder)
        assert found["speculative"]["model"] == "bundled"
    monkeypatch.setenv("PEAGLE_TARGET", "bundled")
    monkeypatch.setenv("PEAGLE_SPECULATIVE_CONFIG", '{"model": "bundled-eagle3"}')
    found = shown(peagle)
    assert found["target"] == str(BUNDLED_TARGET)
    assert found["speculative"]["model"] == "bundled-eagle3"


def test_training_takes_the_names(tmp_path: Path) -> None:
    file = tmp_path / "head.toml"
    rest = 'output = "run"\n[data]\ntrain = "t.jsonl"\n[optimizer]\nsteps = 1\n'
    expected = (
        ("bundled", "bundled", BUNDLED_TARGET, BUNDLED_PEAGLE),
        ("bundled", "bundled-eagle3", BUNDLED_TARGET, BUNDLED_EAGLE3),
        ("./bundled", "./bundled", tmp_path / "bundled", tmp_path / "bundled"),
    )
    for target, init, target_folder, head_folder in expected:
        file.write_text(f'target = "{target}"\n{rest}[head]\ninit = "{init}"\n')
        config = TrainConfig.read(file)
        assert (config.target, config.head.init) == (target_folder, head_folder)


@pytest.mark.slow
def test_measurements_take_the_names(peagle: Peagle, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n")
    common = ["--set", prompts, "--max-new-tokens", 8, "--threads", 1, "--format", "json"]
    named = ["--target", "bundled", "--draft", "bundled", "--eagle3", "bundled"]
    more = ["--method", "other=bundled", "--method", "older=bundled-eagle3"]
    result = peagle("eval", "-k", 2, *common, *named, *more)
    assert result.status == 0, result.err
    methods = {entry["method"]: entry for entry in json.loads(result.out)["entries"]}
    for name, like in (("other", "peagle"), ("older", "eagle3")):
        assert methods[name]["pooled"] == methods[like]["pooled"]


@pytest.mark.slow
def test_the_demo_takes_the_names(peagle: Peagle) -> None:
    result = peagle(
        *("demo", "--limit", 1, "--max-new-tokens", 4, "--format", "json"),
        *("--target", "bundled", "--draft", "bundled", "--eagle3", "bundled"),
    )
    assert result.status == 0, result.err
    methods = [method["name"] for method in json.loads(result.out)["methods"]]
    assert methods == ["plain", "EAGLE-3", "P-EAGLE", "P-EAGLE tree"]


def test_the_server_takes_the_names() -> None:
    setup = Setup(Given(target=Setting("bundled", "MODEL")))
    default, default_name = serve._spec(Setup(Given()), ServerConfig(), None)
    spec, name = serve._spec(setup, ServerConfig(), "bundled")
    assert (spec, name) == (default, default_name)
    assert sorted(spec.proposers) == ["eagle3", "peagle"]


def test_the_server_answers_to_the_name_that_was_typed(
    peagle: Peagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def run(*_: Any, listening: socket, name: str, typed_name: str) -> None:
        listening.close()
        served.append((name, typed_name))

    monkeypatch.setattr("peagle.serving.server.serve", run)
    monkeypatch.setattr("peagle.serving.logs.configure_logging", lambda _: None)
    for words in (["bundled"], ["bundled", "--served-model-name", "mine"], []):
        assert peagle("serve", *words, "--port", 0).status == 0
    assert served == [("peagle-code", "bundled"), ("mine", None), ("peagle-code", None)]


@pytest.mark.slow
def test_smollm2_names_a_target_and_its_heads(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is as if the user had named the three folders."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    common = ["-k", 2, "--set", prompts, "--max-new-tokens", 6, "--threads", 1, "--format", "json"]
    by_folder = ["--target", pair.target, "--draft", pair.peagle, "--eagle3", pair.eagle3]
    expected = json.loads(peagle("eval", *common, *by_folder).out)["entries"]
    monkeypatch.setattr(bundled, "fetch_wheel_file", lambda wanted: Path(pair.target))
    for role, folder in (("draft", pair.peagle), ("eagle3", pair.eagle3)):
        monkeypatch.setitem(bundled.FOLDERS[role], "smollm2", Path(folder))
    monkeypatch.setitem(bundled.FOLDERS["draft"], "smollm2-eagle3", Path(pair.eagle3))

    done = peagle("eval", "smollm2", *common)
    assert done.status == 0, done.err
    entries = json.loads(done.out)["entries"]
    assert [(one["method"], one["pooled"]) for one in entries] == [
        (one["method"], one["pooled"]) for one in expected
    ]
    assert shown(peagle, "--target", "smollm2")["speculative"]["model"] == str(pair.peagle)
    assert expand_bundled("smollm2-eagle3", "draft") == str(pair.eagle3)
    spec, name = serve._spec(Setup(Given(target=Setting("smollm2", "MODEL"))), ServerConfig(), None)
    assert (spec.target, name) == (str(pair.target), "smollm2")
    assert sorted(spec.proposers) == ["eagle3", "peagle"]
    file = tmp_path / "head.toml"
    rest = 'output = "run"\n[data]\ntrain = "t.jsonl"\n[optimizer]\nsteps = 1\n'
    file.write_text(f'target = "smollm2"\n{rest}[head]\ninit = "smollm2"\n')
    config = TrainConfig.read(file)
    assert (config.target, config.head.init) == (Path(pair.target), Path(pair.peagle))


def test_a_head_that_does_not_ship_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bundled.FOLDERS["draft"], "smollm2", Path("none") / "peagle")
    with pytest.raises(UserError, match=r"has no smollm2 peagle \('none/peagle' is not there\)"):
        expand_bundled("smollm2", "draft")


def test_convert_takes_the_name(peagle: Peagle, tmp_path: Path) -> None:
    result = peagle(
        *("convert", "bundled", tmp_path / "head", "--format", "speculators"),
        *("--target", "bundled", "--json"),
    )
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["source"], told["target"]) == (str(BUNDLED_PEAGLE), str(BUNDLED_TARGET))
