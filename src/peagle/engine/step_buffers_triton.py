"""State of the sequences that decode, on the device, and how the host writes it.

Shapes: B sequences (a bucket), K drafts, M blocks a sequence, E stop ids a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from peagle.engine.feature_ring import NO_SLOT
from peagle.engine.graph_runner import StepSizes
from peagle.engine.sequence import Sequence
from peagle.kernels.step_state import StepLimits, StepRecord, StepState
from peagle.kernels.verify_triton import SequenceSampling, SyntheticAcceptance

# What there is one integer, or one number, a sequence of; the first five are `StepState`.
_INTS = (
    "last_tokens",
    "first_positions",
    "num_outputs",
    "num_drafts",
    "finish",
    "min_tokens",
    "max_tokens",
    "num_speculative",
    "top_k",
    "seeds",
    "active",
    "context_starts",
    "feature_slots",
)
_FLOATS = ("temperature", "top_p", "min_p")


class HostWritten:
    """Tensors of one type in one allocation that the host writes with one copy.

    There are two twins on the host, used in turn: one may still be read by a copy that is under
    way while the other is written.

    Attributes:
        on_device: the tensors by name.
        on_host: the twin to be written next, as numpy arrays.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]

        def views(flat: Tensor) -> dict[str, Tensor]:
            parts = flat.split(sizes)
            return {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}

        pinned = device.type == "cuda"
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._twins = [torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._arrays: list[dict[str, Any]] = [
            {name: view.numpy() for name, view in views(twin).items()} for twin in self._twins
        ]
        self._turn = 0
        self.on_device = views(self._flat)

    @property
    def on_host(self) -> dict[str, Any]:
        return self._arrays[self._turn]

    def upload(self) -> None:
        """Copy what was written to the device; the other twin's turn comes."""
        self._flat.copy_(self._twins[self._turn], non_blocking=True)
        self._turn = 1 - self._turn


class StepBuffers:
    """State of the sequences that decode, on the device.

    Attributes:
        state, limits, sampling: see the classes.
        synthetic: acceptance set for measurements, None: the real one.
        drafts_BK: drafts that the next step verifies.
        block_tables_BM: KV blocks, int64.
        active_B: which rows are sequences; int64, 0 or 1.
        context_starts_B: first drafter slot that may be looked at.
        feature_slots_B: ring of `FeatureRings` that takes the features; -1: none.
        out: what the last step said.
        report_RX: the same in one tensor, for the host: see `kernels.step_frame_triton`.
    """

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        batch, most = sizes.num_seqs, max(sizes.num_drafts, 1)
        self.sizes = sizes
        rows = dict.fromkeys(_INTS, (batch,))
        shapes = {**rows, "stop_ids": (batch, sizes.num_stop_ids), "drafts": (batch, most)}
        self._ints = HostWritten(shapes, torch.int64, device)
        self._floats = HostWritten(dict.fromkeys(_FLOATS, (batch,)), torch.float32, device)
        self._tables = HostWritten({"tables": (batch, sizes.table_width)}, torch.int64, device)
        ints, floats = self._ints.on_device, self._floats.on_device
        self.state = StepState(*(ints[name] for name in _INTS[:5]))
        self.limits = StepLimits(
            stop_ids_BE=ints["stop_ids"],
            min_tokens_B=ints["min_tokens"],
            max_tokens_B=ints["max_tokens"],
            num_speculative_B=ints["num_speculative"],
            max_model_len=sizes.max_model_len,
            max_draft_len=sizes.max_draft_len,
        )
        self.sampling = SequenceSampling(
            temperature_B=floats["temperature"],
            top_k_B=ints["top_k"],
            top_p_B=floats["top_p"],
            seeds_B=ints["seeds"],
            min_p_B=floats["min_p"],
        )
        self.synthetic: SyntheticAcceptance | None = None
        if sizes.synthetic_rates is not None:
            rates_K = torch.tensor(sizes.synthetic_rates, dtype=torch.float32, device=device)
            self.synthetic = SyntheticAcceptance(rates_K, ints["seeds"])
        self.drafts_BK = ints["drafts"]
        self.block_tables_BM = self._tables.on_device["tables"]
        self.active_B = ints["active"]
        self.context_starts_B = ints["context_starts"]
        self.feature_slots_B = ints["feature_slots"]
        self.out = StepRecord.allocate(batch, most, device)
        self.report_RX = torch.zeros(batch + 1, 2 * most + 4, dtype=torch.int64, device=device)
        # The blocks of each row, and how many of them the twins know.
        self._blocks: list[list[int]] = [[] for _ in range(batch)]
        self._known = [[0] * batch for _ in range(2)]

    def upload(self, sequences: SequenceOf[Sequence], vocab_size: int) -> None:
        """Write what the host knows of the sequences over what the device knew."""
        count, most = len(sequences), self.sizes.num_drafts
        params = [s.params for s in sequences]
        ints, floats = self._ints.on_host, self._floats.on_host
        for name, values in (
            ("last_tokens", [s.token_ids[-1] for s in sequences]),
            ("first_positions", [len(s) - 1 for s in sequences]),
            ("num_outputs", [s.num_output_tokens for s in sequences]),
            ("num_drafts", [min(len(s.drafts), most) for s in sequences]),
            ("min_tokens", [p.min_tokens for p in params]),
            ("max_tokens", [p.max_tokens for p in params]),
            ("num_speculative", [min(s.num_speculative_tokens, most) for s in sequences]),
            ("top_k", [min(p.top_k, vocab_size) for p in params]),
            ("seeds", [s.seed for s in sequences]),
            ("context_starts", [s.drafter_start for s in sequences]),
            ("feature_slots", [_feature_slot(s) for s in sequences]),
        ):
            ints[name][:count] = values
        for name in _FLOATS:
            floats[name][:count] = [getattr(p, name) for p in params]
        ints["active"][:] = 0
        ints["active"][:count] = 1
        ints["stop_ids"][:] = -1
        for row, sequence in enumerate(sequences):
            ids = sorted(sequence.stop_token_ids)
            ints["stop_ids"][row, : len(ids)] = ids
            drafts = sequence.drafts[:most]
            ints["drafts"][row, : len(drafts)] = drafts
        self._ints.upload()
        self._floats.upload()
        self._known = [[0] * len(known) for known in self._known]
        self.upload_tables(sequences)

    def upload_tables(self, sequences: SequenceOf[Sequence]) -> None:
        """Write the blocks that each sequence holds now; those that ended keep what they had."""
        known = self._known[0]
        tables = self._tables.on_host["tables"]
        for row, sequence in enumerate(sequences):
            # Who ended has none; the twin whose turn it is may not know the last ones.
            blocks = self._blocks[row] = sequence.block_table or self._blocks[row]
            if len(blocks) > known[row]:
                tables[row, known[row] : len(blocks)] = blocks[known[row] :]
                known[row] = len(blocks)
        self._tables.upload()
        self._known.reverse()


def _feature_slot(sequence: Sequence) -> int:
    ring = sequence.pending_features
    return NO_SLOT if ring is None else ring.slot
