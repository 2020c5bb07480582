"""Ends of a head that are its target's: embed_tokens, and lm_head as rows of the target's.

A head that was trained with both frozen does not store them. The key "from_target" of the "peagle"
object in config.json names them, and whatever loads the head takes the rows from the target. Other
runtimes do not know the key: `checkpoint.convert` writes them a head with everything.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target_facts import TargetFacts

FROM_TARGET_KEY = "from_target"
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
ENDS = (EMBEDDING, LM_HEAD)


def ends_from_target(facts: Mapping[str, Any], config: DrafterConfig) -> tuple[str, ...]:
    """Return the tensors that a head takes from its target, as its "peagle" object names them.

    Raises:
        CheckpointError: the object names others, or the head is not as wide as its target.
    """
    names = facts.get(FROM_TARGET_KEY, [])
    if not isinstance(names, list) or not all(name in ENDS for name in names):
        raise CheckpointError(
            f"peagle.{FROM_TARGET_KEY} is {names!r}; expected a list of {' and '.join(ENDS)}."
        )
    if names and config.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"peagle.{FROM_TARGET_KEY} names {names[0]!r}, and the head is {config.hidden_size} "
            f"wide and its target {config.target_hidden_size}; expected one width, since rows of "
            "another one are not the target's."
        )
    return tuple(names)


def end_rows(name: str, target: TargetFacts, draft_ids: Tensor | None) -> Tensor:
    """Return the target's rows for an end of a head.

    Args:
        name: one of `ENDS`.
        target: the head's target.
        draft_ids: target id of every draft id, [DV]; None where the vocabularies are equal.

    Returns:
        [V, H] for the embedding, [DV, H] for lm_head.
    """
    if name == EMBEDDING:
        return target.embedding_weight()
    weight_VH = target.lm_head_weight()
    return weight_VH if draft_ids is None else weight_VH[draft_ids.to(weight_VH.device)]


@torch.no_grad()
def has_target_ends(drafter: Drafter, target: TargetFacts) -> bool:
    """Return whether both ends of a head are the target's rows, bit for bit in the head's type."""
    config = drafter.config
    if config.hidden_size != target.hidden_size:
        return False
    draft_ids = drafter.target_ids() if config.is_pruned else None
    for name in ENDS:
        own, rows = drafter.get_parameter(name), end_rows(name, target, draft_ids)
        if not torch.equal(own, rows.to(own)):
            return False
    return True
