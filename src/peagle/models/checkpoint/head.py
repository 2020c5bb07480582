"""A head as a folder: config.json and tensors, saved and loaded."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from peagle.disk import put_in_place
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint.correction import CORRECTION_NAME
from peagle.models.checkpoint.ends import ENDS, FROM_TARGET_KEY, end_rows
from peagle.models.checkpoint.formats import HeadFormat, config_to_json, trained_length
from peagle.models.checkpoint.packed import QUANTIZATION_KEY, Rounding, hold_packed
from peagle.models.checkpoint.stored import CONFIG_NAME, read_head
from peagle.models.checkpoint.weights import (
    fill,
    remove_weights,
    replace_weights,
    split_tensors,
    write_tensors,
)
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target_facts import TargetFacts, TargetSizes


def save_drafter(
    folder: str | Path,
    drafter: Drafter,
    *,
    fingerprint: TargetFingerprint | None = None,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    format: HeadFormat = "vllm",
    ends_are_targets: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Write a head as config.json and model.safetensors.

    Where `extra` has the longest sequence of the head's training (LENGTH_KEY), its mask slots draft
    badly if they attend to more positions: config.json then gives the layers of a P-EAGLE head that
    window, under the keys that vLLM reads.

    Args:
        folder: made if it is not there.
        drafter: the head.
        fingerprint: fingerprint of its target, checked at load.
        extra: further facts for the "peagle" object of config.json.
        dtype: type of the stored weights; None keeps the module's.
        format: style of the checkpoint.
        ends_are_targets: leave out embed_tokens and lm_head, which `load_drafter` then takes from
            the target (`checkpoint.ends.has_target_ends`).
        rounding: what has rounded the head's linear layers: they are stored quantised, exactly as
            they are.

    Raises:
        UserError: it could not be written.
    """
    facts, quantization = dict(extra or {}), None
    if ends_are_targets or rounding is not None:
        facts[FROM_TARGET_KEY] = list(ENDS) if ends_are_targets else []
    if fingerprint is not None:
        facts["target"] = fingerprint.to_json()
    tensors = {
        name: value.detach().cpu()
        for name, value in split_tensors(drafter)
        if not (ends_are_targets and name in ENDS)
    }
    if rounding is not None:
        tensors, quantization = rounding.pack(tensors)

    def stored(name: str, value: Tensor) -> Tensor:
        is_cast = value.is_floating_point() and not name.endswith(".weight_scale")
        return value.to(dtype if is_cast else None).contiguous()

    tensors = {name: stored(name, value) for name, value in tensors.items()}
    config = drafter.config
    if (length := trained_length(facts)) is not None:
        windows = (length,) * config.num_layers if config.is_parallel else ()
        config = replace(config, windows=windows)
    write_head(Path(folder), config, facts, tensors, format, quantization)


def write_head(
    folder: Path,
    config: DrafterConfig,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    format: HeadFormat,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write a head with all its facts, in place of an earlier head in the folder.

    A crash at any moment leaves the earlier head, the new one or, where their config.json differ,
    none: never the weights of one beside the config.json of the other. The correction of an
    earlier head goes: it fits no other.

    `quantization` is the quantization_config that describes quantised tensors.

    Raises:
        UserError: it could not be written, for want of space or of permission.
    """
    data = config_to_json(config, facts, format=format)
    data["dtype"] = str(tensors["norm.weight"].dtype).removeprefix("torch.")
    if quantization is not None:
        data[QUANTIZATION_KEY] = dict(quantization)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = write_tensors(folder, tensors)
        config_json, old = folder / (CONFIG_NAME + ".part"), folder / CONFIG_NAME
        config_json.write_text(json.dumps(data, indent=2) + "\n")
        if not old.is_file() or old.read_bytes() != config_json.read_bytes():
            remove_weights(folder)
        put_in_place(config_json, old)
        replace_weights(folder, weights)
        (folder / CORRECTION_NAME).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The head {str(folder)!r} could not be written: {error}.") from None


def load_drafter(
    folder: str | Path,
    target: TargetFacts,
    *,
    dtype: torch.dtype | None = None,
    check_target: bool = True,
    unpack: bool = True,
) -> Drafter:
    """Load a head for `target`, onto its device.

    `embed_tokens` and `lm_head` may be absent: the target's own stand in, as in vLLM, of lm_head
    the rows of the draft vocabulary (`checkpoint.ends`). Weights of linear layers may be
    quantised (`models.quantization`).

    Args:
        folder: the head, in either style.
        target: the model it drafts for.
        dtype: type of the weights; None takes the target's.
        check_target: compare the fingerprint where the head has one.
        unpack: compute plain weights of quantised ones; else the layers' weights stay packed.

    Raises:
        CheckpointError: another target; a tensor missing, unknown or misshapen; a pickle.
    """
    folder = Path(folder)
    head = read_head(folder, num_target_layers=target.num_layers)
    config = head.config
    check_fits(config, target, str(folder))
    if check_target and (fingerprint := head.fingerprint) is not None:
        fingerprint.check(target, str(folder))
    tensors, packed = head.read_tensors(folder)
    fill_ends(tensors, config, target)
    with torch.device("meta"):  # where weights cost nothing to make
        drafter = Drafter(config).to(dtype or target.dtype)
    drafter.to_empty(device=target.device)
    fill(drafter, tensors)
    if not unpack:
        hold_packed(drafter, packed)
    return drafter.requires_grad_(False).eval()


def fill_ends(tensors: dict[str, Tensor], config: DrafterConfig, target: TargetFacts) -> None:
    """Put the target's rows in the place of the ends that a head does not store, and t2d."""
    draft_ids = None
    if config.is_pruned:
        draft_ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
        tensors.setdefault("t2d", kept_tokens(tensors["d2t"], config))
    for name in ENDS:
        if name not in tensors:
            tensors[name] = end_rows(name, target, draft_ids)


def kept_tokens(d2t: Tensor, config: DrafterConfig) -> Tensor:
    """Return the t2d that follows from d2t: bool [V], true for tokens of the draft vocabulary."""
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[torch.arange(config.draft_vocab_size) + d2t] = True
    return kept


def check_fits(config: DrafterConfig, target: TargetSizes, head: str) -> None:
    """Refuse a head whose sizes differ from `target`'s.

    Raises:
        CheckpointError: naming both sizes.
    """
    for name, given in (
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        expected = getattr(config, name)
        if expected != given:
            raise CheckpointError(
                f"The head {head!r} has {name} {expected}, the target {target.name!r} has {given}: "
                "it is a head of another target."
            )
    if max(config.aux_layer_ids) >= target.num_layers:
        raise CheckpointError(
            f"The head {head!r} reads target layers {list(config.aux_layer_ids)}, but "
            f"{target.name!r} has {target.num_layers} layers: it is a head of another target."
        )
