"""A whole target pass, as transformers runs it, fused, compiled and autotuned.

    python benchmarks/kernels/bench_layers.py                               # needs a GPU of 24 GB
    python benchmarks/kernels/bench_layers.py --shape tiny --device cpu     # a smoke test

A pass is embedding, layers, last norm and lm_head of every row, with random weights. On a GPU each
pass is one CUDA graph. Attention is left out unless --context is given, so that the figures compare
with the floor: the bare matrix products, measured once on an H100 (fused, cuBLAS or autotuned).
Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from peagle.attention import AttentionMetadata, LayerKVCache, Prepared, TorchAttention
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.environment import environment
from peagle.models.compilation import CompiledLayers, compile_layers
from peagle.models.fusion import fuse
from peagle.models.target import TargetModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    },
}
# Milliseconds by tokens: cuBLAS through Inductor, Inductor max-autotune.
FLOORS = {
    "qwen3-8b": {
        1: (6.20, 5.43),
        8: (6.28, 5.95),
        32: (6.34, 6.17),
        128: (6.44, 7.03),
        512: (13.09, 13.29),
    }
}
# Whether fused, and the mode of compilation (None: eager). Unfused ones must come first.
VARIANTS: dict[str, tuple[bool, Any]] = {
    "eager": (False, None),
    "compiled": (False, "default"),
    "fused": (True, None),
    "fused compiled": (True, "default"),
    "fused autotuned": (True, "max-autotune-no-cudagraphs"),
}
FLUSH_BYTES = 256 << 20  # larger than the second-level cache of any card
QUERIES = 8  # of a sequence, where there is attention
BLOCK_SIZE = 16


class NoAttention:
    """Gives back what nobody computed: the pass without attention, and without a kernel for it."""

    def __init__(self) -> None:
        self.out_THd: Tensor | None = None

    def __call__(self, query_THd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.out_THd is None:
            self.out_THd = torch.randn_like(query_THd, memory_format=torch.contiguous_format)
        return self.out_THd


def main() -> None:
    """Run it."""
    args = arguments()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    tokens = [int(n) for n in args.tokens.split(",")]
    names = [name for name in VARIANTS if name in args.variants.split(",")]
    target = build(args.shape, device, dtype)
    results: dict[str, dict[int, float]] = {}
    differences: dict[str, float] = {}
    memory: dict[str, float] = {}
    expected: Tensor | None = None
    is_fused = False
    with torch.inference_mode():
        for name in names:
            wants_fused, mode = VARIANTS[name]
            if wants_fused and not is_fused:
                memory, is_fused = fuse_measured(target), True
            with compiled(target, mode, tokens) as layers:
                results[name] = {
                    n: 1000 * time_call(make_pass(target, n, args.context), device, args.repeats)
                    for n in tokens
                }
                logits = check(target, tokens[-1])
            expected = logits if expected is None else expected
            differences[name] = float((logits - expected).norm() / expected.norm())
            if layers is not None and layers.left:
                warnings.warn(f"{name}: layers run uncompiled: {layers.left}", stacklevel=1)
            print(f"{name}: done", file=sys.stderr)
    show(args, results)
    facts = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device),
        "shape": args.shape,
        "dtype": args.dtype,
        "context": args.context,
        "repeats": args.repeats,
        "ms": results,
        "floor_ms": FLOORS.get(args.shape),
        "logits_relative_difference": differences,
        "fusing_gib": memory,
    }
    print(json.dumps(facts))


def arguments() -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    result.add_argument("--tokens", default="1,8,32,128,512", help="tokens of a pass, a list")
    result.add_argument("--variants", default=",".join(VARIANTS), help="a list, as by default")
    result.add_argument(
        "--context", type=int, default=0, help="tokens of context to attend to; 0: no attention"
    )
    result.add_argument("--repeats", type=int, default=30)
    result.add_argument("--device", default="cuda" if on_gpu else "cpu")
    result.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    return result.parse_args()


def build(shape: str, device: torch.device, dtype: torch.dtype) -> TargetModel:
    """A target of random weights, made on the device."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return TargetModel(model.to(device), name=shape)


def fuse_measured(target: TargetModel) -> dict[str, float]:
    """Fuse; GiB on the card before, at most meanwhile, and after."""
    if target.device.type != "cuda":
        fuse(target.model)
        return {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    fuse(target.model)
    torch.cuda.empty_cache()
    numbers = (before, torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved())
    return {name: n / 2**30 for name, n in zip(("before", "most", "after"), numbers, strict=True)}


@contextmanager
def compiled(target: TargetModel, mode: Any, tokens: list[int]) -> Iterator[CompiledLayers | None]:
    """The target's layers compiled in a mode, or as they are."""
    if mode is None:
        yield None
        return
    yield compile_layers(target.model, mode=mode, buckets=tokens)
    for layer in target.model.get_decoder().layers:
        del layer.forward


def time_call(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call after a warm-up; on a card, of its CUDA graph with cold caches.

    A graph leaves out what the host does between kernels, as decoding does.
    """
    call()
    times = []
    if device.type != "cuda":
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / 1000)
    return median(times)


def make_pass(target: TargetModel, tokens: int, context: int) -> Callable[[], Tensor]:
    """One pass over so many tokens, to be called again and again."""
    generator = torch.Generator().manual_seed(tokens)
    ids_T = torch.randint(target.vocab_size, (tokens,), generator=generator).to(target.device)
    attend, positions_T = attention(target, tokens, context)

    def run() -> Tensor:
        hidden_TH, _ = target.forward(ids_T, positions_T, attend)
        return target.compute_logits(hidden_TH)

    return run


def attention(target: TargetModel, tokens: int, context: int) -> tuple[Prepared, Tensor]:
    """Attention of the pass, and the positions of its tokens."""
    device = target.device
    if not context:
        return NoAttention(), torch.arange(tokens, device=device)
    queries = min(tokens, QUERIES)
    sequences = tokens // queries
    num_blocks = -(-(context + queries) // BLOCK_SIZE)
    caches = [
        LayerKVCache(sequences * num_blocks, BLOCK_SIZE, heads, size, target.dtype, device)
        for heads, size in target.kv_shapes()
    ]
    target.set_kv_caches(caches)
    tables_BM = torch.arange(sequences * num_blocks, device=device).view(sequences, num_blocks)
    offset_Q = context + torch.arange(queries, device=device)
    slots_BQ = tables_BM[:, :1] * BLOCK_SIZE + offset_Q
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(sequences + 1, device=device) * queries,
        seq_lens_B=torch.full((sequences,), context + queries, device=device),
        block_tables_BM=tables_BM,
        slots_T=slots_BQ.flatten(),
        max_query_len=queries,
        max_seq_len=context + queries,
    )
    return TorchAttention().prepare(metadata), offset_Q.repeat(sequences)


def check(target: TargetModel, tokens: int) -> Tensor:
    """Logits with real attention: all variants must agree on them."""
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(target.vocab_size, (tokens,), generator=generator).to(target.device)
    positions_T = torch.arange(tokens, device=target.device)
    hidden_TH, _ = target.forward(ids_T, positions_T, DenseCausalAttention(1))
    return target.compute_logits(hidden_TH[-1:]).float()


def show(args: argparse.Namespace, results: dict[str, dict[int, float]]) -> None:
    """The table, in milliseconds."""
    floors = FLOORS.get(args.shape, {})
    heads = ["tokens", *(["floor cuBLAS", "floor autotuned"] if floors else []), *results]
    print("  ".join(heads))
    for n in next(iter(results.values()), {}):
        known = [f"{ms:.2f}" for ms in floors.get(n, ())] or ["-", "-"]
        floor = known if floors else []
        cells = [str(n), *floor, *(f"{times[n]:.3f}" for times in results.values())]
        print("  ".join(cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True)))


main()
