"""The fingerprint of a target: kept in a head, checked when the head is loaded.

A head on the wrong target drafts nonsense that verification silently rejects, so the mistake shows
only as a lost speed-up; the fingerprint turns it into an error.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from peagle.errors import CheckpointError
from peagle.model_folder import sha256_of
from peagle.models.target_facts import TargetFacts

_NUM_ROWS = 8


@dataclass(frozen=True, slots=True)
class TargetFingerprint:
    """The sizes and hashes that identify a target.

    Attributes:
        name: folder or hub id it was trained on, for the message only.
        vocab_size, hidden_size, num_layers: its sizes.
        tokenizer_sha256: of tokenizer.json, None where the target has none.
        lm_head_sha256: of some rows of the output embedding, rounded to bfloat16.
        tokens_sha256: of the tokens and merges in tokenizer.json (`tokens_digest`), which stay the
            same where a library saves the file anew; None in heads that were trained before this
            field existed.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    tokenizer_sha256: str | None
    lm_head_sha256: str
    tokens_sha256: str | None = None

    @classmethod
    def of(cls, target: TargetFacts, *, tokens: bool = True) -> Self:
        """Return the fingerprint of a target; without `tokens`, which take a second, not that."""
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
            tokens_sha256=tokens_digest(Path(target.name)) if tokens and target.name else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read the JSON object of `to_json`.

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
        """Return the first difference between `target` and the owner's own target; "" if none."""
        found = TargetFingerprint.of(target, tokens=False)
        names = ["vocab_size", "hidden_size", "num_layers"]
        digests = self.tokenizer_sha256, found.tokenizer_sha256, self.tokens_sha256
        if same_tokenizer(*digests, Path(target.name)) is False:
            names.append("tokenizer_sha256")
        # float16 flushes small bfloat16 values, so the hash cannot be compared.
        if target.dtype != torch.float16:
            names.append("lm_head_sha256")
        for name in names:
            expected, given = getattr(self, name), getattr(found, name)
            if expected != given:
                return f"{name} is {given}, {owner} expects {expected}"
        return ""


def identity_of(target: TargetFacts) -> dict[str, str | None]:
    """Return the hashes of a target that its records name: `tokenizer_sha256`, `lm_head_sha256`.

    None stands for one that cannot be compared.
    """
    found = TargetFingerprint.of(target, tokens=False)
    # float16 flushes small bfloat16 values.
    lm_head = None if target.dtype == torch.float16 else found.lm_head_sha256
    return {"tokenizer_sha256": found.tokenizer_sha256, "lm_head_sha256": lm_head}


def same_tokenizer(
    expected: str | None, given: str | None, tokens: str | None, folder: Path
) -> bool | None:
    """Return whether the tokenizer in `folder` is the one that a head was trained with.

    A file that was saved anew counts as the same where it has the same tokens and merges.

    Args:
        expected, tokens: `tokenizer_sha256` and `tokens_sha256` of the head's fingerprint.
        given: `tokenizer_digest` of the folder.

    Returns:
        None where the head or the folder has no digest to compare.
    """
    if None in (expected, given):
        return None
    return expected == given or (tokens is not None and tokens == tokens_digest(folder))


def tokenizer_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a folder's tokenizer.json; None without one."""
    file = folder / "tokenizer.json"
    return sha256_of(file) if file.is_file() else None


def tokens_digest(folder: Path) -> str | None:
    """Return the SHA-256 of the tokens with their ids, and of the merges, in tokenizer.json.

    None without such a file, or where its model has no vocabulary.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = data.get("model", {}).get("vocab")
    if not vocabulary:
        return None
    # A unigram model lists its tokens, with their scores.
    by_token = (
        vocabulary
        if isinstance(vocabulary, dict)
        else {token: index for index, (token, _) in enumerate(vocabulary)}
    )
    tokens = {(index, token) for token, index in by_token.items()}
    tokens |= {(token["id"], token["content"]) for token in data.get("added_tokens", [])}
    merges = data["model"].get("merges") or []
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    text = json.dumps([sorted(tokens), pairs])
    return hashlib.sha256(text.encode()).hexdigest()
