"""Healthy heads, broken in one way each: in their files, or where they are served."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import peagle.engine.head as engine_head
import peagle.speculation.proposers as proposers
from peagle.doctor.probe import Probe, Question
from peagle.doctor.serving import EngineServing, Served
from peagle.models.checkpoint import load_drafter
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer
from tests.models.editing import edit_config, edit_tensors

AUX = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """A fault, the cause that a doctor has to name, and what plants it into a head's folder."""

    name: str
    cause: str
    plant: Callable[[Path], None]


def copy_head(source: Path, folder: Path, *faults: Fault) -> Path:
    """A copy of a head with these faults."""
    shutil.copytree(source, folder)
    for fault in faults:
        fault.plant(folder)
    return folder


def train_shortly(probe: Probe, folder: Path, *, steps: int) -> Path:
    """A new head after some steps on the answers in a probe."""
    data = folder / "answers.jsonl"
    with data.open("w") as file:
        spans = zip(probe.prompt_lens, probe.lengths, strict=True)
        for ids, (start, end) in zip(probe.tokens_PN.tolist(), spans, strict=True):
            row = {"prompt_token_ids": ids[:start], "response_token_ids": ids[start:end]}
            file.write(json.dumps(row) + "\n")
    config = {
        "target": probe.target.name,
        "output": folder / "out",
        "head": {"num_layers": 1},
        "data": {"train": data, "batch_tokens": 1024, "length_multiple": 32},
        "method": {"name": "peagle", "depth": 6},
        "optimizer": {"name": "muon", "steps": steps, "learning_rate": 1e-2},
        "run": {"device": "cpu", "target_dtype": "float32"},
    }
    Trainer(TrainConfig.model_validate(config)).run()
    return folder / "out" / "head"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def _tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def _aux(by: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        ids = [i + by for i in config_of(folder)[AUX]]
        edit_config(folder, **{AUX: ids, "eagle_config": {AUX: ids, "use_aux_hidden_state": True}})

    return plant


def _mask_ids(**ids: int | None) -> Callable[[Path], None]:
    return _config(**ids)


def _swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return change


def _set(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        value = tensors[name]
        tensors[name] = make(value).to(value.dtype)

    return change


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7))


def _after_fc(tensors: Tensors) -> None:
    fc, mask = tensors["fc.weight"].float(), tensors["mask_hidden"].float()
    tensors["mask_hidden"] = (fc @ mask.flatten()).view(1, 1, -1).to(tensors["fc.weight"].dtype)


def _ids(tensors: Tensors) -> Tensor:
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _set_ids(tensors: Tensors, ids: Tensor, kept: bool) -> None:
    tensors["d2t"] = ids - torch.arange(len(ids))
    if kept:
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, ids, True)


def _shuffle_map(tensors: Tensors) -> None:
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(3))
    _set_ids(tensors, _ids(tensors)[order], kept=False)


def _rebuild_map(tensors: Tensors) -> None:
    """A map in order, of other data: a third of its tokens are others."""
    size, vocab = len(tensors["d2t"]), len(tensors["t2d"])
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[: size // 3]
    picked = list(dict.fromkeys([*chosen.tolist(), *_ids(tensors).flip(0).tolist()]))[:size]
    _set_ids(tensors, torch.tensor(sorted(picked)), kept=True)


def _contradict(tensors: Tensors) -> None:
    """t2d of other tokens than d2t."""
    tensors["t2d"] = tensors["t2d"].roll(1)


def _leave_vocabulary(tensors: Tensors) -> None:
    """The last draft token leads to the first id behind the vocabulary."""
    ids = _ids(tensors)
    ids[-1] = len(tensors["t2d"])
    _set_ids(tensors, ids, kept=False)


def _overflow(tensors: Tensors) -> None:
    """The same function in float32; in float16 the normed state overflows."""
    scale = 3.0e5
    for name in ("gate_proj", "up_proj"):
        key = f"layers.1.mlp.{name}.weight"
        tensors[key] = tensors[key].float() / scale
    norm = "layers.1.post_attention_layernorm.weight"
    tensors[norm] = tensors[norm].float() * scale


def _nan(tensors: Tensors) -> None:
    tensors["layers.1.mlp.down_proj.weight"][3, 5] = float("inf")


def _theta(folder: Path) -> None:
    theta = 1e4 if config_of(folder)["rope_theta"] > 1e5 else 5e5
    rope = {"rope_type": "default", "rope_theta": theta}
    edit_config(folder, rope_theta=theta, rope_parameters=rope)


def _window(folder: Path) -> None:
    count = config_of(folder)["num_hidden_layers"]
    edit_config(folder, sliding_window=16, layer_types=["sliding_attention"] * count)


HIDDEN, TOKEN = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
NO_MASK = {"mask_token_id": None, "pard_token": None, "ptd_token_id": None}
ONES = torch.ones_like

FILE_FAULTS = [
    Fault("aux layers + 1", "aux_layers", _aux(1)),
    Fault("aux layers - 1", "aux_layers", _aux(-1)),
    Fault("mask id", "mask_token_id", _mask_ids(mask_token_id=77, pard_token=77, ptd_token_id=77)),
    Fault("mask ids contradict", "mask_token_id", _mask_ids(mask_token_id=77)),
    Fault("no mask id", "parallel_drafting", _mask_ids(**NO_MASK)),
    Fault("mask_hidden 0", "mask_hidden", _tensors(_set("mask_hidden", torch.zeros_like))),
    Fault("mask_hidden untrained", "mask_hidden", _tensors(_set("mask_hidden", _noise))),
    Fault("mask_hidden missing", "mask_hidden", _tensors(lambda t: t.pop("mask_hidden"))),
    Fault("mask_hidden after fc", "mask_hidden", _tensors(_after_fc)),
    Fault("theta", "rope", _theta),
    Fault("few positions", "max_positions", _config(max_position_embeddings=64)),
    Fault("sliding window", "sliding_window", _window),
    Fault("norm flag", "norms", _config(norm_before_fc=True)),
    Fault("fc_norm flag", "norms", _config(fc_norm=True)),
    Fault("final norm missing", "norms", _tensors(lambda t: t.pop("norm.weight"))),
    Fault("final norm lost", "norms", _tensors(_set("norm.weight", ONES))),
    Fault("norms exchanged", "norms", _tensors(_swap(HIDDEN, TOKEN))),
    Fault("residual", "residual", _config(norm_before_residual=True)),
    Fault("infinite weight", "dtype", _tensors(_nan)),
]
MAP_FAULTS = [
    Fault("d2t + 1", "draft_vocabulary", _tensors(lambda t: t["d2t"].add_(1))),
    Fault("d2t shuffled", "draft_vocabulary", _tensors(_shuffle_map)),
    Fault("t2d contradicts", "draft_vocabulary", _tensors(_contradict)),
    Fault("d2t leaves", "draft_vocabulary", _tensors(_leave_vocabulary)),
    Fault("map rebuilt", "vocabulary_rebuilt", _tensors(_rebuild_map)),
]
OVERFLOW = Fault("float16 overflow", "dtype", _tensors(_overflow))


def without_fingerprint(folder: Path) -> None:
    """As heads from elsewhere: nothing says which target they are for."""
    edit_config(folder, peagle=None)


# ---- targets that are not the head's ----


def turn_target(source: Path, folder: Path) -> Path:
    """The same function of the tokens, with the hidden units in another order."""
    shutil.copytree(source, folder)
    width = config_of(folder)["hidden_size"]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1))

    def change(tensors: Tensors) -> None:
        for name, value in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = value[order]
            elif value.shape[-1] == width and not name.endswith(("q_norm.weight", "k_norm.weight")):
                tensors[name] = value[..., order]

    edit_tensors(folder, change)
    return folder


def scramble_tokenizer(source: Path, folder: Path) -> Path:
    """Another tokenizer of the same size: the words have other numbers."""
    shutil.copytree(source, folder)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    added = {token["id"] for token in data["added_tokens"]}
    words = [(word, i) for word, i in data["model"]["vocab"].items() if i not in added]
    numbers = [i for _, i in words]
    moved = dict(zip((w for w, _ in words), numbers[300:] + numbers[:300], strict=True))
    data["model"]["vocab"].update(moved)
    file.write_text(json.dumps(data))
    return folder


# ---- serving sides that report little, or run a healthy head wrongly ----


@dataclass(frozen=True)
class Counting:
    """A serving side that reports counters only, as servers do."""

    inner: EngineServing
    change: Callable[[Served], Served] = lambda one: one
    name: str = "http://server"
    notes: Sequence[str] = ()

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        told = self.inner.answer(questions, max_tokens)
        return [self.change(replace(one, token_ids=None, drafts=None)) for one in told]


def serve_changed(patch: pytest.MonkeyPatch, change: Callable[[Drafter], Any]) -> None:
    """Engines made from now on change a head after they have loaded it."""

    def load(folder: str, target: TargetModel, **options: Any) -> Drafter:
        drafter = load_drafter(folder, target, **options)
        changed = change(drafter)
        return changed if isinstance(changed, Drafter) else drafter

    patch.setattr(engine_head, "load_drafter", load)


def _reconfigure(**changes: Any) -> Callable[[Drafter], None]:
    def change(drafter: Drafter) -> None:
        drafter.config = replace(drafter.config, **changes)

    return change


def _served_aux(drafter: Drafter) -> None:
    ids = tuple(i + 1 for i in drafter.config.aux_layer_ids)
    drafter.config = replace(drafter.config, aux_layer_ids=ids)


def _served_residual(drafter: Drafter) -> None:
    drafter.layers[0].norm_before_residual = True  # type: ignore[union-attr]


def _served_theta(drafter: Drafter) -> None:
    theta = 1e4 if drafter.config.rope_parameters["rope_theta"] > 1e5 else 5e5
    rope = {"rope_type": "default", "rope_theta": theta}
    drafter.config = replace(drafter.config, rope_parameters=rope)


def _served_zero(drafter: Drafter) -> None:
    drafter.shared_hidden = lambda: torch.zeros(drafter.config.hidden_size)  # type: ignore


def _served_no_fc(drafter: Drafter) -> None:
    assert drafter.mask_hidden is not None
    value = drafter.mask_hidden.flatten()[: drafter.config.hidden_size]
    drafter.shared_hidden = lambda: value  # type: ignore[method-assign]


def _served_one_by_one(drafter: Drafter) -> Drafter:
    alone = Drafter(replace(drafter.config, mask_token_id=None))
    rest = {k: v for k, v in drafter.state_dict().items() if k != "mask_hidden"}
    alone.load_state_dict(rest)
    return alone.requires_grad_(False).eval()


def _served_unmapped(drafter: Drafter) -> None:
    drafter.to_target_ids = lambda ids: ids  # type: ignore[method-assign]


def _served_norm(drafter: Drafter) -> None:
    drafter.norm.weight.fill_(1)


def _served_mask_state(drafter: Drafter) -> None:
    state = torch.randn(drafter.config.hidden_size, generator=torch.Generator().manual_seed(0))
    drafter.shared_hidden = lambda: state  # type: ignore[method-assign]


def _served_noise(drafter: Drafter) -> None:
    weight = drafter.layers[0].mlp.down_proj.weight  # type: ignore[union-attr]
    weight.add_(_noise(weight) * weight.std() * 2)


# By name: the causes (the doctor has to name one of them), and the change of a loaded head.
HEAD_CHANGES: dict[str, tuple[tuple[str, ...], Callable[[Drafter], Any]]] = {
    "aux layers": (("aux_layers",), _served_aux),
    "mask id": (("mask_token_id",), _reconfigure(mask_token_id=0)),
    "no fc": (("mask_hidden",), _served_no_fc),
    "mask_hidden 0": (("mask_hidden",), _served_zero),
    "one by one": (("parallel_drafting",), _served_one_by_one),
    "residual": (("residual",), _served_residual),
    "theta": (("rope",), _served_theta),
    "final norm": (("norms",), _served_norm),
    "d2t": (("draft_vocabulary",), _served_unmapped),
    # No known fault makes these drafts; where little of a draft is accepted, counters may not show
    # in which way mask_hidden is wrong.
    "any mask id": (("mask_slots",), _reconfigure(mask_token_id=77)),
    "mask state": (("mask_slots", "mask_hidden"), _served_mask_state),
    "layer noise": (("serving",), _served_noise),
}


def serve_shifted(patch: pytest.MonkeyPatch) -> None:
    """NTP slot p gets the token x[p]."""
    expand = proposers.expand_draft_batch

    def shifted(tokens_T: Tensor, *arguments: Any, **options: Any) -> Any:
        batch = expand(tokens_T, *arguments, **options)
        rows_S = batch.feature_rows_R
        own_S = tokens_T[rows_S.clamp_max(len(tokens_T) - 1)]
        is_mask_S = rows_S >= len(tokens_T)
        return replace(batch, tokens_R=torch.where(is_mask_S, batch.tokens_R, own_S))

    patch.setattr(proposers, "expand_draft_batch", shifted)


def serve_windowed(patch: pytest.MonkeyPatch, window: int) -> None:
    """Drafters look back so far only."""

    def attend(self: Any, prepared: Any) -> Any:
        def call(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            options = {"scaling": self.scaling, "sliding_window": window}
            return prepared(query, key, value, self.caches[layer], **options)

        return call

    patch.setattr(proposers.HeadProposer, "_attend", attend)
