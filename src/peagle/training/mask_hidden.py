"""Where the shared state of mask slots begins in a head whose other weights are trained already.

Shapes: T positions, A aux states, H target width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.data.dataset import ResponseDataset
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

# Sequences whose features are averaged: some thousands of tokens, a moment of the target's time.
_NUM_SEQUENCES = 16


@torch.no_grad()
def start_mask_hidden(
    drafter: Drafter, dataset: ResponseDataset, features_of: Callable[[int], Tensor]
) -> None:
    """Let `mask_hidden` begin as the mean of the target's features over some responses.

    For a head whose other weights know features already: fc of the mean is the mean of what fc
    gives, so that a mask slot looks to the layers like an average place. A random vector does not,
    and zeros hide behind a norm before fc; both learn more slowly.

    Args:
        drafter: the head, its `mask_hidden` new.
        dataset: responses; the first of them are taken.
        features_of: features of a whole sequence of it, by number, [T, A * H].
    """
    assert drafter.mask_hidden is not None
    kept: list[Tensor] = []
    for index in range(min(_NUM_SEQUENCES, len(dataset))):
        features_TA = features_of(index)
        # The first positions of a text may hold huge values that no other has.
        kept.append(features_TA[int(dataset.prompt_lens[index]) :].double())
    drafter.mask_hidden.copy_(torch.cat(kept).mean(0))


def features_by(
    target: TargetModel, dataset: ResponseDataset, aux_layer_ids: tuple[int, ...]
) -> Callable[[int], Tensor]:
    """Features as `start_mask_hidden` wants them, from the target itself; its taps are not kept."""
    target.tap_aux(aux_layer_ids)

    def features_of(index: int) -> Tensor:
        begin, end = dataset.start_loc[index : index + 2].tolist()
        tokens_T = dataset.tokens[begin:end].long().to(target.device)
        positions_T = torch.arange(end - begin, device=target.device)
        return target.forward(tokens_T, positions_T, DenseCausalAttention(1))[1]

    return features_of
