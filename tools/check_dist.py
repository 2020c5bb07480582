"""Compare the built archives with the checkout: `python tools/check_dist.py dist`.

The wheel and the sdist must both hold every file of src/peagle that git tracks or would track (the
bundled weights, tokenizers and prompts above all) and the licence texts, and nothing else of size.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTICES = ("LICENSE", "THIRD_PARTY.md")


def package_files() -> set[str]:
    """Paths below src/ of all files of the package, as git sees them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src/peagle"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = (name for name in listing.split("\0") if name)
    return {name.removeprefix("src/") for name in names if (ROOT / name).is_file()}


def check_wheel(path: Path, expected: set[str]) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    problems = [f"{path.name} lacks {name}" for name in sorted(expected - names)]
    for notice in NOTICES:
        if not any(n.endswith(f".dist-info/licenses/{notice}") for n in names):
            problems.append(f"{path.name} lacks the notice {notice}")
    for name in sorted(names - expected):
        if ".dist-info/" not in name:
            problems.append(f"{path.name} holds {name}, which is no file of the package")
    return problems


def check_sdist(path: Path, expected: set[str]) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"src/{name}" for name in expected} | set(NOTICES) | {"pyproject.toml", "README.md"}
    problems = [f"{path.name} lacks {name}" for name in sorted(wanted - names)]
    for name in sorted(names):
        if name.startswith("shared/"):
            problems.append(f"{path.name} holds {name}, which must not ship")
    return problems


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tools/check_dist.py DIST_FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        print(f"{folder}: expected one wheel and one sdist, found {len(wheels)} and {len(sdists)}")
        return 1
    expected = package_files()
    problems = check_wheel(wheels[0], expected) + check_sdist(sdists[0], expected)
    for problem in problems:
        print(problem)
    if not problems:
        sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB" for p in wheels + sdists)
        print(f"{sizes}: all {len(expected)} files of the package are in both")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
