"""A head written anew: in the other style, whole for other runtimes, or compact.

A compact head is a head in the vLLM style that only peagle loads: its ends may be its target's
(`checkpoint.ends`), and its linear layers may be quantised. In memory it is as any other.
"""

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint.correction import CORRECTION_NAME, copy_correction
from peagle.models.checkpoint.ends import ENDS, FROM_TARGET_KEY
from peagle.models.checkpoint.formats import HeadFormat, verifier_of
from peagle.models.checkpoint.head import check_fits, fill_ends, kept_tokens, write_head
from peagle.models.checkpoint.packed import compact_maps, pack_tensors
from peagle.models.checkpoint.stored import StoredHead, read_head
from peagle.models.drafter import DrafterConfig
from peagle.models.head_json import RECORD_NAME
from peagle.models.head_quantization import DEFAULT_GROUP, HeadQuantization, StoredQuantization
from peagle.models.loading import resolve_model
from peagle.models.target_ends import TargetEnds

StoredFormat = Literal["vllm", "speculators", "compact"]
_WHOLE_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of `convert_head`.

    Attributes:
        source, destination: folders.
        source_format, format: styles; "compact" too of the new one.
        config: shape of the head.
        target: the name of its target, None if unknown.
        dtype: types of the weights.
        num_tensors, num_bytes: count and size of the weights.
        notes: what a user of the new checkpoint should know.
    """

    source: str
    source_format: HeadFormat
    destination: str
    format: StoredFormat
    config: DrafterConfig
    target: str | None
    dtype: str
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the conversion as a JSON object."""
        config = self.config
        return {
            "source": self.source,
            "source_format": self.source_format,
            "destination": self.destination,
            "format": self.format,
            "kind": self.config.kind,
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
    """Write the head in `source` to `destination` in the given style, with all of its tensors.

    Tensors keep their bits, type and order of rows; `midlayer.` becomes `layers.0.`, and shards
    become one file. A compact or quantised head becomes a whole one of bfloat16: that needs its
    target where ends of the head are the target's. A correction and a train.json go with their
    head.

    Args:
        source: a head in either style, or a compact one.
        destination: a folder that is empty or not there.
        format: "vllm" or "speculators".
        force: write into a folder that is not empty; a head in it is replaced.
        target: name of the target to write down, in place of the one that the head has. Where ends
            are the target's, its folder, file or hub id.

    Raises:
        UserError: the folders are one, the destination holds something, or it is not writable; the
            target is wanted and is not given or not there.
        CheckpointError: the head in `source` is broken, or is another target's.
    """
    source, destination = Path(source), Path(destination)
    head = read_head(source)
    tensors, _ = head.read_tensors(source)
    _check_destination(source, destination, force=force)
    config, facts = head.config, dict(head.facts)
    if head.from_target:
        _fill_ends(source, head, tensors, target)
    elif target is not None:
        facts["verifier"] = {"name_or_path": target, "architectures": []}
    notes = _notes(config, format, verifier_of(facts).get("name_or_path"))
    if head.is_compact or head.is_quantised:
        facts.pop(FROM_TARGET_KEY, None)
        if config.is_pruned:
            tensors.setdefault("t2d", kept_tokens(tensors["d2t"], config))
        tensors = {name: _whole(name, value) for name, value in tensors.items()}
        notes.append("the head was stored compactly: its weights are whole now, in bfloat16")
    write_head(destination, config, facts, tensors, format)
    return _finished(source, destination, format, head, facts, tensors, notes)


def compact_head(
    source: str | Path,
    destination: str | Path,
    *,
    quantization: StoredQuantization | None = None,
    int8_layers: Collection[str] = (),
    group_size: int = DEFAULT_GROUP,
    force: bool = False,
    target: str | None = None,
) -> Conversion:
    """Write the head in `source` to `destination` as a compact one.

    Ends that `source` does not store stay out. Norms, mask_hidden, stored ends and the correction
    keep their type; of the maps of a vocabulary d2t is stored alone.

    Args:
        source, destination, force: as in `convert_head`.
        quantization, int8_layers, group_size: how the linear layers are stored
            (`HeadQuantization`); without the first they keep their type.
        target: name of the target to write down, in place of the one that the head has.

    Raises:
        UserError: as `convert_head`; or the inputs of a layer do not divide into groups, or the
            head has no layer of a name.
        CheckpointError: the head in `source` is broken, or quantised already.
    """
    source, destination = Path(source), Path(destination)
    head = read_head(source)
    tensors, _ = head.read_tensors(source)
    _check_destination(source, destination, force=force)
    if head.is_quantised:
        raise CheckpointError(
            f"The head {str(source)!r} is stored quantised already: use it as it is. For another "
            "type take the head from before; what --format vllm writes of this one would be "
            "rounded a second time."
        )
    facts, described = dict(head.facts), None
    facts.setdefault(FROM_TARGET_KEY, [])
    if target is not None:
        facts["verifier"] = {"name_or_path": target, "architectures": []}
    if quantization is None:
        tensors, types = compact_maps(tensors), []
    else:
        how = HeadQuantization(quantization, tuple(int8_layers), group_size)
        tensors, described = pack_tensors(tensors, how)
        groups = described["config_groups"].values()
        types = [f"int{group['weights']['num_bits']}" for group in groups]
    write_head(destination, head.config, facts, tensors, "vllm", described)
    return _finished(source, destination, "compact", head, facts, tensors, [], types)


def _fill_ends(
    source: Path, head: StoredHead, tensors: dict[str, Tensor], target: str | None
) -> None:
    """Put the ends of a compact head into its tensors, from the target.

    Raises:
        UserError: no target is named, or it is not there.
        CheckpointError: it is not the head's.
    """
    if target is None:
        raise UserError(
            f"The head {str(source)!r} does not store its {' and '.join(ENDS)}: they are its "
            "target's. Name the target's folder or hub id with --target."
        )
    ends = TargetEnds.load(resolve_model(target))
    check_fits(head.config, ends, str(source))
    if (fingerprint := head.fingerprint) is not None:
        fingerprint.check(ends, str(source))
    fill_ends(tensors, head.config, ends)


def _whole(name: str, value: Tensor) -> Tensor:
    """Return a tensor as a whole head stores it."""
    if value.is_floating_point():
        return value.detach().to(_WHOLE_DTYPE).cpu().contiguous()
    return value.to(torch.int64) if name == "d2t" else value


def _finished(
    source: Path,
    destination: Path,
    format: StoredFormat,
    head: StoredHead,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    notes: list[str],
    rounded: Collection[str] = (),
) -> Conversion:
    """Copy the correction and the training record of a head that is written; say what was done.

    `rounded` are the types of its quantised layers.
    """
    if copy_correction(source, destination, head.config):
        notes.append(
            f"{CORRECTION_NAME} is beside the head: peagle reads it, vLLM and the speculators "
            "package draft without the correction"
        )
    if (record := source / RECORD_NAME).is_file():
        shutil.copyfile(record, destination / RECORD_NAME)
    return Conversion(
        source=str(source),
        source_format=head.format,
        destination=str(destination),
        format=format,
        config=head.config,
        target=verifier_of(facts).get("name_or_path"),
        dtype=", ".join(dict.fromkeys([_name(tensors["norm.weight"]), *rounded])),
        num_tensors=len(tensors),
        num_bytes=sum(value.nbytes for value in tensors.values()),
        notes=tuple(notes),
    )


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


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
