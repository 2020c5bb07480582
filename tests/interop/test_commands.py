"""`peagle eval`, `bench` and `doctor` on real vLLM: the engine's figures, and faults by name."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import SpeculativeConfig
from peagle.doctor.examiner import examine
from peagle.doctor.probe import Probe, choose_texts
from peagle.doctor.serving import VllmServing
from peagle.models.checkpoint import CORRECTION_NAME
from peagle.models.target import load_tokenizer
from tests.doctor.conftest import make_probe
from tests.doctor.planting import FILE_FAULTS, Fault, copy_head
from tests.interop.trained import BUILD, PAIR2, make_pair2, pair2_head
from tests.models.editing import edit_config

pytestmark = pytest.mark.vllm
PLANTS = {fault.name: fault for fault in FILE_FAULTS}
ID_0 = {"mask_token_id": 0, "pard_token": 0, "ptd_token_id": 0}
PLANTS["mask id 0"] = Fault("mask id 0", "mask_token_id", lambda f: edit_config(f, **ID_0))
K = 5


@pytest.fixture(scope="module")
def pair2() -> list[object]:
    """Options that name the second pair, with attention heads that vLLM's CPU build can run."""
    target, head = (
        make_pair2(BUILD / "commands" / "target"),
        pair2_head(BUILD / "commands" / "head"),
    )
    return ["--target", target, "--draft", head]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options that name the bundled pair, its head without the correction, as vLLM reads it."""
    head = tmp_path_factory.mktemp("bundled") / "head"
    shutil.copytree(BUNDLED_PEAGLE, head, ignore=shutil.ignore_patterns(CORRECTION_NAME))
    return ["--target", BUNDLED_TARGET, "--draft", head]


def peagle(installation: VllmInstallation, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Run a command that prints JSON: its status and what it printed."""
    given = [*arguments, "--format", "json", "--threads", 1]
    if "vllm" in arguments:
        given += ["--vllm-python", installation.python]
    ran = subprocess.run(
        [sys.executable, "-m", "peagle", *map(str, given)], capture_output=True, text=True
    )
    assert ran.stdout.startswith("{"), ran.stderr[-3000:]
    return ran.returncode, json.loads(ran.stdout)


# ---- eval -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["bundled", "pair2"])
def test_eval_counts_what_our_engine_counts(
    pair: str, installation: VllmInstallation, request: pytest.FixtureRequest
) -> None:
    options = [*request.getfixturevalue(pair), "-k", K, "--concurrency", 1, "--no-ngram"]
    options += ["--max-new-tokens", 64, "--limit", 8]
    if pair == "pair2":
        options += ["--set", PAIR2 / "prompts.jsonl", "--thinking"]
    told = {}
    for engine in ("peagle", "vllm"):
        status, data = peagle(installation, "eval", *options, "--engine", engine)
        assert status == 0
        (entry,) = data["entries"]
        assert (entry["engine"], entry["k"]) == (engine, K)
        assert data["provenance"]["dtype"] == "float32"
        told[engine] = entry["pooled"]
    names = ("num_requests", "num_drafts", "num_accepted_tokens_per_pos", "acceptance_length")
    ours, theirs = ([told[engine][name] for name in names] for engine in ("peagle", "vllm"))
    assert theirs == ours
    assert min(told["vllm"]["num_accepted_tokens_per_pos"]) > 0


# ---- bench ----------------------------------------------------------------------------------


def test_bench_measures_every_method_and_k(
    bundled: list[object], installation: VllmInstallation
) -> None:
    options = [*bundled, "-k", "2,5", "--concurrency", 2, "--limit", 4, "--max-new-tokens", 48]
    status, data = peagle(installation, "bench", *options, "--repeats", 1, "--engine", "vllm")
    assert status == 0
    lengths = {(one["method"], one["k"]): one["median"] for one in data["cells"]}
    assert list(lengths) == [("plain", 0), ("peagle", 2), ("peagle", 5)]
    assert {one["engine"] for one in data["cells"]} == {"vllm"}
    two, five = (lengths["peagle", k]["acceptance_length"] for k in (2, 5))
    assert 1.5 < two <= 3 and two < five <= 6
    assert lengths["plain", 0]["acceptance_length"] is None


# ---- doctor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["bundled", "pair2"])
def test_doctor_finds_healthy_heads_healthy(
    pair: str, installation: VllmInstallation, request: pytest.FixtureRequest
) -> None:
    options = [*request.getfixturevalue(pair), "--engine", "vllm"]
    if pair == "pair2":
        options += ["--prompts", PAIR2 / "prompts.jsonl"]
    status, report = peagle(installation, "doctor", *options)
    assert status == 0, report["causes"]
    assert report["healthy"] and report["serving"] == "vLLM"
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["served drafts"]["status"] == "agrees"
    assert checks["served drafts"]["text"].startswith("100% of ")


@pytest.mark.parametrize("name", ["norms exchanged", "final norm missing"])
def test_doctor_names_what_is_wrong_with_a_head_that_vllm_serves(
    name: str, installation: VllmInstallation, tmp_path: Path
) -> None:
    """vLLM loads both without a word: a tensor that is missing stays as it was made."""
    head = copy_head(BUNDLED_PEAGLE, tmp_path / "head", PLANTS[name])
    options = ["--target", BUNDLED_TARGET, "--draft", head, "--engine", "vllm"]
    status, report = peagle(installation, "doctor", *options)
    assert status == 1
    assert ("norms", "head") in [(one["id"], one["where"]) for one in report["causes"]]
    assert report["served"]["num_drafts"] > 0


@pytest.fixture(scope="module")
def probe() -> Probe:
    texts = choose_texts(None, load_tokenizer(BUNDLED_TARGET))[::2]
    return make_probe(BUNDLED_TARGET, BUNDLED_PEAGLE, texts)


def _plant(*names: str) -> Callable[[Path], Path]:
    faults: list[Fault] = [PLANTS[name] for name in names]
    return lambda folder: copy_head(BUNDLED_PEAGLE, folder, *faults)


@pytest.mark.parametrize(
    ("cause", "served", "options"),
    [
        ("parallel_drafting", _plant(), {"is_parallel": False}),
        ("aux_layers", _plant("aux layers + 1"), {}),
        ("norms", _plant("final norm missing"), {}),
        ("residual", _plant("residual"), {}),
        ("mask_token_id", _plant("mask id 0"), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_doctor_names_what_vllm_serves_wrongly(
    cause: str,
    served: Callable[[Path], Path],
    options: dict[str, Any],
    installation: VllmInstallation,
    probe: Probe,
    tmp_path: Path,
) -> None:
    """The head examined is healthy; the one that vLLM serves differs in one respect."""
    launch = VllmLaunch(
        str(BUNDLED_TARGET),
        SpeculativeConfig(model=str(served(tmp_path / "head")), num_speculative_tokens=6),
        port=0,
        max_num_seqs=1,
        enable_prefix_caching=False,
        threads=1,
        **options,
    )
    report = examine(probe, BUNDLED_PEAGLE, VllmServing(launch, installation))
    assert [(one.id, one.where) for one in report.causes] == [(cause, "serving")], report.causes


def test_doctor_says_that_vllm_does_not_start(
    installation: VllmInstallation, bundled: list[object]
) -> None:
    flags = ["--", "--tokenizer-mode", "nonsense"]
    arguments = ["doctor", *bundled, "--engine", "vllm", "--vllm-python", installation.python]
    arguments += ["--format", "json", *flags]
    ran = subprocess.run(
        [sys.executable, "-m", "peagle", *map(str, arguments)], capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stderr[-3000:]
    report = json.loads(ran.stdout)
    assert [one["id"] for one in report["causes"]] == ["serving"]
    assert "nonsense" in report["causes"][0]["evidence"]
