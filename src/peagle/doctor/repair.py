"""Changes of a head, one for each known fault, and the search for those that make a head better.

A repair is the head as it would be without a fault of its files; a fault of a serving side is the
head that would draft on the training side as that side drafts. Both change a head in memory only.
The search makes one repair after another, as long as one clearly helps. Its statistics are paired
by prompt: the same prompts, anchors and depths with and without a repair.

Shapes: DV draft vocabulary, V target vocabulary, D drafter width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.doctor.files import HeadFiles, json_bool, target_rope
from peagle.doctor.head import Head, HeadDrafts, drafted
from peagle.doctor.probe import Probe, aux_choices
from peagle.models.checkpoint.formats import AUX_KEY
from peagle.models.end_tokens import eos_token_ids

MEAN_FEATURE = "the mean feature in place of mask_hidden"
MASK_STATE = "fc(norm(mask_hidden)), with the norm before fc if any"
_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)
_WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_MASK_IDS = 8
_NEAREST_ROWS = 512  # draft rows whose nearest target row is looked for

# A repair counts if it raises the log-probability of the target's tokens by so much (in nats), by
# so many standard errors; and matches too. Some 40 repairs are tried on a head: a healthy one
# passes by chance less than once in a hundred examinations.
MIN_GAIN, MIN_T = 0.03, 3.5
# It must raise the acceptance length so many times. A head that lost weights is off whatever is
# done, and wrong changes may help it a little on every text: there more is asked.
MIN_RATIO, MIN_RATIO_WITHOUT_WEIGHTS = 1.01, 1.05
# A head that matches less often than this with its repairs has not been repaired.
MIN_MATCH = 0.1
_MAX_ROUNDS = 5
# Repairs are tried on every fourth prompt first, and the best of them on all.
_SCREEN, _FINALISTS = 4, 4


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a head.

    Attributes:
        cause: key of CAUSES.
        what: the change, with the values after and before.
        remedy: the thing to do: to the files for a repair, to the server for a fault.
        apply: makes the changed head of a head.
        rows: the prompts on which a repair may be judged, where it was made from the others.
    """

    cause: str
    what: str
    remedy: str
    apply: Callable[[Head], Head]
    rows: slice | None = None


def repairs(head: Head, now: HeadDrafts, files: HeadFiles, probe: Probe) -> list[Change]:
    """Return every candidate repair of a head that drafts so by now."""
    return [
        *_common_changes(head, files, probe, is_repair=True),
        *_aux_order_repairs(head),
        *(_mask_state_repairs(head, probe) if head.config.is_parallel else ()),
        *(_map_repairs(head, now, files, probe) if head.config.is_pruned else ()),
        *_window_repairs(head, files, probe),
        *_norm_repairs(head),
    ]


def serving_faults(files: HeadFiles, probe: Probe) -> list[Change]:
    """Return every known fault of a serving side, as the change that it makes to a head."""
    assert files.head is not None
    return [
        *_common_changes(files.head, files, probe, is_repair=False),
        *(_parallel_faults() if files.head.config.is_parallel else ()),
        *_layer_faults(files.head, probe),
    ]


def _common_changes(
    head: Head, files: HeadFiles, probe: Probe, *, is_repair: bool
) -> Iterator[Change]:
    """Yield the changes that repair files, and are faults where a serving side makes them."""
    config, target = head.config, probe.target

    def change(
        cause: str, what: str, of_files: str, of_server: str, apply: Callable[[Head], Head]
    ) -> Change:
        return Change(cause, what, of_files if is_repair else of_server, apply)

    ids = config.aux_layer_ids
    for other in aux_choices(ids, target.num_layers):
        if set(other) <= set(probe.entering):
            yield change(
                "aux_layers",
                f"aux layers {list(other)} instead of {list(ids)}",
                f"Set {AUX_KEY} to {list(other)} in config.json.",
                "Correct its taps: the ids name layers whose entering states are taken, which are "
                "the outputs of the layers before.",
                partial(Head.configured, aux_layer_ids=other),
            )
    for name, what in (
        ("token_shift", "slot p with the token x[p] instead of x[p+1]"),
        ("feature_shift", "slot p with the feature g[p-1] instead of g[p]"),
    ):
        if not getattr(head, name):
            yield change(
                "token_shift",
                what,
                "Train the head again with slot p = (x[p+1], g[p]), which is how it is served.",
                "Slot p takes the token x[p+1] and the feature g[p], at position p.",
                partial(Head.read, **{name: 1}),
            )
    if config.is_parallel:
        current = config.mask_token_id
        choices = _mask_choices(files, probe, current)
        if not is_repair:
            choices = [*choices, *eos_token_ids(target.name, probe.tokenizer), 0]
        for other in dict.fromkeys(choices):
            if other != current:
                token = probe.tokenizer.convert_ids_to_tokens(other)
                yield change(
                    "mask_token_id",
                    f"mask token {other} ({token!r}) instead of {current}",
                    f"Set mask_token_id, ptd_token_id and pard_token to {other} in config.json.",
                    "Write mask_token_id, ptd_token_id and pard_token into config.json, all equal.",
                    partial(Head.configured, mask_token_id=other),
                )
        has_norm = config.norm_before_fc or config.fc_norm
        for kind in ("fc", "no fc", *(["fc without norm"] if has_norm else [])):
            if kind != head.shared_state and config.feature_size >= config.hidden_size:
                yield change(
                    "mask_hidden",
                    f"the state of mask slots by {kind!r} instead of {head.shared_state!r}",
                    "Export mask_hidden again, [1, 1, A * H], as it is before fc and its norm.",
                    f"The state of mask slots is {MASK_STATE}.",
                    partial(Head.read, shared_state=kind),
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
    current_rope, of_target = dict(config.rope_parameters), target_rope(target)
    of_target.pop("partial_rotary_factor", None)
    thetas = [{"rope_type": "default", "rope_theta": theta} for theta in _THETAS]
    for rope in [of_target, *thetas]:
        kind = rope.get("rope_type", "default")
        same_kind = {"rope_type": "default"} | current_rope == {"rope_type": "default"} | rope
        if rope.get("rope_theta") and not same_kind:
            was, theta = current_rope.get("rope_theta"), rope["rope_theta"]
            yield change(
                "rope",
                f"RoPE of theta {theta:g} ({kind}) instead of {was:g}",
                f"Set rope_theta, and in rope_parameters, to {theta:g} (rope_type {kind}).",
                "Write the head's rope_theta both at the top level and in rope_parameters.",
                partial(Head.configured, rope_parameters=rope),
            )
    flag = not config.norm_before_residual
    yield change(
        "residual",
        f"norm_before_residual {json_bool(flag)} instead of {json_bool(not flag)}",
        f"Set norm_before_residual to {json_bool(flag)} in config.json.",
        "Write norm_before_residual into config.json: runtimes assume different defaults.",
        partial(Head.configured, norm_before_residual=flag),
    )


def _mask_choices(files: HeadFiles, probe: Probe, current: int | None) -> list[int]:
    """Return ids that may be the mask token: in the files, named so, special, unused, the last."""
    tokenizer, vocab_size = probe.tokenizer, probe.target.vocab_size
    vocabulary = tokenizer.get_vocab()
    named = [i for token, i in vocabulary.items() if "mask" in token.lower() and "<" in token]
    used = set(vocabulary.values())
    unused = [i for i in range(vocab_size) if i not in used]
    special = [i for i in tokenizer.all_special_ids if isinstance(i, int)]
    few = [*files.mask_ids, *sorted(named)[:2], vocab_size - 1, *unused[:2], *unused[-2:]]
    choices = [i for i in dict.fromkeys([*few, *special]) if i < vocab_size and i != current]
    return choices[:_MAX_MASK_IDS]


# ---- repairs alone ----


def _aux_order_repairs(head: Head) -> Iterator[Change]:
    ids = head.config.aux_layer_ids
    backwards = torch.cat(head.tensors["fc.weight"].chunk(len(ids), dim=1)[::-1], dim=1)
    what = f"the aux states in the order {list(ids[::-1])}"
    remedy = "Reorder the columns of fc.weight: runtimes concatenate in ascending layer order."
    yield Change("aux_layers", what, remedy, partial(Head.filled, tensors={"fc.weight": backwards}))


def _mask_state_repairs(head: Head, probe: Probe) -> Iterator[Change]:
    features = probe.features(head.config.aux_layer_ids)
    mean = features.flatten(0, 1).mean(0).float().cpu().view(1, 1, -1)
    remedy = "Export mask_hidden again, or train it: mask slots do better without the stored one."
    yield Change(
        "mask_hidden", MEAN_FEATURE, remedy, partial(Head.filled, tensors={"mask_hidden": mean})
    )


def _map_repairs(head: Head, now: HeadDrafts, files: HeadFiles, probe: Probe) -> Iterator[Change]:
    """Yield changes of the maps by t2d, by the head's rows and by its drafts."""
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
    rows, target_rows = head.tensors["lm_head.weight"], probe.target.lm_head_weight().detach()
    if rows.shape[1] == target_rows.shape[1]:
        mended = _map_by_rows(ids, rows, target_rows.cpu(), now.draft_ids)
        what, judged = "each draft id as the target token whose lm_head row is nearest", None
    else:
        truth, half = probe.truth(probe.anchors_PC).cpu(), slice(0, None, 2)
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


def _window_repairs(head: Head, files: HeadFiles, probe: Probe) -> Iterator[Change]:
    longest = max(probe.lengths)
    if head.window is not None:
        if head.window >= longest:
            return
        what = f"no sliding window instead of {head.window}"
        remedy = "Remove sliding_window and layer_types from config.json: the head was trained "
        remedy += "without."
        yield Change("sliding_window", what, remedy, partial(Head.read, window=None))
        return
    of_target = getattr(probe.target.text_config, "sliding_window", None)
    for window in dict.fromkeys((files.window, of_target)):
        if window and window < longest:
            what = f"a sliding window of {window} in the head"
            remedy = 'Name "sliding_attention" for each layer in layer_types of config.json, and '
            remedy += f"sliding_window {window}: the head was trained with it."
            yield Change("sliding_window", what, remedy, partial(Head.read, window=window))


def _norm_repairs(head: Head) -> Iterator[Change]:
    config, tensors = head.config, head.tensors
    hidden, token = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
    swapped = {**tensors, hidden: tensors[token], token: tensors[hidden]}
    what = "hidden_norm and input_layernorm of layer 0 exchanged"
    remedy = "Exchange the two tensors in the checkpoint."
    yield Change("norms", what, remedy, partial(Head.read, tensors=swapped))
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
        changed = replace(config, **flags), rest if is_set else {**rest, **weights}
        what = f"{flag} {json_bool(not is_set)} instead of {json_bool(is_set)}"
        remedy = f"Set {flag} to {json_bool(not is_set)} in config.json, and export its weights."
        yield Change(
            "norms", what, remedy, partial(Head.read, config=changed[0], tensors=changed[1])
        )
    if not config.is_parallel:
        flag = not config.norm_output
        what = f"norm_output {json_bool(flag)} instead of {json_bool(not flag)}"
        remedy = f"Set norm_output to {json_bool(flag)} in config.json."
        yield Change("norms", what, remedy, partial(Head.configured, norm_output=flag))


# ---- faults of a serving side alone ----


def _parallel_faults() -> Iterator[Change]:
    def one_by_one(head: Head) -> Head:
        rest = {name: value for name, value in head.tensors.items() if name != "mask_hidden"}
        return replace(head.configured(mask_token_id=None), tensors=rest)

    def without_mask_hidden(head: Head) -> Head:
        if not head.config.is_parallel:
            return head
        return head.filled({"mask_hidden": torch.zeros_like(head.tensors["mask_hidden"])})

    remedy = 'Turn it on: "parallel_drafting": true in the speculative configuration.'
    yield Change("parallel_drafting", "drafts made token by token", remedy, one_by_one)
    remedy = f"The state of mask slots is {MASK_STATE}."
    yield Change("mask_hidden", "mask slots of the state 0", remedy, without_mask_hidden)


def _layer_faults(head: Head, probe: Probe) -> Iterator[Change]:
    if head.window is not None and head.window < max(probe.lengths):
        what = f"a drafter without the head's window of {head.window} positions"
        remedy = "Serve with a runtime that reads layer_types and sliding_window of config.json."
        yield Change("sliding_window", what, remedy, partial(Head.read, window=None))
    for window in _WINDOWS:
        if window < max(probe.lengths):
            what = f"a drafter that looks back {window} positions only"
            remedy = "Take the target's sliding window out of the drafter's configuration."
            yield Change("sliding_window", what, remedy, partial(Head.read, window=window))
    yield Change(
        "norms",
        "a final norm without its weight",
        "Load norm.weight of the head.",
        lambda h: h.filled({"norm.weight": torch.ones_like(h.tensors["norm.weight"])}),
    )
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        what = f"drafts computed in {name}, where the head falls apart"
        yield Change(
            "dtype", what, "Serve it in bfloat16, or in float32.", partial(Head.read, dtype=dtype)
        )


# ---- the search ----


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain that a repair brings.

    Attributes:
        logprob: mean gain of the log-probability of the target's tokens, nats.
        t: that in standard errors, over prompts.
        matches: gain of the share of drafts that are the target's tokens.
        before, after: acceptance lengths over all anchors.
        first_match: share of matching first drafts, after.
    """

    logprob: float
    t: float
    matches: float
    before: float
    after: float
    first_match: float

    @classmethod
    def of(cls, before: HeadDrafts, after: HeadDrafts, rows: slice | None = None) -> Self:
        """Compare two runs over the same probe."""
        rows = rows or slice(None)
        gain_P = (after.score_P - before.score_P)[rows]
        spread = float(gain_P.std()) / len(gain_P) ** 0.5
        match_gain = after.matches[rows].double().mean() - before.matches[rows].double().mean()
        return cls(
            logprob=float(gain_P.mean()),
            t=float(gain_P.mean()) / max(spread, 1e-9),
            matches=float(match_gain),
            before=before.acceptance_length,
            after=after.acceptance_length,
            first_match=after.match_share[0],
        )

    @property
    def is_clear(self) -> bool:
        """Return whether the head is better beyond doubt."""
        likelier = self.logprob >= MIN_GAIN and self.t >= MIN_T
        accepted = self.matches > 0 and self.ratio >= MIN_RATIO
        return likelier and accepted and self.first_match >= MIN_MATCH

    @property
    def ratio(self) -> float:
        """Return the acceptance length after the change over the one before."""
        return self.after / self.before

    def __str__(self) -> str:
        return (
            f"acceptance length {self.before:.2f} to {self.after:.2f}, log-probability "
            f"{self.logprob:+.2f} nats ({self.t:.1f} standard errors)"
        )


@dataclass(frozen=True, slots=True)
class Repaired:
    """A head with all repairs that count, its drafts on the probe, and the gain of each repair."""

    head: Head
    drafted: HeadDrafts
    applied: tuple[tuple[Change, Gain], ...] = ()


def repair(first: Repaired, files: HeadFiles, probe: Probe) -> Repaired:
    """Repair a head in memory until no candidate helps any more."""
    repaired = first
    for number in range(1, _MAX_ROUNDS + 1):
        # The rows that drafts use are others once the head does better.
        done = {one.cause for one, _ in repaired.applied} - {"vocabulary_rebuilt"}
        candidates = repairs(repaired.head, repaired.drafted, files, probe)
        candidates = [one for one in candidates if one.cause not in done]
        probe.progress(f"trying {len(candidates)} repairs (round {number})")
        better = _best(repaired, candidates, files, probe)
        if better is None:
            break
        repaired = better
    return repaired


def _best(
    now: Repaired, candidates: list[Change], files: HeadFiles, probe: Probe
) -> Repaired | None:
    """Return the head with the best of the repairs that clearly help."""
    part = probe.part(_SCREEN)
    base_P = drafted(now.head, part).score_P
    screened = [
        (float((drafted(one.apply(now.head), part).score_P - base_P).mean()), index)
        for index, one in enumerate(candidates)
    ]
    finalists = [index for gain, index in sorted(screened, reverse=True)[:_FINALISTS] if gain > 0]
    tried = []
    least = MIN_RATIO_WITHOUT_WEIGHTS if files.lost_weights else MIN_RATIO
    for index in finalists:
        chosen = candidates[index]
        head = chosen.apply(now.head)
        after = drafted(head, probe)
        gain = Gain.of(now.drafted, after, chosen.rows)
        if gain.is_clear and gain.ratio >= least:
            applied = (*now.applied, (chosen, gain))
            tried.append((gain.logprob, index, Repaired(head, after, applied)))
    return max(tried, key=lambda one: one[:2])[2] if tried else None


def features_matter(now: Repaired, probe: Probe) -> tuple[bool, Gain]:
    """Return whether a head does better with the features of its text than with another text's.

    Where it does not, the head learned from other features.
    """
    foreign = drafted(now.head, probe, foreign_features=True)
    gain = Gain.of(foreign, now.drafted)
    return gain.logprob >= MIN_GAIN and gain.t >= MIN_T and gain.matches > 0.02, gain


def starved_depth(now: HeadDrafts) -> int | None:
    """Return the first depth whose drafts match far less often than the depth above's, if any."""
    share = now.match_share
    if share[0] >= MIN_MATCH:
        for depth in range(1, min(3, len(share))):
            if share[depth] < 0.35 * share[depth - 1]:
                return depth
    return None
