"""What a launch needs to know of its target, as far as its files are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import CheckpointError
from peagle.model_folder import read_json

if TYPE_CHECKING:
    from peagle.models.drafter_config import DrafterConfig


@dataclass(frozen=True, slots=True)
class Target:
    """A target by its small files.

    Attributes:
        name: as the user calls it.
        folder: where they are.
        sizes: vocab_size, hidden_size and num_layers, where they are told.
        layer_kinds: of attention, as transformers names them; () if all are of full attention.
        kv_heads, head_dim: heads of keys in a layer, and numbers of each.
    """

    name: str
    folder: Path
    sizes: Mapping[str, int]
    layer_kinds: tuple[str, ...]
    kv_heads: int
    head_dim: int


def read_target(name: str, revision: str | None) -> Target | None:
    """A target in a folder or in the hub's cache; None if it is not here. Nothing is fetched."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # no name of a repository
            return None
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    try:
        config = read_json(folder / "config.json")
        text = config.get("text_config") or config
        heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        kinds = tuple(text.get("layer_types") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    keys = {"vocab_size": "vocab_size", "hidden_size": "hidden_size"}
    keys["num_layers"] = "num_hidden_layers"
    sizes = {ours: text[theirs] for ours, theirs in keys.items() if theirs in text}
    return Target(name, folder, sizes, kinds, heads, width)


def check_fits(target: Target, head: DrafterConfig, facts: Mapping[str, Any], folder: str) -> None:
    """Refuse a head of another target.

    Its sizes are compared, and where the head has a fingerprint of its target, that: the number of
    layers, the tokenizer, and some rows of lm_head.

    Raises:
        CheckpointError: naming the first difference.
    """
    expected = {"vocab_size": head.vocab_size, "hidden_size": head.target_hidden_size}
    trained_for = facts.get("target")
    if isinstance(trained_for, Mapping):
        expected["num_layers"] = trained_for.get("num_layers", target.sizes.get("num_layers", 0))
    for name, value in expected.items():
        if target.sizes.get(name, value) != value:
            raise _other(target, folder, f"{name} is {target.sizes[name]}, expected {value}")
    deepest, num_layers = max(head.aux_layer_ids), target.sizes.get("num_layers")
    if num_layers is not None and deepest >= num_layers:
        raise _other(target, folder, f"it reads layer {deepest} of {num_layers}")
    if isinstance(trained_for, Mapping):
        _check_fingerprint(target, dict(trained_for), folder)


def _check_fingerprint(target: Target, trained_for: dict[str, Any], folder: str) -> None:
    from peagle.models.fingerprint import TargetFingerprint, tokenizer_digest
    from peagle.models.target_ends import TargetEnds

    fingerprint = TargetFingerprint.from_json(trained_for)
    if fingerprint.tokenizer_sha256 is not None:
        found = tokenizer_digest(target.folder)
        if found not in (None, fingerprint.tokenizer_sha256):
            raise _other(target, folder, "its tokenizer is another one")
    try:
        ends = TargetEnds.load(target.folder)
    except (CheckpointError, OSError):
        return  # a target that vLLM knows and peagle does not, or whose ends are quantised
    if difference := fingerprint.difference(ends, "the head"):
        raise _other(target, folder, difference)


def _other(target: Target, folder: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"The head {folder!r} was not trained for the target {target.name!r}: {difference}. Use "
        'its own target, or set "check_target": false if you know that the head fits.'
    )
