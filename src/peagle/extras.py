"""The commands that install missing packages, for the environment that runs this program."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from peagle.errors import UserError


def pip_install(what: str) -> str:
    """Return the shell command that installs packages where this Python finds them."""
    return f"{shlex.quote(sys.executable or 'python')} -m pip install {what}"


def install_extra(extra: str) -> str:
    """Return the shell command that adds an extra of peagle, like "serve", to this environment.

    From a checkout, the package is installed from there, as it was before.
    """
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "src" / "peagle").is_dir()
    return pip_install(f"-e '{root}[{extra}]'" if is_checkout else f"'peagle[{extra}]'")


def require_package(package: str, extra: str, what: str) -> None:
    """Refuse a feature whose package is not there; the package is only looked for.

    Raises:
        UserError: naming the package and the command that installs it.
    """
    if not _is_there(package):
        raise UserError(
            f"{what} needs the package {package}, which is not installed; run "
            f"{install_extra(extra)}"
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # its import is forbidden in this process
        return False
