"""Paged attention in Triton against the torch backend in float64.

On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from peagle.kernels.paged_attention import (
    AttentionShape,
    PagedAttentionConfig,
    Workspace,
    paged_attention,
)
from tests.attention.paged_cases import FP8, SCALING, PagedCase
from tests.kernels.devices import DEVICES
from tests.kernels.paged_runs import HALF, attend, config

pytest.importorskip("triton", reason="needs triton")


# ---- the same numbers as the reference ------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(head_dim: int, num_splits: int, device: str) -> None:
    case = PagedCase([37, 0], [3, 5], head_dim=head_dim, device=device, padding_rows=3)
    case.check(attend(case, config(num_splits=num_splits, block_n=32)), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_grouped_heads(group: int, num_splits: int, device: str) -> None:
    case = PagedCase([9, 40, 3], [4, 1, 9], num_heads=2 * group, device=device, padding_rows=2)
    case.check(attend(case, config(num_splits=num_splits)), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32])
def test_block_sizes(block_size: int, device: str) -> None:
    case = PagedCase([30, 17], [2, 7], block_size=block_size, device=device)
    case.check(attend(case, config(num_splits=2)), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 8, 20])
def test_splits(num_splits: int, device: str) -> None:
    """From none to more than there are tiles of keys."""
    case = PagedCase([129, 0, 15], [2, 3, 1], device=device, num_kv_heads=1)
    case.check(attend(case, config(num_splits=num_splits)), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "starts"),
    [
        (1, None, False, None),
        (5, None, False, None),
        (40, None, True, None),
        (None, 3.0, False, None),
        (None, None, True, None),
        (None, None, False, [33, 0, 20]),
        (7, 0.5, True, [50, 9, 0]),
    ],
)
def test_windows_softcaps_sinks_and_starts(
    window: int | None,
    softcap: float | None,
    sinks: bool,
    starts: list[int] | None,
    num_splits: int,
    device: str,
) -> None:
    case = PagedCase([50, 9, 70], [3, 20, 1], device=device, starts=starts, padding_rows=5)
    special = {"softcap": softcap, "sinks": case.sinks() if sinks else None}
    chosen = config(num_splits=num_splits)
    case.check(attend(case, chosen, window, **special), case.reference(window, **special))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, device: str) -> None:
    """Ragged batches, with sequences that run nothing, as `choose_config` and others cut them."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    new = [draw.choice([0, 1, 1, 2, 5, 8, 30]) for _ in range(count)]
    new[draw.randrange(count)] = draw.choice([1, 4, 33])
    past = [draw.choice([0, 1, 15, 16, 40, 90]) for _ in range(count)]
    num_kv_heads = draw.choice([1, 2])
    case = PagedCase(
        past,
        new,
        num_heads=num_kv_heads * draw.choice([1, 3, 4]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([8, 64, 72]),
        block_size=draw.choice([4, 16, 24]),
        dtype=draw.choice([torch.float32, HALF[device]]),
        device=device,
        seed=seed,
        starts=[draw.randint(0, p) for p in past] if draw.random() < 0.5 else None,
        padding_rows=draw.choice([0, 7]),
        padding_sequences=draw.choice([0, 3]),
    )
    window = draw.choice([None, None, 6])
    special = {
        "softcap": draw.choice([None, 8.0]),
        "sinks": draw.choice([None, case.sinks()]),
    }
    chosen = draw.choice([None, config(32, 32, 3), config(16, 16, 1)])
    case.check(attend(case, chosen, window, **special), case.reference(window, **special))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_half_precision(num_splits: int, device: str) -> None:
    case = PagedCase([70, 12], [8, 8], num_heads=8, dtype=HALF[device], device=device)
    case.check(attend(case, config(32, 32, num_splits)), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_scores_beyond_what_exp_can_take(num_splits: int, device: str) -> None:
    case = PagedCase([20, 3], [4, 2], device=device)
    case.query_THd *= 1e3
    for sinks in (case.sinks() * 1e3, case.sinks() - 1e3, None):
        for softcap in (None, 50.0):
            special = {"sinks": sinks, "softcap": softcap}
            expected = case.reference(**special)
            out = attend(case, config(num_splits=num_splits), **special)
            # Scores near 1e4 are rounded to 1e-3 in float32, and so are the weights.
            assert (out.double() - expected).abs().amax() / expected.abs().amax() < 5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_queries_that_see_nothing_give_zeros(num_splits: int, device: str) -> None:
    case = PagedCase([20, 30], [4, 2], device=device)
    expected = case.reference()
    case.starts = [24, 0]  # the first sequence's context begins after its end
    for sinks in (None, case.sinks()):
        out = attend(case, config(num_splits=num_splits), sinks=sinks)
        assert bool((out[:4] == 0).all())
        assert bool(out.isfinite().all())
    case.check(attend(PagedCase([20, 30], [4, 2], device=device), config()), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_padding_may_be_sequences_with_rows_but_no_context(
    num_splits: int, window: int | None, device: str
) -> None:
    """As where every sequence has the same number of rows, those that pad the batch too."""
    case = PagedCase([20, 0, 30], [4, 4, 4], device=device)
    special = {"sinks": case.sinks()}
    out = attend(case, config(num_splits=num_splits), window, lens=[24, 0, 34], **special)
    expected = case.reference(window, **special)
    expected[4:8] = 0.0
    case.check(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_strides_of_queries_and_a_given_workspace(num_splits: int, device: str) -> None:
    """Queries as models hand them over: heads outermost, or a part of a fused projection."""
    case = PagedCase([20, 30], [4, 2], device=device)
    expected = case.reference()
    chosen = config(num_splits=num_splits)
    rows = case.query_THd
    wide = torch.cat((rows, rows.new_full(rows.shape, torch.nan)), dim=1)
    for query in (rows.transpose(0, 1).contiguous().transpose(0, 1), wide[:, : rows.shape[1]]):
        assert not query.is_contiguous()
        case.query_THd = query
        shape = AttentionShape(2, 6, 4, 4, 2, 64, case.dtype, case.dtype)
        workspace = Workspace.make(shape, chosen, query.device)
        assert (workspace is None) == (num_splits == 1)
        if workspace is not None:
            workspace.partial.fill_(torch.nan)
            workspace.lse.fill_(torch.nan)
        case.check(attend(case, chosen, workspace=workspace), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_corrupted_key_changes_only_its_sequence(device: str) -> None:
    case = PagedCase([20, 30], [4, 2], device=device)
    before = attend(case, config(num_splits=2))
    case.contexts[1][0][7] += 1.0
    after = attend(case, config(num_splits=2))
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


# ---- what only a card can do ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [((32, 8), 128), ((14, 2), 64), ((16, 8), 256)])
def test_long_contexts(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, queries: int
) -> None:
    case = PagedCase(
        [3000, 0, 517, 8191],
        [queries] * 4,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    case.check(attend(case, None), case.reference())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [((32, 8), 128), ((8, 4), 256)])
def test_long_prompts(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    case = PagedCase(
        [0, 100, 700],
        [900, 3, 300],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
        padding_rows=21,
        padding_sequences=1,
    )
    case.check(attend(case, None, window), case.reference(window))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("new", [[1, 1], [8, 8], [200, 40]])
def test_8bit_cache(new: list[int], scales: tuple[float, float]) -> None:
    case = PagedCase(
        [1000, 70],
        new,
        num_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        cache_dtype=FP8,
        device="cuda",
        key_scale=scales[0],
        value_scale=scales[1],
    )
    case.check(attend(case, None), case.reference())


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_configuration_of_the_benchmark(
    block_n: int, num_warps: int, num_stages: int
) -> None:
    case = PagedCase(
        [1500, 99], [8, 8], num_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    chosen = PagedAttentionConfig(32, block_n, 3, num_warps, num_stages)
    case.check(attend(case, chosen), case.reference())


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last blocks of a cache of more than 2**31 elements."""
    torch.manual_seed(0)
    heads, size, block_size, length = 8, 128, 16, 300
    num_blocks = 2**31 // (heads * size * block_size) + 40
    keys, values = (
        torch.empty(num_blocks, block_size, heads, size, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    assert keys.numel() > 2**31
    blocks = torch.arange(num_blocks - 20, num_blocks, device="cuda").flip(0)
    keys[blocks], values[blocks] = (
        torch.randn(20, block_size, heads, size, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    query = torch.randn(2, heads, size, dtype=torch.bfloat16, device="cuda")

    def run(keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
        start, lens = torch.tensor([0, 2], device="cuda"), torch.tensor([length], device="cuda")
        return paged_attention(
            query, keys, values, start, lens, table[None], max_query_len=2, scaling=SCALING
        )

    small = run(keys[blocks], values[blocks], torch.arange(20, device="cuda"))
    torch.testing.assert_close(run(keys, values, blocks), small)
