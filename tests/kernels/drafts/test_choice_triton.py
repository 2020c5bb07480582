"""The choice of drafts against a search row by row, and EAGLE-3's passes against slot_mapping.

On a CPU the kernels run under Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts.batches import slot_mapping
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.drafts.choice_triton import (
    ChainBuffers,
    ChoiceScratch,
    choose_drafts,
    plan_chain,
)
from peagle.kernels.sampling.probabilities_triton import chunk_size

CPU = "cpu"
POISON = -77
# Rows and vocabularies: one chunk and several, powers of two and beside them, all chunk sizes.
SIZES = [(1, 1), (3, 97), (2, 2048), (5, 2049), (12, 4100), (17, 4097), (64, 8191), (65, 8193)]


# ---- choosing ----


def first_greatest(logits_NV: Tensor, d2t: Tensor | None) -> list[int]:
    """The reference: a row at a time, the first of the greatest."""
    found = []
    for row in logits_NV.float().cpu():
        token = int((row == row.max()).nonzero()[0])
        found.append(token if d2t is None else token + int(d2t[token]))
    return found


def poisoned_scratch(num_rows: int, vocab_size: int, device: str) -> ChoiceScratch:
    """What another batch may have left there."""
    scratch = ChoiceScratch.allocate(num_rows, vocab_size, device)
    scratch.max_NC.fill_(torch.inf)
    scratch.argmax_NC.fill_(POISON)
    return scratch


def choose(logits_NV: Tensor, d2t: Tensor | None = None) -> list[int]:
    num_rows, vocab_size = logits_NV.shape
    device = logits_NV.device.type
    out = torch.full((num_rows + 1,), POISON, dtype=torch.int64, device=device)
    scratch = poisoned_scratch(num_rows, vocab_size, device)
    choose_drafts(logits_NV, d2t, scratch, out[:num_rows])
    assert out[num_rows] == POISON, "written beyond its end"
    return out[:num_rows].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_the_greatest(num_rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(num_rows)
    # Rows of a wider matrix, as a padded head gives them: what lies between them is larger.
    wide = torch.full((num_rows, vocab_size + 3), 1000.0)
    wide[:, :vocab_size] = torch.randn(num_rows, vocab_size) * 5 - 20
    wide[:, :vocab_size][torch.rand(num_rows, vocab_size) < 0.2] = -torch.inf
    wide[:, vocab_size // 2] = -30.0  # each row has something finite
    logits_NV = wide.to(device, dtype)[:, :vocab_size]
    assert choose(logits_NV) == first_greatest(logits_NV, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_of_equal_ones_the_first(num_rows: int, vocab_size: int, device: str) -> None:
    torch.manual_seed(num_rows)
    # The greatest stands in many places of every chunk.
    logits_NV = torch.randint(0, 4, (num_rows, vocab_size)).float()
    logits_NV[0] = 2.5
    assert choose(logits_NV.to(device)) == first_greatest(logits_NV, None)
    # And in two chunks alone.
    chunk = chunk_size(num_rows, vocab_size)
    if vocab_size > chunk:
        logits_NV.fill_(-1.0)
        logits_NV[:, [chunk - 1, chunk, vocab_size - 1]] = 7.0
        assert choose(logits_NV.to(device)) == [chunk - 1] * num_rows


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_may_stand_anywhere(device: str) -> None:
    """Every place of a vocabulary that is cut into three chunks, the last of them short."""
    vocab_size = 2 * 2048 + 5
    places = torch.tensor([0, 1, 2047, 2048, 2049, 4095, 4096, 4099, vocab_size - 1])
    logits_NV = torch.full((len(places), vocab_size), -3.0)
    logits_NV[torch.arange(len(places)), places] = -2.0  # above padding that is taken for 0
    assert choose(logits_NV.to(device)) == places.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 97), (6, 2100)])
def test_drafts_are_ids_of_the_target(num_rows: int, vocab_size: int, device: str) -> None:
    torch.manual_seed(0)
    ids = torch.randperm(10 * vocab_size)[:vocab_size].sort().values
    d2t = ids - torch.arange(vocab_size)
    logits_NV = torch.randn(num_rows, vocab_size)
    found = choose(logits_NV.to(device), d2t.to(device))
    assert found == first_greatest(logits_NV, d2t)
    assert found == ids[logits_NV.argmax(1)].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["whole", "column", "columns", "transposed", "spread"])
def test_outputs_of_any_strides(layout: str, device: str) -> None:
    torch.manual_seed(1)
    memory = torch.full((7, 12), POISON, dtype=torch.int64, device=device)
    out = {
        "whole": memory.view(-1)[:15].view(5, 3),
        "column": memory[:5, 4],
        "columns": memory[1:6, 3:6],
        "transposed": memory[1:4, 2:7].t(),
        "spread": memory[:5, ::5],
    }[layout]
    logits_NV = torch.randn(out.numel(), 97, device=device)
    choose_drafts(logits_NV, None, poisoned_scratch(out.numel(), 97, device), out)
    expected = first_greatest(logits_NV, None)
    assert [int(x) for row in out for x in row.view(-1)] == expected
    out.fill_(POISON)
    assert memory.eq(POISON).all(), "written beside its places"


def test_rows_and_places_must_agree() -> None:
    scratch = ChoiceScratch.allocate(4, 97, CPU)
    logits_NV, out = torch.zeros(4, 97), torch.zeros(4, dtype=torch.int64)
    for wrong in (out[:3], out.view(2, 2)[:1]):
        with pytest.raises(AssertionError):
            choose_drafts(logits_NV, None, scratch, wrong)
    with pytest.raises(AssertionError):
        choose_drafts(logits_NV[:3], None, scratch, out[:3])
    with pytest.raises(AssertionError):
        choose_drafts(torch.zeros(97, 4).t(), None, scratch, out)


# ---- the passes behind the first ----


def guarded_chain(num_seqs: int, k: int, device: str) -> tuple[ChainBuffers, list[Tensor]]:
    """Poisoned buffers, each with a row behind it that nobody may write."""
    parts = torch.full((3, k, num_seqs), POISON, dtype=torch.int64, device=device)
    positions, slots, lens = (part[: k - 1] for part in parts)
    start_loc = ChainBuffers.allocate(num_seqs, k, device).query_start_loc
    return ChainBuffers(positions, slots, lens, start_loc), [part[k - 1] for part in parts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_seqs", "k", "block_size", "max_model_len"),
    [(1, 2, 4, 100), (3, 3, 4, 30), (8, 7, 16, 33), (17, 5, 3, 20), (5, 8, 1, 25), (4, 1, 4, 30)],
)
def test_chain(num_seqs: int, k: int, block_size: int, max_model_len: int, device: str) -> None:
    num_beyond = num_inactive = 0
    for seed in range(4):
        torch.manual_seed(seed)
        running_B = (torch.rand(num_seqs) < 0.7).long()
        running_B[:2] = torch.tensor([1, 0])[:num_seqs]
        # The first pass: each sequence's slots from some position on, packed; the rest is padding.
        lens = torch.randint(1, k + 2, (num_seqs,)) * running_B
        start = torch.nn.functional.pad(lens.cumsum(0), (1, 0))[:-1]
        first = torch.randint(max_model_len - k, (num_seqs,))
        first[0] = max_model_len - lens[0]  # stands at the end
        positions_S = torch.zeros(num_seqs * (k + 1), dtype=torch.int64)
        for b in range(num_seqs):
            own = slice(int(start[b]), int(start[b] + lens[b]))
            positions_S[own] = first[b] + torch.arange(int(lens[b]))
        last_ntp_B = torch.where(running_B > 0, start + lens - 1, 0)
        # As wide as the longest sequence is, like the engine's; no two sequences share a block.
        width = -(-max_model_len // block_size)
        tables_BM = torch.randperm(num_seqs * width).view(num_seqs, width)
        chain, guards = guarded_chain(num_seqs, k, device)
        plan_chain(
            last_ntp_B.to(device),
            positions_S.to(device),
            tables_BM.to(device),
            running_B.to(device),
            chain,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        for p in range(k - 1):
            behind_B = first + lens + p
            slots_B = slot_mapping(
                tables_BM, torch.arange(num_seqs), behind_B, block_size, max_model_len
            )
            runs = running_B > 0
            expected = {
                "positions_PB": torch.where(runs, behind_B, 0),
                "slots_PB": torch.where(runs, slots_B, -1),
                "seq_lens_PB": torch.where(runs, behind_B + 1, 1),
            }
            for name, values in expected.items():
                assert getattr(chain, name)[p].tolist() == values.tolist(), (name, p)
            num_beyond += int((runs & (behind_B >= max_model_len)).sum())
            num_inactive += int((~runs).sum())
        assert chain.query_start_loc.tolist() == list(range(num_seqs + 1))
        assert all(guard.eq(POISON).all() for guard in guards), "written beyond its end"
    assert k == 1 or num_beyond, "the cases have lost their edge"
    assert k == 1 or num_seqs == 1 or num_inactive


def test_chain_buffers_stand_apart() -> None:
    """They come from one allocation: none may reach into the other."""
    chain = ChainBuffers.allocate(5, 4, CPU)
    parts = [chain.positions_PB, chain.slots_PB, chain.seq_lens_PB]
    for value, part in enumerate(parts):
        assert part.shape == (3, 5) and part.is_contiguous()
        part.fill_(value)
    assert [set(part.view(-1).tolist()) for part in parts] == [{0}, {1}, {2}]
