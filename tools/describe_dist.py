"""Describe the built archives: `python tools/describe_dist.py dist`.

Writes into the folder `NAME-VERSION.cdx.json`, the software bill of materials of the wheel
(CycloneDX 1.6), and `SHA256SUMS`, the hashes of all files there. The bill lists every package that
the wheel and its extras for users bring, with its version, its licence and the packages that it
needs; packages of extras alone are optional. It is read from the packages installed beside this
Python, so it holds for this platform: a torch for CUDA also brings NVIDIA's libraries. Its content
depends on the wheel and these packages alone.
"""

import hashlib
import json
import sys
import uuid
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# Extras of those who change peagle.
DEVELOPMENT = {"dev", "docs"}


def distribution_of(wheel: Path) -> Distribution:
    """Return the metadata of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return PathDistribution(zipfile.Path(wheel, f"{name}-{version}.dist-info/"))  # type: ignore[arg-type]


def needs(package: Distribution, extras: Iterable[str]) -> dict[str, set[str]]:
    """Return the packages that a package with extras needs here, each with its own extras."""
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, package.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
    return found


def closure(root: Distribution, extras: Iterable[str]) -> dict[str, set[str]]:
    """Return all packages that come along with `root`, each with the packages that it needs.

    Raises:
        SystemExit: one of them is not installed.
    """
    graph: dict[str, set[str]] = {}
    seen: dict[str, set[str]] = {}
    waiting = list(needs(root, extras).items())
    while waiting:
        name, wanted = waiting.pop()
        if name in seen and wanted <= seen[name]:
            continue
        seen.setdefault(name, set()).update(wanted)
        try:
            below = needs(distribution(name), seen[name])
        except PackageNotFoundError:
            sys.exit(f"describe_dist: {name} is not installed; install the extra dev first")
        graph.setdefault(name, set()).update(below)
        waiting += below.items()
    return graph


def licences(package: Distribution) -> list[dict[str, Any]]:
    """Return the licences that a package names, in CycloneDX's form."""
    if expression := package.metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = package.metadata.get_all("Classifier", [])
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")]
    # Some packages put the whole text there.
    if not names and 0 < len(text := (package.metadata.get("License") or "").strip()) < 60:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def component(package: Distribution, kind: str) -> dict[str, Any]:
    """Return a package as a component of the bill."""
    name, version = canonicalize_name(package.metadata["Name"]), Version(package.version).public
    purl = f"pkg:pypi/{name}@{version}"
    found = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return {**found, "licenses": said} if (said := licences(package)) else found


def bill_of_materials(wheel: Path) -> dict[str, Any]:
    """Return the bill of a wheel.

    Raises:
        SystemExit: a package that it needs is not installed.
    """
    root = distribution_of(wheel)
    extras = set(root.metadata.get_all("Provides-Extra", [])) - DEVELOPMENT
    everything, required = closure(root, extras), closure(root, ())
    # An extra may name the package itself.
    own = canonicalize_name(root.metadata["Name"])
    everything.pop(own, None)
    parts = {name: component(distribution(name), "library") for name in sorted(everything)}
    for name, part in parts.items():
        part["scope"] = "required" if name in required else "optional"
    digest = sha256(wheel)
    product = {
        **component(root, "application"),
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
    graph = {product["bom-ref"]: needs(root, extras).keys() - {own}}
    graph |= {parts[name]["bom-ref"]: below for name, below in sorted(everything.items())}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"component": product},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(parts[name]["bom-ref"] for name in below)}
            for ref, below in graph.items()
        ],
    }


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> int:
    """Write both files into the folder that the command names."""
    if len(sys.argv) != 2:
        print("usage: python tools/describe_dist.py DIST_FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    (wheel,) = folder.glob("*.whl")
    bill = bill_of_materials(wheel)
    name = "-".join(wheel.name.split("-")[:2])
    (folder / f"{name}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    sums = folder / "SHA256SUMS"
    files = sorted(file for file in folder.iterdir() if file != sums)
    sums.write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    print(f"{name}.cdx.json: {len(bill['components'])} packages; SHA256SUMS: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
