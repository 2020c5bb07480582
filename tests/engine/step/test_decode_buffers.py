"""What the host writes for a captured step, and what then stands on the device.

No kernel runs here; on a card the copies run behind the host's back.
"""

import random
from typing import Any

import pytest
import torch

from peagle.config import CandidateTrees, SamplingParams
from peagle.engine.sequence import Sequence
from peagle.kernels.trees.survival import MIN_SCORE, SCORE_UNIT
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from tests.conftest import make_drafter

pytest.importorskip("triton", reason="needs triton")

from peagle.engine.step.decode_step import BufferSizes, DecodeBuffers, DecodeRows
from peagle.engine.step.drawn_drafts import DrawnDrafts
from peagle.kernels.upload import upload_ints

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, K, WIDTH, STOP_IDS, VOCAB = 5, 3, 12, 4, 100


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def sleep(device: torch.device) -> None:
    """Keep a card busy, so that copies are late."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_an_upload() -> None:
    device = torch.device("cuda")
    upload_ints([1], device)  # allocates
    sleep(device)
    event = torch.cuda.Event()
    found = [upload_ints([value] * 1000, device) for value in range(1, 6)]
    event.record()
    assert not event.query(), "the host has waited for a copy"
    torch.cuda.synchronize()
    assert [set(values.tolist()) for values in found] == [{1}, {2}, {3}, {4}, {5}]


# ---- sequences ----


def make_buffers(
    device: torch.device,
    rates: tuple[float, ...] | None = None,
    trees: CandidateTrees | None = None,
) -> DecodeBuffers:
    sizes = BufferSizes(
        num_seqs=ROWS,
        num_rows=ROWS,
        table_width=WIDTH,
        num_stop_ids=STOP_IDS,
        block_size=4,
        max_model_len=48,
        max_draft_len=40,
        synthetic_rates=rates,
        trees=trees,
    )
    buffers = DecodeBuffers(sizes, device)
    buffers.switch(K)
    return buffers


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


class Host:
    """What a test has written, beside the buffers that should hold it."""

    def __init__(self, device: torch.device) -> None:
        self.buffers, self.device = make_buffers(device), device
        self.sequences: list[Sequence | None] = [None] * ROWS
        self.num_blocks = [0] * ROWS

    def write(self, rows: dict[int, Sequence | None]) -> None:
        sleep(self.device)
        self.buffers.write(rows, VOCAB)
        for row, sequence in rows.items():
            self.sequences[row], self.num_blocks[row] = sequence, 0
        self.add_blocks()

    def add_blocks(self) -> None:
        entries = []
        for row, sequence in enumerate(self.sequences):
            if sequence is not None:
                blocks = sequence.block_table
                entries += [(row, i, blocks[i]) for i in range(self.num_blocks[row], len(blocks))]
                self.num_blocks[row] = len(blocks)
        if entries:
            self.buffers.add_blocks(entries)

    def move(self, moves: dict[int, int]) -> None:
        self.buffers.move(moves)
        self.buffers.write(dict.fromkeys(moves), VOCAB)
        for old, new in moves.items():
            self.sequences[new], self.num_blocks[new] = self.sequences[old], self.num_blocks[old]
            self.sequences[old] = None

    @torch.inference_mode()
    def step(self) -> None:
        """Change state and drafts as a step on the device would; the host then knows it too."""
        rows = self.buffers.rows(ROWS, K)
        rows.drafts_BK.add_(1)
        rows.state.first_positions_B.add_(1)
        rows.state.num_outputs_B.add_(1)
        for sequence in self.sequences:
            if sequence is not None:
                sequence.drafts = [token + 1 for token in sequence.drafts]
                sequence.token_ids.append(sequence.token_ids[-1])

    def check(self) -> None:
        check(self.buffers.rows(ROWS, self.buffers.k), self.sequences)


def check(rows: DecodeRows, sequences: list[Sequence | None]) -> None:
    """What the device holds of each sequence, and that the other rows are empty."""
    state, limits, sampling = rows.state, rows.limits, rows.sampling
    k = rows.drafts_BK.shape[1]
    for row, s in enumerate(sequences):
        if s is None:
            assert rows.active_B[row] == 0
            assert limits.stop_ids_BE[row].eq(-1).all()
            continue
        expected: list[tuple[Any, float]] = [
            (state.last_tokens_B, s.token_ids[-1]),
            (state.first_positions_B, len(s.token_ids) - 1),
            (state.num_outputs_B, len(s.output_token_ids)),
            (state.num_draft_tokens_B, min(len(s.drafts), k)),
            (state.finish_B, 0),
            (limits.min_tokens_B, s.params.min_tokens),
            (limits.max_tokens_B, s.params.max_tokens),
            (limits.k_B, min(s.num_speculative_tokens, k)),
            (sampling.temperature_B, s.params.temperature),
            (sampling.top_k_B, min(s.params.top_k, VOCAB)),
            (sampling.top_p_B, s.params.top_p),
            (sampling.min_p_B, s.params.min_p),
            (sampling.seeds_B, s.seed),
            (rows.active_B, 1),
            (rows.context_starts_B, s.drafter_start),
        ]
        for index, (tensor, value) in enumerate(expected):
            assert tensor[row].item() == value, (row, index)
        stops = limits.stop_ids_BE[row].tolist()
        assert {*stops} - {-1} == s.stop_token_ids
        assert stops.count(-1) == STOP_IDS - len(s.stop_token_ids)
        drafts = s.drafts[:k]
        assert rows.drafts_BK[row, : len(drafts)].tolist() == drafts
        assert rows.block_tables_BM[row, : len(s.block_table)].tolist() == s.block_table


def test_trees_join_move_and_stay_whole(device: torch.device) -> None:
    """A step of fewer nodes drafts less deeply and drops none; one of none drops all."""
    buffers = make_buffers(device, trees=CandidateTrees(2, K, max_nodes=6))
    sequence = make_sequence(0, random.Random(0))
    sequence.num_speculative_tokens = K
    sequence.drafts, sequence.draft_parents = [7, 8, 9, 7, 5], [0, 0, 1, 2, 3]
    sequence.draft_scores = [-0.5, -0.75, -1.0, -2.0, -float("inf")]
    buffers.write({1: sequence, 2: None}, VOCAB)
    buffers.move({1: 3})
    for k in (6, 1, 2):
        buffers.switch(k)
        rows = buffers.rows(ROWS, k)
        assert rows.drafts_BK[3].tolist() == [*sequence.drafts, 0]
        assert rows.nodes(0)[3].tolist() == [*sequence.draft_parents, 0]
        assert int(rows.state.num_draft_tokens_B[3]) == 5
        expected = [*sequence.draft_scores[:4], MIN_SCORE, 0]
        assert (rows.nodes(1)[3] * SCORE_UNIT).tolist() == expected
        assert int(rows.limits.k_B[3]) == min(K, k + 1)
    for k in (0, 6):
        buffers.switch(k)
        assert int(buffers.rows(ROWS, k).state.num_draft_tokens_B[3]) == 0


@pytest.mark.parametrize("seed", range(8))
def test_sequences_join_leave_move_and_grow(device: torch.device, seed: int) -> None:
    """Between steps that change the state on the device, which the other rows keep."""
    rng, host = random.Random(seed), Host(device)
    for number in range(25):
        rows = rng.sample(range(ROWS), rng.randrange(ROWS + 1))
        joining = {row: make_sequence(10 * number + row, rng) for row in rows}
        written: dict[int, Sequence | None] = {**joining}
        written |= {row: None for row in rows if rng.random() < 0.3}
        if written:
            host.write(written)
        host.check()
        taken = [row for row, s in enumerate(host.sequences) if s is not None]
        free = [row for row, s in enumerate(host.sequences) if s is None]
        if taken and free:
            count = rng.randrange(1, min(len(taken), len(free)) + 1)
            host.move(dict(zip(rng.sample(taken, count), rng.sample(free, count), strict=True)))
            host.check()
        host.step()
        for sequence in host.sequences:
            if sequence is not None and rng.random() < 0.5:
                room = WIDTH - len(sequence.block_table)
                sequence.block_table += rng.sample(range(500, 900), min(room, rng.randrange(3)))
        host.add_blocks()
        host.check()


def test_k_changes_between_steps(device: torch.device) -> None:
    """Fewer drafts are the first ones; more are made by the step that has them."""
    rng, host = random.Random(0), Host(device)
    sequences = [make_sequence(row, rng) for row in range(ROWS)]
    for sequence in sequences:
        sequence.num_speculative_tokens = K + 2
        sequence.drafts = list(range(40, 42 + K))
    host.write(dict(enumerate(sequences)))
    host.check()
    host.buffers.switch(1)
    for sequence in sequences:
        sequence.drafts = sequence.drafts[:1]
    host.check()
    host.buffers.switch(K)
    rows = host.buffers.rows(ROWS, K)
    assert rows.state.num_draft_tokens_B.tolist() == [1] * ROWS
    assert rows.limits.k_B.tolist() == [K] * ROWS
    assert rows.drafts_BK[:, 0].tolist() == [40] * ROWS
    host.buffers.switch(0)
    rows = host.buffers.rows(ROWS, 0)
    assert rows.state.num_draft_tokens_B.eq(0).all() and rows.limits.k_B.eq(0).all()
    assert rows.drafts_BK.shape == (ROWS, 1)


@torch.inference_mode()
def test_steps_of_fewer_rows_see_the_first(device: torch.device) -> None:
    host = Host(device)
    host.write({row: make_sequence(row, random.Random(row)) for row in range(ROWS)})
    rows = host.buffers.rows(2, K)
    check(rows, host.sequences[:2])
    assert rows.block_tables_BM.is_contiguous() and rows.drafts_BK.is_contiguous()
    rows.state.num_outputs_B.add_(7)
    assert host.buffers.rows(ROWS, K).state.num_outputs_B[:2].equal(rows.state.num_outputs_B)


def test_made_up_acceptance(device: torch.device) -> None:
    assert make_buffers(device).rows(2, K).synthetic is None
    rates = (0.75, 0.5, 0.25)
    synthetic = make_buffers(device, rates).rows(2, K).synthetic
    assert synthetic is not None
    assert synthetic.rates_K.tolist() == list(rates)


def test_outputs_of_a_pass_are_kept(device: torch.device) -> None:
    buffers = make_buffers(device)
    for count in (5, 3):
        outputs = [torch.randn(count, width, device=device) for width in (4, 6)]
        kept = buffers.copy_outputs(outputs)
        assert all(one.equal(other) for one, other in zip(kept, outputs, strict=True))
    assert kept[0].data_ptr() == buffers.copy_outputs([o[:1] for o in outputs])[0].data_ptr()


# ---- drawn drafts ----


def make_head(target: TargetModel, device: torch.device, draft_vocab_size: int) -> Drafter:
    return make_drafter(target, draft_vocab_size=draft_vocab_size).to(device)


def random_probs(head: Drafter, num_draft_tokens: int, seed: int) -> Any:
    """q in the target vocabulary, of what the head can draft."""
    generator = torch.Generator().manual_seed(seed)
    probs_KV = torch.zeros(num_draft_tokens, head.config.vocab_size)
    ids = head.target_ids().cpu()
    probs_KV[:, ids] = torch.rand(num_draft_tokens, len(ids), generator=generator).softmax(-1)
    return probs_KV.to(head.fc.weight.device)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_probabilities_come_and_go_with_a_sequence(
    target: TargetModel, device: torch.device, share: float
) -> None:
    """To the last bit, through moves and changes of K; drafts without any have q = 0."""
    head = make_head(target, device, int(share * target.vocab_size))
    buffers = DecodeBuffers(make_buffers(device).sizes, device, DrawnDrafts(head, ROWS, K))
    buffers.switch(K)
    drawn, rng = buffers.drawn, random.Random(0)
    assert drawn is not None
    sequences = {row: make_sequence(row, rng) for row in range(4)}
    wanted = [random_probs(head, num_draft_tokens, 9) for num_draft_tokens in (K, K + 2, 1)]
    for row, probs_KV in enumerate(wanted):
        sequences[row].draft_probs_KV = probs_KV
    buffers.write(sequences, VOCAB)
    buffers.move({1: 4})
    buffers.write({1: None}, VOCAB)
    buffers.switch(1)
    buffers.switch(K)
    assert drawn.read(0).equal(wanted[0])
    assert drawn.read(4).equal(wanted[1][:K])
    assert drawn.read(2)[:1].equal(wanted[2]) and not drawn.read(2)[1:].any()
    assert not drawn.read(1).any() and not drawn.read(3).any()


def test_steps_without_drafts_have_no_probabilities(
    target: TargetModel, device: torch.device
) -> None:
    head = make_head(target, device, 20)
    buffers = DecodeBuffers(make_buffers(device).sizes, device, DrawnDrafts(head, ROWS, K))
    probs = buffers.rows(2, 2).draft_probs
    assert probs is not None and probs.probs_BKD.shape == (2, K, 20)
    assert buffers.rows(2, 0).draft_probs is None
    assert make_buffers(device).rows(2, 2).draft_probs is None
