"""Counter-based numbers and sort-free cuts in Triton against their torch references.

On a CPU the kernels run under Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from peagle.kernels.sampling.logits import apply_probability_filters
from peagle.kernels.sampling.probabilities import probs_from_logits
from peagle.kernels.sampling.random import Purpose, uniform
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from peagle.kernels.launch import launch
from peagle.kernels.sampling import probabilities_triton
from peagle.kernels.sampling.probabilities_triton import RowStats, chunk_size
from peagle.kernels.sampling.random_triton import uniform as uniform_in_kernel
from peagle.kernels.sampling.search_triton import is_kept, temperature_rate, weights_of

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REAL = 151_936


@triton.jit
def _uniform_kernel(
    seeds_ptr, positions_ptr, out_ptr, count, PURPOSE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seeds = tl.load(seeds_ptr + i, mask=i < count, other=0)
    positions = tl.load(positions_ptr + i, mask=i < count, other=0)
    tl.store(out_ptr + i, uniform_in_kernel(seeds, positions, PURPOSE), mask=i < count)


def uniform_numbers(seeds_N: Tensor, positions_N: Tensor, purpose: int) -> Tensor:
    out_N = torch.empty(len(seeds_N), dtype=torch.float64, device=seeds_N.device)
    grid = (triton.cdiv(len(seeds_N), 256),)
    launch(
        _uniform_kernel, grid, seeds_N, positions_N, out_N, len(seeds_N), PURPOSE=purpose, BLOCK=256
    )
    return out_N


@triton.jit
def _probs_kernel(
    logits_ptr,
    sequences_ptr,
    temperature_ptr,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    probs_ptr,
    vocab_size,
    row_stride,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    out_ptr = probs_ptr + row * vocab_size + v
    if sequence >= 0:
        temperature = tl.load(temperature_ptr + sequence)
        x = tl.load(logits_ptr + row * row_stride + v, mask=v < vocab_size, other=-float("inf"))
        weights = weights_of(x, tl.load(max_ptr + row), temperature_rate(temperature))
        kept = is_kept(weights, v, tl.load(threshold_ptr + row), tl.load(last_tie_ptr + row))
        probs = tl.where(kept, weights / tl.load(total_ptr + row), 0.0)
        best = tl.where(v == tl.load(argmax_ptr + row), 1.0, 0.0)
        tl.store(out_ptr, tl.where(temperature == 0, best, probs), mask=v < vocab_size)
    else:
        tl.store(out_ptr, tl.zeros([CHUNK], dtype=tl.float32), mask=v < vocab_size)


def probs_from_stats(
    logits_RV: Tensor, sequences_R: Tensor, temperature_B: Tensor, stats: RowStats, out_RV: Tensor
) -> None:
    """`probs_from_logits` in float32, from `row_stats`; one launch. Rows with sequence -1 are 0."""
    num_rows, vocab_size = logits_RV.shape
    chunk = chunk_size(num_rows, vocab_size)
    launch(
        _probs_kernel,
        (num_rows, triton.cdiv(vocab_size, chunk)),
        logits_RV,
        sequences_R,
        temperature_B,
        stats.max_R,
        stats.argmax_R,
        stats.threshold_R,
        stats.last_tie_R,
        stats.total_R,
        out_RV,
        vocab_size,
        logits_RV.stride(0),
        CHUNK=chunk,
        num_warps=8 if chunk > 4096 else 4,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_to_the_last_bit(purpose: Purpose, device: str) -> None:
    edges = torch.tensor([0, 1, 2**31, 2**62, 2**63 - 1, -1])
    seeds = torch.cat((torch.randint(2**62, (1000,)), edges))
    positions = torch.cat((torch.randint(2**20, (1000,)), edges.flip(0).clamp_min(0)))
    found = uniform_numbers(seeds.to(device), positions.to(device), purpose)
    assert torch.equal(found.cpu(), uniform(seeds, positions, purpose))


def probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    device: str = "cpu",
    capacity: int = probabilities_triton.CAPACITY,
) -> tuple[Tensor, RowStats]:
    """What the kernels make of one row a sequence."""
    num_rows, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=device)
    stats = RowStats.allocate(num_rows, vocab_size, device, capacity)
    x, t, k, p = (v.to(device) for v in (logits, temperature, top_k, top_p))
    min_p = None if min_p is None else min_p.to(device)
    probabilities_triton.row_stats(x, rows, t, k, p, min_p, stats)
    out = torch.full(logits.shape, torch.nan, device=device)
    probs_from_stats(x, rows, t, stats, out)
    return out.cpu(), stats


def near_tie(row: Tensor, top_p: float, top_k: int) -> bool:
    """Whether float rounding may move the top-p cut of these probabilities by a token."""
    sorted_V = row.double().sort(descending=True, stable=True).values
    if top_k:
        sorted_V[top_k:] = 0
    mass_V = sorted_V.cumsum(0) / sorted_V.sum()
    return bool(((mass_V - top_p).abs() < 2e-6).any())


def check(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    device: str = "cpu",
    capacity: int = probabilities_triton.CAPACITY,
) -> RowStats:
    found, stats = probs(logits, temperature, top_k, top_p, min_p, device, capacity)
    filtered = apply_probability_filters(logits, temperature, min_p)
    expected = probs_from_logits(filtered, temperature, top_k, top_p)
    everything = probs_from_logits(
        filtered, temperature, torch.zeros_like(top_k), torch.ones_like(top_p)
    )
    for row in range(len(logits)):
        # What underflows in one of the two weighs nothing.
        differs = (found[row] > 1e-30) != (expected[row] > 1e-30)
        if differs.any() and top_p[row] < 1:
            assert near_tie(everything[row], float(top_p[row]), int(top_k[row]))
            assert int(differs.sum()) <= 1 + 4 * int(len(logits[row]) / 1000)
            continue
        assert not differs.any(), (row, float(temperature[row]), int(top_k[row]))
        torch.testing.assert_close(found[row], expected[row], rtol=2e-5, atol=1e-30)
    return stats


def params(*rows: tuple[float, int, float]) -> tuple[Tensor, Tensor, Tensor]:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )


MIXED = [
    (1.0, 0, 1.0),
    (0.0, 0, 1.0),
    (0.7, 20, 1.0),
    (1.0, 0, 0.9),
    (1.3, 50, 0.8),
    (0.6, 1, 1.0),
    (2.0, 10_000_000, 0.5),
    (0.0, 3, 0.2),
    (1.0, 5, 0.0),
    (1e-38, 7, 0.9),
    (1e30, 7, 1.0),
    (1e30, 0, 0.3),
    (1e-300, 0, 0.99),
    (0.5, 2, 0.999),
    (3.0, 0, 0.9999),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [2, 3, 37, 1000, 5003])
def test_random_rows(vocab_size: int, device: str) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(len(MIXED), vocab_size) * 4
    check(logits, *params(*MIXED), device=device)
    # With little room for candidates more of the search runs over the whole row.
    check(logits.half().float(), *params(*MIXED), device=device, capacity=16)


@pytest.mark.parametrize("device", DEVICES)
def test_min_p(device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(MIXED), 517) * 3
    min_p = torch.tensor([0.0, 0.01, 0.05, 0.3, 1.0], dtype=torch.float64).repeat(3)
    # Where top-k or top-p cut as well, both orders of magnitude occur.
    check(logits, *params(*MIXED), min_p, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_keep_the_lower_index(device: str) -> None:
    torch.manual_seed(2)
    rows = [(1.0, k, 1.0) for k in (1, 2, 3, 40, 100)]
    logits = torch.randint(-3, 4, (len(rows), 301)).float()
    check(logits, *params(*rows), device=device)
    check(logits, *params(*rows), device=device, capacity=16)
    flat = torch.zeros(6, 64)
    flat_rows = [(1.0, 0, 0.25), (1.0, 5, 1.0), (1.0, 8, 0.5), (9.0, 64, 1.0), (1.0, 0, 1e-9)]
    found, _ = probs(flat, *params(*flat_rows, (1.0, 63, 0.999)), device=device)
    assert [int(row.count_nonzero()) for row in found] == [16, 5, 4, 64, 1, 63]
    for row in found:
        assert row[: int(row.count_nonzero())].all(), "the lowest indices"
    check(flat, *params(*flat_rows, (1.0, 63, 0.999)), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_removed_tokens_stay_removed(device: str) -> None:
    torch.manual_seed(3)
    logits = torch.randn(len(MIXED), 410)
    logits[torch.rand(logits.shape) < 0.5] = -torch.inf
    logits[:, 0] = 0
    logits[3] = -torch.inf
    logits[3, 409] = -7  # one token is left
    logits[4, 128:] = -torch.inf
    check(logits, *params(*MIXED), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 7, 40, 300])
def test_passes(top_k: int, device: str) -> None:
    torch.manual_seed(4)
    rows = [(1.0, top_k, 1.0), (1.0, 0, 0.9), (1.0, 0, 1.0), (0.0, top_k, 0.9)]
    logits = torch.randn(len(rows), 4000) * 3
    stats = check(logits, *params(*rows), device=device)
    passes = stats.num_passes_R.tolist()
    assert max(passes[:2]) <= 3
    assert passes[2:] == [0, 0], "nothing to cut"
    stats = check(logits, *params(*rows), device=device, capacity=2)
    assert int(stats.num_passes_R.max()) <= 18
    # Fewer tokens than top-k asks for, as behind a grammar.
    logits[:, top_k // 2 + 1 :] = -torch.inf
    assert int(check(logits, *params(*rows), device=device).num_passes_R.max()) <= 3


@pytest.mark.parametrize("device", DEVICES)
def test_padded_rows_are_skipped(device: str) -> None:
    logits = torch.full((3, 50), torch.nan, device=device)
    logits[1] = torch.arange(50)
    stats = RowStats.allocate(3, 50, device)
    t, k, p = (v.to(device) for v in params((1.0, 2, 0.9)))
    rows = torch.tensor([-1, 0, -1], device=device)
    probabilities_triton.row_stats(logits, rows, t, k, p, None, stats)
    out = torch.full((3, 50), torch.nan, device=device)
    probs_from_stats(logits, rows, t, stats, out)
    assert out[0].count_nonzero() == 0
    assert out[2].count_nonzero() == 0
    assert float(out[1].sum()) == pytest.approx(1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    logits = (torch.randn(4 * len(MIXED), REAL) * 3).to(dtype).float()
    stats = check(logits, *params(*MIXED * 4), device="cuda")
    print("passes", stats.num_passes_R.view(4, -1).amax(0).tolist())
