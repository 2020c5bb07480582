"""The P-EAGLE training step of the speculators package: seconds, tokens/s and memory by length.

    python benchmarks/training/peer_speculators.py --lengths 2048,4096,8192 --loss fused

A step is the forward pass of its draft model (COD sampling, mask, layers, both vocabulary
projections, loss, accuracy counters) and the backward pass; no target model, no optimizer. Its
torch.compile, attention, sampling and loss are taken as they come. A row is one document of random
tokens and states, all supervised. As in its trainer, embeddings are trained and lm_head is frozen.
Unlike there, all anchors count unless --max-anchors is given (its command line says 512), and
weights are bfloat16, which costs less (its trainer: float32 under autocast). --loss fused is its
default, Triton kernels inside a compiled graph; fused-outside runs them between graphs; eager is
its reference in plain torch, which its torch.compile fuses.

Sizes become symbols only once they have changed, so a shorter row runs first, and no step that
compiled something counts. Prints a JSON object a length. Needs speculators 0.9.0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from statistics import median
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8}
SIZES = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
SAMPLING = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
LOSSES = ("fused", "fused-outside", "eager") if CUDA else ("eager",)
WARM_UP = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens of a row, a list")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loss", default=LOSSES[0], choices=LOSSES)
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--checkpointing", action="store_true", help="recompute the layers")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--max-anchors", type=int, help="anchors with elements below depth 0")
    for name, value in (LAYERS | SIZES | SAMPLING).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    if parser.parse_known_args()[0].small:
        tiny = {"hidden_size": 512, "intermediate_size": 64, "vocab_size": 500}
        parser.set_defaults(lengths="64,96", draft_vocab_size=200, **tiny)
    return parser.parse_args()


def loss_terms(kind: str) -> Any:
    """Its KL loss in one of the implementations."""
    if kind != "eager":
        fused: Any = importlib.import_module("speculators.losses.fused")
        # Forward and backward kernel share one list of tile sizes, and Dynamo of PyTorch 2.11
        # fails on a list that it meets under two names. With a copy it traces the loss.
        fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
        if kind == "fused-outside":
            fused.fused_kl_div_loss = torch.compiler.disable(fused.fused_kl_div_loss)
    losses: Any = importlib.import_module("speculators.losses")
    return losses.resolve_loss_config("kl_div", kind.partition("-")[0])


def build(args: argparse.Namespace) -> Any:
    """Its draft model with random weights, in training mode."""
    peagle: Any = importlib.import_module("speculators.models.peagle")
    layers = LlamaConfig(**{name: getattr(args, name) for name in LAYERS | SIZES})
    # FlexAttention is its default; on a CPU that has no backward pass.
    layers._attn_implementation = "simple_flex_attention" if CUDA else "eager"
    head = {"draft_vocab_size": args.draft_vocab_size, "mask_token_id": args.vocab_size - 1}
    config = peagle.PEagleSpeculatorConfig(transformer_layer_config=layers, **head)
    with DEVICE:
        model = peagle.PEagleDraftModel(config)
    for matrix in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        torch.nn.init.normal_(matrix.weight, std=0.02)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    return model.to(DEVICE, getattr(torch, args.weights)).train()


def random_row(args: argparse.Namespace, length: int) -> dict[str, Any]:
    """What its model is called with, for one row of `length` tokens."""
    width, half = args.hidden_size, torch.bfloat16
    with DEVICE:
        return {
            "hidden_states": torch.randn(1, length, 3 * width, dtype=half),
            "verifier_last_hidden_states": torch.randn(1, length, width, dtype=half),
            "input_ids": torch.randint(args.vocab_size, (1, length)),
            "document_ids": torch.zeros(1, length, dtype=torch.long),
            "loss_mask": torch.ones(1, length),
            **{name: getattr(args, name) for name in ("max_anchors", *SAMPLING)},
        }


def run(model: Any, row: dict[str, Any]) -> tuple[float, bool, dict[str, Any]]:
    """One step: its seconds, whether it compiled something, its loss and supervised elements."""
    wait = torch.cuda.synchronize if CUDA else lambda: None
    wait()
    graphs, start = counters["stats"]["unique_graphs"], time.perf_counter()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=model.dtype == torch.float32):
        _, loss, metrics = model(**row)
    loss.backward()
    wait()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    facts = {"loss": float(loss.detach()), "elements": int(metrics["full_acc_total"])}
    return seconds, counters["stats"]["unique_graphs"] != graphs, facts


def measure(model: Any, row: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Median and least time after the warm-up; the peak memory of one more step."""
    runs = [run(model, row) for _ in range(WARM_UP + 2 * repeats)][WARM_UP:]
    seconds = [took for took, compiled, _ in runs if not compiled][-repeats:]
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    *_, facts = run(model, row)
    facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    facts["tokens_per_s"] = row["input_ids"].numel() / median(seconds)
    return {"seconds_median": median(seconds), "seconds_min": min(seconds), **facts}


def main() -> None:
    args = parse()
    # A frame that is compiled anew more often than this would run uncompiled from then on.
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    model, terms = build(args), {"loss_config": loss_terms(args.loss)}
    lengths = [int(length) for length in args.lengths.split(",")]
    run(model, random_row(args, lengths[0] // 2) | terms)
    for length in lengths:
        line = {"side": "speculators", "length": length, "loss_kind": args.loss}
        line |= {"weights": args.weights, "checkpointing": args.checkpointing}
        try:
            line |= measure(model, random_row(args, length) | terms, args.repeats)
        except torch.OutOfMemoryError:
            line["error"] = "out of memory"
            model.zero_grad(set_to_none=True)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
