"""The K that a head was trained for, and the K that is drafted where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.config import DEFAULT_DEPTH, SpeculativeConfig
from peagle.errors import CheckpointError
from peagle.model_folder import read_json

DEPTH_KEY = "num_speculative_tokens_trained"  # of the "peagle" object of config.json


def default_depth(trained: int | None) -> int:
    """Return K where none is given: the trained depth, at most 7; 7 where it is not known."""
    return min(trained or DEFAULT_DEPTH, DEFAULT_DEPTH)


def trained_depth(data: Mapping[str, Any]) -> Any:
    """Return the K that a config.json says its head was trained for; None where it does not say.

    Our own key comes first. Without the "peagle" object, the tokens that a file in the style of
    speculators proposes to draft are as many as that package trained.

    Args:
        data: the file, in either style. The value is returned as it stands there, unchecked.

    Raises:
        CheckpointError: the proposal methods are not a list of objects.
    """
    if own := data.get("peagle"):
        return own.get(DEPTH_KEY)
    proposal = data.get("speculators_config")
    if not proposal:
        return data.get("speculative_tokens")
    methods = (proposal.get("proposal_methods") if isinstance(proposal, Mapping) else None) or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise CheckpointError(
            f"speculators_config.proposal_methods is {methods!r}; expected a list of objects."
        )
    return methods[0].get("speculative_tokens")


def with_depth(config: SpeculativeConfig, folder: str | Path) -> SpeculativeConfig:
    """Return the configuration with K filled in from the head in `folder` where none was given.

    A schedule of K, or synthetic rates, give K themselves. A file that cannot be read changes
    nothing: whatever loads the head says what is wrong with it.
    """
    schedule, rates = (
        config.num_speculative_tokens_per_batch_size,
        config.synthetic_acceptance_rates,
    )
    if config.model is None or (config.num_speculative_tokens, schedule, rates) != (None,) * 3:
        return config
    try:
        depth = trained_depth(read_json(Path(folder) / "config.json"))
    except (OSError, ValueError, AttributeError, CheckpointError):
        depth = None
    is_depth = type(depth) is int and depth >= 1
    return replace(config, num_speculative_tokens=default_depth(depth if is_depth else None))
