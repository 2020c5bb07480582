"""The corrected logits of a slot against a loop over rows, and against `DraftCorrection.add`.

On a CPU the kernel runs under Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from peagle.models.correction import DraftCorrection
from tests.corrections import random_correction
from tests.kernels.devices import DEVICES, INTERPRETED, compile_for_card

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.drafts import correction_triton
from peagle.kernels.drafts.correction_triton import WalkScratch, correct_logits, walk_chains

# Rows, W, r, DV and V: whole blocks and beside them, one row and more than a program's.
SIZES = [(1, 64, 16, 128, 128), (3, 5, 1, 7, 30), (16, 70, 64, 129, 300), (37, 256, 65, 500, 500)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


Weights = tuple[Tensor, Tensor, Tensor]


def made(
    size: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Logits, states and drafts, two of every three rows and columns of larger tensors; weights."""
    rows, width, rank, vocab_size, num_ids = size
    torch.manual_seed(0)
    floats = (
        torch.randn(rows, 3, vocab_size),
        torch.randn(rows, 2, width),
        torch.randn(num_ids, width),
        torch.randn(rank, width) / width**0.5,
        torch.randn(vocab_size, rank) / rank**0.5,
    )
    logits, states, tokens, down, weight = (x.to(device, dtype) for x in floats)
    drafts = torch.randint(num_ids, (rows, 4), device=device)
    return logits, states, drafts, (tokens, down, weight)


def by_loops(logits_NV: Tensor, states_NW: Tensor, drafts_N: Tensor, weights: Weights) -> Tensor:
    """The reference: a row at a time, in float64."""
    tokens, down, w = weights
    out = logits_NV.double().clone()
    for n, draft in enumerate(drafts_N.tolist()):
        inner = states_NW[n].double() + tokens[draft].double()
        silu = [float(x * torch.sigmoid(x)) for x in inner]
        term = [
            sum(a * x for a, x in zip(row, silu, strict=True)) for row in down.double().tolist()
        ]
        out[n] += w.double() @ torch.tensor(term, dtype=torch.float64, device=w.device)
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_slot_of_a_batch(size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter's product of bfloat16 matrices is wrong")
    logits, states, drafts, weights = made(size, dtype, device)
    expected = by_loops(logits[:, 1], states[:, 1], drafts[:, 2], weights)
    before = logits.clone()
    correct_logits(logits[:, 1], states[:, 1], drafts[:, 2], weights)
    torch.testing.assert_close(
        logits[:, 1].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(logits[:, ::2], before[:, ::2]), "other slots are not touched"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_slot_of_a_batch_with_several(
    size: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter's product of bfloat16 matrices is wrong")
    logits, states, drafts, weights = made(size, dtype, device)
    every = [weights, tuple(x.flip(0) for x in weights), tuple(x * 0.5 for x in weights)]
    which = torch.arange(len(logits), device=device) % 3
    rows = [
        by_loops(logits[n : n + 1, 1], states[n : n + 1, 1], drafts[n : n + 1, 2], every[n % 3])
        for n in range(len(logits))
    ]
    tokens, down, weight = (torch.stack(parts) for parts in zip(*every, strict=True))
    correct_logits(logits[:, 1], states[:, 1], drafts[:, 2], (tokens, down, weight), which)
    torch.testing.assert_close(
        logits[:, 1].double(), torch.cat(rows), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert len({tuple(row.flatten().tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_does_what_drafting_by_torch_does(device: str) -> None:
    torch.manual_seed(0)
    correction = random_correction(24, rank=8, width=40).to(device)
    embedding, lm_head = torch.randn(50, 24, device=device), torch.randn(30, 24, device=device)
    ready = DraftCorrection(correction, embedding, lm_head)
    normed, logits = torch.randn(5, 4, 24, device=device), torch.randn(5, 4, 30, device=device)
    states, tokens = ready.start(normed), torch.randint(50, (5,), device=device)
    expected = ready.add(logits[:, 2], states[:, 2], tokens)
    assert (expected - logits[:, 2]).abs().max() > 0.1
    correct_logits(logits[:, 2], states[:, 2], tokens, ready.weights)
    torch.testing.assert_close(logits[:, 2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_any_token_will_do_where_drafts_mean_nothing(device: str) -> None:
    logits, states, _, weights = made(SIZES[1], torch.float32, device)
    wild = torch.tensor([-1, 2147483647, 0], device=device)
    expected = by_loops(logits[:, 0], states[:, 0], wild.clamp(0, len(weights[0]) - 1), weights)
    correct_logits(logits[:, 0], states[:, 0], wild, weights)
    torch.testing.assert_close(logits[:, 0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank_and_width", [(8, 40), (100, 300)], ids=str)
@pytest.mark.parametrize(
    ("rows", "num_slots", "vocab", "most_chunks"),
    [(1, 1, 30, 256), (5, 4, 129, 256), (17, 3, 1300, 2), (3, 7, 700, 256)],
)
def test_a_walk_is_a_loop_over_slots(
    device: str,
    rows: int,
    num_slots: int,
    vocab: int,
    most_chunks: int,
    rank_and_width: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch, a slot at a time; two of three rows and columns of larger tensors."""
    monkeypatch.setattr(correction_triton, "_MOST_CHUNKS", most_chunks)
    torch.manual_seed(vocab)
    rank, width = rank_and_width
    correction = random_correction(24, rank=rank, width=width).to(device)
    embedding, lm_head = (torch.randn(n, 24, device=device) for n in (2 * vocab + 1, vocab))
    ready = DraftCorrection(correction, embedding, lm_head)
    normed = torch.randn(rows, num_slots, 24, device=device)
    logits = torch.randn(rows, num_slots + 1, vocab + 3, device=device)[:, 1:, :vocab]
    logits[:, :, vocab // 2 :] *= -1
    before, states = logits.clone(), ready.start(normed)
    ids = torch.arange(vocab, device=device)
    out = torch.full((rows, num_slots + 2), -77, dtype=torch.int64, device=device)
    for d2t in (None, ids % 2 + ids):
        expected = list[Tensor]()
        for j in range(num_slots):
            slot = before[:, j]
            if j:
                slot = ready.add(slot, states[:, j], expected[-1])
            chosen = slot.argmax(-1)
            expected.append(chosen if d2t is None else chosen + d2t[chosen])
        scratch = WalkScratch.allocate(rows, ready.weights)
        scratch.max_2NC.fill_(torch.inf)
        walk_chains(logits, states, d2t, ready.weights, scratch, out[:, 1:-1])
        assert torch.equal(out[:, 1:-1], torch.stack(expected, 1))
        assert bool((out[:, [0, -1]] == -77).all()), "written beside its places"
    assert torch.equal(logits, before)


@pytest.mark.parametrize("device", DEVICES)
def test_broken_logits_give_some_token_and_spoil_no_other_row(device: str) -> None:
    torch.manual_seed(0)
    correction = random_correction(24, rank=8, width=40).to(device)
    embedding, lm_head = torch.randn(50, 24, device=device), torch.randn(30, 24, device=device)
    ready = DraftCorrection(correction, embedding, lm_head)
    normed, logits = torch.randn(3, 4, 24, device=device), torch.randn(3, 4, 30, device=device)
    found = []
    for broken in (False, True):
        if broken:
            normed[1, 2], logits[1, 2], logits[1, 3] = torch.nan, torch.nan, -torch.inf
        out = torch.zeros(3, 4, dtype=torch.int64, device=device)
        states, scratch = ready.start(normed), WalkScratch.allocate(3, ready.weights)
        d2t = torch.full((30,), 20, device=device)
        walk_chains(logits, states, d2t, ready.weights, scratch, out)
        found.append(out)
    assert torch.equal(found[0][::2], found[1][::2])
    assert bool(((found[1] >= 20) & (found[1] < 50)).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank_and_width", [(8, 40), (100, 300)], ids=str)
@pytest.mark.parametrize(("rows", "vocab", "most_chunks"), [(1, 30, 256), (21, 1300, 2)])
def test_each_row_has_its_own_of_several_corrections(
    device: str,
    rows: int,
    vocab: int,
    most_chunks: int,
    rank_and_width: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot and a walk, against each row by torch with its correction alone; odd slots too."""
    monkeypatch.setattr(correction_triton, "_MOST_CHUNKS", most_chunks)
    torch.manual_seed(vocab)
    rank, width = rank_and_width
    made = [
        random_correction(24, rank=rank, width=width, num_slots=j, seed=j).to(device)
        for j in (3, 1, 2, 4)
    ]
    ends = [torch.randn(n, 24, device=device) for n in (2 * vocab + 1, vocab)]
    alone, ready = [DraftCorrection(one, *ends) for one in made], DraftCorrection(made, *ends)
    # The last rows are of another program, and number 3 is of none.
    which = [n % 3 for n in range(15)] + [2] * 6
    which = torch.tensor(which[:rows], device=device)
    normed = torch.randn(rows, 5, 24, device=device)
    logits = torch.randn(rows, 5, vocab, device=device)
    states = ready.start(normed, which)
    drafts = torch.randint(2 * vocab, (rows,), device=device)
    expected, slots = list[Tensor](), list[Tensor]()
    for n, number in enumerate(which.tolist()):
        own, chosen = alone[number], list[Tensor]()
        own_states = own.start(normed[n : n + 1])
        torch.testing.assert_close(states[n : n + 1], own_states, rtol=1e-5, atol=1e-5)
        slots.append(own.add(logits[n : n + 1, 2], own_states[:, 2], drafts[n : n + 1]))
        for j in range(5):
            slot = logits[n : n + 1, j]
            chosen.append((own.add(slot, own_states[:, j], chosen[-1]) if j else slot).argmax(-1))
        expected.append(torch.cat(chosen))
    out = torch.zeros_like(states[..., 0], dtype=torch.int64)
    scratch = WalkScratch.allocate(rows, ready.weights)
    walk_chains(logits, states, None, ready.weights, scratch, out, which)
    assert torch.equal(out, torch.stack(expected))
    by_torch = ready.add(logits[:, 2], states[:, 2], drafts, which)
    correct_logits(logits[:, 2], states[:, 2], drafts, ready.weights, which)
    for found in (by_torch, logits[:, 2]):
        torch.testing.assert_close(found, torch.cat(slots), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_kernels_of_corrections_compile_for_a_card() -> None:
    found = compile_for_card("corrections")
    stacks = [kernel["stack"] for kernel in found.values()]
    assert len(stacks) == 8
    assert max(kernel["shared"] for kernel in found.values()) < 160 * 1024
    assert max(stacks[:3]) <= 8 and max(stacks) <= 72, "full vocabularies and wide terms spill"
