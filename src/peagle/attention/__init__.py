"""Attention over the paged KV cache, behind one interface."""

from peagle.attention.base import AttentionBackend, AttentionMetadata, LayerKVCache, Prepared
from peagle.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "AttentionMetadata", "LayerKVCache", "Prepared", "TorchAttention"]
