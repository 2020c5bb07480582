"""How `paged_attention` cuts its work."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.kernels.attention.paged_attention import (
    MAX_FLOAT32_HEAD_DIM,
    AttentionShape,
    QueryTiles,
    choose_config,
    paged_attention,
    writes_new,
)
from peagle.kernels.launch import DeviceLimits

H100 = DeviceLimits(num_sms=132, shared_bytes=232_448)


def shape_of(**sizes: Any) -> AttentionShape:
    batch = sizes.pop("num_sequences", 1)
    queries = sizes.pop("max_query_len", 1)
    defaults: dict[str, Any] = {
        "num_tokens": batch * queries,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "query_dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
    }
    return AttentionShape(num_sequences=batch, max_query_len=queries, **{**defaults, **sizes})


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 33, 64, 256])
@pytest.mark.parametrize("queries", [1, 8, 17])
def test_a_wave_of_programs(batch: int, queries: int) -> None:
    shape = shape_of(num_sequences=batch, max_query_len=queries)
    chosen = choose_config(shape, H100)
    programs = QueryTiles.of(shape, chosen.block_m).count * shape.num_kv_heads * chosen.num_splits
    assert programs >= 0.7 * H100.num_sms
    assert chosen.num_splits == 1 or programs <= 2.5 * H100.num_sms


@pytest.mark.parametrize("queries", [1, 5, 8])
def test_the_queries_of_a_step_share_one_tile(queries: int) -> None:
    shape = shape_of(num_sequences=4, max_query_len=queries)
    chosen = choose_config(shape, H100)
    assert QueryTiles.of(shape, chosen.block_m) == QueryTiles(4, 1)
    assert chosen.block_m < max(17, 2 * queries * shape.group)


@pytest.mark.parametrize("batch", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("queries", [16, 17, 32, 64])
@pytest.mark.parametrize("head", [{}, {"num_heads": 64, "head_dim": 64}])
def test_many_rows_are_shared_out(batch: int, queries: int, head: dict[str, int]) -> None:
    """Into tiles of 32 where two programs can share the keys of each, else of 64."""
    shape = shape_of(num_sequences=batch, max_query_len=queries, **head)
    small = 2 * shape.num_kv_heads * QueryTiles.of(shape, 32).count <= H100.num_sms
    assert choose_config(shape, H100).block_m == (32 if small else 64)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ({"num_sequences": 16, "max_query_len": 8}, (32, 128, 4)),  # nothing is split
        ({"num_sequences": 4, "max_query_len": 8}, (32, 64, 4)),
        ({"num_sequences": 4, "max_query_len": 16}, (32, 64, 4)),  # many rows, shared out
        ({"max_query_len": 64}, (32, 64, 4)),
        ({"num_sequences": 16, "max_query_len": 16}, (64, 32, 4)),
        ({"num_sequences": 16, "max_query_len": 64}, (64, 32, 4)),
        ({"num_sequences": 64, "max_query_len": 8}, (32, 32, 2)),  # several a multiprocessor
        ({"max_query_len": 2048}, (128, 64, 8)),
    ],
)
def test_the_tiles_that_were_fastest(sizes: dict[str, int], tile: tuple[int, int, int]) -> None:
    """Of the sweeps in docs/lab/engine.md."""
    chosen = choose_config(shape_of(**sizes), H100)
    assert (chosen.block_m, chosen.block_n, chosen.num_warps) == tile


def test_a_prompt_is_not_split() -> None:
    shape = shape_of(num_sequences=3, max_query_len=2048, num_tokens=2400)
    chosen = choose_config(shape, H100)
    assert chosen.num_splits == 1
    # Ragged: not three times the longest.
    assert QueryTiles.of(shape, chosen.block_m) == QueryTiles(2400 // 32 + 3, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [(1, 1), (14, 2), (64, 1)])
@pytest.mark.parametrize("shared_bytes", [99 * 1024, 232_448])
def test_tiles_fit_shared_memory(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], shared_bytes: int
) -> None:
    num_heads, num_kv_heads = heads
    if dtype == torch.float32 and head_dim > MAX_FLOAT32_HEAD_DIM:
        return  # refused by the backend
    for queries in (1, 8, 500):
        shape = shape_of(
            max_query_len=queries,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            query_dtype=dtype,
            cache_dtype=dtype,
        )
        chosen = choose_config(shape, DeviceLimits(100, shared_bytes))
        assert chosen.block_m >= shape.group
        # Beside the tile that is worked on, one less than there are stages is on its way.
        keys_and_values = 2 * (chosen.num_stages - 1) * chosen.block_n
        block_d = max(16, 1 << (head_dim - 1).bit_length())
        assert (keys_and_values + chosen.block_m) * block_d * dtype.itemsize <= shared_bytes


@pytest.mark.parametrize("seed", range(30))
def test_ragged_tiles_cover_every_query(seed: int) -> None:
    """The device's rule: sequence b has the tiles from start_b // queries + b on."""
    draw = random.Random(seed)
    lens = [draw.choice([0, 1, 3, 8, 100]) for _ in range(draw.randint(1, 8))]
    block_m, group = draw.choice([(16, 1), (16, 4), (32, 7), (64, 64)])
    queries = block_m // group
    shape = shape_of(
        num_sequences=len(lens),
        num_tokens=sum(lens),
        max_query_len=max([*lens, 1]),
        num_heads=group,
        num_kv_heads=1,
    )
    tiles = QueryTiles.of(shape, block_m)
    first = [sum(lens[:b]) // queries + b for b in range(len(lens) + 1)]
    for length, start, end in zip(lens, first, first[1:]):
        assert (end - start) * queries >= length
        if tiles.per_sequence is not None:
            assert tiles.per_sequence * queries >= length
    assert tiles.count >= (first[-1] if tiles.per_sequence is None else len(lens))


@pytest.mark.parametrize(
    ("batch", "queries", "tokens", "expected"),
    [
        (1, 1, 1, True),
        (64, 8, 512, True),
        (4, 32, 128, True),
        (4, 64, 256, True),
        (4, 65, 260, False),  # too many to write at a time
        (3, 32, 40, True),
        (3, 2048, 2400, False),
    ],
)
def test_who_writes_keys(batch: int, queries: int, tokens: int, expected: bool) -> None:
    shape = shape_of(num_sequences=batch, max_query_len=queries, num_tokens=tokens)
    assert writes_new(shape) == expected


@pytest.mark.parametrize(
    "batches",
    [
        ([300, 400], [40] * 5 + [700], [60, 90] * 50),
        ([33 + i for i in range(17)], [64] * 4 + [3] * 9, [1, 8, 50] * 40),
    ],
    ids=["long", "short"],
)
def test_ragged_batches_of_many_sizes_share_a_kernel(
    batches: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel compiles for seconds, and the requests of its batch wait for that."""
    constants: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: constants.append(options)

    kernels = pytest.importorskip("peagle.kernels.attention.paged_attention_triton")
    monkeypatch.setattr(kernels, "attend_kernel", Recorder())
    cache = torch.zeros(4, 16, 2, 64)
    for lens in batches:
        starts = torch.tensor([0, *lens]).cumsum(0)
        tables = torch.zeros(len(lens), 64, dtype=torch.int64)
        paged_attention(
            torch.zeros(sum(lens), 4, 64), cache, cache, starts, torch.tensor(lens), tables,
            max_query_len=max(lens), scaling=1.0,
        )  # fmt: skip
    assert all(options == constants[0] for options in constants)
