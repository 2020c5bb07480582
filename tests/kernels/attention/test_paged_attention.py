"""Paged attention in Triton against the torch backend in float64.

`WRITTEN` runs a test twice: over a cache that holds all keys, and as in a step, where the launch
writes the new keys itself. On a CPU Triton's interpreter (TRITON_INTERPRET=1) runs the kernels, one
program after another.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.attention import LayerKVCache
from peagle.kernels.attention.kv_write import kv_write
from peagle.kernels.attention.paged_attention import (
    MAX_WRITE_ROWS,
    AttentionShape,
    NewKeyValues,
    PagedAttentionConfig,
    Workspace,
    choose_config,
    paged_attention,
)
from peagle.kernels.launch import DeviceLimits, arrivals
from tests.attention.paged_cases import FP8, SCALING, PagedCase
from tests.kernels.devices import DEVICES, compile_for_card

pytest.importorskip("triton", reason="needs triton")

HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}
# On a card another kernel may add in another order.
SAME: dict[str, dict[str, float]] = {"cpu": {"rtol": 0, "atol": 0}, "cuda": {}}
WRITTEN = pytest.mark.parametrize("written", [False, True], ids=["cached", "written"])


def config(
    block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_warps: int = 4
) -> PagedAttentionConfig:
    return PagedAttentionConfig(block_m, block_n, num_splits, num_warps, num_stages=2)


def attend(
    case: PagedCase,
    chosen: PagedAttentionConfig | None,
    window: int | None = None,
    lens: list[int] | None = None,
    *,
    cache: LayerKVCache | None = None,
    slots_T: Tensor | None = None,
    **special: Any,
) -> Tensor:
    """Over a cache that holds all keys; or with `cache`, which lacks those of `slots_T`, or of all
    new tokens, writes them.
    """
    meta = case.metadata()
    seq_lens_B = meta.seq_lens_B if lens is None else meta.seq_lens_B.new_tensor(lens)
    new = None
    if cache is not None:
        rows = (case.padded(x) for x in case.new_kv())
        new = NewKeyValues(*rows, meta.slots_T if slots_T is None else slots_T)
    cache = cache or case.make_cache(with_new=True)
    return paged_attention(
        case.padded(case.query_THd),
        cache.keys,
        cache.values,
        meta.query_start_loc,
        seq_lens_B,
        meta.block_tables_BM,
        max_query_len=meta.max_query_len,
        scaling=SCALING,
        sliding_window=window,
        context_starts_B=meta.context_starts_B,
        visible_T=None if meta.tree is None else meta.tree.visible_T,
        positions_T=None if meta.tree is None else meta.tree.positions_T,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        config=chosen,
        new=new,
        **special,
    )


def assert_same_cache(found: LayerKVCache, expected: LayerKVCache) -> None:
    """Bit by bit, NaN included."""
    for x, y in ((found.keys, expected.keys), (found.values, expected.values)):
        raw = torch.uint8 if y.dtype == FP8 else y.dtype
        torch.testing.assert_close(x.view(raw), y.view(raw), rtol=0, atol=0, equal_nan=True)


def check(
    case: PagedCase, chosen: Any, written: bool, window: int | None = None, **special: Any
) -> Tensor:
    """Output, and the cache where the launch writes it; counters end as they began."""
    cache = case.make_cache(with_new=False) if written else None
    out = attend(case, chosen, window, cache=cache, **special)
    case.check(out, case.reference(window, **special))
    if cache is not None:
        assert_same_cache(cache, case.make_cache(with_new=True))
    assert not arrivals(out.device).any()
    return out


# ---- the same numbers as the reference ----


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 20])
def test_splits(num_splits: int, written: bool, device: str) -> None:
    """From none to more than there are tiles of keys; one sequence has one tile, one has none."""
    case = PagedCase([129, 0, 15, 44], [2, 3, 1, 0], device=device, padding_rows=3)
    chosen = config(num_splits=num_splits)
    assert torch.equal(check(case, chosen, written), check(case, chosen, written))


def random_trees(new: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(max(0, row - 5), row) for row in range(n - 1)] for n in new]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 33])
@pytest.mark.parametrize(
    ("new", "block_m"),
    [
        ([17, 1, 5, 8], 16),
        ([24, 1, 23, 24], 16),
        ([17, 1, 5, 8], 64),
        ([64, 33], 32),
        ([64, 33], 128),
    ],
    ids=["ragged", "in tiles", "in one tile", "large, in tiles", "large"],
)
def test_trees(
    new: list[int], block_m: int, window: int | None, num_splits: int, written: bool, device: str
) -> None:
    """Windows count positions: a late row of a tree may stand just behind the root."""
    past = [61, 30, 0, 9][: len(new)]
    trees = random_trees(new, len(new))
    starts = [3, 0, 0, 9][: len(new)] if window is None else None
    case = PagedCase(past, new, 4, 2, device=device, starts=starts, trees=trees, padding_rows=2)
    check(case, config(block_m, 16, num_splits), written, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 4, 70])
def test_a_prompt_beside_trees(window: int | None, num_splits: int, device: str) -> None:
    """It has more rows than a word has bits: each sees its own and all before it."""
    new = [17, 90, 5]
    trees = random_trees(new, 3)
    trees[1] = list(range(89))
    case = PagedCase([61, 30, 0], new, 4, 2, device=device, trees=trees, padding_rows=2)
    check(case, config(64, 16, num_splits), False, window)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "head_dim", "new", "block_m"),
    [
        ((2, 2), 64, [16, 3], 16),
        ((14, 2), 80, [2, 1], 16),
        ((8, 2), 128, [8, 5], 32),
        ((3, 1), 96, [5, 4], 16),
        ((8, 1), 192, [2, 2], 16),
        ((4, 1), 256, [4, 4], 16),
        ((16, 2), 512, [8, 1], 64),
        ((4, 4), 8, [32, 17], 32),
    ],
)
def test_heads_and_sizes(
    heads: tuple[int, int],
    head_dim: int,
    new: list[int],
    block_m: int,
    num_splits: int,
    written: bool,
    device: str,
) -> None:
    case = PagedCase([37, 61], new, *heads, head_dim, device=device, padding_sequences=1)
    check(case, config(block_m, 16, num_splits), written)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize(
    ("block_size", "block_n"), [(1, 16), (5, 16), (5, 64), (8, 32), (16, 16), (32, 16), (32, 64)]
)
def test_tiles_and_blocks(block_size: int, block_n: int, written: bool, device: str) -> None:
    case = PagedCase([30, 62, 13], [4, 4, 4], block_size=block_size, device=device)
    check(case, config(16, block_n, 3), written)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "starts"),
    [
        (1, None, False, None),
        (5, None, True, None),
        (40, None, False, [3, 0, 69]),
        (None, 3.0, False, None),
        (None, None, True, [33, 0, 20]),
        (7, 0.5, True, [50, 9, 0]),
    ],
)
def test_windows_softcaps_sinks_and_starts(
    window: int | None,
    softcap: float | None,
    sinks: bool,
    starts: list[int] | None,
    num_splits: int,
    written: bool,
    device: str,
) -> None:
    # All queries of a sequence are in one tile where they are written, in several where not.
    new, block_m = ([3, 8, 1], 32) if written else ([3, 20, 1], 16)
    case = PagedCase([50, 9, 70], new, device=device, starts=starts, padding_rows=5)
    special = {"softcap": softcap, "sinks": case.sinks() if sinks else None}
    check(case, config(block_m, 16, num_splits), written, window, **special)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, written: bool, device: str) -> None:
    """Ragged batches, with sequences that run nothing, as `choose_config` and others cut them."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    new = [draw.choice([0, 1, 2, 5, 8] + [30] * (not written)) for _ in range(count)]
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
    check(case, chosen, written, draw.choice([None, None, 6]), **special)


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
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 4])
def test_strides(num_splits: int, written: bool, device: str) -> None:
    """Queries, keys and values as parts of a fused projection."""
    case = PagedCase([20, 30], [4, 2], device=device)
    expected = case.reference()
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
    fused = torch.cat((case.query_THd, *case.new_kv()), dim=1)
    query, *new = fused.split(heads, dim=1)
    outer = query.transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost
    meta = case.metadata()
    for given in (query, outer):
        assert not given.is_contiguous()
        cache = case.make_cache(with_new=not written)
        out = paged_attention(
            given,
            cache.keys,
            cache.values,
            meta.query_start_loc,
            meta.seq_lens_B,
            meta.block_tables_BM,
            max_query_len=4,
            scaling=SCALING,
            config=config(num_splits=num_splits),
            new=NewKeyValues(*new, meta.slots_T) if written else None,
        )
        case.check(out, expected)
        assert_same_cache(cache, case.make_cache(with_new=True))


# ---- an 8-bit cache ----

SCALES = pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)], ids=str)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@SCALES
@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "softcap", "sinks"),
    [
        ((4, 2), 64, None, None, False),
        ((6, 2), 80, 9, None, True),
        ((3, 1), 24, None, 3.0, False),
        ((2, 1), 512, 40, 0.5, True),
    ],
)
def test_8bit_cache(
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    num_splits: int,
    scales: tuple[float, float],
    written: bool,
    device: str,
) -> None:
    sizes: dict[str, Any] = {"head_dim": head_dim, "dtype": HALF[device], "cache_dtype": FP8}
    case = PagedCase([100, 0, 70], [8, 1, 3], *heads, **sizes, device=device, padding_rows=2)
    case.key_scale, case.value_scale = scales
    special = {"softcap": softcap, "sinks": case.sinks() if sinks else None}
    check(case, config(32, 16, num_splits), written, window, **special)


@pytest.mark.parametrize("device", DEVICES)
@SCALES
def test_8bit_cache_in_float32(scales: tuple[float, float], device: str) -> None:
    case = PagedCase([40, 5], [20, 3], cache_dtype=FP8, device=device, starts=[3, 0])
    case.key_scale, case.value_scale = scales
    check(case, None, False)


@pytest.mark.parametrize("device", DEVICES)
@SCALES
@pytest.mark.parametrize("num_splits", [1, 5])
def test_an_8bit_cache_as_in_two_launches(
    num_splits: int, scales: tuple[float, float], device: str
) -> None:
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
    assert_same_cache(one, two)


@pytest.mark.slow
def test_kernels_over_an_8bit_cache_compile_for_cards() -> None:
    """Also for one of compute capability 8.0, which has no instructions for e4m3."""
    found = compile_for_card("caches")
    assert len(found) == 5 + 3
    shared_bytes = {"80": 163 * 1024, "90": 227 * 1024}
    for name, needs in found.items():
        what, capability = name.split()[:2]
        assert needs["mma"] == (what == "attend"), name
        assert needs["shared"] <= shared_bytes[capability], name


@pytest.mark.gpu
@WRITTEN
@SCALES
@pytest.mark.parametrize("new", [[1, 1], [8, 3], [200, 40]])
@pytest.mark.parametrize("num_splits", [None, 1, 5])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 128), ((16, 2), 512)])
def test_an_8bit_cache_of_long_contexts(
    heads: tuple[int, int],
    head_dim: int,
    num_splits: int | None,
    new: list[int],
    scales: tuple[float, float],
    written: bool,
) -> None:
    if written and max(new) > MAX_WRITE_ROWS:
        pytest.skip("attention does not write prompts")
    sizes: dict[str, Any] = {"head_dim": head_dim, "dtype": torch.bfloat16, "cache_dtype": FP8}
    case = PagedCase([1000, 70], new, *heads, **sizes, device="cuda")
    case.key_scale, case.value_scale = scales
    check(case, num_splits and config(64, 16, num_splits), written)


@pytest.mark.gpu
@SCALES
def test_an_8bit_cache_of_32k(scales: tuple[float, float]) -> None:
    sizes: dict[str, Any] = {"head_dim": 128, "dtype": torch.bfloat16, "cache_dtype": FP8}
    case = PagedCase([32_760, 5], [8, 8], 32, 8, **sizes, device="cuda")
    case.key_scale, case.value_scale = scales
    check(case, None, True)


# ---- what is not written, or not seen ----


@pytest.mark.parametrize("device", DEVICES)
def test_a_corrupted_key_changes_only_its_sequence(device: str) -> None:
    case = PagedCase([20, 30], [4, 2], device=device)
    before = attend(case, config(num_splits=2))
    case.contexts[1][0][7] += 1.0
    after = attend(case, config(num_splits=2))
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


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
    assert_same_cache(cache, both[0])
    case.make_cache = lambda **_: both[1]  # type: ignore[method-assign]
    expected = attend(case, chosen)
    torch.testing.assert_close(out[:3], expected[:3], **SAME[device])
    torch.testing.assert_close(out[5:], expected[5:], **SAME[device])


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (3, None), (2, 3)])
def test_rows_of_a_context_of_nothing(
    num_splits: int, window: int | None, written: bool, device: str
) -> None:
    """Padding as sequences that have rows, no context and no slots; it comes out as zeros."""
    case = PagedCase([20, 0, 30], [4, 4, 4], device=device)
    special = {"sinks": case.sinks()}
    slots_T = case.metadata().slots_T.clone()
    slots_T[4:8] = -1
    cache = case.make_cache(with_new=False) if written else None
    chosen = config(num_splits=num_splits)
    out = attend(case, chosen, window, [24, 0, 34], cache=cache, slots_T=slots_T, **special)
    expected = case.reference(window, **special)
    expected[4:8] = 0.0
    case.check(out, expected)
    if cache is not None:
        full = case.make_cache(with_new=True)
        for x in (full.keys, full.values):
            x.flatten(0, 1)[case.slots(1)] = torch.nan
        assert_same_cache(cache, full)


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
@pytest.mark.parametrize("num_splits", [1, 3])
def test_queries_that_see_nothing_give_zeros(num_splits: int, written: bool, device: str) -> None:
    """A context that begins after its end, or in the middle of the new keys, which are written."""
    case = PagedCase([20, 30], [4, 4], device=device)
    full = case.make_cache(with_new=True)
    cache = case.make_cache(with_new=False) if written else None
    case.starts = [24, 32]
    for sinks in (None, case.sinks()):
        out = attend(case, config(num_splits=num_splits), cache=cache, sinks=sinks)
        assert bool((out[:6] == 0).all())
        assert bool(out.isfinite().all())
        assert bool((out[6:] != 0).any())
        if cache is not None:
            assert_same_cache(cache, full)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_that_shares_a_cache(device: str) -> None:
    """It brings the keys that are there already, and other queries."""
    case = PagedCase([20, 70], [4, 2], device=device)
    cache = case.make_cache(with_new=False)
    first = attend(case, config(num_splits=3), cache=cache)
    assert torch.equal(attend(case, config(num_splits=3), cache=cache), first)
    case.query_THd = case.query_THd.flip(0)
    case.check(attend(case, config(num_splits=3), 9, cache=cache), case.reference(9))


# ---- counters and partial results ----


@pytest.mark.parametrize("device", DEVICES)
@WRITTEN
def test_launches_of_other_shapes_share_counters(written: bool, device: str) -> None:
    cases = [
        PagedCase([90, 3], [4, 2], device=device),
        PagedCase([31], [8], 8, 2, device=device),
        PagedCase([5, 7, 60], [2, 0, 1], 2, 1, device=device),
    ]
    for _ in range(2):
        for case, splits in zip(cases, (3, 7, 2)):
            chosen = config(32, 16, splits)
            batch, queries = len(case.new), max(case.new)
            shape = AttentionShape(
                *(batch, sum(case.new), queries, case.num_heads, case.num_kv_heads, case.head_dim),
                *(case.dtype, case.dtype),
            )
            assert Workspace.make(shape, config(32, 16, 1), torch.device(device)) is None
            workspace = Workspace.make(shape, chosen, torch.device(device))
            assert workspace is not None
            workspace.partial.fill_(torch.nan)
            workspace.lse.fill_(torch.nan)
            cache = case.make_cache(with_new=False) if written else None
            out = attend(case, chosen, cache=cache, workspace=workspace)
            case.check(out, case.reference())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [False, True])
def test_prompts_may_be_split_too(sinks: bool, device: str) -> None:
    """Tiles of ragged prompts, with keys that are cached."""
    case = PagedCase([30, 0, 11], [40, 3, 29], device=device, padding_rows=3)
    check(case, config(num_splits=3), False, sinks=case.sinks() if sinks else None)


# ---- what only a card can do ----


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, head_dim", [((32, 8), 128), ((14, 2), 64), ((16, 8), 256), ((32, 4), 512)]
)
def test_long_contexts(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, queries: int
) -> None:
    past, new = [3000, 0, 517, 8191], [queries] * 4
    case = PagedCase(past, new, *heads, head_dim, dtype=dtype, device="cuda")
    check(case, None, False)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [((32, 8), 128), ((8, 4), 256), ((32, 4), 512)])
def test_long_prompts(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    case = PagedCase([0, 100, 700], [900, 3, 300], *heads, head_dim, dtype=dtype, device="cuda")
    case.padding_rows, case.padding_sequences = 21, 1
    check(case, None, False, window)


@pytest.mark.gpu
@WRITTEN
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_warps", [2, 4, 8])
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 8, 33])
def test_configurations_of_the_benchmark(
    num_splits: int, block_n: int, num_warps: int, num_stages: int, written: bool
) -> None:
    many: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    for queries, block_m in ((1, 16), (8, 32)):
        case = PagedCase([1500, 249, 0, 63], [queries] * 4, 8, 2, 128, **many)
        chosen = replace(config(block_m, block_n, num_splits, num_warps), num_stages=num_stages)
        assert torch.equal(check(case, chosen, written), check(case, chosen, written))


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
