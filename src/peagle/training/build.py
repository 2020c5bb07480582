"""The head that a configuration asks for, before its first step."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.checkpoint import (
    CORRECTION_NAME,
    find_correction,
    load_drafter,
    read_correction,
)
from peagle.models.checkpoint.packed import layer_types
from peagle.models.checkpoint.weights import tensor_shapes
from peagle.models.correction import Correction
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target import TargetModel, default_aux_layer_ids
from peagle.models.target_facts import TargetFacts, TargetSizes
from peagle.training.config import TrainConfig
from peagle.training.vocabulary import always_kept, choose_draft_vocabulary
from peagle.training.warm_start import InitHead, WarmStart, features_by, start_mask_hidden

MASK_TOKEN = "<|mask|>"

_LEFT_OUT = (
    f"the head's correction, {CORRECTION_NAME}, is left out, since it fits that head alone; set "
    'correction.train = "together" to go on with both, or fit a new one with --correction-on'
)


@dataclass(frozen=True, slots=True)
class Built:
    """A head before its first step.

    Attributes:
        drafter: the head.
        warm_start: the start from another head; None: from random weights.
        correction: trained with the head, or in its place; None: the head itself is trained.
        is_frozen: the head stays as it is.
    """

    drafter: Drafter
    warm_start: WarmStart | None
    correction: Correction | None = None
    is_frozen: bool = False

    @property
    def trained(self) -> nn.Module:
        """Return what is trained, whose weights keep their names in the head."""
        if self.correction is None:
            return self.drafter
        if self.is_frozen:
            return self.correction
        return HeadWithCorrection(self.drafter, self.correction)


class HeadWithCorrection(nn.Module):
    """A head's own modules, under the names that they have there, and its correction."""

    def __init__(self, drafter: Drafter, correction: Correction) -> None:
        super().__init__()
        self._modules |= drafter._modules
        self._parameters |= drafter._parameters
        self._buffers |= drafter._buffers
        self.correction = correction


def build_drafter(
    config: TrainConfig,
    target: TargetFacts,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ResponseDataset,
) -> Built:
    """Return a head to train: fresh, or started from the head that `head.init` names.

    With `correction.on` it is the head named there, frozen, with a fresh correction. With
    `correction.train` = "together" a head to train has a correction too: that of the head to start
    from, or a fresh one.

    Fresh means random layers, embeddings and lm_head from the target. Geometry that the
    configuration leaves out is the target's. The draft vocabulary is the most frequent tokens of
    the training responses and the tokens that end a text (`training.vocabulary.vocabulary_report`
    tells its coverage).

    A new `mask_hidden` of a warm start needs features (`warm_start.start_mask_hidden`). Where the
    target has no layers here to make them, it is random, and the caller starts it from stored ones.

    Raises:
        UserError: the geometry does not work out, or the head to start from or to correct is not
            usable.
    """
    if config.correction.on is not None:
        return _corrected(config.correction.on, config, target)
    built = _built(config, target, tokenizer, dataset)
    if config.correction.is_trained and built.correction is None:
        built = replace(built, correction=_fresh_correction(built.drafter, config))
    return built


def _built(
    config: TrainConfig,
    target: TargetFacts,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ResponseDataset,
) -> Built:
    """Return a head to train, with the correction of the head to start from, if both have one."""
    mask_token_id = _mask_token_id(config, target, tokenizer)
    if config.head.init is not None:
        return _warm(config.head.init, config, target, tokenizer, dataset, mask_token_id)
    drafter = Drafter(_fresh_shape(config, target, mask_token_id))
    if drafter.config.is_pruned:
        always = _always_kept(config, target, tokenizer, mask_token_id)
        counts = dataset.response_token_counts(target.vocab_size)
        size = drafter.config.draft_vocab_size
        drafter.set_draft_vocabulary(choose_draft_vocabulary(counts, size, always))
    _initialize(drafter, target, config.run.seed)
    return Built(_ready(drafter, config, target), None)


def planned_shape(
    config: TrainConfig, target: TargetSizes, tokenizer: PreTrainedTokenizerBase
) -> DrafterConfig:
    """Return the shape of the head of `build_drafter`; weights of target and head stay unread.

    Raises:
        UserError: as `build`, where shapes alone show the mistake.
    """
    mask_token_id = _mask_token_id(config, target, tokenizer)
    if config.head.init is None:
        shape = _fresh_shape(config, target, mask_token_id)
    else:
        init = InitHead.shape_of(config.head.init, target)
        shape = init.shape(config.head, config.method.depth, mask_token_id)
    if (quantization := config.head.layer_quantization) is not None:
        layer_types(tensor_shapes(shape), quantization)
    return shape


def _corrected(folder: Path, config: TrainConfig, target: TargetFacts) -> Built:
    """Return the head in `folder`, frozen, with its correction or one whose term is 0."""
    drafter = load_drafter(folder, target, dtype=torch.promote_types(target.dtype, torch.float32))
    if not drafter.config.is_parallel:
        raise UserError(
            f"correction.on is {str(folder)!r}, an EAGLE-3 head, whose drafts see each other; "
            "expected a P-EAGLE head."
        )
    _reserve(drafter, config)
    correction = None
    if config.correction.start == "present":
        correction = _present_correction(folder, drafter, config, "the head")
    return Built(drafter, None, correction or _fresh_correction(drafter, config), is_frozen=True)


def build_correction(hidden_size: int, config: TrainConfig) -> Correction:
    """Return an empty correction of the sizes that a run asks for."""
    own, num_slots = config.correction, config.method.depth - 1
    return Correction(hidden_size, rank=own.rank, width=own.width, num_slots=num_slots)


def _fresh_correction(drafter: Drafter, config: TrainConfig) -> Correction:
    """Return a correction whose term is 0, on the device and in the type of its head."""
    correction = build_correction(drafter.config.hidden_size, config)
    correction.reset(config.run.seed)
    return correction.to(drafter.fc.weight.device, drafter.fc.weight.dtype)


def _warm(
    folder: Path,
    config: TrainConfig,
    target: TargetFacts,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ResponseDataset,
    mask_token_id: int | None,
) -> Built:
    """Return a head that takes over all it can of the head in `folder`; the rest is fresh."""
    config.check_init()
    init = InitHead.read(folder, target)
    drafter = Drafter(init.shape(config.head, config.method.depth, mask_token_id))
    if (draft_ids := init.draft_ids()) is not None:
        drafter.set_draft_vocabulary(draft_ids)
    _initialize(drafter, target, config.run.seed)
    init.put_into(drafter)
    always = _always_kept(config, target, tokenizer, drafter.config.mask_token_id)
    record = init.record(drafter, dataset, always)
    leaves_correction = not config.correction.is_trained and drafter.config.is_parallel
    if leaves_correction and find_correction(init.folder):
        record = replace(record, warnings=(*record.warnings, _LEFT_OUT))
    if record.mask_hidden_is_new and isinstance(target, TargetModel):
        features_of = features_by(target, dataset, drafter.config.aux_layer_ids)
        start_mask_hidden(drafter, dataset, features_of)
    return Built(_ready(drafter, config, target), record, _warm_correction(init, config, drafter))


def _warm_correction(init: InitHead, config: TrainConfig, drafter: Drafter) -> Correction | None:
    """Return the correction of the head to start from; None: it has none, or none is trained."""
    if not config.correction.is_trained or not init.config.is_parallel:
        return None
    return _present_correction(init.folder, drafter, config, "head.init", init.config)


def _present_correction(
    folder: Path,
    drafter: Drafter,
    config: TrainConfig,
    where: str,
    stored_config: DrafterConfig | None = None,
) -> Correction | None:
    """Return the correction beside the head in `folder`, to go on with; None: there is none."""
    stored = read_correction(folder, stored_config or drafter.config)
    if stored is None:
        return None
    fresh = build_correction(drafter.config.hidden_size, config)
    for name in ("rank", "width"):
        asked, found = getattr(fresh, name), getattr(stored, name)
        if asked != found:
            raise UserError(
                f"correction.{name} is {asked!r}, and the correction of {where}, "
                f"{str(folder / CORRECTION_NAME)!r}, has {found!r}. Set correction.{name} to "
                f"{found!r} to go on with it, or move that file away for a new one."
            )
    taken = stored.state_dict()
    # Slots that the stored one does not know take its last p, as in drafting.
    taken["slots"] = stored.of_slots(torch.arange(1, config.method.depth))
    fresh.load_state_dict(taken)
    return fresh.to(drafter.fc.weight.device, drafter.fc.weight.dtype)


def _ready(drafter: Drafter, config: TrainConfig, target: TargetFacts) -> Drafter:
    """Move the head to the device and give it angles for the longest row."""
    _reserve(drafter, config)
    for name in config.head.frozen:
        drafter.get_parameter(name).requires_grad_(False)
    return drafter.to(target.device)


def _reserve(drafter: Drafter, config: TrainConfig) -> None:
    data = config.data
    drafter.reserve_positions(max(data.max_length, data.batch_tokens) + config.method.depth)


def _fresh_shape(
    config: TrainConfig, target: TargetSizes, mask_token_id: int | None
) -> DrafterConfig:
    head, model = config.head, target.text_config
    heads = head.num_attention_heads or model.num_attention_heads
    size = head.hidden_size or model.hidden_size
    if head.freeze_lm_head and size != target.hidden_size:
        raise UserError(
            f"head.freeze_lm_head is true and head.hidden_size is {size}; expected the target's "
            f"width, {target.hidden_size}: rows of another width cannot be the target's. Leave one "
            "of them out."
        )
    return DrafterConfig(
        hidden_size=size,
        intermediate_size=head.intermediate_size or model.intermediate_size,
        num_layers=head.num_layers,
        num_attention_heads=heads,
        num_kv_heads=head.num_kv_heads or min(model.num_key_value_heads, heads),
        head_dim=head.head_dim or getattr(model, "head_dim", None) or size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=head.draft_vocab_size or target.vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=head.aux_layer_ids or default_aux_layer_ids(target.num_layers),
        mask_token_id=mask_token_id,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=_rope_parameters(model),
        trained_depth=config.method.depth,
        qk_norm=head.qk_norm,
        norm_output=head.norm_output,
    )


def _rope_parameters(model: PretrainedConfig) -> dict[str, Any]:
    """Return the RoPE of the target's global layers, over the whole of the head's own heads."""
    rope = model.rope_parameters
    rope = dict(rope.get("full_attention", rope))
    rope.pop("partial_rotary_factor", None)
    return rope


def _always_kept(
    config: TrainConfig,
    target: TargetFacts,
    tokenizer: PreTrainedTokenizerBase,
    mask_token_id: int | None,
) -> set[int]:
    return always_kept(
        target,
        tokenizer,
        special_tokens=config.head.keep_special_tokens,
        mask_token_id=mask_token_id,
    )


def _mask_token_id(
    config: TrainConfig, target: TargetSizes, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    if config.method.name == "eagle3":
        return None
    wanted = config.head.mask_token_id
    if wanted is not None:
        if wanted >= target.vocab_size:
            raise UserError(
                f"head.mask_token_id is {wanted}; expected an id of the vocabulary, 0 to "
                f"{target.vocab_size - 1}, that the tokenizer does not otherwise use."
            )
        return wanted
    known = tokenizer.get_vocab().get(MASK_TOKEN)
    return known if known is not None else target.vocab_size - 1


@torch.no_grad()
def _initialize(drafter: Drafter, target: TargetFacts, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
    # Residual branches start small, so that a fresh head passes its feature through.
    for layer in drafter.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
            projection.weight.mul_((2 * len(drafter.layers)) ** -0.5)  # type: ignore[union-attr]
    if drafter.mask_hidden is not None:
        drafter.mask_hidden.normal_(0, 1.0, generator=generator)

    if drafter.config.hidden_size == target.hidden_size:
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
        rows = target.lm_head_weight().cpu()[drafter.target_ids()]
        drafter.lm_head.weight.copy_(rows)
    else:
        drafter.embed_tokens.weight.normal_(0, 0.02, generator=generator)
