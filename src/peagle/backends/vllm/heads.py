"""What a launch needs to know of its head, read from the head's files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.backends.vllm.command import VllmLaunch
from peagle.bundled import expand_bundled
from peagle.config import SpeculativeConfig
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import read_file_header

if TYPE_CHECKING:
    from peagle.models.drafter_config import DrafterConfig

# Only asked for heads that leave their aux layers to the runtime; the kind does not depend on it.
_ANY_DEPTH = 32


def with_head(launch: VllmLaunch) -> VllmLaunch:
    """The launch with the folder of its head, and whether that head drafts in parallel.

    vLLM is given a hub id as it is: on several nodes each fetches it for itself.

    Raises:
        UserError: the head is not there, or is asked for what it was not trained for.
    """
    launch = replace(launch, **_hub_id(launch.target, launch.revision, "target"))
    config = launch.speculative
    if config is None or config.model is None or launch.is_parallel is not None:
        return replace(launch, is_parallel=bool(launch.is_parallel))
    from peagle.models.loading import with_local_head

    local = with_local_head(config)
    folder = local.model
    assert folder is not None
    head, _ = read_head(folder)
    _check_kind(config, head, folder)
    model = expand_bundled(config.model, "draft")
    config = replace(
        config,
        num_speculative_tokens=local.num_speculative_tokens,
        **_hub_id(model, config.revision, "model"),
    )
    return replace(launch, speculative=config, is_parallel=head.is_parallel, head_folder=folder)


def _hub_id(name: str, revision: str | None, key: str) -> dict[str, str | None]:
    """Name and revision apart, which vLLM wants; a folder is left alone."""
    if not os.path.exists(os.path.expanduser(name)) and "@" in name:
        name, _, revision = name.partition("@")
    return {key: os.path.expanduser(name), "revision": revision}


def read_head(folder: str) -> tuple[DrafterConfig, dict[str, Any]]:
    """Shape and facts of a head.

    Raises:
        CheckpointError: it is none.
    """
    from peagle.models.checkpoint import read_head_config

    return read_head_config(folder, num_target_layers=_ANY_DEPTH)


def _check_kind(config: SpeculativeConfig, head: DrafterConfig, folder: str) -> None:
    """Refuse a kind of drafting that the head was not trained for."""
    asked = config.parallel_drafting
    if asked is not None and asked != head.is_parallel:
        kind = "a P-EAGLE head, trained" if head.is_parallel else "an EAGLE-3 head, not trained"
        raise UserError(
            f"parallel_drafting is {asked} and the head {config.model!r} is {kind} for parallel "
            "drafting; vLLM would draft nonsense with it. Leave parallel_drafting out: it is read "
            "from the head."
        )
    if head.is_parallel and not _has_mask_hidden(folder):
        raise CheckpointError(
            f"The head {config.model!r} names a mask token but has no tensor mask_hidden, without "
            "which vLLM does not draft in parallel. Export it again from its training run "
            "(peagle doctor looks at the rest)."
        )


def _has_mask_hidden(folder: str) -> bool:
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            names = read_file_header(file)
        except ValueError as error:
            raise CheckpointError(f"{str(file)!r} is cut or damaged: {error}.") from None
        if any(name.endswith("mask_hidden") for name in names):
            return True
    return False
