"""Published security advisories of vLLM that concern a server, and what to tell its user.

Of versions that peagle takes (0.16 or newer), as of November 2026. Each line is as in the record of
PyPI's advisory database (PYSEC) or of the CVE. Those of media, of gRPC and of servers without HTTP
are left out, since peagle serves text over HTTP.
"""

from __future__ import annotations

from typing import NamedTuple

from peagle.backends.vllm.installation import VllmInstallation


class Advisory(NamedTuple):
    """An advisory.

    Attributes:
        name: under which it is found.
        since: first version with the fault; "0" for all before `fixed`.
        fixed: first version without it.
        what: a sentence.
    """

    name: str
    since: str
    fixed: str
    what: str


ADVISORIES = (
    Advisory(
        "CVE-2026-27893",
        "0.10.1",
        "0.18.0",
        "two kinds of models run code of their own although that was not allowed",
    ),
    Advisory(
        "CVE-2026-34756",
        "0.1.0",
        "0.19.0",
        "one request with a huge n blocks the server and takes all memory",
    ),
    Advisory(
        "CVE-2026-48746",
        "0.3.0",
        "0.22.0",
        "a request can get past vLLM's own check of API keys",
    ),
    Advisory(
        "CVE-2026-47155",
        "0",
        "0.22.0",
        "some files of a model are not loaded from the revision that was asked for",
    ),
    Advisory(
        "PYSEC-2026-2303",
        "0.12.0",
        "0.24.0",
        "a prompt of embeddings ends the engine, with models of M-RoPE",
    ),
    Advisory(
        "CVE-2026-105757",
        "0",
        "0.30.0",
        "a request for structured output can end the engine",
    ),
    Advisory(
        "PYSEC-2026-4353",
        "0.20.0",
        "0.30.0",
        "a request to /inference/v1/generate can end the engine",
    ),
    Advisory(
        "CVE-2026-114051",
        "0",
        "0.31.0",
        "a request to /inference/v1/generate with a large min_tokens hangs the engine",
    ),
    Advisory(
        "CVE-2026-115911",
        "0.19.0",
        "0.32.0",
        "a chat template in a request blocks the server or takes all memory",
    ),
    Advisory(
        "PYSEC-2026-4349",
        "0.16.0",
        "0.32.0",
        "/v1/responses takes chat templates from requests that may not bring one",
    ),
)


def advisory_note(installation: VllmInstallation) -> str:
    """What to tell the user about known faults of a version's security; "" for others.

    A version that cannot be read counts as none with faults: `version_note` tells about it.
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
