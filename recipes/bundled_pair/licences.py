"""Which distributions may be trained on: permissive licences only, declared and shipped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message

# The families that are allowed, by the identifiers that stand for them.
_SPDX = {
    "MIT": "MIT",
    "MIT-0": "MIT",
    "0BSD": "BSD",
    "BSD-2-CLAUSE": "BSD",
    "BSD-3-CLAUSE": "BSD",
    "APACHE-2.0": "Apache-2.0",
    "PSF-2.0": "PSF",
    "PYTHON-2.0": "PSF",
    "ISC": "ISC",
    "CC0-1.0": "CC0",
}
# How a licence is named in the free-text License field or in a classifier.
_NAMES = [
    (re.compile(r"^(the )?(modified |new |simplified )?(0|2|3)?-?(clause )?bsd\b", re.I), "BSD"),
    (re.compile(r"^(the )?(expat|mit)(?![\w-]*(hpnd|cmu))\b", re.I), "MIT"),
    (re.compile(r"^(the )?apache\b", re.I), "Apache-2.0"),
    (re.compile(r"^(psf\b|python software foundation)", re.I), "PSF"),
    (re.compile(r"^isc\b", re.I), "ISC"),
    (re.compile(r"^cc0\b", re.I), "CC0"),
]
# Sentences that occur in the licence itself, whatever title it carries.
_TEXTS = [
    (re.compile(r"permission is hereby granted, free of charge"), "MIT"),
    (re.compile(r"redistributions of source code|redistribution and use in source"), "BSD"),
    (re.compile(r"apache license,? (version|v) ?2|apache\.org/licenses/license-2"), "Apache-2.0"),
    (re.compile(r"python software foundation license|psf is making python"), "PSF"),
    (re.compile(r"permission to use, copy, modify,? and(/or)? distribute this soft"), "ISC"),
    (re.compile(r"cc0 1\.0 universal"), "CC0"),
]
COPYLEFT = re.compile(
    r"\b(l|a)?gpl(v?[23]|\b)|gnu (lesser |library |affero )?general public|affero|mozilla public"
    r"|\bmpl\b|mpl-2|cecill|\beupl\b|eclipse public|share-?alike|non-?commercial|server side public"
    r"|business source|proprietary",
    re.I,
)
# Python's own licence text explains how it relates to the GPL; that is no grant under the GPL.
_PSF_HISTORY = re.compile(
    r"gpl[- ]{0,2}(from )?compatible|compatible with the gpl|unlike the gpl|\bthe gpl\b"
    r"|previously distributed under the gnu general public license \(gpl\)",
    re.I,
)
# The compiler's runtime, shipped beside compiled extensions; no Python source is under it.
_GCC_RUNTIME = re.compile(r"gcc[- ](runtime library )?exception", re.I)


@dataclass(frozen=True)
class Verdict:
    """`licence` names the families found ("BSD AND MIT"); `reason` says why it was refused."""

    accepted: bool
    licence: str
    reason: str = ""


def _from_expression(expression: str) -> tuple[set[str], str]:
    parts = re.split(r"\s+(?:AND|OR|WITH)\s+|[()]", expression, flags=re.I)
    parts = [part.strip() for part in parts if part.strip()]
    unknown = [part for part in parts if part.upper() not in _SPDX]
    families = {_SPDX[part.upper()] for part in parts if part.upper() in _SPDX}
    return families, f"licence expression holds {', '.join(unknown)}" if unknown else ""


def _from_name(name: str) -> str | None:
    return next((family for pattern, family in _NAMES if pattern.search(name)), None)


def classify_text(text: str) -> set[str]:
    """Families whose own wording occurs in `text`."""
    flat = " ".join(text.lower().split())
    return {family for pattern, family in _TEXTS if pattern.search(flat)}


def _declared(metadata: Message) -> tuple[set[str], str]:
    """(families, why refused) from License-Expression, else classifiers and License."""
    if expression := metadata.get("License-Expression"):
        return _from_expression(str(expression))
    families: set[str] = set()
    names = [
        classifier.split("::")[-1].strip()
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith("License ::") and classifier.count("::") > 0
    ]
    names = [name for name in names if name != "OSI Approved"]
    field = str(metadata.get("License") or "").strip()
    if "\n" in field or len(field) > 120:
        families |= classify_text(field)
    elif field and field.upper() not in ("UNKNOWN", "DUAL LICENSE", "NONE"):
        parts = re.split(r"\s+(?:AND|OR)\s+|,|/", field, flags=re.I) if " " in field else [field]
        names += [part.strip() for part in parts if part.strip()]
    for name in names:
        if COPYLEFT.search(name):
            return families, f"declares {name}"
        family = _SPDX.get(name.upper()) or _from_name(name)
        # A second, vaguer name beside a known one ("BSD-3-Clause", "2.0") tells nothing new.
        if family:
            families.add(family)
        elif not families:
            return families, f"declares {name}"
    return families, ""


def classify(name: str, metadata: Message, licence_files: dict[str, str]) -> Verdict:
    """Decide on one distribution from its METADATA and the licence files that it ships.

    Both must say so: a declaration made only of permissive families, and at least one licence
    file with the wording of a permissive licence and none of a copyleft one.
    """
    if name.lower().startswith("nvidia"):
        return Verdict(False, "", "nvidia distribution")
    families, refused = _declared(metadata)
    label = " AND ".join(sorted(families))
    if refused:
        return Verdict(False, label, refused)
    if not families:
        return Verdict(False, "", "no licence declared")
    if not licence_files:
        return Verdict(False, label, "no licence file")
    found: set[str] = set()
    for path, text in sorted(licence_files.items()):
        flat = " ".join(text.split())
        if "PSF" in classify_text(flat):
            flat = _PSF_HISTORY.sub("", flat)
        hit = COPYLEFT.search(flat)
        if hit and not _GCC_RUNTIME.search(text):
            return Verdict(False, label, f"{path} mentions {hit.group(0)!r}")
        found |= classify_text(text)
    if not found:
        return Verdict(False, label, "licence files not recognised")
    return Verdict(True, label)
