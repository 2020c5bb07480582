"""A head's files, examined without running it; what can be mended is, so that the rest can run.

Every contradiction in the files is a cause of its own. The mended head is then tried on texts,
where changes compete (`repair`), so a mend need only be a reasonable beginning.

Shapes: DV draft vocabulary, V target vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.doctor.findings import Examination
from peagle.doctor.head import Head, SharedState
from peagle.errors import CheckpointError
from peagle.models.checkpoint.ends import EMBEDDING, ENDS, end_rows
from peagle.models.checkpoint.formats import AUX_KEY, config_from_json, facts_from_json, format_of
from peagle.models.checkpoint.packed import unpack_tensors
from peagle.models.checkpoint.stored import StoredHead, read_head_json
from peagle.models.checkpoint.weights import read_tensors, tensor_shapes
from peagle.models.drafter import DrafterConfig
from peagle.models.fingerprint import TargetFingerprint, same_tokenizer
from peagle.models.head_json import MASK_KEYS
from peagle.models.target import TargetModel, default_aux_layer_ids

_FLOAT16_MAX = 65504.0
# A head with fewer positions stops drafting in the middle of ordinary answers.
_FEW_POSITIONS = 1024
_NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
_NEEDED_NORMS = ("norm", "layers.0.hidden_norm", "layers.0.input_layernorm")
_ONE_EXPORT = "Put config.json and weights of one export together."


@dataclass(slots=True)
class HeadFiles:
    """The facts in the files of a head, as far as they are understood.

    Attributes:
        target: the model that it drafts for.
        report: gets the checks and the causes.
        data: config.json, mended.
        tensors: weights by canonical name, mended.
        head: the mended head; None where it cannot be made to run.
        mask_ids: the mask token ids of config.json, without repeats.
        window: the size of a sliding window in config.json, whether a layer has it or not.
        kept_ids: the tokens that t2d keeps, if their number is the draft vocabulary's.
        has_broken_maps: d2t and t2d contradict each other.
        loads: nothing had to be mended that keeps a runtime from loading the head.
        lost_weights: some weights have to be exported again; no repair makes up for them.
    """

    folder: Path
    target: TargetModel
    report: Examination
    data: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    head: Head | None = None
    shared_state: SharedState = "fc"
    mask_ids: list[int] = field(default_factory=list)
    window: int | None = None
    kept_ids: Tensor | None = None
    has_broken_maps: bool = False
    loads: bool = True
    lost_weights: bool = False

    @property
    def layers(self) -> dict[str, Any]:
        """Return the keys of the layers: nested in the speculators style."""
        return self.data.get("transformer_layer_config") or self.data

    def fault(
        self, cause: str, check: str, text: str, remedy: str, *, loads: bool = False, why: str = ""
    ) -> None:
        """Add a check that differs and its cause in the head.

        Args:
            cause: key of CAUSES.
            check: name of the check; "" adds none.
            text: the figures, which are the evidence too unless `why` is.
            loads: a runtime can load the head all the same.
        """
        self.loads = self.loads and loads
        if check:
            self.report.check(check, "differs", text)
        self.report.blame(cause, "head", why or text, remedy)


def examine_files(
    folder: Path, target: TargetModel, report: Examination | None = None
) -> HeadFiles:
    """Examine a head's files.

    Raises:
        UserError: no such folder.
    """
    files = HeadFiles(folder, target, report or Examination(), read_head_json(folder))
    try:
        files.tensors = {k: v.clone() for k, v in read_tensors(folder)[0].items()}
    except CheckpointError as error:
        files.fault("weights", "", str(error), "Save or copy the weights again.")
        return files
    if not _unpack(files):
        return files
    if _fits_target(files):
        _mend_values(files)
        _mend_mask(files)
        _mend_norms(files)
        _mend_aux(files)
        _mend_positions(files)
        files.head = _make_head(files)
    return files


def _unpack(files: HeadFiles) -> bool:
    """Put plain weights in the place of quantised ones; False if they cannot be read."""
    source = str(files.folder / "config.json")
    try:
        config = config_from_json(files.data, source, num_target_layers=files.target.num_layers)
    except CheckpointError:  # what follows says why
        return True
    try:
        unpack_tensors(files.tensors, config, files.data, source)
    except CheckpointError as error:
        files.fault("weights", "", str(error), "Quantise the head again, or serve it plain.")
        return False
    return True


def _make_head(files: HeadFiles) -> Head | None:
    """Return the mended head, None where it still does not work out."""
    source, target = str(files.folder / "config.json"), files.target
    try:
        stored = StoredHead.from_json(files.data, source, num_target_layers=target.num_layers)
        config, from_target = stored.config, stored.from_target
    except CheckpointError as error:
        remedy = "Correct config.json, or export the head again."
        files.fault("weights", "", str(error), remedy, loads=files.loads)
        return None
    _mend_maps(files, config)
    tensors, shapes = files.tensors, tensor_shapes(config)
    draft_ids = None
    if config.is_pruned and "d2t" in tensors:
        draft_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    for name in ENDS if config.hidden_size == target.hidden_size else ():
        may_be_absent = name == EMBEDDING or not config.is_pruned or name in from_target
        if name not in tensors and may_be_absent:
            tensors[name] = end_rows(name, target, draft_ids).detach().cpu()
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != shape:
            text = f"tensor {name!r} is {found}; config.json asks for {shape}"
            files.fault("weights", "", text, _ONE_EXPORT)
            return None
    if unknown := sorted(set(tensors) - set(shapes)):
        text = f"{len(unknown)} tensors are unknown to this config.json, {unknown[0]!r} first"
        files.fault("weights", "", text, _ONE_EXPORT, loads=True)
    known = {name: tensors[name] for name in shapes}
    window = _window_of(files, config)
    return Head(config, known, shared_state=files.shared_state, window=window)


def _fits_target(files: HeadFiles) -> bool:
    """Compare sizes and fingerprint with the target's; False means another size, which ends it."""
    target, report = files.target, files.report
    expected, problem = None, "the head does not say which target it is for"
    try:
        facts = facts_from_json(files.data).get("target")
        expected = None if facts is None else TargetFingerprint.from_json(facts)
    except CheckpointError as error:
        problem = str(error)
    sizes: dict[str, Any] = {
        "vocab_size": files.layers.get("vocab_size"),
        "hidden_size": files.data.get("target_hidden_size") or files.layers.get("hidden_size"),
        "num_layers": expected and expected.num_layers,
    }
    found = TargetFingerprint.of(target, tokens=False)
    wrong = [
        f"{key} {value} (here {getattr(found, key)})"
        for key, value in sizes.items()
        if isinstance(value, int) and value != getattr(found, key)
    ]
    if wrong:
        name = "a target" if expected is None else repr(expected.name)
        remedy = "Serve it with that target, or train a head for this one."
        text = f"the head is for {name} of {', '.join(wrong)}"
        files.fault("wrong_target", "target", text, remedy)
        return False
    if expected is None:
        report.check("fingerprint", "not checked", problem)
        return True
    is_other = target.dtype != torch.float16 and expected.lm_head_sha256 != found.lm_head_sha256
    tokenizers = expected.tokenizer_sha256, found.tokenizer_sha256
    if is_other:
        files.fault(
            "wrong_target",
            "fingerprint",
            "the target's lm_head_sha256 differ",
            f"Serve the head with {expected.name!r}, or train one for this target.",
            loads=True,
            why=f"the head was trained for {expected.name!r}, whose lm_head_sha256 differ from "
            f"those of {target.name!r}",
        )
    if same_tokenizer(*tokenizers, expected.tokens_sha256, Path(target.name)) is False:
        files.fault(
            "tokenizer",
            "tokenizer",
            "the target's tokenizer.json is not the head's",
            "Put the original tokenizer.json back into the target's folder.",
            loads=True,
            why="tokenizer.json of the target is not the one the head was trained with (SHA-256 "
            f"{str(tokenizers[1])[:12]}, expected {str(tokenizers[0])[:12]})",
        )
    elif not is_other:
        report.check("fingerprint", "agrees", f"the head was trained for {expected.name!r}")
    return True


# ---- weights ----


def _mend_values(files: HeadFiles) -> None:
    """Mend NaN, infinities, and norms that were never trained."""
    broken = {
        name: int((~value.isfinite()).sum())
        for name, value in files.tensors.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    }
    for name in broken:
        files.tensors[name] = files.tensors[name].float().nan_to_num(0.0, 0.0, 0.0)
    if broken:
        name, count = next(iter(broken.items()))
        text = f"{len(broken)} tensors hold NaN or infinite values, {name!r} has {count}"
        remedy = "Export the head again from its float32 weights, as bfloat16 or float32: "
        remedy += f"float16 ends at {_FLOAT16_MAX:.0f}."
        files.fault("dtype", "finite weights", text, remedy)
    else:
        files.report.check("finite weights", "agrees", f"{len(files.tensors)} tensors")
    norms = {n: v.float() for n, v in files.tensors.items() if n.endswith("norm.weight")}
    blank = [name for name, value in norms.items() if bool((value == 1).all())]
    others = [float((value - 1).abs().mean()) for n, value in norms.items() if n not in blank]
    if blank and others and min(others) > 0.02 and len(blank) <= len(others):
        files.lost_weights = True
        text = f"{', '.join(blank)}: every weight is exactly 1, unlike the other norms'"
        remedy = f"Export {blank[0]} again: it was lost on the way."
        files.fault("norms", "norm weights", text, remedy, loads=True)


def _mend_norms(files: HeadFiles) -> None:
    """Mend the norm flags of config.json to fit the norms among the weights."""
    data, tensors = files.data, files.tensors
    eagle = data.get("eagle_config") or {}
    for flag, tensor in _NORM_TENSORS.items():
        is_set, is_there = bool(data.get(flag) or eagle.get(flag)), tensor in tensors
        if is_set == is_there:
            continue
        data[flag] = is_there
        if "eagle_config" in data:
            data["eagle_config"] = {k: v for k, v in eagle.items() if k != flag}
        has = "is there" if is_there else "is not there"
        text = f"{flag} is {json_bool(is_set)} in config.json, but {tensor} {has}"
        remedy = f"Set {flag} to {json_bool(is_there)} in config.json."
        files.fault("norms", "norm flags", text, remedy)
    lost = [f"{name}.weight" for name in _NEEDED_NORMS if f"{name}.weight" not in tensors]
    if lost:
        files.lost_weights = True
        width = int(files.layers.get("hidden_size") or 0)
        tensors.update({name: torch.ones(width) for name in lost})
        remedy = f"Export {lost[0]} again from the trained head."
        files.fault("norms", "norm weights", f"{', '.join(lost)} is missing", remedy)


# ---- drafting in parallel ----


def _mend_mask(files: HeadFiles) -> None:
    """Mend the mask token id and mask_hidden: both present, once, and filled."""
    data, last = files.data, files.target.vocab_size - 1
    is_nested = format_of(data) == "speculators"
    keys = MASK_KEYS[:1] if is_nested else MASK_KEYS
    found = {key: data[key] for key in keys if data.get(key) is not None}
    files.mask_ids = list(dict.fromkeys(found.values()))
    if len(files.mask_ids) > 1:
        text = ", ".join(f"{key} {value}" for key, value in found.items())
        files.fault(
            "mask_token_id",
            "mask token id",
            f"config.json contradicts itself: {text}",
            f"Set {', '.join(found)} to the one that the head was trained with.",
            loads=True,
            why=f"config.json names several mask tokens ({text}); runtimes read different ones",
        )
    off = [i for i in files.mask_ids if type(i) is not int or not 0 <= i <= last]
    files.mask_ids = [i for i in files.mask_ids if i not in off]
    usable = files.mask_ids[0] if files.mask_ids else last
    if off:
        text = f"the mask token id is {off[0]!r}; the vocabulary ends at {last}"
        remedy = "Set it to the id that the head was trained with."
        files.fault("mask_token_id", "", text, remedy)
        data.update(dict.fromkeys(found, usable))
    is_eagle3 = data.get("speculators_model_type") == "eagle3"
    has_mask_hidden = "mask_hidden" in files.tensors
    if has_mask_hidden and (not found or is_eagle3):
        key, value, needed = "mask_token_id", "missing", "the head's mask token"
        if is_eagle3:
            key, value, needed = "speculators_model_type", "eagle3", '"peagle"'
        text = f"the head has mask_hidden, but {key} is {value}: it would draft token by token"
        remedy = f"Set {key} to {needed} in config.json."
        files.fault("parallel_drafting", "parallel drafting", text, remedy)
        data["mask_token_id"] = usable
        if is_nested:
            data["speculators_model_type"] = "peagle"
    if has_mask_hidden or found:
        _mend_mask_hidden(files)


def _mend_mask_hidden(files: HeadFiles) -> None:
    tensors = files.tensors
    size = int(tensors["fc.weight"].shape[1]) if "fc.weight" in tensors else 0
    width = int(files.layers.get("hidden_size") or 0)
    value = tensors.get("mask_hidden", torch.empty(0))
    if "mask_hidden" not in tensors:
        text, remedy = "mask_hidden is missing", "Export it with the other weights."
    elif value.numel() == width != size:
        text = f"mask_hidden has {width} numbers, the head's width; expected {size}, before fc"
        remedy = "Store mask_hidden as it is before fc, [1, 1, A * H]."
        files.shared_state = "no fc"
    elif not bool(value.any()):
        text, remedy = "mask_hidden is all zeros", "Export it again, or train on: it was not saved."
    else:
        tensors["mask_hidden"] = value.reshape(1, 1, -1)
        files.report.check("mask_hidden", "agrees", f"{value.numel()} numbers, not all 0")
        return
    files.lost_weights = files.lost_weights or not bool(value.any())
    padded = torch.zeros(1, 1, size)
    if value.numel() <= size:
        padded[0, 0, : value.numel()] = value.flatten().float()
    tensors["mask_hidden"] = padded
    files.fault("mask_hidden", "mask_hidden", text, remedy, loads=value.numel() == size > 0)


# ---- draft vocabulary ----


def _mend_maps(files: HeadFiles, config: DrafterConfig) -> None:
    """Examine d2t and t2d, and leave maps that select distinct tokens of the vocabulary."""
    tensors, size, vocab = files.tensors, config.draft_vocab_size, config.vocab_size
    remedy = "Export d2t and t2d again from the trained head."
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if not config.is_pruned:
        if (d2t is not None and bool(d2t.any())) or (t2d is not None and not bool(t2d.all())):
            text = "d2t and t2d select tokens, but draft_vocab_size is vocab_size"
            files.fault("draft_vocabulary", "", text, remedy)
            files.has_broken_maps = True
        return
    kept = None if t2d is None or t2d.numel() != vocab else t2d.bool().nonzero().flatten()
    ids = None if d2t is None or d2t.numel() != size else d2t.long() + torch.arange(size)
    if problem := _map_problem(ids, kept, config):
        files.has_broken_maps = True
        files.fault("draft_vocabulary", "draft vocabulary", problem, remedy)
    else:
        text = f"{size} of {vocab} tokens; d2t and t2d agree"
        files.report.check("draft vocabulary", "agrees", text)
    if kept is not None and len(kept) == size:
        files.kept_ids = kept
    if ids is None or _leaves_vocabulary(ids, config) or len(ids.unique()) < len(ids):
        ids = torch.arange(size) if files.kept_ids is None else files.kept_ids
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def _leaves_vocabulary(ids: Tensor, config: DrafterConfig) -> bool:
    return int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size


def _map_problem(ids: Tensor | None, kept: Tensor | None, config: DrafterConfig) -> str:
    """Return the fault of the maps by themselves, for a message; "" if they have none."""
    if ids is None:
        return f"d2t is missing or not of draft_vocab_size ({config.draft_vocab_size})"
    if _leaves_vocabulary(ids, config):
        low, high = int(ids.min()), int(ids.max())
        return f"d2t leads to target ids {low} to {high}, the vocabulary ends before that"
    if len(ids.unique()) < len(ids):
        return f"d2t leads to {len(ids.unique())} distinct tokens; expected {len(ids)}"
    if kept is not None and set(kept.tolist()) != set(ids.tolist()):
        shared = len(set(kept.tolist()) & set(ids.tolist()))
        return f"d2t and t2d share {shared} of {len(ids)} tokens; expected all"
    if bool((ids.diff() <= 0).any()):
        return "the target ids of d2t do not ascend"
    return ""


# ---- layers ----


def _window_of(files: HeadFiles, config: DrafterConfig) -> int | None:
    """Return the window that config.json gives all layers; None if there is none."""
    layers, windows = files.layers, set(config.windows)
    size = layers.get("sliding_window")
    if isinstance(size, int) and size > 0 and layers.get("use_sliding_window") is not False:
        files.window = size
    if len(windows) > 1:
        text = f"{list(config.windows)} positions by layer: the examination looks back over all"
        files.report.check("sliding window", "not checked", text)
        return None
    return windows.pop() if windows else None


def _mend_aux(files: HeadFiles) -> None:
    """Mend the aux layers: one ascending list, within the target, of the length that fc reads."""
    data, num_layers = files.data, files.target.num_layers
    eagle = data.get("eagle_config") or {}
    top, nested = data.get(AUX_KEY), eagle.get(AUX_KEY)
    fc = files.tensors.get("fc.weight")
    count = 3 if fc is None else fc.shape[1] // files.target.hidden_size
    given = top or nested

    def are_inside(ids: Any) -> bool:
        return all(type(i) is int and 0 <= i < num_layers for i in ids)

    if not given:
        problem = ""
    elif top and nested and list(top) != list(nested):
        problem = f"{AUX_KEY} is {top}, in eagle_config {nested}"
    elif not are_inside(given):
        problem = f"{AUX_KEY} is {given}, the target has {num_layers} layers"
    elif list(given) != sorted(set(given)):
        problem = f"{AUX_KEY} is {given}, not distinct and ascending"
    else:
        wrong = f"{AUX_KEY} names {len(given)} layers, fc reads {count}"
        problem = wrong if len(given) != count else ""
    if not problem:
        files.report.check("aux layers", "agrees", f"{given or 'the default'}, fc reads {count}")
        return
    usable = [
        ids
        for ids in (top, nested, list(default_aux_layer_ids(num_layers)))
        if ids and are_inside(ids) and len(ids) == count and list(ids) == sorted(set(ids))
    ]
    chosen = usable[0] if usable else list(range(count))
    data[AUX_KEY] = chosen
    if "eagle_config" in data:
        data["eagle_config"] = {**eagle, AUX_KEY: chosen}
    remedy = f"Set both to the layers it was trained on, like {chosen}."
    files.fault("aux_layers", "aux layers", problem, remedy, loads=chosen == given)


def _mend_positions(files: HeadFiles) -> None:
    """Compare the head's number of positions, and its RoPE, with the target's."""
    layers, target, name = files.layers, files.target, "maximum position"
    most, longest = layers.get("max_position_embeddings"), target.max_model_len
    if isinstance(most, int):
        text = f"max_position_embeddings is {most}, the target's {longest}"
        if most < min(longest, _FEW_POSITIONS):
            layers["max_position_embeddings"] = longest
            remedy = f"Set max_position_embeddings to {longest}, or to the length of training."
            check = f"{text}: longer texts go on without drafts"
            why = f"{text}: no drafts beyond position {most}"
            files.fault("max_positions", name, check, remedy, loads=True, why=why)
        elif most < longest:
            text = f"{most}, the target's {longest}: longer texts go on without drafts"
            files.report.check(name, "differs", text)
        else:
            files.report.check(name, "agrees", f"{most}, the target's {longest}")
    theta, own = _theta_of(layers), _theta_of({"rope_parameters": target_rope(target)})
    # Another theta than the target's may be the head's own: the repairs show it.
    status = "agrees" if theta == own else "not checked"
    files.report.check("RoPE theta", status, f"{theta:g}, the target's {own:g}")


def target_rope(target: TargetModel) -> dict[str, Any]:
    """Return the RoPE parameters of a target's layers of full attention."""
    rope = dict(target.text_config.rope_parameters or {})
    return dict(rope.get("full_attention", rope))


def _theta_of(layers: Mapping[str, Any]) -> float:
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    return float(rope.get("rope_theta") or layers.get("rope_theta") or 10000.0)


def json_bool(value: bool) -> str:
    """Return a boolean as config.json writes it."""
    return "true" if value else "false"
