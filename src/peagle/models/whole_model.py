"""Whole models told from draft heads by their config.json, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peagle.errors import UserError

# Keys that only heads have, in the style of vLLM or of speculators.
_HEAD_KEYS = (
    *("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    *("target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm"),
    *("mask_token_id", "pard_token", "ptd_token_id", "peagle"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config"),
)
_WHOLE = ("ForCausalLM", "ForConditionalGeneration")


def refuse_whole_model(data: Mapping[str, Any], source: str) -> None:
    """Refuse the config.json of a whole language model where that of a draft head is wanted.

    Args:
        data: the file.
        source: the file, or its folder, for the message.

    Raises:
        UserError: it names the architecture of a whole model, and has no key of a head.
    """
    named = data.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str) or not first.endswith(_WHOLE):
        return
    if "eagle" in first.lower() or any(data.get(key) is not None for key in _HEAD_KEYS):
        return
    name = source.removesuffix("/config.json")
    raise UserError(
        f"{name!r} is a whole model ({first}), not a draft head. A draft head is a small network "
        "that was trained to guess the next tokens of one target from its hidden states. Name a "
        "head of your target instead (peagle train makes one), or draft without a head (--method "
        "ngram). If this model is what you want to run, name it with --target."
    )
