"""Sizes and placement of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peagle.config.checks import is_int, is_number, require
from peagle.config.sampling import MAX_SEED

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and placement of one engine.

    Attributes:
        dtype: type of weights, activations and KV cache; "auto" is float32 on a CPU and
            bfloat16 on a GPU.
        device: "auto" takes the GPU where there is one.
        max_model_len: longest sequence (prompt and output) in tokens; None takes the model's.
        max_num_seqs: most sequences decoded together.
        max_num_batched_tokens: most prompt tokens of one step; longer prompts go in chunks, between
            which running sequences decode on.
        block_size: token slots of one KV block.
        num_kv_blocks: KV blocks of the cache; None derives it from max_num_seqs and memory.
        kv_cache_gib: memory bound of the KV cache in GiB; None is 2 on a CPU, and on a GPU what
            gpu_memory_utilization leaves, which bounds it in any case.
        gpu_memory_utilization: share of the GPU's memory that may be in use in all: by weights,
            KV cache, activations and graphs of this engine, and by whatever else is there.
        enable_prefix_caching: keep the KV of prompts and outputs for later requests that begin the
            same way, as long as nobody else needs the blocks.
        enforce_eager: launch every kernel by itself instead of a CUDA graph a step; a GPU only.
        seed: source of the seeds of requests that bring none.
    """

    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "float64", "bfloat16", "float16")
        require(self.dtype in dtypes, "dtype", self.dtype, "one of " + ", ".join(dtypes))
        ok = isinstance(self.device, str)
        require(ok, "device", self.device, '"auto", "cpu" or "cuda"')
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, name, value, "a whole number of at least 1")
        for name in ("max_model_len", "num_kv_blocks"):
            value = getattr(self, name)
            ok = value is None or (is_int(value) and value >= 1)
            require(ok, name, value, "a whole number of at least 1, or none")
        ok = self.kv_cache_gib is None or (is_number(self.kv_cache_gib) and self.kv_cache_gib > 0)
        require(ok, "kv_cache_gib", self.kv_cache_gib, "a number above 0, or none")
        share = self.gpu_memory_utilization
        ok = is_number(share) and 0 < share <= 1
        require(ok, "gpu_memory_utilization", share, "a number above 0, at most 1")
        for name in ("enable_prefix_caching", "enforce_eager"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "true or false")
        require(
            is_int(self.seed) and 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            "a whole number from 0 to 2**63 - 1",
        )
