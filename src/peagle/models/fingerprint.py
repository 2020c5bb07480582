"""The fingerprint of a target: kept in a head, checked when the head is loaded.

A head on the wrong target drafts nonsense that verification silently rejects, so the mistake shows
only as a lost speed-up; the fingerprint turns it into an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.errors import CheckpointError
from peagle.model_folder import sha256_of
from peagle.models.target_facts import TargetFacts

_NUM_ROWS = 8


@dataclass(frozen=True, slots=True)
class TargetFingerprint:
    """What identifies a target.

    Attributes:
        name: folder or hub id it was trained on, for the message only.
        vocab_size, hidden_size, num_layers: its sizes.
        tokenizer_sha256: of tokenizer.json, None where the target has none.
        lm_head_sha256: of some rows of the output embedding, rounded to bfloat16.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    tokenizer_sha256: str | None
    lm_head_sha256: str

    @classmethod
    def of(cls, target: TargetFacts) -> TargetFingerprint:
        """Return the fingerprint of a target."""
        rows = torch.linspace(0, target.vocab_size - 1, _NUM_ROWS).round().long()
        # bfloat16 is the common ground of the types that a target is loaded in.
        values = target.lm_head_weight()[rows.to(target.device)].detach().float().bfloat16()
        raw = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return cls(
            name=Path(target.name).name,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            tokenizer_sha256=tokenizer_digest(Path(target.name)) if target.name else None,
            lm_head_sha256=hashlib.sha256(raw).hexdigest(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TargetFingerprint:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: a field is missing or unknown.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise CheckpointError(
                f"The head's target fingerprint is not readable: {error}."
            ) from None

    def check(self, target: TargetFacts, head: str) -> None:
        """Refuse `target` when it is not the one that the head was trained for.

        Raises:
            CheckpointError: naming the first difference.
        """
        if difference := self.difference(target, "the head"):
            raise CheckpointError(
                f"The head {head!r} was trained for target {self.name!r}, not for "
                f"{target.name!r}: {difference}. Use its own target, or set "
                '"check_target": false if you know that the head fits.'
            )

    def difference(self, target: TargetFacts, owner: str) -> str:
        """Say how `target` first differs from what the owner of this expects; "" if it does not."""
        found = TargetFingerprint.of(target)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "tokenizer_sha256",
            "lm_head_sha256",
        ):
            expected, given = getattr(self, name), getattr(found, name)
            if name == "tokenizer_sha256" and None in (expected, given):
                continue
            # float16 flushes small bfloat16 values, so the hash cannot be compared.
            if name == "lm_head_sha256" and target.dtype == torch.float16:
                continue
            if expected != given:
                return f"{name} is {given}, {owner} expects {expected}"
        return ""


def tokenizer_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a folder's tokenizer.json; None without one."""
    file = folder / "tokenizer.json"
    return sha256_of(file) if file.is_file() else None
