"""Changes of a head, by one for each known fault: repairs of its files, faults of a serving side.

A repair is the head as it would be without a fault; a fault of a serving side is the head that
would draft on the training side as that side drafts. Both change a head in memory only.

Shapes: DV draft vocabulary, V target vocabulary, D drafter width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.doctor.files import HeadFiles, json_bool, target_rope
from peagle.doctor.forward import HeadDrafts
from peagle.doctor.head import Head
from peagle.doctor.probed_target import ProbedTarget, aux_choices
from peagle.models.checkpoint.formats import AUX_KEY

MEAN_FEATURE = "the mean feature in place of mask_hidden"
MASK_STATE = "fc(norm(mask_hidden)), with the norm before fc if any"
_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)
_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_MASK_IDS = 8
_NEAREST_ROWS = 512  # draft rows whose nearest target row is looked for


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a head.

    Attributes:
        cause: key of CAUSES.
        what: the change, with the values after and before.
        remedy: what to do about it: to the files for a repair, to the server for a fault.
        apply: makes the changed head of a head.
        rows: the prompts on which a repair may be judged, where it was made from the others.
    """

    cause: str
    what: str
    remedy: str
    apply: Callable[[Head], Head]
    rows: slice | None = None


def repairs(head: Head, now: HeadDrafts, files: HeadFiles, probed: ProbedTarget) -> list[Change]:
    """Return every candidate repair of a head.

    Args:
        head: as it is by now.
        now: its drafts on the probe.
        files: the head's files.
        probed: the target and its answers.
    """
    return [
        *_common_changes(head, files, probed, is_repair=True),
        *_aux_order_repairs(head),
        *(_mask_state_repairs(head, probed) if head.config.is_parallel else ()),
        *(_map_repairs(head, now, files, probed) if head.config.is_pruned else ()),
        *_window_repairs(head, files, probed),
        *_norm_repairs(head),
    ]


def serving_faults(head: Head, files: HeadFiles, probed: ProbedTarget) -> list[Change]:
    """Return every known fault of a serving side, as what it makes of a head."""
    return [
        *_common_changes(head, files, probed, is_repair=False),
        *(_parallel_faults() if head.config.is_parallel else ()),
        *_layer_faults(head, probed),
    ]


def _common_changes(
    head: Head, files: HeadFiles, probed: ProbedTarget, *, is_repair: bool
) -> Iterator[Change]:
    """Yield the changes that repair files, and are faults where a serving side makes them."""
    config = head.config

    def change(
        cause: str, what: str, of_files: str, of_server: str, apply: Callable[[Head], Head]
    ) -> Change:
        return Change(cause, what, of_files if is_repair else of_server, apply)

    def configured(**values: Any) -> Callable[[Head], Head]:
        return lambda h: h.configured(**values)

    ids = config.aux_layer_ids
    for other in aux_choices(ids, probed.target.num_layers):
        if set(other) <= set(probed.probe.entering):
            yield change(
                "aux_layers",
                f"aux layers {list(other)} instead of {list(ids)}",
                f"Set {AUX_KEY} to {list(other)} in config.json.",
                "Correct its taps: the ids name layers whose entering states are taken, which are "
                "the outputs of the layers before.",
                configured(aux_layer_ids=other),
            )
    for name, what in (
        ("token_shift", "slot p with the token x[p] instead of x[p+1]"),
        ("feature_shift", "slot p with the feature g[p-1] instead of g[p]"),
    ):
        if not getattr(head.reading, name):
            yield change(
                "token_shift",
                what,
                "Train the head again with slot p = (x[p+1], g[p]), which is how it is served.",
                "Slot p takes the token x[p+1] and the feature g[p], at position p.",
                lambda h, name=name: h.read(**{name: 1}),
            )
    if config.is_parallel:
        current = config.mask_token_id
        choices = _mask_choices(files, probed, current)
        if not is_repair:
            choices = [*choices, *probed.target.eos_token_ids(), 0]
        for other in dict.fromkeys(choices):
            if other != current:
                token = probed.tokenizer.convert_ids_to_tokens(other)
                yield change(
                    "mask_token_id",
                    f"mask token {other} ({token!r}) instead of {current}",
                    f"Set mask_token_id, ptd_token_id and pard_token to {other} in config.json.",
                    "Write mask_token_id, ptd_token_id and pard_token into config.json, all equal.",
                    configured(mask_token_id=other),
                )
        state, has_norm = head.reading.shared_state, config.norm_before_fc or config.fc_norm
        for kind in ("fc", "no fc", *(["fc without norm"] if has_norm else [])):
            if kind != state and config.feature_size >= config.hidden_size:
                yield change(
                    "mask_hidden",
                    f"the state of mask slots by {kind!r} instead of {state!r}",
                    "Export mask_hidden again, [1, 1, A * H], as it is before fc and its norm.",
                    f"The state of mask slots is {MASK_STATE}.",
                    lambda h, kind=kind: h.read(shared_state=kind),
                )
    if config.is_pruned:
        last = config.vocab_size - 1
        maps: dict[str, Callable[[Head], Tensor]] = {
            "d2t as target ids, not as offsets": lambda h: h.tensors["d2t"].clamp(0, last),
            "target ids lowered by 1": lambda h: (h.target_ids() - 1).clamp(0, last),
            "target ids raised by 1": lambda h: (h.target_ids() + 1).clamp(0, last),
        }
        if not is_repair:
            maps["draft ids as target ids"] = lambda h: torch.arange(h.config.draft_vocab_size)
        for what, ids_of in maps.items():
            yield change(
                "draft_vocabulary",
                what,
                "Export d2t and t2d again from the trained head, d2t[i] = target id - i.",
                "The target id of draft id i is i + d2t[i].",
                lambda h, ids_of=ids_of: h.with_target_ids(ids_of(h)),
            )
    current_rope = dict(config.rope_parameters)
    of_target = target_rope(probed.target)
    of_target.pop("partial_rotary_factor", None)
    thetas = [{"rope_type": "default", "rope_theta": theta} for theta in _THETAS]
    for rope in [of_target, *thetas]:
        if rope.get("rope_theta") and _rope_key(rope) != _rope_key(current_rope):
            was, theta = current_rope.get("rope_theta"), rope["rope_theta"]
            kind = rope.get("rope_type", "default")
            yield change(
                "rope",
                f"RoPE of theta {theta:g} ({kind}) instead of {was:g}",
                f"Set rope_theta, and in rope_parameters, to {theta:g} (rope_type {kind}).",
                "Write the head's rope_theta both at the top level and in rope_parameters.",
                configured(rope_parameters=rope),
            )
    flag = not config.norm_before_residual
    yield change(
        "residual",
        f"norm_before_residual {json_bool(flag)} instead of {json_bool(not flag)}",
        f"Set norm_before_residual to {json_bool(flag)} in config.json.",
        "Write norm_before_residual into config.json: runtimes assume different defaults.",
        configured(norm_before_residual=flag),
    )


def _mask_choices(files: HeadFiles, probed: ProbedTarget, current: int | None) -> list[int]:
    """Ids that may be the mask token: in the files, named so, special, unused, the last one."""
    tokenizer, vocab_size = probed.tokenizer, probed.target.vocab_size
    vocabulary = tokenizer.get_vocab()
    named = [i for token, i in vocabulary.items() if "mask" in token.lower() and "<" in token]
    used = set(vocabulary.values())
    unused = [i for i in range(vocab_size) if i not in used]
    special = [i for i in tokenizer.all_special_ids if isinstance(i, int)]
    few = [*files.mask_ids, *sorted(named)[:2], vocab_size - 1, *unused[:2], *unused[-2:]]
    choices = [i for i in dict.fromkeys([*few, *special]) if i < vocab_size and i != current]
    return choices[:_MOST_MASK_IDS]


def _rope_key(rope: dict[str, Any]) -> tuple[object, ...]:
    rest = {k: v for k, v in rope.items() if k not in ("rope_type", "rope_theta")}
    return rope.get("rope_type", "default"), rope.get("rope_theta"), tuple(sorted(rest.items()))


# ---- repairs ---------------------------------------------------------------------------------


def _aux_order_repairs(head: Head) -> Iterator[Change]:
    ids = head.config.aux_layer_ids
    backwards = torch.cat(head.tensors["fc.weight"].chunk(len(ids), dim=1)[::-1], dim=1)
    yield Change(
        "aux_layers",
        f"the aux states in the order {list(ids[::-1])}",
        "Reorder the columns of fc.weight: runtimes concatenate in ascending layer order.",
        lambda h: h.filled(fc__weight=backwards),
    )


def _mask_state_repairs(head: Head, probed: ProbedTarget) -> Iterator[Change]:
    features = probed.probe.features(head.config.aux_layer_ids)
    mean = features.flatten(0, 1).mean(0).float().cpu().view(1, 1, -1)
    yield Change(
        "mask_hidden",
        MEAN_FEATURE,
        "Export mask_hidden again, or train it: mask slots do better without the stored one.",
        lambda h: h.filled(mask_hidden=mean),
    )


def _map_repairs(
    head: Head, now: HeadDrafts, files: HeadFiles, probed: ProbedTarget
) -> Iterator[Change]:
    """Maps by t2d, by the head's rows and by its drafts."""
    ids, kept = head.target_ids(), files.kept_ids
    if kept is not None and not torch.equal(kept, ids):
        remedy = "Export d2t and t2d again from the trained head, d2t[i] = target id - i."
        what = "the tokens that t2d keeps"
        yield Change("draft_vocabulary", what, remedy, lambda h: h.with_target_ids(kept))
    cause = "draft_vocabulary" if files.has_broken_maps else "vocabulary_rebuilt"
    remedy = (
        "Take d2t and t2d from the training run of this very head: the map belongs to the rows of "
        "its lm_head, and one made from other data does not fit them."
    )
    rows, target_rows = head.tensors["lm_head.weight"], probed.target.lm_head_weight().detach()
    if rows.shape[1] == target_rows.shape[1]:
        mended = _map_by_rows(ids, rows, target_rows.cpu(), now.draft_ids)
        what, judged = "each draft id as the target token whose lm_head row is nearest", None
    else:
        truth, half = probed.probe.truth(probed.probe.anchors_PC).cpu(), slice(0, None, 2)
        mended = _map_by_drafts(ids, now.draft_ids[half], truth[half])
        what = "each draft id as the token that the target said most often in its place"
        judged = slice(1, None, 2)
    yield Change(cause, what, remedy, lambda h: h.with_target_ids(mended), judged)


def _map_by_rows(ids: Tensor, lm_head: Tensor, target_rows: Tensor, drafts: Tensor) -> Tensor:
    """Return a map by which the rows of lm_head that drafts use are the target's nearest ones."""
    # Heads start from the target's rows and stay near them.
    used, counts = drafts.flatten().unique(return_counts=True)
    chosen = used[counts.argsort(descending=True)][:_NEAREST_ROWS]
    rows = F.normalize(lm_head[chosen].float(), dim=1)
    best = torch.full((len(chosen),), -2.0)
    mended = ids.clone()
    for start in range(0, len(target_rows), 16384):
        part = F.normalize(target_rows[start : start + 16384].float(), dim=1)
        cosine, index = (rows @ part.T).max(dim=1)
        mended[chosen] = torch.where(cosine > best, index + start, mended[chosen])
        best = torch.maximum(best, cosine)
    return mended


def _map_by_drafts(ids: Tensor, drafts: Tensor, truth: Tensor) -> Tensor:
    """Return a map by which each draft id stands for the target's commonest token there."""
    mended = ids.clone()
    for draft in drafts.unique().tolist():
        said = truth[drafts == draft]
        if len(said) >= 3:
            mended[draft] = said.mode().values
    return mended


def _window_repairs(head: Head, files: HeadFiles, probed: ProbedTarget) -> Iterator[Change]:
    if head.reading.window is not None:
        yield Change(
            "sliding_window",
            f"no sliding window instead of {head.reading.window}",
            "Remove sliding_window and layer_types from config.json.",
            lambda h: h.read(window=None),
        )
        return
    of_target = getattr(probed.target.text_config, "sliding_window", None)
    for window in dict.fromkeys((files.window, of_target)):
        if window and window < max(probed.probe.lengths):
            yield Change(
                "sliding_window",
                f"a sliding window of {window} in the head",
                "Train the head with full attention: runtimes give its layers no window.",
                lambda h, window=window: h.read(window=window),
            )


def _norm_repairs(head: Head) -> Iterator[Change]:
    config, tensors = head.config, head.tensors
    hidden, token = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
    swapped = {**tensors, hidden: tensors[token], token: tensors[hidden]}
    what = "hidden_norm and input_layernorm of layer 0 exchanged"
    remedy = "Exchange the two tensors in the checkpoint."
    yield Change("norms", what, remedy, lambda h: replace(h, tensors=swapped))
    width, aux = config.target_hidden_size, range(len(config.aux_layer_ids))
    blank = {
        "norm_before_fc": {"input_norm.weight": torch.ones(config.feature_size)},
        "fc_norm": {f"fc_norm.{i}.weight": torch.ones(width) for i in aux},
    }
    others = {name for weights in blank.values() for name in weights}
    rest = {name: value for name, value in tensors.items() if name not in others}
    for flag, weights in blank.items():
        is_set = getattr(config, flag)
        flags = {**dict.fromkeys(blank, False), flag: not is_set}
        changed = Head(
            replace(config, **flags), rest if is_set else {**rest, **weights}, head.reading
        )
        yield Change(
            "norms",
            f"{flag} {json_bool(not is_set)} instead of {json_bool(is_set)}",
            f"Set {flag} to {json_bool(not is_set)} in config.json, and export its weights.",
            lambda h, changed=changed: changed,
        )
    if not config.is_parallel:
        flag = not config.norm_output
        what = f"norm_output {json_bool(flag)} instead of {json_bool(not flag)}"
        remedy = f"Set norm_output to {json_bool(flag)} in config.json."
        yield Change("norms", what, remedy, lambda h: h.configured(norm_output=flag))


# ---- faults of a serving side ------------------------------------------------------------------


def _parallel_faults() -> Iterator[Change]:
    def one_by_one(head: Head) -> Head:
        rest = {name: value for name, value in head.tensors.items() if name != "mask_hidden"}
        return Head(replace(head.config, mask_token_id=None), rest, head.reading)

    def without_mask_hidden(head: Head) -> Head:
        if not head.config.is_parallel:
            return head
        return head.filled(mask_hidden=torch.zeros_like(head.tensors["mask_hidden"]))

    remedy = 'Turn it on: "parallel_drafting": true in the speculative configuration.'
    yield Change("parallel_drafting", "drafts made token by token", remedy, one_by_one)
    remedy = f"The state of mask slots is {MASK_STATE}."
    yield Change("mask_hidden", "mask slots of the state 0", remedy, without_mask_hidden)


def _layer_faults(head: Head, probed: ProbedTarget) -> Iterator[Change]:
    for window in _WINDOWS:
        if window < max(probed.probe.lengths):
            yield Change(
                "sliding_window",
                f"a drafter that looks back {window} positions only",
                "Take the target's sliding window out of the drafter's configuration.",
                lambda h, window=window: h.read(window=window),
            )
    yield Change(
        "norms",
        "a final norm without its weight",
        "Load norm.weight of the head.",
        lambda h: h.filled(norm__weight=torch.ones_like(h.tensors["norm.weight"])),
    )
    for dtype in (torch.bfloat16, torch.float16):
        yield Change(
            "dtype",
            f"drafts computed in {str(dtype).removeprefix('torch.')}, where the head falls apart",
            "Serve it in bfloat16, or in float32.",
            lambda h, dtype=dtype: h.read(dtype=dtype),
        )
