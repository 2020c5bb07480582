"""GPU memory that a model and its head take, from sizes and shapes alone; nothing is loaded."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from peagle.errors import CheckpointError
from peagle.model_folder import read_file_header
from peagle.model_shape import ModelShape

GIB = 2**30
# An estimate of the memory for activations, CUDA graphs and the buffers of a step.
RESERVE_BYTES = 2 * GIB
# Prompt tokens that vLLM computes in one step; sliding windows keep all of them until it ends.
IN_FLIGHT_TOKENS = 8192
# Names of `quantization_config.quant_method` and of `dtype` in config.json, as precisions.
_PRECISIONS = {
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"},
    **{"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"},
    **{"awq": "int4", "gptq": "int4", "bitsandbytes": "int4"},
}
# Plain weights are loaded in two bytes; words of packed weights (I32) and bytes stay.
_LOAD_RATIOS = {"F64": 4, "F32": 2}
_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep keys and values of one shape; catalogs list them.

    A token takes 2 · kv_heads · head_dim values of each of the `layers`. A sliding window makes a
    layer keep the last `window` tokens only.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    layers: _Positive
    kv_heads: _Positive
    head_dim: _Positive
    window: _Positive | None = None

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values, in a type of two bytes."""
        return 2 * self.num_values(1, 1, 0)

    def num_values(self, num_tokens: int, num_sequences: int, in_flight: int) -> int:
        """Return how many values `num_sequences` sequences of `num_tokens` tokens each keep."""
        slots = num_sequences * num_tokens
        if self.window is not None:
            slots = min(slots, num_sequences * min(num_tokens, self.window) + in_flight)
        return 2 * self.layers * self.kv_heads * self.head_dim * slots


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that decide its memory.

    Attributes:
        weights_bytes: bytes of the loaded weights. Packed weights and their scales stay as they
            are stored; plain float32 weights become a type of two bytes.
        precision: type of the weights, "bf16", "fp8", "mxfp4"; "" if unknown.
        kv_layers: layers with a KV cache.
        max_model_len: the longest context; None if unknown.
    """

    weights_bytes: int
    precision: str
    kv_layers: tuple[KvLayers, ...] = ()
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeeded:
    """GPU memory of a deployment, in bytes.

    Attributes:
        target_bytes, draft_bytes: weights.
        kv_parts: for each kind of layer the bytes of its KV cache, and its number of KV heads.
        max_model_len, num_sequences: length and number of the sequences in the KV cache.
        precision: type in which the target runs.
        max_gpus: GPUs that one copy of the model may be split over; None for any number.
    """

    target_bytes: int
    draft_bytes: int
    kv_parts: tuple[tuple[int, int], ...]
    max_model_len: int
    num_sequences: int
    precision: str
    max_gpus: int | None = None

    def kv_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Return the bytes of one GPU's KV cache; KV heads are never split, but repeated."""
        return sum(
            size * math.ceil(heads / tensor_parallel_size) // heads for size, heads in self.kv_parts
        )

    def per_gpu(self, tensor_parallel_size: int = 1) -> int:
        """Return the memory that each GPU must have free, reserve included."""
        weights = math.ceil((self.target_bytes + self.draft_bytes) / tensor_parallel_size)
        return weights + self.kv_bytes(tensor_parallel_size) + RESERVE_BYTES

    def describe(self, tensor_parallel_size: int = 1) -> str:
        """Return the parts of `per_gpu`, for people."""
        head = f", head {gib(self.draft_bytes)}" if self.draft_bytes else ""
        split = f", over {tensor_parallel_size} GPUs" if tensor_parallel_size > 1 else ""
        kv_cache = gib(self.kv_bytes(tensor_parallel_size))
        return (
            f"weights {gib(self.target_bytes)}{head}{split}, KV cache {kv_cache} for "
            f"{self.num_sequences} sequence{'s' * (self.num_sequences > 1)} of "
            f"{self.max_model_len} tokens, reserve {gib(RESERVE_BYTES)}"
        )


def gib(size: int) -> str:
    """Return a size for people: "60.8 GiB"."""
    return f"{size / GIB:.1f} GiB"


def memory_needed(
    target: ModelFacts,
    draft: ModelFacts | None = None,
    *,
    max_model_len: int | None = None,
    num_sequences: int = 1,
    kv_value_bytes: int = 2,
    in_flight_tokens: int = IN_FLIGHT_TOKENS,
    native: bool = False,
) -> MemoryNeeded:
    """Return the least memory that serves the target, with its head.

    On each of T GPUs, with weights W, KV caches and the reserve R:

        (W_target + W_draft) / T + KV · ceil(heads / T) / heads + R
        KV = num_sequences · max_model_len · 2 · layers · heads · head_dim · kv_value_bytes

    A layer with a sliding window keeps num_sequences · window + in_flight_tokens tokens, if that is
    less. Drafts, the nodes of candidate trees too, lie within max_model_len: no KV slot is beyond.

    Args:
        target, draft: the facts about both models.
        max_model_len: tokens of a prompt and its output; None takes the target's longest context.
        num_sequences: sequences of full length that must fit; the others wait.
        kv_value_bytes: 2, or 1 for an 8-bit KV cache.
        in_flight_tokens: most prompt tokens of a step.
        native: our own engine runs a copy on one GPU, computes in bfloat16 and keeps the tokens
            outside of sliding windows too.
    """
    length = max_model_len or target.max_model_len or IN_FLIGHT_TOKENS
    layers = [*target.kv_layers, *(draft.kv_layers if draft else ())]
    if native:
        layers = [replace(kind, window=None) for kind in layers]
    return MemoryNeeded(
        target_bytes=target.weights_bytes,
        draft_bytes=draft.weights_bytes if draft else 0,
        kv_parts=tuple(
            (kind.num_values(length, num_sequences, in_flight_tokens) * kv_value_bytes, heads)
            for kind in layers
            if (heads := kind.kv_heads)
        ),
        max_model_len=length,
        num_sequences=num_sequences,
        precision="bf16" if native else target.precision,
        max_gpus=1 if native else None,
    )


def memory_for_flags(
    target: ModelFacts, draft: ModelFacts | None, flags: Mapping[str, str], *, native: bool = False
) -> MemoryNeeded:
    """Return `memory_needed` with options of vLLM, by name without dashes."""
    if flags.get("dtype") in ("half", "float16") and target.precision in ("bf16", "fp32"):
        target = replace(target, precision="fp16")
    return memory_needed(
        target,
        draft,
        max_model_len=token_count(flags.get("max-model-len", "")),
        in_flight_tokens=token_count(flags.get("max-num-batched-tokens", "")) or IN_FLIGHT_TOKENS,
        kv_value_bytes=1 if flags.get("kv-cache-dtype", "").startswith("fp8") else 2,
        native=native,
    )


def token_count(text: str) -> int | None:
    """Return the number of tokens that vLLM reads in 32768, 32k or 32K; None for other text."""
    scale = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    return int(digits) * scale or None if digits.isdecimal() else None


# ---- facts from files ----


def facts_of_folder(folder: Path) -> ModelFacts:
    """Return the facts about a model or head in a folder: its config.json and headers of weights.

    Raises:
        CheckpointError: no readable config.json, or a file that is not safetensors.
    """
    from peagle.models.checkpoint.files import read_object  # imports torch

    try:
        config = read_object(folder / "config.json")
    except OSError as error:
        raise CheckpointError(
            f"{str(folder / 'config.json')!r} is not readable: {error.strerror}. Expected a folder "
            "in Hugging Face format, with config.json."
        ) from None
    return model_facts(config, _tensors(folder))


def model_facts(config: Mapping[str, Any], tensors: Iterable[tuple[str, str, int]]) -> ModelFacts:
    """Return facts from a config.json's content and the tensors' name, safetensors type, bytes."""
    shape = ModelShape.from_json(config)
    weights = 0
    for name, dtype, size in tensors:
        is_scale = "_scale" in name  # a packed weight's; they keep their type
        weights += size if is_scale else size // _LOAD_RATIOS.get(dtype, 1)
    return ModelFacts(
        weights_bytes=weights,
        precision=_precision(config, shape.text),
        kv_layers=_kv_layers(shape),
        max_model_len=shape.max_model_len,
    )


def _tensors(folder: Path) -> Iterator[tuple[str, str, int]]:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            for name, entry in read_file_header(file).items():
                begin, end = entry["data_offsets"]
                yield name, entry["dtype"], end - begin
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{str(file)!r} is no safetensors file, or a cut one. Copy or fetch it again."
            ) from None


def _precision(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        return _PRECISIONS.get(str(quantization.get("quant_method")), "")
    named = [c.get(key) for c in (config, shapes) for key in ("dtype", "torch_dtype")]
    return next((_PRECISIONS.get(str(name), "") for name in named if name), "")


def _kv_layers(shape: ModelShape) -> tuple[KvLayers, ...]:
    """Return the layers of a config.json by the shape of their KV cache; () if it has no shapes."""
    layers, text = shape.num_layers, shape.text
    if layers is None or shape.num_heads is None:
        return ()
    if rank := text.get("kv_lora_rank"):
        # Latent attention: one vector for keys and values of all heads, and the rotary part.
        width = rank + text.get("qk_rope_head_dim", 0)
        return (KvLayers(layers, 1, math.ceil(width / 2)),)
    kinds = shape.layer_kinds or ("full_attention",) * layers
    # The last layers may use the keys and values of earlier layers.
    own = kinds[: layers - (text.get("num_kv_shared_layers") or 0)]
    found = Counter(
        _kv_shape(shape, index, kind)
        for index, kind in enumerate(own)
        if kind.endswith("attention") and kind != "linear_attention"
    )
    return tuple(KvLayers(count, *shape) for shape, count in found.items())


def _kv_shape(shape: ModelShape, index: int, kind: str) -> tuple[int, int, int | None]:
    """Return the number of KV heads of a layer, their size and the layer's window."""
    text, kv_heads, head_dim = shape.text, shape.num_kv_heads, shape.head_dim
    if kind == "full_attention":  # in Gemma 4 these layers have other heads
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
        head_dim = text.get("global_head_dim") or head_dim
    # transformers 5.23 and later list the differences between layers here.
    differs = (text.get("per_layer_config") or {}).get(str(index), {})
    return (
        differs.get("num_key_value_heads", kv_heads),
        differs.get("head_dim", head_dim),
        text.get("sliding_window") if kind == "sliding_attention" else None,
    )
