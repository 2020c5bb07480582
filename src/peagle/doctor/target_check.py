"""Whether a head is for this target, as the fingerprint in it tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from peagle.errors import CheckpointError
from peagle.models.checkpoint.formats import facts_from_json
from peagle.models.fingerprint import TargetFingerprint

if TYPE_CHECKING:
    from peagle.doctor.files import Files


def check_target(files: Files) -> None:
    """The fingerprint in the head against the target."""
    target = files.target
    try:
        told = facts_from_json(files.data).get("target")
        expected = None if told is None else TargetFingerprint.from_json(told)
    except CheckpointError as error:
        files.check("fingerprint", "not checked", str(error))
        return
    if expected is None:
        files.check("fingerprint", "not checked", "the head does not say which target it is for")
        return
    found = TargetFingerprint.of(target)
    names = [n for n in ("vocab_size", "hidden_size", "num_layers") if _differ(expected, found, n)]
    if target.dtype != torch.float16 and _differ(expected, found, "lm_head_sha256"):
        names.append("lm_head_sha256")
    if names:
        files.check("fingerprint", "differs", f"the target's {', '.join(names)} differ")
        files.blame(
            "wrong_target",
            f"the head was trained for {expected.name!r}, whose {' and '.join(names)} differ "
            f"from those of {target.name!r}",
            f"Serve the head with {expected.name!r}, or train one for this target.",
        )
    if _differ(expected, found, "tokenizer_sha256"):
        files.check("tokenizer", "differs", "the target's tokenizer.json is not the head's")
        files.blame(
            "tokenizer",
            "tokenizer.json of the target is not the one the head was trained with (SHA-256 "
            f"{str(found.tokenizer_sha256)[:12]}, expected {str(expected.tokenizer_sha256)[:12]})",
            "Put the original tokenizer.json back into the target's folder.",
        )
    elif not names:
        files.check("fingerprint", "agrees", f"the head was trained for {expected.name!r}")


def _differ(expected: TargetFingerprint, found: TargetFingerprint, name: str) -> bool:
    one, other = getattr(expected, name), getattr(found, name)
    return None not in (one, other) and one != other
