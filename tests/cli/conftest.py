"""Commands run in this process, on a tiny pair."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import peagle as package
from peagle.cli.main import run
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import placement
from peagle.evaluation.report import charts
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from serving.warm import WarmProcess
from tests.conftest import byte_tokenizer, make_drafter, make_target_folder
from tests.models.tiny import make_model


@dataclass(frozen=True)
class Result:
    """What a command did."""

    status: int
    out: str
    err: str


Peagle = Callable[..., Result]
_can_draw = charts.can_draw

# Sections of what `--show-config` prints.
DEFAULTS = {
    "engine": EngineConfig(),
    "speculative": SpeculativeConfig(method="ngram"),
    "sampling": SamplingParams(),
}


def without_defaults(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a section of `--show-config` that are not defaults."""
    defaults = json.loads(json.dumps(asdict(DEFAULTS[section])))
    defaults |= {"method": None, "logit_bias": {}, "corrections": {}}
    return {key: value for key, value in values.items() if value != defaults[key]}


def environment() -> dict[str, str]:
    """Of a process that finds the package."""
    return {**os.environ, "PYTHONPATH": str(Path(package.__file__).resolve().parents[1])}


def kill_when(condition: Callable[[], bool], command: list[str], log: Path) -> None:
    """Run a command in a process of its own, and kill it with SIGKILL once the condition holds."""
    process = WarmProcess(["peagle", *command], {**environment(), "OMP_NUM_THREADS": "1"}, log)
    until = time.monotonic() + 60
    while time.monotonic() < until and not condition():
        time.sleep(0.002)
    process.kill()
    process.wait()


def entries_of(result: Result) -> list[dict[str, Any]]:
    """The entries of a run that went well."""
    assert result.status == 0, result.err
    return json.loads(result.out)["entries"]


@pytest.fixture
def peagle(capsys: pytest.CaptureFixture[str]) -> Peagle:
    """peagle("generate", "--prompt", "x") runs the command line."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture(autouse=True)
def _undrawn() -> Iterator[None]:
    """Leave out the charts of reports: drawing takes longer than measuring the tiny pair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "can_draw", lambda: False)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the charts of reports, as outside of tests."""
    monkeypatch.setattr(charts, "can_draw", _can_draw)


@pytest.fixture(autouse=True)
def _keep_threads(monkeypatch: pytest.MonkeyPatch):
    """A command that sets the threads of the process sets them for its own test alone."""
    threads = torch.get_num_threads()
    for name in ("_is_set", "_chosen"):
        monkeypatch.setattr(placement, name, getattr(placement, name))
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Pair:
    """Folders of a tiny random target and of its heads."""

    target: Path
    peagle: Path
    eagle3: Path

    @property
    def options(self) -> tuple[object, ...]:
        return "--target", self.target, "--draft", self.peagle


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target with room for a HumanEval prompt in bytes, a P-EAGLE and an EAGLE-3 head."""
    root = tmp_path_factory.mktemp("pair")
    folder = make_target_folder(root / "target", max_position_embeddings=2048)
    return _with_heads(root, folder)


@pytest.fixture(scope="session")
def mixture_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny mixture of experts, a P-EAGLE and an EAGLE-3 head."""
    root = tmp_path_factory.mktemp("mixture_pair")
    folder = root / "target"
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_model("qwen3_moe", head_dim=8, max_position_embeddings=2048, **experts)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return _with_heads(root, folder)


def _with_heads(root: Path, folder: Path) -> Pair:
    target = TargetModel.load(folder)
    for name, parallel in (("peagle", True), ("eagle3", False)):
        drafter = make_drafter(target, parallel=parallel, max_position_embeddings=2048)
        save_drafter(root / name, drafter, fingerprint=TargetFingerprint.of(target))
    return Pair(folder, root / "peagle", root / "eagle3")
