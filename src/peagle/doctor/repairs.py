"""One candidate repair for each known fault of a head: the head as it would be without it.

None of them is written anywhere: a head is changed in memory and tried again on the same texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.doctor.files import json_bool
from peagle.doctor.forward import HeadDrafts
from peagle.doctor.head import Head
from peagle.doctor.head_files import HeadFiles
from peagle.doctor.maps import by_drafts, by_rows
from peagle.doctor.probe import Probe
from peagle.models.checkpoint.formats import AUX_KEY
from peagle.models.target import TargetModel, default_aux_layer_ids

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)
_MOST_MASK_IDS = 8
MEAN_FEATURE = "the mean feature in place of mask_hidden"


@dataclass(frozen=True, slots=True)
class Repair:
    """A changed head.

    Attributes:
        cause: key of CAUSES.
        what: the change, with the values before and after.
        remedy: how to make it for good.
        head: the head with it.
        rows: the prompts on which it may be judged, where it was made from the others.
    """

    cause: str
    what: str
    remedy: str
    head: Head
    rows: slice | None = None


@dataclass(frozen=True)
class Known:
    """What repairs are made from.

    Attributes:
        files: of the head.
        target, tokenizer: that it drafts for.
        probe: texts with their features.
    """

    files: HeadFiles
    target: TargetModel
    tokenizer: PreTrainedTokenizerBase
    probe: Probe


def repairs(head: Head, now: HeadDrafts, known: Known) -> Iterator[Repair]:
    """Every candidate.

    Args:
        head: as it is by now.
        now: what it drafts on the probe.
        known: what else there is.
    """
    yield from _aux_repairs(head, known)
    yield from _shift_repairs(head)
    if head.config.is_parallel:
        yield from _mask_repairs(head, known)
        yield from _mask_hidden_repairs(head, known)
    if head.config.is_pruned:
        yield from _map_repairs(head, now, known)
    yield from _rope_repairs(head, known)
    yield from _window_repairs(head, known)
    yield from _norm_repairs(head)
    flag = not head.config.norm_before_residual
    yield Repair(
        "residual",
        f"norm_before_residual {json_bool(flag)} instead of {json_bool(not flag)}",
        f"Set norm_before_residual to {json_bool(flag)} in config.json.",
        head.configured(norm_before_residual=flag),
    )


def aux_choices(ids: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Layers that a head may have been trained on: its own and the usual ones, one off each way."""
    usual = default_aux_layer_ids(num_layers)
    bases = [ids] + ([usual] if len(usual) == len(ids) else [])
    shifted = [tuple(i + by for i in base) for base in bases for by in (0, 1, -1)]
    inside = [one for one in shifted if min(one) >= 0 and max(one) < num_layers]
    return [one for one in dict.fromkeys(inside) if one != ids]


def _aux_repairs(head: Head, known: Known) -> Iterator[Repair]:
    ids = head.config.aux_layer_ids
    for other in aux_choices(ids, known.target.num_layers):
        if set(other) <= set(known.probe.entering):
            yield Repair(
                "aux_layers",
                f"aux layers {list(other)} instead of {list(ids)}",
                f"Set {AUX_KEY} to {list(other)} in config.json.",
                head.configured(aux_layer_ids=other),
            )
    weight = head.tensors["fc.weight"]
    backwards = weight.chunk(len(ids), dim=1)[::-1]
    yield Repair(
        "aux_layers",
        f"the aux states in the order {list(ids[::-1])}",
        "Reorder the columns of fc.weight: runtimes concatenate in ascending layer order.",
        head.filled(fc__weight=torch.cat(backwards, dim=1)),
    )


def _shift_repairs(head: Head) -> Iterator[Repair]:
    for name, what in (
        ("token_shift", "slot p with the token x[p] instead of x[p+1]"),
        ("feature_shift", "slot p with the feature g[p-1] instead of g[p]"),
    ):
        if not getattr(head.reading, name):
            remedy = "Train the head again with slot p = (x[p+1], g[p]), which is how it is served."
            yield Repair("token_shift", what, remedy, head.read(**{name: 1}))


# ---- mask slots ------------------------------------------------------------------------------


def mask_choices(known: Known, current: int | None) -> list[int]:
    """Ids that may be the mask token: told, named so, special, unused, the last one."""
    tokenizer, vocab_size = known.tokenizer, known.target.vocab_size
    vocabulary = tokenizer.get_vocab()
    named = [i for token, i in vocabulary.items() if "mask" in token.lower() and "<" in token]
    used = set(vocabulary.values())
    unused = [i for i in range(vocab_size) if i not in used]
    special = [i for i in tokenizer.all_special_ids if isinstance(i, int)]
    few = [*known.files.mask_ids, *sorted(named)[:2], vocab_size - 1, *unused[:2], *unused[-2:]]
    choices = [i for i in dict.fromkeys([*few, *special]) if i < vocab_size and i != current]
    return choices[:_MOST_MASK_IDS]


def _mask_repairs(head: Head, known: Known) -> Iterator[Repair]:
    current = head.config.mask_token_id
    for other in mask_choices(known, current):
        token = known.tokenizer.convert_ids_to_tokens(other)
        yield Repair(
            "mask_token_id",
            f"mask token {other} ({token!r}) instead of {current}",
            f"Set mask_token_id, ptd_token_id and pard_token to {other} in config.json.",
            head.configured(mask_token_id=other),
        )


def _mask_hidden_repairs(head: Head, known: Known) -> Iterator[Repair]:
    config, state = head.config, head.reading.shared_state
    remedy = "Export mask_hidden again, [1, 1, A * H], as it is before fc and its norm."
    kinds = ["fc", "no fc"] + (
        ["fc without norm"] if config.norm_before_fc or config.fc_norm else []
    )
    for kind in kinds:
        if kind != state and config.feature_size >= config.hidden_size:
            what = f"the state of mask slots by {kind!r} instead of {state!r}"
            yield Repair("mask_hidden", what, remedy, head.read(shared_state=kind))
    features = known.probe.features(config.aux_layer_ids)
    mean = features.flatten(0, 1).mean(0).float().cpu()
    yield Repair(
        "mask_hidden",
        MEAN_FEATURE,
        "Export mask_hidden again, or train it: mask slots do better without the stored one.",
        head.filled(mask_hidden=mean.view(1, 1, -1)),
    )


# ---- draft vocabulary ------------------------------------------------------------------------


def _map_repairs(head: Head, now: HeadDrafts, known: Known) -> Iterator[Repair]:
    ids, size = head.target_ids(), head.config.draft_vocab_size
    remedy = "Export d2t and t2d again from the trained head, d2t[i] = target id - i."
    d2t, kept = head.tensors["d2t"], known.files.kept_ids
    maps: list[tuple[str, Tensor]] = [
        ("d2t as target ids, not as offsets", d2t.clamp(0, head.config.vocab_size - 1)),
        ("d2t lowered by 1", (ids - 1).clamp_min(0)),
        ("d2t raised by 1", (ids + 1).clamp_max(head.config.vocab_size - 1)),
    ]
    if kept is not None and len(kept) == size and not torch.equal(kept, ids):
        maps.insert(0, ("the tokens that t2d keeps", kept))
    for what, other in maps:
        yield Repair("draft_vocabulary", what, remedy, head.with_target_ids(other))
    yield from _rebuilt_repairs(head, now, known)


def _rebuilt_repairs(head: Head, now: HeadDrafts, known: Known) -> Iterator[Repair]:
    """Maps by the head's rows and by its drafts.

    They are blamed on the data that the map was made of if d2t and t2d are in order.
    """
    ids, rows = head.target_ids(), head.tensors["lm_head.weight"]
    broken = any(cause.id == "draft_vocabulary" for cause in known.files.causes)
    cause = "draft_vocabulary" if broken else "vocabulary_rebuilt"
    remedy = (
        "Take d2t and t2d from the training run of this very head: the map belongs to the rows of "
        "its lm_head, and one made from other data does not fit them."
    )
    mended = by_rows(ids, rows, known.target.lm_head_weight().detach(), now.draft_ids.flatten())
    if mended is not None:
        what = "each draft id as the target token whose lm_head row is nearest"
        yield Repair(cause, what, remedy, head.with_target_ids(mended))
        return
    truth = known.probe.truth(known.probe.anchors_PC).cpu()
    half = slice(0, None, 2)
    mended = by_drafts(ids, now.draft_ids[half].flatten(), truth[half].flatten())
    what = "each draft id as the token that the target said most often in its place"
    yield Repair(cause, what, remedy, head.with_target_ids(mended), slice(1, None, 2))


# ---- layers ----------------------------------------------------------------------------------


def _rope_repairs(head: Head, known: Known) -> Iterator[Repair]:
    current = dict(head.config.rope_parameters)
    of_target = dict(known.target.text_config.rope_parameters or {})
    of_target = dict(of_target.get("full_attention", of_target))
    of_target.pop("partial_rotary_factor", None)
    plain = {"rope_type": "default"}
    for rope in [of_target, *({**plain, "rope_theta": theta} for theta in _THETAS)]:
        if rope.get("rope_theta") and _rope_key(rope) != _rope_key(current):
            was, now = current.get("rope_theta"), rope["rope_theta"]
            kind = rope.get("rope_type", "default")
            yield Repair(
                "rope",
                f"RoPE of theta {now:g} ({kind}) instead of {was:g}",
                f"Set rope_theta, and in rope_parameters, to {now:g} (rope_type {kind}).",
                head.configured(rope_parameters=rope),
            )


def _rope_key(rope: dict[str, object]) -> tuple[object, ...]:
    rest = {k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")}
    return rope.get("rope_type", "default"), rope.get("rope_theta"), tuple(sorted(rest.items()))


def _window_repairs(head: Head, known: Known) -> Iterator[Repair]:
    if head.reading.window is not None:
        yield Repair(
            "sliding_window",
            f"no sliding window instead of {head.reading.window}",
            "Remove sliding_window and layer_types from config.json.",
            head.read(window=None),
        )
        return
    of_target = getattr(known.target.text_config, "sliding_window", None)
    for window in dict.fromkeys((known.files.window, of_target)):
        if window and window < max(known.probe.lengths):
            yield Repair(
                "sliding_window",
                f"a sliding window of {window} in the head",
                "Train the head with full attention: runtimes give its layers no window.",
                head.read(window=window),
            )


def _norm_repairs(head: Head) -> Iterator[Repair]:
    config, tensors = head.config, head.tensors
    hidden, token = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
    swapped = {**tensors, hidden: tensors[token], token: tensors[hidden]}
    what = "hidden_norm and input_layernorm of layer 0 exchanged"
    remedy = "Exchange the two tensors in the checkpoint."
    yield Repair("norms", what, remedy, replace(head, tensors=swapped))
    width, aux = config.target_hidden_size, range(len(config.aux_layer_ids))
    blank = {
        "norm_before_fc": {"input_norm.weight": torch.ones(config.feature_size)},
        "fc_norm": {f"fc_norm.{i}.weight": torch.ones(width) for i in aux},
    }
    for flag, weights in blank.items():
        others = {name for kind in blank for name in blank[kind]}
        rest = {name: value for name, value in tensors.items() if name not in others}
        is_set = getattr(config, flag)
        flags = {**dict.fromkeys(blank, False), flag: not is_set}
        yield Repair(
            "norms",
            f"{flag} {json_bool(not is_set)} instead of {json_bool(is_set)}",
            f"Set {flag} to {json_bool(not is_set)} in config.json, and export its weights.",
            Head(replace(config, **flags), rest if is_set else {**rest, **weights}, head.reading),
        )
    if not config.is_parallel:
        flag = not config.norm_output
        what = f"norm_output {json_bool(flag)} instead of {json_bool(not flag)}"
        remedy = f"Set norm_output to {json_bool(flag)} in config.json."
        yield Repair("norms", what, remedy, head.configured(norm_output=flag))
