"""How much GPU memory a model and its head take, from sizes and shapes alone; nothing is loaded."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import CheckpointError
from peagle.model_folder import read_file_header

GIB = 2**30
# Of a GPU, for activations, CUDA graphs and buffers of the steps: an estimate.
RESERVE_BYTES = 2 * GIB
# Prompt tokens that vLLM computes in one step; those of sliding windows are kept until it is done.
IN_FLIGHT_TOKENS = 8192
# Names of `quantization_config.quant_method` and of `dtype` in config.json, as precisions.
_PRECISIONS = {
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"},
    **{"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"},
    **{"awq": "int4", "gptq": "int4", "bitsandbytes": "int4"},
}
_VALUE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_MXFP4_VALUES_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep keys and values of one shape.

    Attributes:
        layers: how many.
        kv_heads, head_dim: of each; a token takes 2 · kv_heads · head_dim values of each layer.
        window: tokens that a layer with a sliding window looks back; None for all of them.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def num_values(self, num_tokens: int, num_sequences: int, in_flight: int) -> int:
        """Values that so many sequences of so many tokens keep."""
        slots = num_sequences * num_tokens
        if self.window is not None:
            slots = min(slots, num_sequences * min(num_tokens, self.window) + in_flight)
        return 2 * self.layers * self.kv_heads * self.head_dim * slots


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a model decides its memory.

    Attributes:
        weights_bytes: as an engine loads them; float32 becomes a type of two bytes.
        unpacked_bytes: with every weight in two bytes; our own engine unpacks MXFP4 at load.
        precision: of the weights, "bf16", "fp8", "mxfp4"; "" where it is not known.
        kv_layers: layers with a KV cache.
        max_model_len: the longest context; None where it is not known.
    """

    weights_bytes: int
    unpacked_bytes: int
    precision: str
    kv_layers: tuple[KvLayers, ...] = ()
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeeded:
    """GPU memory of a deployment, in bytes.

    Attributes:
        target_bytes, draft_bytes: weights.
        kv_parts: bytes of the KV cache and the KV heads that these are spread over, for each kind
            of layer.
        max_model_len, num_sequences: that the KV cache is for.
        precision: of the target, as it runs.
        max_gpus: over which one copy of the model may be split; None for any number.
        unpacked: whether the target's weights are unpacked when they are loaded.
    """

    target_bytes: int
    draft_bytes: int
    kv_parts: tuple[tuple[int, int], ...]
    max_model_len: int
    num_sequences: int
    precision: str
    max_gpus: int | None = None
    unpacked: bool = False

    def kv_bytes(self, tensor_parallel_size: int = 1) -> int:
        """The KV cache of one GPU; a KV head is never split, but repeated on several GPUs."""
        return sum(
            size * math.ceil(heads / tensor_parallel_size) // heads for size, heads in self.kv_parts
        )

    def per_gpu(self, tensor_parallel_size: int = 1) -> int:
        """What each GPU must have free, reserve included."""
        weights = math.ceil((self.target_bytes + self.draft_bytes) / tensor_parallel_size)
        return weights + self.kv_bytes(tensor_parallel_size) + RESERVE_BYTES

    def told(self, tensor_parallel_size: int = 1) -> str:
        """The parts of `per_gpu`, for people."""
        weights = gib(self.target_bytes) + (f" unpacked to {self.precision}" * self.unpacked)
        head = f", head {gib(self.draft_bytes)}" if self.draft_bytes else ""
        split = f", over {tensor_parallel_size} GPUs" if tensor_parallel_size > 1 else ""
        kv_cache = gib(self.kv_bytes(tensor_parallel_size))
        sequences = f"{self.num_sequences} sequence{'s' * (self.num_sequences > 1)}"
        return (
            f"weights {weights}{head}{split}, KV cache {kv_cache} for {sequences} of "
            f"{self.max_model_len} tokens, reserve {gib(RESERVE_BYTES)}"
        )


def gib(size: int) -> str:
    """A size for people: "60.8 GiB"."""
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
    """The least memory that serves the target, with its head.

    On each of T GPUs, W weights, KV caches and the reserve R:

        (W_target + W_draft) / T + KV · ceil(heads / T) / heads + R
        KV = num_sequences · max_model_len · 2 · layers · heads · head_dim · kv_value_bytes

    A layer with a sliding window keeps num_sequences · window + in_flight_tokens tokens where that
    is less. More sequences wait, or are preempted, if they do not fit: one is the least.

    Args:
        target, draft: their sizes.
        max_model_len: tokens of a prompt and its output; None takes the target's longest context.
        num_sequences: that must fit at full length.
        kv_value_bytes: 2, or 1 for an 8-bit KV cache.
        in_flight_tokens: most prompt tokens of a step.
        native: for our own engine, which runs on one GPU, unpacks quantized weights and keeps the
            tokens outside of sliding windows too.
    """
    length = max_model_len or target.max_model_len or IN_FLIGHT_TOKENS
    layers = [*target.kv_layers, *(draft.kv_layers if draft else ())]
    if native:
        layers = [KvLayers(k.layers, k.kv_heads, k.head_dim) for k in layers]
    return MemoryNeeded(
        target_bytes=target.unpacked_bytes if native else target.weights_bytes,
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
        unpacked=native and target.unpacked_bytes > target.weights_bytes,
    )


# ---- of files -------------------------------------------------------------------------------


def facts_of_folder(folder: Path) -> ModelFacts:
    """Sizes of the model, or of the head, in a folder; of its safetensors files only the headers.

    Raises:
        CheckpointError: no readable config.json, or a safetensors file that is none.
    """
    return model_facts(_object(folder / "config.json"), _tensors(folder))


def model_facts(config: Mapping[str, Any], tensors: Iterable[tuple[str, str, int]]) -> ModelFacts:
    """Sizes by what is in config.json, and the name, type and bytes of every tensor.

    Types are those of safetensors, "BF16".
    """
    shapes = config.get("transformer_layer_config") or config.get("text_config") or config
    weights = unpacked = 0
    for name, dtype, size in tensors:
        value_bytes = _VALUE_BYTES.get(dtype, 1)
        values = size // value_bytes
        weights += values * min(value_bytes, 2)
        if name.endswith("_scales") and "mxfp4" in json.dumps(config.get("quantization_config")):
            continue
        packed = _MXFP4_VALUES_PER_BYTE if name.endswith("_blocks") and dtype == "U8" else 1
        unpacked += 2 * values * packed
    length = shapes.get("max_position_embeddings")
    return ModelFacts(
        weights_bytes=weights,
        unpacked_bytes=unpacked,
        precision=_precision(config, shapes),
        kv_layers=_kv_layers(shapes),
        max_model_len=length if isinstance(length, int) else None,
    )


def _object(path: Path) -> dict[str, Any]:
    # It brings torch, which only who measures a folder waits for.
    from peagle.models.checkpoint.files import read_object

    try:
        return read_object(path)
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} is not readable: {error.strerror}. Expected a folder in Hugging Face "
            "format, with config.json."
        ) from None


def _tensors(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Name, type and bytes of every tensor of the safetensors files."""
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


def _kv_layers(shapes: Mapping[str, Any]) -> tuple[KvLayers, ...]:
    """The layers of a config.json by their kind; none where it does not tell its shapes."""
    layers, heads = shapes.get("num_hidden_layers"), shapes.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int) or heads < 1:
        return ()
    if rank := shapes.get("kv_lora_rank"):
        # Latent attention: one vector for keys and values of all heads, and the rotary part.
        width = rank + shapes.get("qk_rope_head_dim", 0)
        return (KvLayers(layers, 1, math.ceil(width / 2)),)
    kinds = shapes.get("layer_types") or ["full_attention"] * layers
    # The last ones may take over the keys of earlier ones.
    own = kinds[: layers - (shapes.get("num_kv_shared_layers") or 0)]
    found = Counter(_shape(shapes, index, kind) for index, kind in enumerate(own))
    found.pop(None, None)
    return tuple(KvLayers(count, *shape) for shape, count in found.items() if shape)


def _shape(shapes: Mapping[str, Any], index: int, kind: str) -> tuple[int, int, int | None] | None:
    """KV heads, their size and the window of a layer; None for one without a KV cache."""
    if not kind.endswith("attention") or kind == "linear_attention":
        return None
    heads = shapes["num_attention_heads"]
    kv_heads = shapes.get("num_key_value_heads") or heads
    head_dim = shapes.get("head_dim") or shapes.get("hidden_size", 0) // heads
    if kind == "full_attention":  # those of Gemma 4 have heads of their own
        kv_heads = shapes.get("num_global_key_value_heads") or kv_heads
        head_dim = shapes.get("global_head_dim") or head_dim
    # How transformers writes what differs by layer, since 5.23.
    differs = (shapes.get("per_layer_config") or {}).get(str(index), {})
    window = shapes.get("sliding_window") if kind == "sliding_attention" else None
    return (
        differs.get("num_key_value_heads", kv_heads),
        differs.get("head_dim", head_dim),
        window,
    )
