"""Peak memory of training steps on a GPU: real steps, the probe of `peagle train`, the estimate.

    python benchmarks/training/probe_against_plan.py --shapes bundled,qwen3-8b

Each case is a head with random weights, float32 masters and AdamW's moments, a batch of one
document, and stored features. A line has the peak of whole optimizer steps, what
`training.step_memory` measures before the first one, and what `training.step_memory` adds up, in
GiB, with the ratios to the real peak; the last line has the range of the ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peagle.data.batches import Batch, BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.data.features import TargetStates
from peagle.environment import environment
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.target_facts import TargetShape
from peagle.training.config import TrainConfig
from peagle.training.element_attention import flex_attention
from peagle.training.inputs import Source
from peagle.training.optimizers import Masters, build_optimizers
from peagle.training.step import Objective, TrainingStep
from peagle.training.step_memory import BatchShape, MemoryProbe, TrainingShape, estimate_memory
from peagle.training.training_methods import TrainingMethod

GIB = 1 << 30
DEVICE = torch.device("cuda")
SHAPES: dict[str, dict[str, Any]] = {
    "bundled": {
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "draft_vocab_size": 2048,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "draft_vocab_size": 32_000,
    },
}
# Tokens of a row, S, and whether layers are recomputed.
CASES = [(2048, 1, False), (2048, 4, False), (4096, 1, False), (4096, 2, False), (4096, 2, True)]
CASES += [(8192, 1, False), (8192, 2, False), (8192, 4, False), (8192, 1, True)]


class Run:
    """A training run of one row without its target: the head, its optimizer and its batches."""

    def __init__(self, shape: str, length: int) -> None:
        torch.manual_seed(0)
        sizes, data = SHAPES[shape], {"train": "none", "features": "none"}
        self.config = TrainConfig.model_validate(
            {
                "target": "none",
                "output": "none",
                "data": {**data, "max_length": length, "batch_tokens": length},
                "method": {"depth": 8, "cod_ratio": 0.7, "cod_floor": 0.2},
                "optimizer": {"steps": 3},
                "run": {"device": "cuda"},
            }
        )
        width = sizes["hidden_size"]
        head = DrafterConfig(
            **sizes,
            num_layers=4,
            target_hidden_size=width,
            aux_layer_ids=(0, 1, 2),
            mask_token_id=1,
            max_position_embeddings=length + 8,
        )
        with DEVICE:
            self.drafter = Drafter(head)
        for parameter in self.drafter.parameters():
            torch.nn.init.normal_(parameter, 0, 0.02)
        if head.is_pruned:
            self.drafter.set_draft_vocabulary(torch.arange(head.draft_vocab_size, device=DEVICE))
        self.masters = Masters(self.drafter, torch.bfloat16)
        self.optimizers = build_optimizers(self.masters.named(), self.config.optimizer)
        self.lm_head = torch.randn(head.vocab_size, width, device=DEVICE, dtype=torch.bfloat16)
        tokens = torch.randint(2, head.vocab_size, (length,), dtype=torch.int32)
        dataset = ResponseDataset.of_prompts(tokens, torch.tensor([0, length]), torch.tensor([1]))
        self.stream = BatchStream(dataset, length, 128, 0)
        text: Any = SimpleNamespace(hidden_size=width, vocab_size=head.vocab_size)
        target = TargetShape("none", text, 0, 0, self.lm_head.numel())
        batch = BatchShape.of(self.stream)
        self.shape = TrainingShape(self.config, head, target, batch, DEVICE)
        states = (torch.randn(1, length, n * width, dtype=torch.bfloat16) for n in (3, 1))
        states = TargetStates(*states)
        read: Callable[[Batch], TargetStates] = lambda _: states  # noqa: E731
        source = lambda batch_at: Source(batch_at, DEVICE, read=read)  # noqa: E731
        self.inputs: Any = SimpleNamespace(config=self.config, device=DEVICE, source=source)

    def build_step(self, segments: int, recompute: bool) -> TrainingStep:
        target: Any = SimpleNamespace(logits_of=self._logits_of, compute_logits=self._logits)
        method = TrainingMethod(
            self.config.method, flex_attention, flex=True, recompute=recompute, compiled=True
        )
        objective = Objective(
            self.drafter, target, self.config.method, whole_vocabulary=False, temperature=0.0
        )
        return TrainingStep(self.drafter, method, objective, objective, segments)

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.mT

    def _logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        rows = self.lm_head[token_ids]
        return lambda hidden: hidden @ rows.mT

    def probe(self) -> MemoryProbe:
        return MemoryProbe(
            self.masters,
            self.optimizers,
            self.inputs,
            self.stream.largest(),
            self.build_step,
        )

    def step_peak(self, segments: int, recompute: bool) -> int:
        """Bytes at the peak of real steps, all of them together."""
        step = self.build_step(segments, recompute)

        def batch_at(index: int) -> Batch:
            batch, generator = self.stream.at(index), torch.Generator().manual_seed(index)
            return replace(batch, layout=step.lay_out(batch, generator))

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for batch, states in self.inputs.source(batch_at).range(0, 4):
            step.backward(batch, states, torch.Generator())
            self.masters.clip(self.masters.collect(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.masters.publish()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        for optimizer in self.optimizers:
            optimizer.state.clear()
        return peak


def measure(shape: str, length: int) -> Iterator[dict[str, Any]]:
    """The lines of a length's cases.

    Head, optimizer and probe live no longer than the call. A probe that outlived it would keep its
    head on the card, and the next length's probe, which counts all bytes there, would count it too.
    """
    run = Run(shape, length)
    for _, segments, recompute in [case for case in CASES if case[0] == length]:
        with run.probe() as probe:
            probed = probe.peak(segments, recompute)
        step = run.step_peak(segments, recompute)
        estimate = estimate_memory(run.shape, segments, recompute).total
        line: dict[str, Any] = {"shape": shape, "length": length, "segments": segments}
        line |= {"recompute": recompute, "step_gib": round(step / GIB, 3)}
        for key, size in (("probe", probed or 0), ("estimate", estimate)):
            line |= {f"{key}_gib": round(size / GIB, 3), f"{key}_ratio": size / step}
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shapes", default="bundled,qwen3-8b", help="a list")
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens of a row, a list")
    options = parser.parse_args()
    print(json.dumps({"environment": environment(DEVICE), "options": vars(options)}), flush=True)
    ratios: dict[str, list[float]] = {"probe": [], "estimate": []}
    for name in options.shapes.split(","):
        for length in map(int, options.lengths.split(",")):
            for line in measure(name, length):
                for key, found in ratios.items():
                    found.append(line[f"{key}_ratio"])
                print(json.dumps(line), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps({key: [min(found), max(found)] for key, found in ratios.items()}))


if __name__ == "__main__":
    main()
