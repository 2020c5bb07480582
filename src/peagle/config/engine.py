"""Sizes and placement of one engine."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from peagle.config.checks import (
    BOOLEAN,
    FieldCheck,
    check_fields,
    choice_of,
    is_number,
    number_check,
    whole,
)
from peagle.config.sampling import MAX_SEED
from peagle.config.speculative import Quantization

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8"]
Fp8Activations = Literal["auto", "off"]
# The fields that say how a target is loaded, as an engine on a loaded target leaves them.
TARGET_DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "device": "auto",
    "quantization": None,
    "fp8_activations": "off",
    "kv_cache_dtype": "auto",
}


_CHECKS = {
    "dtype": choice_of(*get_args(DType)),
    "quantization": choice_of(None, *get_args(Quantization)),
    "fp8_activations": choice_of(*get_args(Fp8Activations)),
    "kv_cache_dtype": choice_of(*get_args(KVCacheDType)),
    "device": FieldCheck(lambda name: isinstance(name, str), '"auto", "cpu" or "cuda"'),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size"), whole(1)),
    **dict.fromkeys(("max_model_len", "num_kv_blocks"), whole(1, optional=True)),
    "kv_cache_gib": FieldCheck(
        lambda gib: gib is None or (is_number(gib) and gib > 0), "a number above 0, or none"
    ),
    **dict.fromkeys(
        ("max_itl_ms", "max_hold_ms"), number_check(lambda ms: ms >= 0, "a number of at least 0")
    ),
    "gpu_memory_utilization": number_check(lambda s: 0 < s <= 1, "a number above 0, at most 1"),
    "enable_prefix_caching": BOOLEAN,
    "enforce_eager": BOOLEAN,
    "seed": whole(0, MAX_SEED),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and placement of one engine.

    Attributes:
        dtype: type of weights and activations; "auto" is float32 on a CPU and bfloat16 on a GPU.
        quantization: type that the weights of the target's layers get when they are loaded; None
            takes them as they are stored.
        device: "auto" takes the GPU where there is one.
        max_model_len: longest sequence (prompt and output) in tokens; None takes the model's.
        max_num_seqs: most sequences decoded together.
        max_num_batched_tokens: most prompt tokens of one step; longer prompts go in chunks, between
            which running sequences decode on.
        max_itl_ms: time in milliseconds that sequences which decode should wait at most for their
            next tokens while prompts run; chunks of prompts are as long as this allows. With 0 they
            have max_num_batched_tokens.
        max_hold_ms: longest time in milliseconds that a short prompt waits on a GPU although it
            could begin, so that one step begins several (`engine.gathering`). 0: none waits.
        block_size: token slots of one KV block.
        num_kv_blocks: KV blocks of the cache; None derives it from max_num_seqs and memory.
        kv_cache_dtype: type of the KV cache of the target's layers; "auto" is the type of the
            activations, "fp8" is e4m3 with the scales that the checkpoint has, else 1. The head's
            KV cache has the type of its activations.
        fp8_activations: "auto" lets the linear layers and experts of an FP8 checkpoint that was
            made for it multiply FP8 activations, see `models.fp8_layers`, with the weights of such
            linear layers in memory twice; "off" leaves all activations as they are.
        kv_cache_gib: memory bound of the KV cache in GiB; None is 2 on a CPU, and on a GPU what
            gpu_memory_utilization leaves, which bounds it in any case.
        gpu_memory_utilization: share of the GPU's memory that may be in use in all: by weights,
            KV cache, activations and graphs of this engine, and by whatever else is there.
        enable_prefix_caching: keep the KV of prompts and outputs for later requests that begin the
            same way, until other requests need the blocks.
        enforce_eager: launch every kernel by itself instead of a CUDA graph a step; a GPU only.
        seed: source of the seeds of requests that bring none.
    """

    dtype: DType = "auto"
    quantization: Quantization | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    max_itl_ms: float = 0.0
    max_hold_ms: float = 15.0
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    fp8_activations: Fp8Activations = "off"
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)
