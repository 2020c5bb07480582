"""Published security advisories of vLLM that concern a server, and the note about them.

They are those of versions that peagle takes (0.16 or newer), as of November 2026, with the versions
of PyPI's advisory database (PYSEC) or of the CVE. Those of media, of gRPC and of servers without
HTTP are left out, since peagle serves text over HTTP.
"""

from __future__ import annotations

from typing import NamedTuple

from peagle.backends.vllm.installation import VllmInstallation


class Advisory(NamedTuple):
    """An advisory: first version with the fault ("0": all), first without it, what it is."""

    name: str
    since: str
    fixed: str
    what: str


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


def advisory_note(installation: VllmInstallation) -> str:
    """Return a note about known security faults of a version; "" without any.

    A version that cannot be read has none: `version_note` is about it.
    """
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
