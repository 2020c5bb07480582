"""Fixtures of the tests against real vLLM. Here a test that is skipped has failed."""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle.backends.vllm.command import engine_arguments, vllm_environment
from peagle.backends.vllm.installation import VllmInstallation, find_vllm
from peagle.backends.vllm.launch import VllmLaunch
from peagle.config import SpeculativeConfig
from peagle.models.checkpoint import CORRECTION_NAME
from tests.corrections import add_correction
from tests.interop.cases import CASES, MAX_TOKENS, SCHEDULES, SPLIT, Case, K, Ours, Schedule
from tests.interop.trained import PAIRS

RUNNER = Path(__file__).parent / "run_heads.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and item.get_closest_marker("vllm") is not None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as a failure here: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def installation() -> VllmInstallation:
    """The vLLM to hold against; without one the tests fail and say how to install it."""
    return find_vllm()


@pytest.fixture(scope="session")
def sides() -> dict[str, Ours]:
    """The targets in our engine, by the name of their pair."""
    return {pair: Ours(pair) for pair in PAIRS}


@pytest.fixture(scope="session")
def folders(
    sides: dict[str, Ours], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Path]]:
    """Every head, by the name of its case and its style."""
    folder = tmp_path_factory.mktemp("heads")
    return {case.name: case.make(folder, sides[case.pair].kept) for case in CASES}


@pytest.fixture(scope="session")
def theirs(
    installation: VllmInstallation,
    sides: dict[str, Ours],
    folders: dict[str, dict[str, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """vLLM's results with every head, by "case/style", without corrections."""
    place = tmp_path_factory.mktemp("theirs")
    return _run_all(installation, sides, folders, place, correction=False)


@pytest.fixture(scope="session")
def corrected_folders(
    folders: dict[str, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Path]]:
    """Every P-EAGLE head in vLLM's style with a correction beside it, a random one if need be."""
    place, made = tmp_path_factory.mktemp("corrected"), {}
    for case in (case for case in CASES if case.is_parallel):
        head = shutil.copytree(folders[case.name]["vllm"], place / case.name)
        if not (head / CORRECTION_NAME).exists():
            add_correction(head)
        made[case.name] = {"vllm": head}
    return made


@pytest.fixture(scope="session")
def corrected_theirs(
    installation: VllmInstallation,
    sides: dict[str, Ours],
    corrected_folders: dict[str, dict[str, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """vLLM's results with `corrected_folders`, with the plugin."""
    place = tmp_path_factory.mktemp("corrected-theirs")
    return _run_all(installation, sides, corrected_folders, place, correction=True)


@pytest.fixture(scope="session")
def split_theirs(
    installation: VllmInstallation,
    sides: dict[str, Ours],
    corrected_folders: dict[str, dict[str, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """The same of the heads `SPLIT`, with target and head shared out over two workers."""
    place = tmp_path_factory.mktemp("split-theirs")
    some = {name: corrected_folders[name] for name in SPLIT}
    return _run_all(installation, sides, some, place, correction=True, workers=2)


@pytest.fixture(scope="session")
def scheduled_theirs(
    installation: VllmInstallation,
    sides: dict[str, Ours],
    corrected_folders: dict[str, dict[str, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """The same of two heads with `SCHEDULES` of K; all prompts run together where K varies."""
    some = {name: corrected_folders[name] for name in SPLIT[:2]}
    told: dict[str, dict[str, Any]] = {}
    for name, schedule in SCHEDULES.items():
        place = tmp_path_factory.mktemp(f"scheduled-{name}")
        found = _run_all(installation, sides, some, place, correction=True, schedule=schedule)
        told |= {f"{head}/{name}": one for head, one in found.items()}
    return told


def _run_all(
    installation: VllmInstallation,
    sides: dict[str, Ours],
    folders: dict[str, dict[str, Path]],
    place: Path,
    *,
    correction: bool,
    workers: int = 1,
    schedule: Schedule | None = None,
) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}
    for pair, ours in sides.items():
        heads, variables = {}, dict(os.environ)
        for case in (case for case in CASES if case.pair == pair and case.name in folders):
            for style, folder in folders[case.name].items():
                launch = _launch(case, folder, ours, correction=correction)
                launch = replace(launch, tensor_parallel_size=workers)
                if schedule is not None:
                    launch = _scheduled(launch, schedule)
                heads[f"{case.name}/{style}"] = {
                    **engine_arguments(launch, installation),
                    "disable_log_stats": False,
                }
                variables |= vllm_environment(launch, installation)
        if not heads:
            continue
        job = {"prompts": ours.prompts, "max_tokens": MAX_TOKENS, "k": K, "heads": heads}
        job["together"] = schedule is not None and len(schedule) > 1
        # In the runner's own process where one will do: a third of the time to start.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(workers > 1))
        (place / pair).mkdir()
        told |= _run(installation, job, variables, place / pair)
    return told


def _launch(case: Case, head: Path, ours: Ours, *, correction: bool) -> VllmLaunch:
    return VllmLaunch(
        str(ours.pair.target),
        SpeculativeConfig(model=str(head), num_speculative_tokens=K, correction=correction),
        is_parallel=case.is_parallel,
        dtype="float32",
        max_model_len=ours.target.text_config.max_position_embeddings,
        max_num_seqs=1,
        kv_cache_gib=1,
        enable_prefix_caching=False,
    )


def _scheduled(launch: VllmLaunch, schedule: Schedule) -> VllmLaunch:
    assert launch.speculative is not None
    config = replace(launch.speculative, num_speculative_tokens_per_batch_size=schedule)
    return replace(launch, speculative=config, max_num_seqs=schedule[-1][1])


def _run(
    installation: VllmInstallation, job: dict[str, Any], variables: dict[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Run a job; if the runner dies, the heads after that one have no results either."""
    jobs, results, log = (folder / name for name in ("job.json", "results.jsonl", "vllm.log"))
    jobs.write_text(json.dumps(job))
    variables |= {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        argv = [str(installation.python), str(RUNNER), str(jobs), str(results)]
        ended = subprocess.run(argv, env=variables, stdout=output, stderr=subprocess.STDOUT)
    lines = results.read_text().splitlines() if results.exists() else []
    told = {one.pop("name"): one for one in map(json.loads, lines)}
    lost = f"vLLM's process ended with status {ended.returncode}:\n{log.read_text()[-3000:]}"
    return {name: told.get(name, {"error": lost}) for name in job["heads"]}
