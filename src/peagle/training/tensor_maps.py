"""Move whatever holds tensors: dataclasses and tuples of them, to any depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
# Metadata of a dataclass field whose tensor stays on the host.
ON_HOST = {"on_host": True}


def map_tensors(thing: T, function: Callable[[Tensor], Tensor]) -> T:
    """A copy of `thing` with the function applied to every tensor not marked `ON_HOST`."""
    value: Any = thing
    if isinstance(value, Tensor):
        value = function(value)
    elif isinstance(value, tuple):
        value = tuple(map_tensors(item, function) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in fields(value)
            if not field.metadata.get("on_host")
        }
        value = replace(value, **changed)
    return cast(T, value)


def moved(thing: T, device: torch.device) -> T:
    """Copy to a device; copies from pinned memory are asynchronous."""
    return map_tensors(thing, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(thing: T) -> T:
    """In page-locked memory, for asynchronous copies to a GPU."""
    return map_tensors(thing, lambda x: x if x.is_pinned() or x.is_cuda else x.pin_memory())


def owned_by(thing: T, stream: torch.cuda.Stream) -> T:
    """Keep the memory of `thing` until `stream` has done its work on it."""

    def record(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    return map_tensors(thing, record)
