"""Paged attention of a step in one launch: it writes the new keys and combines its own splits.

On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1), one program after another.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.attention import LayerKVCache
from peagle.kernels.kv_write import kv_write
from peagle.kernels.launch import arrivals
from peagle.kernels.paged_attention import (
    AttentionShape,
    DeviceLimits,
    NewKeyValues,
    Workspace,
    choose_config,
    paged_attention,
)
from tests.attention.paged_cases import FP8, SCALING, PagedCase
from tests.kernels.devices import DEVICES
from tests.kernels.paged_runs import HALF, attend, config

pytest.importorskip("triton", reason="needs triton")

# On a card another kernel may add in another order.
SAME: dict[str, dict[str, float]] = {"cpu": {"rtol": 0, "atol": 0}, "cuda": {}}


def check_step(case: PagedCase, chosen: Any, window: int | None = None, **special: Any) -> None:
    """Output and cache of one launch; and the same again, over a workspace full of NaN."""
    expected = case.reference(window, **special)
    written = case.make_cache(with_new=True)
    outs = []
    for _ in range(2):
        cache = case.make_cache(with_new=False)
        outs.append(attend(case, chosen, window, cache=cache, **special))
        case.check(outs[-1], expected)
        for found, stored in ((cache.keys, written.keys), (cache.values, written.values)):
            raw = torch.uint8 if stored.dtype == FP8 else stored.dtype
            torch.testing.assert_close(
                found.view(raw), stored.view(raw), rtol=0, atol=0, equal_nan=True
            )
    assert torch.equal(*outs)
    assert not arrivals(outs[0].device).any()


# ---- the same numbers as the reference ------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("combine", ["last", "launch"])
@pytest.mark.parametrize("num_splits", [1, 3, 8, 11])
def test_splits(num_splits: int, combine: Any, in_turns: bool, device: str) -> None:
    """From none to more than there are tiles of keys; one sequence has one tile, one has none."""
    case = PagedCase([129, 0, 15, 44], [2, 3, 1, 0], device=device, padding_rows=3)
    chosen = config(num_splits=num_splits, combine=combine, in_turns=in_turns)
    check_step(case, chosen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "head_dim", "new", "block_m"),
    [
        ((2, 2), 64, [16, 3], 16),
        ((14, 2), 80, [2, 1], 16),
        ((8, 2), 128, [8, 5], 32),
        ((3, 1), 96, [5, 4], 16),
        ((4, 1), 256, [4, 4], 16),
        ((4, 4), 8, [32, 17], 32),
    ],
)
def test_heads_and_sizes(
    heads: tuple[int, int],
    head_dim: int,
    new: list[int],
    block_m: int,
    num_splits: int,
    device: str,
) -> None:
    case = PagedCase([37, 61], new, *heads, head_dim, device=device, padding_sequences=1)
    check_step(case, config(block_m, 16, num_splits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_new_keys_across_tiles_and_blocks(block_size: int, block_n: int, device: str) -> None:
    case = PagedCase([30, 62, 13], [4, 4, 4], block_size=block_size, device=device)
    check_step(case, config(16, block_n, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "starts"),
    [
        (1, None, False, None),
        (5, None, True, None),
        (40, None, False, [3, 0, 69]),
        (None, 3.0, False, None),
        (None, None, True, [33, 9, 20]),
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
    case = PagedCase([50, 9, 70], [3, 8, 1], device=device, starts=starts, padding_rows=5)
    special = {"softcap": softcap, "sinks": case.sinks() if sinks else None}
    check_step(case, config(32, 16, num_splits), window, **special)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(16))
def test_random_steps(seed: int, device: str) -> None:
    """Ragged batches, with sequences that run nothing, as `choose_config` and others cut them."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    new = [draw.choice([0, 1, 2, 5, 8]) for _ in range(count)]
    new[draw.randrange(count)] = draw.choice([1, 4, 8])
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
    special = {
        "softcap": draw.choice([None, 8.0]),
        "sinks": draw.choice([None, case.sinks()]),
    }
    # float32: as float32 is cut, 8 queries of 4 heads are a tile.
    chosen = draw.choice([None, config(32, 32, 3), config(32, 16, 1), config(32, 16, 40)])
    check_step(case, chosen, draw.choice([None, None, 6]), **special)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_strides(num_splits: int, device: str) -> None:
    """Queries, keys and values as parts of a fused projection."""
    case = PagedCase([20, 30], [4, 2], device=device)
    expected = case.reference()
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
    fused = torch.cat((case.query_THd, *case.new_kv()), dim=1)
    query, *new = fused.split(heads, dim=1)
    meta, cache = case.metadata(), case.make_cache(with_new=False)
    out = paged_attention(
        query,
        cache.keys,
        cache.values,
        meta.query_start_loc,
        meta.seq_lens_B,
        meta.block_tables_BM,
        max_query_len=4,
        scaling=SCALING,
        config=config(num_splits=num_splits),
        new=NewKeyValues(*new, meta.slots_T),
    )
    case.check(out, expected)
    written = case.make_cache(with_new=True)
    torch.testing.assert_close(cache.keys, written.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, written.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("num_splits", [1, 5])
def test_an_8bit_cache_as_in_two_launches(
    num_splits: int, scales: tuple[float, float], device: str
) -> None:
    """The interpreter rounds in its own way, so there is no other reference on a CPU."""
    case = PagedCase([100, 70], [8, 3], dtype=HALF[device], cache_dtype=FP8, device=device)
    case.key_scale, case.value_scale = scales
    one, two = (case.make_cache(with_new=False) for _ in range(2))
    chosen = config(16, 32, num_splits)
    out = attend(case, chosen, cache=one)
    kv_write(
        *case.new_kv(),
        *(two.keys, two.values, case.metadata().slots_T),
        key_scale=scales[0],
        value_scale=scales[1],
    )
    case.make_cache = lambda **_: two  # type: ignore[method-assign]
    torch.testing.assert_close(attend(case, chosen), out, **SAME[device])
    for x, y in ((one.keys, two.keys), (one.values, two.values)):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# ---- what is not written, or not seen -------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_without_a_slot(num_splits: int, device: str) -> None:
    """Tokens beyond the model's length: nobody's cache changes, and rows before see no difference.

    In two launches the keys without a slot come from wherever the table points to, so they are
    only compared where nothing sees them.
    """
    case = PagedCase([20, 43], [5, 4], device=device, padding_rows=2)
    chosen = config(32, 16, num_splits)
    slots_T = case.metadata().slots_T.clone()
    slots_T[3:5] = -1
    cache = case.make_cache(with_new=False)
    out = attend(case, chosen, cache=cache, slots_T=slots_T)
    # What has no slot is seen all the same.
    case.check(out, case.reference())

    both = case.make_cache(with_new=False), case.make_cache(with_new=False, poison=False)
    for other in both:
        new = (case.padded(x) for x in case.new_kv())
        kv_write(*new, other.keys, other.values, slots_T)
    torch.testing.assert_close(cache.keys, both[0].keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, both[0].values, rtol=0, atol=0, equal_nan=True)
    meta = case.metadata()
    expected = paged_attention(
        case.padded(case.query_THd),
        both[1].keys,
        both[1].values,
        meta.query_start_loc,
        meta.seq_lens_B,
        meta.block_tables_BM,
        max_query_len=meta.max_query_len,
        scaling=SCALING,
        config=chosen,
    )
    torch.testing.assert_close(out[:3], expected[:3], **SAME[device])
    torch.testing.assert_close(out[5:], expected[5:], **SAME[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_of_a_context_of_nothing(num_splits: int, device: str) -> None:
    """Padding as sequences that have rows, no context and no slots; it comes out as zeros."""
    case = PagedCase([20, 0, 30], [4, 4, 4], device=device)
    special = {"sinks": case.sinks()}
    slots_T = case.metadata().slots_T.clone()
    slots_T[4:8] = -1
    cache = case.make_cache(with_new=False)
    chosen = config(num_splits=num_splits)
    out = attend(case, chosen, lens=[24, 0, 34], cache=cache, slots_T=slots_T, **special)
    expected = case.reference(**special)
    expected[4:8] = 0.0
    case.check(out, expected)
    written = case.make_cache(with_new=True).keys
    written.flatten(0, 1)[case.slots(1)] = torch.nan
    torch.testing.assert_close(cache.keys, written, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_new_keys_that_nobody_sees_are_written(num_splits: int, device: str) -> None:
    """A context that begins after its end, or in the middle of the new keys."""
    case = PagedCase([20, 30], [4, 4], device=device)
    written = case.make_cache(with_new=True)
    cache = case.make_cache(with_new=False)
    case.starts = [24, 32]
    out = attend(case, config(num_splits=num_splits), cache=cache, sinks=case.sinks())
    assert bool((out[:6] == 0).all())
    assert bool(out.isfinite().all())
    assert bool((out[6:] != 0).any())
    torch.testing.assert_close(cache.keys, written.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, written.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_that_shares_a_cache(device: str) -> None:
    """It brings the keys that are there already, and other queries."""
    case = PagedCase([20, 70], [4, 2], device=device)
    cache = case.make_cache(with_new=False)
    first = attend(case, config(num_splits=3), cache=cache)
    assert torch.equal(attend(case, config(num_splits=3), cache=cache), first)
    case.query_THd = case.query_THd.flip(0)
    case.check(attend(case, config(num_splits=3), 9, cache=cache), case.reference(9))


# ---- counters and partial results -----------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("combine", ["last", "launch"])
def test_launches_of_other_shapes_share_counters(combine: Any, device: str) -> None:
    cases = [
        PagedCase([90, 3], [4, 2], device=device),
        PagedCase([31], [8], 8, 2, device=device),
        PagedCase([5, 7, 60], [2, 0, 1], 2, 1, device=device),
    ]
    for _ in range(2):
        for case, splits in zip(cases, (3, 7, 2)):
            chosen = config(32, 16, splits, combine=combine)
            batch, queries = len(case.new), max(case.new)
            shape = AttentionShape(
                *(batch, sum(case.new), queries, case.num_heads, case.num_kv_heads, case.head_dim),
                *(case.dtype, case.dtype),
            )
            workspace = Workspace.make(shape, chosen, torch.device(device))
            assert workspace is not None
            workspace.partial.fill_(torch.nan)
            workspace.lse.fill_(torch.nan)
            cache = case.make_cache(with_new=False)
            case.check(attend(case, chosen, cache=cache, workspace=workspace), case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [False, True])
def test_prompts_may_be_split_too(sinks: bool, device: str) -> None:
    """Tiles of ragged prompts, with keys that are cached."""
    case = PagedCase([30, 0, 11], [40, 3, 29], device=device, padding_rows=3)
    special = {"sinks": case.sinks() if sinks else None}
    out = attend(case, config(num_splits=3), **special)
    case.check(out, case.reference(**special))


# ---- what only a card can do ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_warps", [2, 4, 8])
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 8, 33])
def test_configurations_of_the_benchmark(num_splits: int, block_n: int, num_warps: int) -> None:
    many: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    for queries, block_m in ((1, 16), (8, 32)):
        case = PagedCase([1500, 249, 0, 63], [queries] * 4, 8, 2, 128, **many)
        check_step(case, config(block_m, block_n, num_splits, num_warps))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("new", [[1, 1], [8, 3]])
@pytest.mark.parametrize("num_splits", [1, 5])
def test_8bit_cache(num_splits: int, new: list[int], scales: tuple[float, float]) -> None:
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
    check_step(case, config(32, 64, num_splits))


@pytest.mark.gpu
@pytest.mark.parametrize("more_splits", [0, 3])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_many_replays_give_the_same_bits(batch: int, more_splits: int) -> None:
    """Layers of a step in a graph; whoever arrives last, and whenever."""
    past = [(37 * b + 255) % 1500 for b in range(batch)]
    case = PagedCase(past, [8] * batch, 32, 8, 128, dtype=torch.bfloat16, device="cuda")
    shape = AttentionShape(batch, 8 * batch, 8, 32, 8, 128, case.dtype, case.dtype)
    chosen = choose_config(shape, DeviceLimits.of(torch.device("cuda")))
    chosen = replace(chosen, num_splits=chosen.num_splits + more_splits)
    workspace = Workspace.make(shape, chosen, torch.device("cuda"))
    caches = [case.make_cache(with_new=False) for _ in range(4)]
    meta = case.metadata()
    new = NewKeyValues(*case.new_kv(), meta.slots_T)

    def layer(cache: LayerKVCache) -> Tensor:
        return paged_attention(
            case.query_THd,
            cache.keys,
            cache.values,
            meta.query_start_loc,
            meta.seq_lens_B,
            meta.block_tables_BM,
            max_query_len=8,
            scaling=SCALING,
            config=chosen,
            workspace=workspace,
            new=new,
        )

    expected = layer(caches[0]).clone()
    case.check(expected, case.reference())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = torch.stack([layer(cache) for cache in caches * 5])
    for _ in range(300):
        outs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs, expected.expand_as(outs))
    assert not arrivals(expected.device).any()
