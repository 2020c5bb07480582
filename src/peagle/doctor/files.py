"""A head's files, examined without running it; what can be mended is, so that the rest can run.

Every contradiction in the files is a cause of its own. The mended head is then tried on texts,
where repairs compete (`repairs`), so a mend need only be a reasonable beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from peagle.doctor.findings import Status
from peagle.doctor.head import Head, Reading
from peagle.doctor.head_files import HeadFiles
from peagle.doctor.maps import mend_maps
from peagle.doctor.target_check import check_target, fits_target
from peagle.errors import CheckpointError
from peagle.models.checkpoint.formats import AUX_KEY, config_from_json, format_of
from peagle.models.checkpoint.head import read_head_json
from peagle.models.checkpoint.weights import read_tensors, tensor_shapes
from peagle.models.target import TargetModel, default_aux_layer_ids

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_FLOAT16_MAX = 65504.0
# A head with fewer positions stops drafting in the middle of ordinary answers.
_FEW_POSITIONS = 1024
_NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def examine_files(folder: Path, target: TargetModel) -> tuple[HeadFiles, Head | None]:
    """Examine a head's files; the head is None where they cannot be made to run.

    Raises:
        UserError: no such folder.
    """
    data = read_head_json(folder)
    files = HeadFiles(folder, target, data, {})
    try:
        files.tensors = {k: v.clone() for k, v in read_tensors(folder)[0].items()}
    except CheckpointError as error:
        files.blame("weights", str(error), "Save or copy the weights again.")
        return files, None
    if not fits_target(files):
        return files, None
    check_target(files)
    for examine in (
        _mend_values,
        _mend_mask,
        _mend_window,
        _mend_norms,
        _mend_aux,
        _mend_positions,
    ):
        examine(files)
    return files, _head_of(files)


def _head_of(files: HeadFiles) -> Head | None:
    """The mended head, None where it still does not work out."""
    source, target = str(files.folder / "config.json"), files.target
    try:
        config = config_from_json(files.data, source, num_target_layers=target.num_layers)
    except CheckpointError as error:
        files.blame("weights", str(error), "Correct config.json, or export the head again.")
        return None
    mend_maps(files, config)
    tensors, shapes = files.tensors, tensor_shapes(config)
    same_width = config.hidden_size == target.hidden_size
    if same_width:
        tensors.setdefault("embed_tokens.weight", target.embedding_weight().detach().cpu())
    if same_width and not config.is_pruned:
        tensors.setdefault("lm_head.weight", target.lm_head_weight().detach().cpu())
    wrong = [n for n, s in shapes.items() if n not in tensors or tuple(tensors[n].shape) != s]
    if wrong:
        found = tuple(tensors[wrong[0]].shape) if wrong[0] in tensors else "missing"
        files.blame(
            "weights",
            f"tensor {wrong[0]!r} is {found}; config.json asks for {shapes[wrong[0]]}",
            "Put config.json and weights of one export together.",
        )
        return None
    if unknown := sorted(set(tensors) - set(shapes)):
        files.blame(
            "weights",
            f"{len(unknown)} tensors are unknown to this config.json, {unknown[0]!r} first",
            "Put config.json and weights of one export together.",
        )
    return Head(config, {name: tensors[name] for name in shapes}, files.reading)


# ---- weights ---------------------------------------------------------------------------------


def _mend_values(files: HeadFiles) -> None:
    """NaN, infinities, and norms that nobody trained."""
    broken = {
        name: int((~value.isfinite()).sum())
        for name, value in files.tensors.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    }
    for name in broken:
        value = files.tensors[name].float()
        files.tensors[name] = value.nan_to_num(0.0, 0.0, 0.0)
    if broken:
        files.loads = False
        name, count = next(iter(broken.items()))
        text = f"{len(broken)} tensors hold NaN or infinite values, {name!r} has {count}"
        files.check("finite weights", "differs", text)
        files.blame(
            "dtype",
            text,
            "Export the head again from its float32 weights, as bfloat16 or float32: float16 ends "
            f"at {_FLOAT16_MAX:.0f}.",
        )
    else:
        files.check("finite weights", "agrees", f"{len(files.tensors)} tensors")
    norms = {n: v.float() for n, v in files.tensors.items() if n.endswith("norm.weight")}
    blank = [name for name, value in norms.items() if bool((value == 1).all())]
    others = [float((value - 1).abs().mean()) for n, value in norms.items() if n not in blank]
    if blank and others and min(others) > 0.02 and len(blank) <= len(others):
        text = f"{', '.join(blank)}: every weight is exactly 1, unlike the other norms'"
        files.lost_weights = True
        files.check("norm weights", "differs", text)
        files.blame("norms", text, f"Export {blank[0]} again: it was lost on the way.")


def _mend_norms(files: HeadFiles) -> None:
    """Norm flags of config.json against the norms among the weights."""
    data, tensors = files.data, files.tensors
    eagle = data.get("eagle_config") or {}
    for flag, tensor in _NORM_TENSORS.items():
        is_set = bool(data.get(flag) or eagle.get(flag))
        if is_set == (tensor in tensors):
            continue
        files.loads = False
        data[flag] = tensor in tensors
        if "eagle_config" in data:
            data["eagle_config"] = {k: v for k, v in eagle.items() if k != flag}
        has = "is there" if tensor in tensors else "is not there"
        text = f"{flag} is {json_bool(is_set)} in config.json, but {tensor} {has}"
        files.check("norm flags", "differs", text)
        remedy = f"Set {flag} to {json_bool(tensor in tensors)} in config.json."
        files.blame("norms", text, remedy)
    width = int(files.layers.get("hidden_size") or 0)
    needed = ["norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"]
    if lost := [name for name in needed if name not in tensors]:
        files.loads, files.lost_weights = False, True
        tensors.update({name: torch.ones(width) for name in lost})
        text = f"{', '.join(lost)} is missing"
        files.check("norm weights", "differs", text)
        files.blame("norms", text, f"Export {lost[0]} again from the trained head.")


# ---- drafting in parallel --------------------------------------------------------------------


def _mend_mask(files: HeadFiles) -> None:
    """Mask token id and mask_hidden: both there, once, and filled."""
    data, tensors = files.data, files.tensors
    is_nested = format_of(data) == "speculators"
    keys = MASK_KEYS[:1] if is_nested else MASK_KEYS
    told = {key: data[key] for key in keys if data.get(key) is not None}
    files.mask_ids = list(dict.fromkeys(told.values()))
    if len(files.mask_ids) > 1:
        text = ", ".join(f"{key} {value}" for key, value in told.items())
        files.check("mask token id", "differs", f"config.json contradicts itself: {text}")
        files.blame(
            "mask_token_id",
            f"config.json names several mask tokens ({text}); runtimes read different ones",
            f"Set {', '.join(told)} to the one that the head was trained with.",
        )
    vocab = files.target.vocab_size
    off = [i for i in files.mask_ids if type(i) is not int or not 0 <= i < vocab]
    if off:
        files.loads, files.mask_ids = False, [i for i in files.mask_ids if i not in off]
        files.blame(
            "mask_token_id",
            f"the mask token id is {off[0]!r}; the vocabulary ends at {vocab - 1}",
            "Set it to the id that the head was trained with.",
        )
        for key in told:
            data[key] = files.mask_ids[0] if files.mask_ids else vocab - 1
    is_eagle3 = data.get("speculators_model_type") == "eagle3"
    if "mask_hidden" in tensors and (not told or is_eagle3):
        files.loads = False
        key = "speculators_model_type" if is_eagle3 else "mask_token_id"
        found = "eagle3" if is_eagle3 else "missing"
        text = f"the head has mask_hidden, but {key} is {found}: it would draft token by token"
        files.check("parallel drafting", "differs", text)
        wanted = '"peagle"' if is_eagle3 else "the head's mask token"
        files.blame("parallel_drafting", text, f"Set {key} to {wanted} in config.json.")
        data["mask_token_id"] = files.mask_ids[0] if files.mask_ids else vocab - 1
        if is_nested:
            data["speculators_model_type"] = "peagle"
    if "mask_hidden" in tensors or told:
        _mend_mask_hidden(files)


def _mend_mask_hidden(files: HeadFiles) -> None:
    tensors = files.tensors
    size = int(tensors["fc.weight"].shape[1]) if "fc.weight" in tensors else 0
    width = int(files.layers.get("hidden_size") or 0)
    value = tensors.get("mask_hidden")
    if value is None:
        text, remedy = "mask_hidden is missing", "Export it with the other weights."
    elif value.numel() == width != size:
        text = f"mask_hidden has {width} numbers, the head's width; expected {size}, before fc"
        remedy = "Store mask_hidden as it is before fc, [1, 1, A * H]."
        files.reading = Reading(shared_state="no fc")
    elif not bool(value.any()):
        text, remedy = "mask_hidden is all zeros", "Export it again, or train on: it was not saved."
    else:
        tensors["mask_hidden"] = value.reshape(1, 1, -1)
        files.check("mask_hidden", "agrees", f"{value.numel()} numbers, not all 0")
        return
    files.loads = files.loads and value is not None and value.numel() == size
    files.lost_weights = files.lost_weights or value is None or not bool(value.any())
    padded = torch.zeros(1, 1, size)
    if value is not None and value.numel() <= size:
        padded[0, 0, : value.numel()] = value.flatten().float()
    tensors["mask_hidden"] = padded
    files.check("mask_hidden", "differs", text)
    files.blame("mask_hidden", text, remedy)


# ---- layers ----------------------------------------------------------------------------------


def _mend_window(files: HeadFiles) -> None:
    layers = files.layers
    kinds, size = layers.get("layer_types") or (), layers.get("sliding_window")
    is_off = layers.get("use_sliding_window") is False
    if isinstance(size, int) and size > 0 and not is_off:
        files.window = size
    if "sliding_attention" not in kinds:
        return
    files.loads = False
    layers.pop("layer_types")
    text = f"layer_types of config.json names sliding_attention, sliding_window is {size}"
    files.check("sliding window", "differs", text)
    remedy = "Remove layer_types and sliding_window from config.json: P-EAGLE heads attend to all."
    files.blame("sliding_window", text, remedy)


def _mend_aux(files: HeadFiles) -> None:
    """Aux layers: one list, ascending, within the target, as many as fc reads."""
    data, target = files.data, files.target
    eagle = data.get("eagle_config") or {}
    top, nested = data.get(AUX_KEY), eagle.get(AUX_KEY)
    fc = files.tensors.get("fc.weight")
    count = 3 if fc is None else fc.shape[1] // target.hidden_size
    given = top or nested
    problem = ""
    if top and nested and list(top) != list(nested):
        problem = f"{AUX_KEY} is {top}, in eagle_config {nested}"
    elif given and any(type(i) is not int or not 0 <= i < target.num_layers for i in given):
        problem = f"{AUX_KEY} is {given}, the target has {target.num_layers} layers"
    elif given and list(given) != sorted(set(given)):
        problem = f"{AUX_KEY} is {given}, not distinct and ascending"
    elif given and len(given) != count:
        problem = f"{AUX_KEY} names {len(given)} layers, fc reads {count}"
    if not problem:
        files.check("aux layers", "agrees", f"{given or 'the default'}, fc reads {count}")
        return
    usual = list(default_aux_layer_ids(target.num_layers))
    lists = [ids for ids in (top, nested, usual) if ids and _is_usable(ids, target, count)]
    chosen = lists[0] if lists else list(range(count))
    files.loads = files.loads and chosen == given
    data[AUX_KEY] = chosen
    if "eagle_config" in data:
        data["eagle_config"] = {**eagle, AUX_KEY: chosen}
    files.check("aux layers", "differs", problem)
    files.blame("aux_layers", problem, f"Set both to the layers it was trained on, like {chosen}.")


def _is_usable(ids: Any, target: TargetModel, count: int) -> bool:
    whole = all(type(i) is int and 0 <= i < target.num_layers for i in ids)
    return whole and len(ids) == count and list(ids) == sorted(set(ids))


def _mend_positions(files: HeadFiles) -> None:
    """How far the head drafts, and its angles beside the target's."""
    layers, target = files.layers, files.target
    most = layers.get("max_position_embeddings")
    if isinstance(most, int) and most < min(target.max_model_len, _FEW_POSITIONS):
        text = f"max_position_embeddings is {most}, the target's {target.max_model_len}"
        files.check("maximum position", "differs", f"{text}: longer texts go on without drafts")
        files.blame(
            "max_positions",
            f"{text}: no drafts beyond position {most}",
            f"Set max_position_embeddings to {target.max_model_len}, or to the length of training.",
        )
        layers["max_position_embeddings"] = target.max_model_len
    elif isinstance(most, int):
        status: Status = "agrees" if most >= target.max_model_len else "differs"
        text = f"{most}, the target's {target.max_model_len}"
        note = "" if status == "agrees" else ": longer texts go on without drafts"
        files.check("maximum position", status, text + note)
    theta, own = theta_of(layers), theta_of(_rope_of(target))
    # Another theta than the target's may be the head's own: the repairs tell.
    same: Status = "agrees" if theta == own else "not checked"
    files.check("RoPE theta", same, f"{theta:g}, the target's {own:g}")


def _rope_of(target: TargetModel) -> dict[str, Any]:
    rope = dict(target.text_config.rope_parameters or {})
    return {"rope_parameters": dict(rope.get("full_attention", rope))}


def theta_of(layers: Mapping[str, Any]) -> float:
    """RoPE's base, by the keys of a configuration."""
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    return float(rope.get("rope_theta") or layers.get("rope_theta") or 10000.0)


def json_bool(value: bool) -> str:
    """As config.json has it."""
    return "true" if value else "false"
