"""What the host writes for a captured step, and what then stands on the device.

No kernel runs here; on a card the copies run behind the host's back.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from peagle.config import SamplingParams
from peagle.engine.sequence import Sequence, SequenceStatus

pytest.importorskip("triton", reason="needs triton")

from peagle.engine.decode_step import HostWritten, StepBuffers, StepSizes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, K, WIDTH, STOP_IDS, VOCAB = 5, 3, 12, 4, 100


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def sleep(device: torch.device) -> None:
    """Keep a card busy, so that copies are late."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


# ---- host and device ------------------------------------------------------------------------


def test_twins_take_turns(device: torch.device) -> None:
    """A copy that is under way reads one twin: the next is written into the other."""
    written = HostWritten({"a": (1000,)}, torch.int64, device)
    target = written.on_device["a"]
    seen, copies = [], []
    for value in range(1, 6):
        if len(copies) > 1:
            copies[-2].synchronize()  # one copy may be under way, as one step is in flight
        before = written.on_host["a"][0]
        assert before == max(value - 2, 0), "what was written two uploads ago"
        written.on_host["a"][:] = value
        sleep(device)
        written.upload()
        if device.type == "cuda":
            copies.append(torch.cuda.current_stream().record_event())
        # Already while the copy waits.
        assert written.on_host["a"][0] == value - 1
        seen.append(target.clone())
    assert [set(values.tolist()) for values in seen] == [{1}, {2}, {3}, {4}, {5}]


@pytest.mark.gpu
def test_a_late_copy_brings_what_was_uploaded() -> None:
    device = torch.device("cuda")
    written = HostWritten({"a": (100_000,)}, torch.int64, device)
    written.on_host["a"][:] = 1
    sleep(device)
    event = torch.cuda.Event()
    written.upload()
    event.record()
    written.on_host["a"][:] = 2  # of the next upload
    assert not event.query(), "the host has waited for the copy"
    torch.cuda.synchronize()
    assert written.on_device["a"].eq(1).all()


# ---- sequences ------------------------------------------------------------------------------


def make_buffers(device: torch.device, rates: tuple[float, ...] | None = None) -> StepBuffers:
    sizes = StepSizes(
        num_seqs=ROWS,
        num_drafts=K,
        table_width=WIDTH,
        num_stop_ids=STOP_IDS,
        block_size=4,
        max_model_len=48,
        max_draft_len=40,
        synthetic_rates=rates,
    )
    return StepBuffers(sizes, device)


def make_sequence(seq_id: int, rng: random.Random) -> Sequence:
    """As it may stand between two steps."""
    params = SamplingParams(
        max_tokens=rng.randrange(20, 30),
        min_tokens=rng.randrange(3),
        temperature=rng.choice([0.0, 0.25, 0.5]),
        top_k=rng.choice([0, 7, 10_000]),
        top_p=rng.choice([1.0, 0.5]),
        min_p=rng.choice([0.0, 0.125]),
    )
    stops = frozenset(rng.sample(range(VOCAB), rng.randrange(STOP_IDS + 1)))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
    sequence = Sequence(
        seq_id,
        prompt,
        params,
        seed=rng.randrange(2**63),
        stop_token_ids=stops,
        num_speculative_tokens=rng.randrange(K + 1),
        drafter_start=rng.randrange(3),
    )
    sequence.token_ids += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
    sequence.drafts = [rng.randrange(VOCAB) for _ in range(sequence.num_speculative_tokens)]
    sequence.block_table = rng.sample(range(1, 500), rng.randrange(1, 5))
    return sequence


def end(sequence: Sequence) -> None:
    """As the scheduler leaves one that has ended."""
    sequence.status, sequence.block_table = SequenceStatus.FINISHED, []


def check(buffers: StepBuffers, sequences: list[Sequence]) -> None:
    """What the device holds of each sequence, and that the rows behind are empty."""
    state, limits, sampling = buffers.state, buffers.limits, buffers.sampling
    for row, s in enumerate(sequences):
        expected: list[tuple[Any, float]] = [
            (state.last_tokens_B, s.token_ids[-1]),
            (state.first_positions_B, len(s.token_ids) - 1),
            (state.num_outputs_B, len(s.output_token_ids)),
            (state.num_drafts_B, len(s.drafts)),
            (state.finish_B, 0),
            (limits.min_tokens_B, s.params.min_tokens),
            (limits.max_tokens_B, s.params.max_tokens),
            (limits.num_speculative_B, s.num_speculative_tokens),
            (sampling.temperature_B, s.params.temperature),
            (sampling.top_k_B, min(s.params.top_k, VOCAB)),
            (sampling.top_p_B, s.params.top_p),
            (sampling.min_p_B, s.params.min_p),
            (sampling.seeds_B, s.seed),
            (buffers.active_B, 1),
            (buffers.context_starts_B, s.drafter_start),
        ]
        for index, (tensor, value) in enumerate(expected):
            assert tensor[row].item() == value, (row, index)
        stops = limits.stop_ids_BE[row].tolist()
        assert {*stops} - {-1} == s.stop_token_ids
        assert stops.count(-1) == STOP_IDS - len(s.stop_token_ids)
        assert buffers.drafts_BK[row, : len(s.drafts)].tolist() == s.drafts
        assert buffers.block_tables_BM[row, : len(s.block_table)].tolist() == s.block_table
    behind = slice(len(sequences), None)
    assert buffers.active_B[behind].eq(0).all()
    assert limits.stop_ids_BE[behind].eq(-1).all()


@pytest.mark.parametrize("seed", range(5))
def test_each_batch_replaces_the_one_before(device: torch.device, seed: int) -> None:
    """Longer ones and shorter ones, with tables that grow in between."""
    rng, buffers = random.Random(seed), make_buffers(device)
    for batch in range(6):
        count = ROWS if batch == 0 else rng.randrange(1, ROWS + 1)
        sequences = [make_sequence(i, rng) for i in range(count)]
        # What the steps before have made of it on the device.
        for name in buffers.state.__dataclass_fields__:
            getattr(buffers.state, name).fill_(2)
        buffers.drafts_BK.fill_(-5)
        buffers.upload(sequences, VOCAB)
        check(buffers, sequences)
        # Blocks that come over several steps all arrive: each twin misses what the other brought.
        for _ in range(rng.randrange(6)):
            for row, sequence in enumerate(sequences):
                if row == 0 or rng.random() < 0.4:
                    room = WIDTH - len(sequence.block_table)
                    sequence.block_table += rng.sample(range(500, 900), min(room, rng.randrange(3)))
            sleep(device)
            buffers.drafts_BK.add_(1)  # as a step on the device, which tables leave alone
            for sequence in sequences:
                sequence.drafts = [token + 1 for token in sequence.drafts]
            buffers.upload_tables(sequences)
            check(buffers, sequences)


def test_a_step_of_fewer_drafts_takes_the_first(device: torch.device) -> None:
    buffers, sequence = make_buffers(device), make_sequence(0, random.Random(0))
    sequence.num_speculative_tokens = K + 2
    sequence.drafts = list(range(40, 42 + K))
    buffers.upload([sequence], VOCAB)
    assert buffers.state.num_drafts_B[0] == buffers.limits.num_speculative_B[0] == K
    assert buffers.drafts_BK[0].tolist() == sequence.drafts[:K]
    assert len(sequence.drafts) == K + 2


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_who_has_ended_keeps_its_row(device: torch.device, num_before: int) -> None:
    """Its blocks are gone, and on the device it still stands among those that go on.

    It ends after so many uploads of tables: one twin may not have known it yet.
    """
    buffers, rng = make_buffers(device), random.Random(1)
    # A batch before, of which the rows must not come back.
    buffers.upload([make_sequence(i, rng) for i in range(ROWS)], VOCAB)
    buffers.upload_tables([])
    sequences = [make_sequence(i, rng) for i in range(3)]
    buffers.upload(sequences, VOCAB)
    for block in range(num_before):
        for sequence in sequences:
            sequence.block_table.append(600 + block)
        buffers.upload_tables(sequences)
    kept = list(sequences[1].block_table)
    end(sequences[1])
    for block in range(3):
        sequences[0].block_table.append(700 + block)
        buffers.upload_tables(sequences)
        assert buffers.block_tables_BM[1, : len(kept)].tolist() == kept
        for row, sequence in enumerate(sequences):
            blocks = sequence.block_table
            assert buffers.block_tables_BM[row, : len(blocks)].tolist() == blocks, row


def test_sizes_without_drafts_and_with_made_up_acceptance(device: torch.device) -> None:
    sizes = StepSizes(2, 0, 6, STOP_IDS, block_size=4, max_model_len=24, max_draft_len=0)
    plain = StepBuffers(sizes, device)
    assert plain.drafts_BK.shape == (2, 1)
    assert plain.report_RX.shape == (3, 6)
    assert plain.synthetic is None
    rates = (0.75, 0.5, 0.25)
    synthetic = make_buffers(device, rates).synthetic
    assert synthetic is not None
    assert synthetic.rates_K.tolist() == list(rates)
