"""The draft head of a speculative configuration, loaded and checked."""

import warnings
from functools import partial

import torch

from peagle.config import SpeculativeConfig
from peagle.disk import size_text
from peagle.engine.memory_plan import available_ram, device_name, free_and_total
from peagle.errors import UserError
from peagle.models.checkpoint import (
    ANY_DEPTH,
    load_correction,
    load_corrections,
    load_drafter,
    read_corrections,
    read_head,
)
from peagle.models.drafter import Drafter
from peagle.models.head_json import check_trees
from peagle.models.quantize import quantize_head
from peagle.models.target import TargetModel


def check_corrections(speculative: SpeculativeConfig | None) -> None:
    """Refuse corrections that do not fit the head; the target is not needed, which loads slowly.

    Raises:
        UserError: there is no such head.
        CheckpointError: a correction is not readable, or does not fit the head or the others.
    """
    if speculative is None or speculative.model is None:
        return
    head = read_head(speculative.model, num_target_layers=ANY_DEPTH).config
    named, with_own = dict(speculative.corrections), speculative.correction
    read_corrections(speculative.model, head, named, with_own=with_own)


def load_head(target: TargetModel, speculative: SpeculativeConfig | None) -> Drafter | None:
    """Return the draft head of a configuration, None if it has none.

    Raises:
        UserError: parallel_drafting contradicts the kind of head, the head cannot draft the trees,
            or its corrections do not fit the memory.
        CheckpointError: the head does not fit the target, or its correction does not fit the head.
    """
    if speculative is None or speculative.model is None:
        return None
    stored = read_head(speculative.model, num_target_layers=target.num_layers)
    head = stored.config
    parallel = speculative.parallel_drafting
    if parallel is not None and parallel != head.is_parallel:
        kind = "a P-EAGLE" if head.is_parallel else "an autoregressive EAGLE-3"
        raise UserError(
            f"parallel_drafting is {parallel}, but {speculative.model!r} is {kind} head. "
            f"Set it to {head.is_parallel} or leave it out."
        )
    depth = head.trained_depth
    if (trees := speculative.trees) is not None:
        first, k = speculative.drawn_chains_from, speculative.num_speculative_tokens
        check_trees(trees, speculative.model, head.is_parallel, depth, first, k)
    if depth is not None and speculative.k > depth:
        warnings.warn(
            f"num_speculative_tokens is {speculative.k}, but the head "
            f"{speculative.model!r} was trained for {depth}; deeper drafts seldom pass.",
            stacklevel=5,
        )
    unpack = target.device.type != "cuda"
    # A compact head is unpacked, so that it drafts like the whole one, bit for bit.
    is_whole = unpack or stored.is_compact or speculative.quantization is not None
    drafter = load_drafter(
        speculative.model, target, check_target=speculative.check_target, unpack=is_whole
    )
    if speculative.corrections:
        drafter.correction = load_corrections(
            speculative.model,
            drafter,
            dict(speculative.corrections),
            with_own=speculative.correction,
            check_bytes=partial(_check_bytes, target.device, len(speculative.corrections)),
        )
    elif speculative.correction:
        drafter.correction = load_correction(speculative.model, drafter)
    if speculative.quantization is not None:
        quantize_head(drafter, speculative.quantization, unpack=unpack)
    window = speculative.draft_window
    if window is None and not head.windows:
        window = stored.trained_length
    if window is not None:
        # Each layer attends to the window alone, and drafts do without the tokens before it.
        drafter.windows, drafter.reach = (window or None,) * head.num_layers, window or None
    return drafter


def _check_bytes(device: torch.device, count: int, num_bytes: int) -> None:
    """Refuse so many corrections whose tables take more memory than is free."""
    card = free_and_total(device)
    free = available_ram() if card is None else card[0]
    if num_bytes > free:
        raise UserError(
            f"The head's own correction and {count} more take {size_text(num_bytes)}; "
            f"{device_name(device)} has {size_text(free)} free. Name fewer (--correction)."
        )
