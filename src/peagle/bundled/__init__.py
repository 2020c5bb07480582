"""The pair and the prompts that ship inside the package, and the names by which users ask for them.

Wherever a model may be named, `bundled` names the bundled one of the role that is asked for.
"""

from pathlib import Path
from typing import Literal

from peagle.errors import UserError

_ROOT = Path(__file__).parent
BUNDLED_TARGET = _ROOT / "target"
BUNDLED_PEAGLE = _ROOT / "peagle"
BUNDLED_EAGLE3 = _ROOT / "eagle3"
BUNDLED_PROMPTS = _ROOT / "prompts"

BUNDLED = "bundled"
Role = Literal["target", "draft", "eagle3"]
_EAGLE3_NAMES = {"bundled-eagle3": BUNDLED_EAGLE3}
FOLDERS = {
    "target": {BUNDLED: BUNDLED_TARGET},
    "draft": {BUNDLED: BUNDLED_PEAGLE, **_EAGLE3_NAMES},
    "eagle3": {BUNDLED: BUNDLED_EAGLE3, **_EAGLE3_NAMES},
}


def expand_bundled(name: str, role: Role) -> str:
    """Return the folder that the name of a bundled model stands for; other names stay as they are.

    The name means the bundled model even where a folder `bundled` is in the current directory, so
    that a command does the same in every directory; `./bundled` names that folder.

    Args:
        name: the name that the user gave.
        role: what the model is for: `bundled` is the target, the P-EAGLE head or the EAGLE-3 head.

    Raises:
        UserError: this installation has no bundled weights.
    """
    folder = FOLDERS[role].get(name)
    if folder is None:
        return name
    if not (folder / "config.json").is_file():
        raise UserError(
            f"This installation has no bundled {folder.name} ({str(folder)!r} is not there). "
            "Install a released wheel, or name models of your own with --target and --draft."
        )
    return str(folder)
