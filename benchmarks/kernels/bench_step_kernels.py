"""Kernels of a captured decode step beside attention, timed as graph replays on a card.

    PYTHONPATH=src python benchmarks/kernels/bench_step_kernels.py [--json OUT] [--only copies]

Verification: microseconds against the floor of reading the logits once at the bandwidth that a
large copy reaches here (few rows fit the L2 cache and may beat it; so they may in a real step,
where the head has just written them). Logits: "flat" is normal noise, "peaked" the same with
twenty tokens far above.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from peagle.kernels.drafts import batches_triton
from peagle.kernels.drafts.batches import DraftBatch, TargetBatch
from peagle.kernels.drafts.step_state import DecodeLimits, DecodeResult, DecodeState
from peagle.kernels.sampling import probabilities_triton, verify_triton
from peagle.kernels.sampling.logits_rules import VerificationRows
from peagle.kernels.sampling.probabilities import probs_from_logits
from peagle.kernels.trees import copies_triton
from peagle.kernels.trees.copies import MAX_MATCH, PRIOR_RATES, SEARCHED_ROWS
from peagle.speculation.verification import SamplingTensors, verify

VOCAB = 151_936
K = 7
WIDTH = 4096
DEVICE = "cuda"
LENGTHS = (MAX_MATCH, 2)
SETTINGS = {
    "plain": (0, 1.0),
    "top-k 20": (20, 1.0),
    "top-p 0.95": (0, 0.95),
    "top-k 50, top-p 0.9": (50, 0.9),
    "top-p 0.9999": (0, 0.9999),
}


def microseconds(fn: Callable[[], Any]) -> float:
    """Median of graph replays."""
    return 1e3 * float(triton.testing.do_bench_cudagraph(fn, rep=50, return_mode="median"))


def eager_microseconds(fn: Callable[[], Any]) -> float:
    """Median of plain calls: the torch references wait for the device."""
    return 1e3 * float(triton.testing.do_bench(fn, warmup=10, rep=50, return_mode="median"))


def bandwidth() -> float:
    """Bytes a microsecond, read plus written, of a large copy."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source))


def ints(count: int, value: int = 0) -> Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=DEVICE)


def make_logits(num_rows: int, dtype: torch.dtype, kind: str) -> Tensor:
    logits = torch.randn(num_rows, VOCAB, device=DEVICE) * 3
    if kind == "peaked":
        logits[:, torch.randint(VOCAB, (20,), device=DEVICE)] += 15
    return logits.to(dtype)


class Step:
    """A batch of rows / (K + 1) sequences that all drafted K tokens."""

    def __init__(self, num_rows: int, dtype: torch.dtype, kind: str, setting: str) -> None:
        self.num_seqs = num_seqs = num_rows // (K + 1)
        self.logits = make_logits(num_rows, dtype, kind)
        top_k, top_p = SETTINGS[setting]
        self.start_loc = torch.arange(num_seqs + 1, device=DEVICE) * (K + 1)
        self.sequences = torch.arange(num_seqs, device=DEVICE).repeat_interleave(K + 1)
        self.active = torch.ones(num_seqs, dtype=torch.bool, device=DEVICE)
        self.drafts = self.logits.argmax(-1).view(num_seqs, K + 1)[:, :K].contiguous()
        # Far from every limit: replays move the state on and on.
        self.limits = DecodeLimits(
            ints(num_seqs, -1).unsqueeze(1),
            ints(num_seqs),
            ints(num_seqs, 2**60),
            ints(num_seqs, K),
            2**31 - 8,
            2**31 - 8,
        )
        self.state = DecodeState.allocate(num_seqs, DEVICE)
        self.state.num_draft_tokens_B.fill_(K)
        floats: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE}
        self.sampling = verify_triton.SequenceSampling(
            torch.ones(num_seqs, **floats),
            ints(num_seqs, top_k),
            torch.full((num_seqs,), top_p, **floats),
            torch.randint(2**62, (num_seqs,), device=DEVICE),
        )
        self.scratch = verify_triton.VerifyScratch.allocate(num_rows, VOCAB, DEVICE)
        self.out = DecodeResult.allocate(num_seqs, K, DEVICE)

    def verify(self, sampling: verify_triton.SequenceSampling | None) -> None:
        batch, outputs = (self.sequences, self.start_loc), self.state.num_outputs_B
        verify_triton.own_tokens(self.logits, *batch, sampling, outputs, self.scratch)
        drafted = self.start_loc, self.drafts, self.active
        verify_triton.match_drafts(
            self.scratch.tokens_R, *drafted, self.state, self.limits, self.out
        )

    def greedy(self) -> None:
        self.verify(None)

    def sampled(self) -> None:
        self.verify(self.sampling)

    def stats(self) -> None:
        s = self.sampling
        probabilities_triton.row_stats(
            self.logits,
            self.sequences,
            s.temperature_B,
            s.top_k_B,
            s.top_p_B,
            None,
            self.scratch.rows,
        )

    def reference(self, greedy: bool) -> None:
        s = self.sampling
        tensors = SamplingTensors(
            s.temperature_B, s.top_k_B, s.top_p_B, s.seeds_B, ints(self.num_seqs), greedy
        )
        rows = VerificationRows(
            self.drafts, ints(self.num_seqs, K), tensors.num_outputs_B, len(self.logits)
        )
        verify(self.logits, rows, tensors)


def bench_verify(rate: float) -> list[dict[str, Any]]:
    results = []
    print(f"\nverification, V = {VOCAB}, K = {K}; torch: the reference, eager")
    print(
        f"{'rows':>5} {'dtype':>5} {'logits':>7} {'setting':>20} {'us':>8} {'floor':>7} "
        f"{'x floor':>7} {'passes':>6} {'torch us':>9}"
    )
    for num_rows in (8, 32, 64, 128, 256, 512):
        for dtype in (torch.bfloat16, torch.float32):
            for kind in ("flat", "peaked"):
                for setting in ("greedy", *SETTINGS):
                    if kind == "peaked" and setting in ("greedy", "plain"):
                        continue  # as fast as on flat logits
                    greedy = setting == "greedy"
                    step = Step(num_rows, dtype, kind, "plain" if greedy else setting)
                    took = microseconds(step.greedy if greedy else step.sampled)
                    passes = 0 if greedy else int(step.scratch.rows.num_passes_R.max())
                    floor = step.logits.nbytes / rate
                    torch_us = None
                    if kind == "flat" and dtype == torch.float32 and num_rows <= 256:
                        torch_us = eager_microseconds(partial(step.reference, greedy))
                    name = "bf16" if dtype == torch.bfloat16 else "fp32"
                    results.append(
                        {
                            "rows": num_rows,
                            "dtype": name,
                            "logits": kind,
                            "setting": setting,
                            "us": took,
                            "floor_us": floor,
                            "passes": passes,
                            "torch_us": torch_us,
                        }
                    )
                    print(
                        f"{num_rows:5} {name:>5} {kind:>7} {setting:>20} {took:8.1f} {floor:7.1f} "
                        f"{took / floor:7.2f} {passes:6} "
                        f"{'' if torch_us is None else f'{torch_us:9.0f}'}"
                    )
                    del step
    return results


def bench_search() -> list[dict[str, Any]]:
    """The statistics of rows, and torch's sort."""
    results = []
    print("\nrow statistics (two launches), top-p 0.95, fp32 logits")
    for num_rows in (8, 128, 512):
        for kind in ("flat", "peaked"):
            step = Step(num_rows, torch.float32, kind, "top-p 0.95")
            took = microseconds(step.stats)
            results.append({"rows": num_rows, "logits": kind, "us": took})
            print(f"{num_rows:5} {kind:>7} row_stats {took:8.1f} us")
            if num_rows <= 128:
                s, of = step.sampling, step.sequences
                limits = s.temperature_B[of], s.top_k_B[of], s.top_p_B[of]
                took = eager_microseconds(lambda: probs_from_logits(step.logits, *limits))  # noqa: B023
                print(f"{num_rows:5} {kind:>7} probs_from_logits {took:8.1f} us")
    return results


def bench_expand() -> list[dict[str, Any]]:
    results = []
    print(f"\nbatches, K = {K}, D = {WIDTH}, bf16 features")
    print(f"{'B':>4} {'target us':>10} {'expand us':>10} {'gather us':>10}")
    for num_seqs in (1, 2, 4, 8, 16, 32, 64):
        num_rows, num_slots = num_seqs * (K + 1), num_seqs * 2 * K
        tables = torch.randperm(num_seqs * 128, device=DEVICE).view(num_seqs, 128)
        active = torch.ones(num_seqs, dtype=torch.bool, device=DEVICE)
        drafts = torch.randint(VOCAB, (num_seqs, K), device=DEVICE)
        target = TargetBatch.allocate(num_seqs, num_rows, DEVICE)
        buffers = DraftBatch.allocate(num_seqs, num_slots, K, DEVICE)
        features = torch.randn(num_rows, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        shared = torch.randn(WIDTH, device=DEVICE, dtype=torch.bfloat16)
        hidden = torch.empty(num_slots, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        accepted = torch.randint(K + 1, (num_seqs,), device=DEVICE)

        def build() -> None:
            batches_triton.build_target_batch(
                ints_of[0],  # noqa: B023
                drafts,  # noqa: B023
                ints_of[1],  # noqa: B023
                ints_of[2],  # noqa: B023
                tables,  # noqa: B023
                active,  # noqa: B023
                target,  # noqa: B023
                block_size=16,
                max_model_len=2048,
            )

        def expand() -> None:
            batches_triton.expand_draft_batch(
                target.tokens_R,  # noqa: B023
                target.positions_R,  # noqa: B023
                target.query_start_loc,  # noqa: B023
                accepted,  # noqa: B023
                ints_of[0],  # noqa: B023
                tables,  # noqa: B023
                active,  # noqa: B023
                buffers,  # noqa: B023
                block_size=16,
                num_mask_slots_B=ints_of[3],  # noqa: B023
                mask_token_id=5,
                max_model_len=2048,
            )

        def gather() -> None:
            rows = buffers.feature_rows_R  # noqa: B023
            batches_triton.gather_features(features, shared, rows, hidden)  # noqa: B023

        ints_of = (
            ints(num_seqs, 3),
            ints(num_seqs, K),
            torch.randint(2000, (num_seqs,), device=DEVICE),
            ints(num_seqs, K - 1),
        )
        times = [microseconds(fn) for fn in (build, expand, gather)]
        names = "target_us", "expand_us", "gather_us"
        results.append({"B": num_seqs, **dict(zip(names, times, strict=True))})
        print(f"{num_seqs:4} {times[0]:10.2f} {times[1]:10.2f} {times[2]:10.2f}")
    return results


def bench_copies() -> list[dict[str, Any]]:
    """Copies of the text joined to trees: the search alone, and with the joining."""
    results = []
    print("\ncopies of the text; few: random tokens; many: a paragraph again and again")
    print(
        f"{'B':>4} {'tokens':>7} {'nodes':>6} {'rows':>5} {'text':>5} {'find us':>8} {'all us':>8}"
    )
    for length in (1024, 8192, 32_768):
        for num_seqs in (1, 16, 64):
            for nodes in (15, 31):
                for rows in (1, SEARCHED_ROWS):
                    for text in ("few", "many"):
                        step = CopyStep(num_seqs, length, nodes, rows, text)
                        find, both = microseconds(step.find), microseconds(step.join)
                        names = "B", "tokens", "nodes", "rows", "text", "find_us", "all_us"
                        values = num_seqs, length, nodes, rows, text, find, both
                        results.append(dict(zip(names, values, strict=True)))
                        print(
                            f"{num_seqs:4} {length:7} {nodes:6} {rows:5} {text:>5} {find:8.2f} "
                            f"{both:8.2f}"
                        )
    return results


class CopyStep:
    """Trees of a chain and of siblings, and texts."""

    def __init__(self, num_seqs: int, length: int, nodes: int, rows: int, text: str) -> None:
        shape = num_seqs, length
        texts = torch.randint(VOCAB, shape, device=DEVICE, dtype=torch.int32)
        if text == "many":
            paragraph = texts[:, :97]
            texts = paragraph.repeat(1, length // 97 + 1)[:, :length].contiguous()
        self.texts = copies_triton.Texts(
            texts, ints(num_seqs, length - 1), ints(num_seqs, 1), ints(num_seqs, 0)
        )
        tokens = torch.randint(VOCAB, (num_seqs, nodes), device=DEVICE)
        # The head drafts what the text goes on with, and others beside.
        depth = 7
        tokens[:, :depth] = texts[:, length % 97 : length % 97 + depth]
        chain = [*range(depth), *(i % depth for i in range(nodes - depth))]
        parents = torch.tensor(chain[:nodes], device=DEVICE).repeat(num_seqs, 1)
        scores = -torch.linspace(0.1, 4, nodes, device=DEVICE).repeat(num_seqs, 1)
        self.depths = ints(num_seqs, depth)
        sizes = self.depths, ints(num_seqs + nodes, nodes)
        self.trees = copies_triton.HeadTrees(tokens, parents, scores, *sizes)
        self.weights = torch.tensor([[1.0, 0.0]] * depth, device=DEVICE)
        self.rates = torch.tensor(PRIOR_RATES, device=DEVICE)
        self.scratch = copies_triton.CopyScratch.allocate(num_seqs, nodes, rows, DEVICE)
        outs = torch.zeros(5, num_seqs, nodes, dtype=torch.int64, device=DEVICE)
        self.out = copies_triton.JoinedTrees(*outs)

    def find(self) -> None:
        copies_triton.find_copies(self.texts, self.trees, self.scratch, LENGTHS)

    def join(self) -> None:
        copies_triton.join_found_copies(
            self.texts,
            self.trees,
            self.weights,
            self.rates,
            self.scratch,
            self.out,
            lengths=LENGTHS,
            max_model_len=2**20,
        )


BENCHES = {
    "expand": bench_expand,
    "verify": bench_verify,
    "search": bench_search,
    "copies": bench_copies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="kernels of a captured decode step")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--only", choices=BENCHES, help="time one kind of kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"a large copy moves {rate / 1e6:.2f} TB/s")
    figures = {
        "device": torch.cuda.get_device_name(),
        "copy_tb_s": rate / 1e6,
    }
    for name, bench in BENCHES.items():
        if arguments.only in (None, name):
            figures[name] = bench(rate) if name == "verify" else bench()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
