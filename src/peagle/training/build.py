"""The head that a configuration asks for, before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from peagle.errors import UserError
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target import TargetModel, default_aux_layer_ids
from peagle.training.config import TrainConfig
from peagle.training.data import ResponseDataset
from peagle.training.vocabulary import always_kept, choose_draft_vocabulary

MASK_TOKEN = "<|mask|>"


def build_drafter(
    config: TrainConfig,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ResponseDataset,
) -> Drafter:
    """A fresh head: random layers, embeddings and lm_head from the target.

    Geometry that the configuration leaves out is the target's. The draft vocabulary is the most
    frequent tokens of the training responses and those that end a text
    (`training.vocabulary.vocabulary_report` says what it covers).

    Raises:
        UserError: the geometry does not work out.
    """
    head, model = config.head, target.model.config.get_text_config()
    heads = head.num_attention_heads or model.num_attention_heads
    size = head.hidden_size or model.hidden_size
    depth = config.method.depth
    drafter = Drafter(
        DrafterConfig(
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
            mask_token_id=_mask_token_id(config, target, tokenizer),
            norm_before_residual=head.norm_before_residual,
            norm_before_fc=head.norm_before_fc,
            fc_norm=head.fc_norm,
            rms_norm_eps=model.rms_norm_eps,
            max_position_embeddings=model.max_position_embeddings,
            rope_parameters=_rope_parameters(model),
            trained_depth=depth,
            qk_norm=head.qk_norm,
            norm_output=head.norm_output,
        )
    )
    if drafter.config.is_pruned:
        drafter.set_draft_vocabulary(_draft_vocabulary(drafter, config, target, tokenizer, dataset))
    _initialize(drafter, target, config.run.seed)
    drafter.embed_tokens.requires_grad_(not head.freeze_embeddings)
    return drafter.to(target.device)


def _rope_parameters(model: PretrainedConfig) -> dict[str, Any]:
    """RoPE of the target's global layers, over the whole of the head's own heads."""
    rope = model.rope_parameters
    rope = dict(rope.get("full_attention", rope))
    rope.pop("partial_rotary_factor", None)
    return rope


def _draft_vocabulary(
    drafter: Drafter,
    config: TrainConfig,
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ResponseDataset,
) -> Tensor:
    always = always_kept(
        target,
        tokenizer,
        special_tokens=config.head.keep_special_tokens,
        mask_token_id=drafter.config.mask_token_id,
    )
    counts = dataset.response_token_counts(target.vocab_size)
    return choose_draft_vocabulary(counts, drafter.config.draft_vocab_size, always)


def _mask_token_id(
    config: TrainConfig, target: TargetModel, tokenizer: PreTrainedTokenizerBase
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
def _initialize(drafter: Drafter, target: TargetModel, seed: int) -> None:
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
