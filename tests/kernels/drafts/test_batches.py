"""The drafter's batch against a loop that reads the table of the method, sequence by sequence.

With tokens x_0..x_n, of which the target has run x_0..x_{n-1}: slot p holds token x_{p+1}, the
feature of position p and position id p; then come mask slots at n, n + 1, ...
"""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.drafts.batches import DraftBatch, expand_draft_batch, slot_mapping

MASK_TOKEN = 999
MAX_DRAFTS = 8


@dataclass(frozen=True)
class OneSequence:
    """A sequence as the target ran it: `rows` tokens from position `first` on."""

    first: int
    rows: int
    accepted: int
    masks: int = 0


@dataclass(frozen=True)
class Case:
    """A batch, its target tokens and its block tables (the blocks are dealt in random order)."""

    sequences: list[OneSequence]
    block_size: int
    max_model_len: int
    seed: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [[rng.randrange(900) for _ in range(s.rows)] for s in self.sequences]

    @property
    def next_tokens(self) -> list[int]:
        rng = random.Random(self.seed + 1)
        return [rng.randrange(900) for _ in self.sequences]

    @property
    def block_tables(self) -> list[list[int]]:
        longest = max(s.first + s.rows + s.masks for s in self.sequences)
        width = -(-longest // self.block_size)
        blocks = list(range(width * len(self.sequences)))
        random.Random(self.seed + 2).shuffle(blocks)
        return [blocks[i * width : (i + 1) * width] for i in range(len(self.sequences))]


def expand(case: Case) -> DraftBatch:
    rows = [s.rows for s in case.sequences]
    return expand_draft_batch(
        torch.tensor([token for tokens in case.tokens for token in tokens]),
        torch.tensor([s.first + i for s in case.sequences for i in range(s.rows)]),
        torch.tensor([sum(rows[:i]) for i in range(len(rows) + 1)]),
        torch.tensor([s.accepted for s in case.sequences]),
        torch.tensor(case.next_tokens),
        torch.tensor(case.block_tables),
        block_size=case.block_size,
        num_mask_slots_B=torch.tensor([s.masks for s in case.sequences]),
        max_drafts=MAX_DRAFTS,
        mask_token_id=MASK_TOKEN,
        max_model_len=case.max_model_len,
    )


def reference(case: Case) -> dict[str, list[int]]:
    tokens_S, positions_S, slots_S, features_S, lens = [], [], [], [], [0]
    seq_lens, last_ntp = [], []
    total_rows = sum(s.rows for s in case.sequences)
    row = 0
    for one, run, bonus, table in zip(
        case.sequences, case.tokens, case.next_tokens, case.block_tables, strict=True
    ):
        # What the sequence holds now: x[p] for the positions that the target ran and kept, and n.
        x = {one.first + i: run[i] for i in range(one.accepted + 1)}
        n = one.first + one.accepted + 1
        x[n] = bonus
        for p in range(one.first, n + one.masks):
            is_ntp = p < n
            tokens_S.append(x[p + 1] if is_ntp else MASK_TOKEN)
            features_S.append(row + p - one.first if is_ntp else total_rows)
            positions_S.append(p)
            block = table[p // case.block_size]
            slot = block * case.block_size + p % case.block_size
            slots_S.append(slot if p < case.max_model_len else -1)
            if p == n - 1:
                last_ntp.append(len(tokens_S) - 1)
        lens.append(len(tokens_S))
        seq_lens.append(n + one.masks)
        row += one.rows
    return {
        "tokens_R": tokens_S,
        "positions_R": positions_S,
        "slots_R": slots_S,
        "feature_rows_R": features_S,
        "query_start_loc": lens,
        "seq_lens_B": seq_lens,
        "last_ntp_B": last_ntp,
        "draft_rows_BK": [
            [last + min(j, one.masks) for j in range(MAX_DRAFTS)]
            for last, one in zip(last_ntp, case.sequences, strict=True)
        ],
    }


def check(case: Case) -> DraftBatch:
    batch = expand(case)
    for name, expected in reference(case).items():
        found = getattr(batch, name)
        assert found.dtype == torch.int64, name
        assert found.tolist() == expected, name
    return batch


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, 9))
        accepted = draw(st.integers(0, rows - 1))
        first, masks = draw(st.integers(0, 20)), draw(st.integers(0, 7))
        sequences.append(OneSequence(first, rows, accepted, masks))
    return Case(
        sequences,
        block_size=draw(st.integers(1, 7)),
        max_model_len=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(cases())
def test_equals_the_loop(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_decode_step_runs_at_most_2k_slots(k: int) -> None:
    # Every count of accepted drafts, in one ragged batch.
    case = Case([OneSequence(10 * a, k + 1, a, k - 1) for a in range(k + 1)], 4, 1000)
    batch = check(case)
    assert batch.query_start_loc.diff().tolist() == [a + k for a in range(k + 1)]
    assert max(batch.query_start_loc.diff().tolist()) == 2 * k


def test_worked_example() -> None:
    # Target ran [newest x_5, drafts d1 d2 d3] at positions 5..8 and accepted d1: x_6 = d1, then
    # emitted x_7. K = 3: slots 5 and 6 have features, 7 and 8 are masked.
    batch = expand_draft_batch(
        torch.tensor([50, 61, 62, 63]),
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([0, 4]),
        torch.tensor([1]),
        torch.tensor([70]),
        torch.tensor([[3, 0, 2]]),
        block_size=4,
        num_mask_slots_B=torch.tensor([2]),
        max_drafts=MAX_DRAFTS,
        mask_token_id=MASK_TOKEN,
        max_model_len=100,
    )
    assert batch.tokens_R.tolist() == [61, 70, MASK_TOKEN, MASK_TOKEN]
    assert batch.positions_R.tolist() == [5, 6, 7, 8]
    assert batch.feature_rows_R.tolist() == [0, 1, 4, 4]
    assert batch.slots_R.tolist() == [1, 2, 3, 8]
    assert batch.seq_lens_B.tolist() == [9]
    assert batch.last_ntp_B.tolist() == [1]


def test_slot_mapping_past_the_block_table_is_padding() -> None:
    # Beyond the limit the table is not read at all: it may be too short.
    slots = slot_mapping(
        torch.tensor([[7, 1], [4, 5]]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([0, 4, 500, 3, 5, 6]),
        block_size=3,
        limit=6,
    )
    assert slots.tolist() == [21, 4, -1, 15, 17, -1]
