"""Attention over the paged KV cache, behind one interface."""

import torch

from peagle.attention.base import (
    ALL_BEFORE,
    AttentionBackend,
    AttentionMetadata,
    LayerKVCache,
    Prepared,
    PreparedPaged,
    TreeMask,
)
from peagle.attention.passes import Passes
from peagle.attention.torch_backend import TorchAttention


def make_backend(device: torch.device) -> AttentionBackend:
    """Return the fastest attention backend of a device."""
    if device.type != "cuda":
        return TorchAttention()
    # Triton is imported where a GPU is.
    from peagle.attention.triton_backend import TritonAttention

    return TritonAttention()
