"""A head from one style to the other, without its target and without changing a weight."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.models.checkpoint.correction import CORRECTION_NAME
from peagle.models.checkpoint.formats import HeadFormat, format_of, verifier_of
from peagle.models.checkpoint.head import read_head_config, read_head_json, write_head
from peagle.models.checkpoint.weights import check_tensors, read_tensors
from peagle.models.drafter import DrafterConfig


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert_head` did.

    Attributes:
        source, destination: folders.
        source_format, format: styles.
        config: shape of the head.
        target: the name of its target, None if unknown.
        dtype: type of the weights.
        num_tensors, num_bytes: count and size of the weights.
        notes: what a user of the new checkpoint should know.
    """

    source: str
    source_format: HeadFormat
    destination: str
    format: HeadFormat
    config: DrafterConfig
    target: str | None
    dtype: str
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Kind of head, P-EAGLE or EAGLE-3."""
        return "P-EAGLE" if self.config.is_parallel else "EAGLE-3"

    def to_json(self) -> dict[str, Any]:
        """Return the conversion as a JSON object."""
        config = self.config
        return {
            "source": self.source,
            "source_format": self.source_format,
            "destination": self.destination,
            "format": self.format,
            "kind": self.kind,
            "model_type": "qwen3" if config.qk_norm else "llama",
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "target_hidden_size": config.target_hidden_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "aux_layer_ids": list(config.aux_layer_ids),
            "mask_token_id": config.mask_token_id,
            "num_speculative_tokens_trained": config.trained_depth,
            "target": self.target,
            "dtype": self.dtype,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "notes": list(self.notes),
        }


def convert_head(
    source: str | Path,
    destination: str | Path,
    format: HeadFormat,
    *,
    force: bool = False,
    target: str | None = None,
) -> Conversion:
    """Write the head in `source` to `destination` in the given style.

    Tensors keep their bits, type and order of rows; `midlayer.` becomes `layers.0.`, and shards
    become one file. A correction goes with its head.

    Args:
        source: a head in either style.
        destination: a folder that is empty or not there.
        format: "vllm" or "speculators".
        force: write into a folder that is not empty; a head in it is replaced.
        target: name of the target to write down, in place of the one that the head has.

    Raises:
        UserError: the folders are one, the destination holds something, or it is not writable.
        CheckpointError: the head in `source` is broken.
    """
    source, destination = Path(source), Path(destination)
    data = read_head_json(source)
    config, facts = read_head_config(source)
    if target is not None:
        facts["verifier"] = {"name_or_path": target, "architectures": []}
    _check_destination(source, destination, force=force)
    tensors, weights_source = read_tensors(source)
    check_tensors(tensors, config, weights_source)
    name = verifier_of(facts).get("name_or_path")
    notes = _notes(config, format, name)
    write_head(destination, config, facts, tensors, format)
    if (correction := source / CORRECTION_NAME).is_file():
        shutil.copyfile(correction, destination / CORRECTION_NAME)
        notes.append(
            f"{CORRECTION_NAME} is beside the head: peagle reads it, vLLM and the speculators "
            "package draft without the correction"
        )
    return Conversion(
        source=str(source),
        source_format=format_of(data),
        destination=str(destination),
        format=format,
        config=config,
        target=name,
        dtype=str(tensors["fc.weight"].dtype).removeprefix("torch."),
        num_tensors=len(tensors),
        num_bytes=sum(value.nbytes for value in tensors.values()),
        notes=tuple(notes),
    )


def _check_destination(source: Path, destination: Path, *, force: bool) -> None:
    if destination.resolve() == source.resolve():
        raise UserError(
            f"The destination {str(destination)!r} is the source; expected another folder."
        )
    if destination.exists() and not destination.is_dir():
        raise UserError(f"The destination {str(destination)!r} is a file; expected a folder.")
    if destination.is_dir() and any(destination.iterdir()) and not force:
        raise UserError(
            f"The destination {str(destination)!r} is not empty. Name another folder, or replace "
            "the head in it with --force."
        )


def _notes(config: DrafterConfig, format: HeadFormat, target: str | None) -> list[str]:
    if format == "vllm":
        return []
    notes = []
    if target is None:
        notes.append("the target's name is unknown: give it, so that vLLM can serve by the head")
    if config.trained_depth is None:
        notes.append("the trained depth is unknown: speculative_tokens is the package's default")
    if config.hidden_size != config.target_hidden_size:
        notes.append(
            f"the head is {config.hidden_size} wide and its target {config.target_hidden_size}: "
            "vLLM loads it, the speculators package does not"
        )
    return notes
