"""Weights in float32 of a head that computes in bfloat16.

A step of 1e-4 of a weight is lost in bfloat16's eight bits, so optimizers move a float32 copy (the
master weights of Micikevicius et al., 2018) and the head is rounded from it after each step.
Gradients are summed in float32 as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from peagle.models.drafter import Drafter


class Masters:
    """What the optimizers move: float32 copies of the head's weights, or these themselves.

    Args:
        drafter: the head, with its first weights in float32 or wider.
        dtype: in which the head computes; where it is that of its weights nothing is copied.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        self.drafter = drafter
        own = dict(drafter.named_parameters())
        self._copies: dict[str, nn.Parameter] = {}
        if dtype != drafter.fc.weight.dtype:
            for name, parameter in own.items():
                if parameter.requires_grad:
                    self._copies[name] = nn.Parameter(parameter.detach().clone())
            drafter.to(dtype)
            for name, master in self._copies.items():
                own[name].grad_dtype = master.dtype
        self._own = own

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and what optimizers may move."""
        for name, parameter in self._own.items():
            if parameter.requires_grad:
                yield name, self._copies.get(name, parameter)

    def state(self) -> dict[str, Tensor]:
        """All weights and maps of the head, trained ones as precise as there are; no copies.

        Whoever writes to them calls `publish`.
        """
        return {**self.drafter.state_dict(), **{n: p.detach() for n, p in self._copies.items()}}

    def collect(self) -> list[Tensor]:
        """Hand the head's gradients to the masters; returns those there are."""
        for name, master in self._copies.items():
            gradient, self._own[name].grad = self._own[name].grad, None
            master.grad = None if gradient is None else gradient.to(master.dtype)
        return [parameter for _, parameter in self.named() if parameter.grad is not None]

    def clip(self, moved: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`; returns the one that they had."""
        return torch.nn.utils.clip_grad_norm_(moved, max_norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the head from the masters; call it after each optimizer step."""
        if self._copies:
            heads: list[Tensor] = [self._own[name] for name in self._copies]
            torch._foreach_copy_(heads, list(self._copies.values()))
        for _, parameter in self.named():
            parameter.grad = None
