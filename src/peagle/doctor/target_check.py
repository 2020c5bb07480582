"""Whether a head is for this target, as the fingerprint in it tells."""

from __future__ import annotations

from typing import Any

import torch

from peagle.doctor.head_files import HeadFiles
from peagle.errors import CheckpointError
from peagle.models.checkpoint.formats import facts_from_json
from peagle.models.fingerprint import TargetFingerprint


def fits_target(files: HeadFiles) -> bool:
    """Whether a head is of the target's size; if not, that is all that is to be said of it."""
    told: dict[str, Any] = {
        "vocab_size": files.layers.get("vocab_size"),
        "hidden_size": files.data.get("target_hidden_size") or files.layers.get("hidden_size"),
    }
    expected = _expected(files)
    name = "a target"
    if isinstance(expected, TargetFingerprint):
        told["num_layers"], name = expected.num_layers, repr(expected.name)
    found = TargetFingerprint.of(files.target)
    sizes = [(k, v, getattr(found, k)) for k, v in told.items() if isinstance(v, int)]
    wrong = [f"{key} {ours} (here {its})" for key, ours, its in sizes if ours != its]
    if not wrong:
        return True
    text = f"the head is for {name} of {', '.join(wrong)}"
    files.check("target", "differs", text)
    files.blame("wrong_target", text, "Serve it with that target, or train a head for this one.")
    return False


def _expected(files: HeadFiles) -> TargetFingerprint | str | None:
    """The fingerprint in the head; None without one, text where it cannot be read."""
    try:
        told = facts_from_json(files.data).get("target")
        return None if told is None else TargetFingerprint.from_json(told)
    except CheckpointError as error:
        return str(error)


def check_target(files: HeadFiles) -> None:
    """The fingerprint in the head against the target."""
    target, expected = files.target, _expected(files)
    if not isinstance(expected, TargetFingerprint):
        text = expected or "the head does not say which target it is for"
        files.check("fingerprint", "not checked", text)
        return
    found, names = TargetFingerprint.of(target), []
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
