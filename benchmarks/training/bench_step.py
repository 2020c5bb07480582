"""A P-EAGLE training step, forward and backward: seconds, tokens/s and peak memory.

    python benchmarks/training/bench_step.py --lengths 2048,4096,8192 --segments 1,2,8

The step is the one of `peagle train` (`training.step.Step.backward`: element sampling, masks, the
two-pass partition, loss and gradients) on a random head with bfloat16 weights; no target model, no
optimizer: features and final hidden states of the target lie on the device. A row is one document,
all of it supervised. `--segments 0` measures the paper's Algorithm 1 instead, with
`--cumulative-segments` segments that each compute the context before them anew. Warm-up steps,
which compile, are left out. Peak memory is torch's, of one step, everything on the device included.
Elements and blocks of the masks are decided on the host, ahead of the step, as in the trainer
(`layout_seconds`, not part of the step); `mask_share` is the share of a step that making the masks
from them takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from algorithm1 import cumulative_backward
from torch import Tensor

from peagle.data.batches import Batch, make_batch, moved, pinned
from peagle.data.dataset import ResponseDataset
from peagle.data.features import TargetStates
from peagle.environment import environment
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.training.config import MethodSection
from peagle.training.element_attention import dense_attention, flex_attention
from peagle.training.step import Objective, TrainingStep
from peagle.training.training_methods import TrainingMethod

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GIB = 1 << 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens of a row, a list")
    parser.add_argument("--segments", default="1,8", help="S, a list; 0 is Algorithm 1")
    parser.add_argument("--cumulative-segments", type=int, default=8)
    parser.add_argument("--recompute", action="store_true", help="recompute the layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--train-lm-head", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--adamw-states", action="store_true", help="masters and moments resident")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    for name, value in {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_layers": 4,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 151_936,
        "draft_vocab_size": 32_000,
        "depth": 8,
        "loss_chunk_rows": 0,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--ratio", type=float, default=0.7)
    parser.add_argument("--floor", type=float, default=0.2)
    if parser.parse_known_args()[0].small:
        parser.set_defaults(
            lengths="64,96", hidden_size=64, intermediate_size=128, num_attention_heads=4,
            num_kv_heads=2, vocab_size=500, draft_vocab_size=200, dtype="float32",
        )  # fmt: skip
    return parser.parse_args()


class RandomTarget:
    """Rows of an lm_head; the rest of a target is not there."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        shape = (options.draft_vocab_size, options.hidden_size)
        self.rows = torch.randn(shape, device=DEVICE, dtype=dtype) * options.hidden_size**-0.5

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden @ self.rows.mT

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.rows.mT


def make_head(options: argparse.Namespace, longest: int, dtype: torch.dtype) -> Drafter:
    config = DrafterConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_layers=options.num_layers,
        num_attention_heads=options.num_attention_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.hidden_size // options.num_attention_heads,
        vocab_size=options.vocab_size,
        draft_vocab_size=options.draft_vocab_size,
        target_hidden_size=options.hidden_size,
        aux_layer_ids=(2, 18, 33),
        mask_token_id=options.vocab_size - 1,
        max_position_embeddings=longest + options.depth,
    )
    with torch.device(DEVICE):
        head = Drafter(config)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    head.set_draft_vocabulary(torch.arange(options.draft_vocab_size, device=DEVICE))
    head.lm_head.requires_grad_(options.train_lm_head)
    return head.to(dtype)


def make_inputs(
    options: argparse.Namespace, length: int, dtype: torch.dtype
) -> tuple[Batch, TargetStates]:
    tokens = torch.randint(options.draft_vocab_size, (length,), dtype=torch.int32)
    dataset = ResponseDataset.of_prompts(tokens, torch.tensor([0, length]), torch.tensor([1]))
    batch = make_batch(dataset, [[0]], length)
    width = options.hidden_size
    features = torch.randn(1, length, 3 * width, device=DEVICE, dtype=dtype)
    hidden = torch.randn(1, length, width, device=DEVICE, dtype=dtype)
    return batch, TargetStates(features, hidden)


class Stopwatch:
    """Times the calls of a function while it is on, waiting for the device before and after."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.on, self.seconds = function, False, 0.0

    def __call__(self, *arguments: Any) -> Any:
        if not self.on:
            return self.function(*arguments)
        synchronize()
        started = time.perf_counter()
        made = self.function(*arguments)
        synchronize()
        self.seconds += time.perf_counter() - started
        return made


def make_step(
    options: argparse.Namespace, head: Drafter, target: Any, segments: int
) -> TrainingStep:
    section = MethodSection(depth=options.depth, cod_ratio=options.ratio, cod_floor=options.floor)  # type: ignore[call-arg]
    make = Stopwatch(flex_attention if CUDA else dense_attention)
    method = TrainingMethod(section, make, flex=CUDA, recompute=options.recompute, compiled=CUDA)
    chunk = options.loss_chunk_rows or None
    objective = Objective(head, target, section, chunk, whole_vocabulary=False)
    return TrainingStep(head, method, objective, objective, segments)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(
    run: Callable[[int], Callable[[], float]], options: argparse.Namespace, head: Drafter
) -> dict[str, Any]:
    """Medians over the repeats of one step, and its peak memory."""
    seconds: list[float] = []
    peak, loss = 0, 0.0
    for index in range(options.warm_up + options.repeats):
        head.zero_grad(set_to_none=True)
        once = run(index)
        synchronize()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = once()
        synchronize()
        if index >= options.warm_up:
            seconds.append(time.perf_counter() - started)
            peak = max(peak, torch.cuda.max_memory_allocated() if CUDA else 0)
    head.zero_grad(set_to_none=True)
    return {
        "seconds_median": round(median(seconds), 4),
        "seconds_min": round(min(seconds), 4),
        "peak_gib": round(peak / GIB, 2),
        "loss": round(float(loss), 4),
    }


def mask_share(run: Callable[[int], Callable[[], float]], masks: Any) -> float:
    """Share of a step that making its masks takes."""
    once = run(98)
    synchronize()
    masks.on, masks.seconds = True, 0.0
    started = time.perf_counter()
    once()
    synchronize()
    masks.on = False
    return round(masks.seconds / (time.perf_counter() - started), 5)


def layout_seconds(step: TrainingStep, batch: Batch) -> float:
    """Choosing, splitting and sorting the elements and listing the masks' blocks, on the host."""
    seconds = []
    for seed in range(5):
        started = time.perf_counter()
        step.lay_out(batch, torch.Generator().manual_seed(seed))
        seconds.append(time.perf_counter() - started)
    return round(median(seconds), 4)


def run_once(
    step: TrainingStep, backward: Any, batch: Batch, states: TargetStates, seed: int
) -> Callable[[], float]:
    """A step whose elements are drawn already, as the trainer's loader does it ahead."""
    generator = torch.Generator().manual_seed(seed)
    layout = step.lay_out(batch, generator)
    laid_out = replace(batch, layout=layout)
    if CUDA:
        laid_out = moved(pinned(laid_out), DEVICE)
    return lambda: backward(laid_out, states, generator).loss


def profile(run: Callable[[int], Callable[[], float]]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    once = run(99)
    synchronize()
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        once()
        synchronize()
    table = seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=28)
    print("\n".join(line[:60] + line[-75:] for line in table.splitlines()), flush=True)


def main() -> None:
    options = parse()
    dtype = getattr(torch, options.dtype)
    lengths = [int(x) for x in options.lengths.split(",")]
    torch.manual_seed(0)
    head = make_head(options, max(lengths), dtype)
    target = RandomTarget(options, dtype)
    print(json.dumps({"environment": environment(DEVICE), "options": vars(options)}), flush=True)
    kept: list[Tensor] = []
    if options.adamw_states:
        kept = [
            torch.zeros_like(p, dtype=torch.float32) for p in head.parameters() for _ in range(3)
        ]
        for parameter in head.parameters():
            parameter.grad_dtype = torch.float32
    for length in lengths:
        batch, states = make_inputs(options, length, dtype)
        for segments in (int(x) for x in options.segments.split(",")):
            step = make_step(options, head, target, segments or options.cumulative_segments)
            backward = step.backward
            if segments == 0:
                backward = partial(cumulative_backward, step)

            run = partial(run_once, step, backward, batch, states)
            line = {"side": "peagle", "length": length, "segments": segments}
            try:
                figures = measure(run, options, head)
                figures["tokens_per_s"] = round(length / figures["seconds_median"])
                figures["mask_share"] = mask_share(run, step.method.make_attention)
                figures["layout_seconds"] = layout_seconds(step, batch)
                if options.profile:
                    profile(run)
            except torch.OutOfMemoryError:
                head.zero_grad(set_to_none=True)
                figures = {"out_of_memory": True}
            print(json.dumps({**line, **figures}), flush=True)
            if CUDA:
                torch.cuda.empty_cache()
    del kept


if __name__ == "__main__":
    main()
