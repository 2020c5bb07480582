"""The image, read from its Dockerfile: its stages, its context, its entry point as a process."""

import fnmatch
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from serving.warm import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TARGETS = ("cpu", "cuda")
USER = "10001:10001"
PYTHON_BIN = str(Path(sys.executable).parent)


class Instruction(NamedTuple):
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


class Stage(NamedTuple):
    base: str
    instructions: list[Instruction]


def read_stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; what stands before the first is in the stage ""."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages = {"": Stage("", [])}
    name = ""
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = Stage(base, [])
        else:
            stages[name].instructions.append(Instruction(word, rest.strip()))
    return stages


STAGES = read_stages(DOCKERFILE.read_text())


def instructions_of(target: str) -> list[Instruction]:
    """Those of a stage after those of the stages that it builds upon."""
    stage = STAGES[target]
    inherited = instructions_of(stage.base) if stage.base in STAGES else []
    return inherited + stage.instructions


def last(target: str, name: str) -> str:
    return [i.text for i in instructions_of(target) if i.name == name][-1]


def environment_of(target: str) -> dict[str, str]:
    """What the ENV lines of a stage amount to."""
    found: dict[str, str] = {}
    for instruction in instructions_of(target):
        if instruction.name == "ENV":
            found |= dict(word.split("=", 1) for word in instruction.words)
    return found


def let_through(path: str) -> bool:
    """Whether .dockerignore leaves a path of the repository in the build's context."""
    kept = True
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        parts = Path(path).parts
        tops = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(
            fnmatch.fnmatchcase(top, pattern)
            or (pattern.startswith("**/") and fnmatch.fnmatchcase(top, f"*{pattern[2:]}"))
            for top in tops
        ):
            kept = line.startswith("!")
    return kept


def copied_from_context() -> list[str]:
    """The sources of COPY lines that do not copy from another stage."""
    copies = [i.words for s in STAGES.values() for i in s.instructions if i.name == "COPY"]
    return [path for words in copies if not words[0].startswith("--") for path in words[:-1]]


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Run the image's entry point with the image's environment, its paths moved to `folder`.

    The process gets nothing of this one's environment. The package is this checkout's.
    """
    script, words, environment = _process(folder, arguments, variables)
    return subprocess.Popen(
        [sys.executable, script, *words],
        env=environment,
        cwd=folder / "cache",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_warm(folder: Path, *arguments: str, **variables: str) -> WarmProcess:
    """The same, forked from a process that has imported everything, see `serving.warm`."""
    script, words, environment = _process(folder, arguments, variables)
    log, where = folder / "log", folder / "cache"
    return WarmProcess([str(script), *words], environment, log, script=script, folder=where)


def _process(
    folder: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> tuple[Path, list[str], dict[str, str]]:
    """The script that is the entry point, its arguments, its environment."""
    (volume,) = json.loads(last("cpu", "VOLUME"))
    moved = folder / "cache"
    moved.mkdir(exist_ok=True)
    environment = {k: v.replace(volume, str(moved)) for k, v in environment_of("cpu").items()}
    environment["PATH"] = environment["PATH"].replace(
        "/opt/venv/bin:$PATH", f"{PYTHON_BIN}:/usr/bin"
    )
    environment |= {"HOME": str(moved), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    copies = [i.words for i in instructions_of("cpu") if i.name == "COPY"]
    originals = {destination: ROOT / path for path, destination in (c[-2:] for c in copies)}
    words = json.loads(last("cpu", "ENTRYPOINT"))
    assert words[0] == "python" and words[1] in originals
    given = list(arguments) or json.loads(last("cpu", "CMD"))
    return originals[words[1]], given, environment | variables
