"""Versions of vLLM with a published security advisory get a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

from backends.fake_vllm import install
from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.installation import (
    ADVISORIES,
    OLDEST,
    VllmInstallation,
    advisory_note,
    find_vllm,
)
from peagle.backends.vllm.launch import VllmLaunch

OLDEST_VERSION = ".".join(map(str, OLDEST))


def note(version: str) -> str:
    return advisory_note(VllmInstallation(Path("python"), version))


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda one: one.name)
def test_each_from_its_first_version_to_its_fix(advisory) -> None:
    assert re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d{4,}", advisory.name)
    first = max(advisory.since, OLDEST_VERSION, key=Version)
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
