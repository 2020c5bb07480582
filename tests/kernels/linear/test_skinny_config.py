"""Which configuration a product of few rows gets, and when it is left to the library."""

from itertools import product

import pytest

from peagle.kernels.linear.skinny_linear import (
    H100_SHARED_BYTES,
    MAX_BLOCK_M,
    SkinnyConfig,
    choose_config,
    max_skinny_rows,
)

NUM_SMS = 132
# N, K of Qwen3-8B and its drafter.
OUT, QKV, DOWN, GATE_UP = (4096, 4096), (6144, 4096), (4096, 12_288), (24_576, 4096)
LM_HEAD, D_HEAD = (151_936, 4096), (32_000, 4096)
WX_16 = SkinnyConfig(16, 64, 128, 1, 4, 6, kind="wx", tma=True)
GEMV = SkinnyConfig(1, 4, 1024, 1, 2, 1, kind="gemv")


def chosen(m: int, shape: tuple[int, int], *, swiglu: bool = False) -> SkinnyConfig:
    return choose_config(m, *shape, 2, NUM_SMS, swiglu=swiglu, tma=True)


def test_a_config_travels_as_numbers() -> None:
    for config in (WX_16, GEMV, SkinnyConfig(16, 32, 256, 2, 4, 6)):
        assert SkinnyConfig.from_ints(config.to_ints()) == config


def test_what_was_fastest_on_an_h100() -> None:
    for shape in (OUT, QKV, DOWN, GATE_UP, LM_HEAD):
        assert chosen(1, shape) == GEMV
    for m in (2, 8, 16):
        assert chosen(m, OUT) == chosen(m, QKV) == chosen(m, GATE_UP) == chosen(m, D_HEAD) == WX_16
        assert chosen(m, DOWN) == SkinnyConfig(16, 32, 256, 1, 4, 6)
    for m, block_m in ((17, 32), (32, 32), (33, 64), (64, 64)):
        tall = SkinnyConfig(block_m, 128, 128, 1, 4, 3, kind="wx", tma=True)
        assert chosen(m, LM_HEAD) == chosen(m, D_HEAD) == tall
        low = SkinnyConfig(block_m, 64, 128, 1, 4, 4, kind="wx", tma=True)
        assert chosen(m, GATE_UP) == low
        assert chosen(m, DOWN) == SkinnyConfig(block_m, 64, 128, 2, 4, 4, kind="wx", tma=True)
    assert chosen(8, GATE_UP, swiglu=True) == SkinnyConfig(
        16, 64, 128, 1, 4, 4, kind="wx", tma=True
    )
    assert chosen(1, GATE_UP, swiglu=True) == SkinnyConfig(1, 2, 1024, 1, 2, 1, kind="gemv")


def test_small_and_many_rowed_products_stay_with_the_library() -> None:
    assert [max_skinny_rows(*shape) for shape in (OUT, QKV, DOWN, GATE_UP, LM_HEAD)] == [
        *(16, 16, 32, 64, 128)
    ]
    assert max_skinny_rows(*GATE_UP, swiglu=True) == 128
    assert max_skinny_rows(64, 4096) == 0
    assert max_skinny_rows(*OUT, itemsize=4) == max_skinny_rows(4096, 4097) == 0


@pytest.mark.parametrize("m", [1, 4, 16, 17, 64, 200, 100_000])
@pytest.mark.parametrize("n", [16, 2560, 4096, 6144, 24_576, 151_936])
def test_every_choice_fits(m: int, n: int) -> None:
    for k, swiglu, shared_bytes, itemsize, num_sms, tma in product(
        [16, 64, 100, 4096, 12_288],
        [False, True],
        [100_000, H100_SHARED_BYTES],
        [2, 4],
        [8, NUM_SMS],
        [False, True],
    ):
        config = choose_config(
            *(m, n, k, itemsize, num_sms),
            swiglu=swiglu,
            tma=tma,
            shared_bytes=shared_bytes,
        )
        for value in (config.block_m, config.block_n, config.block_k, config.split_k):
            assert value >= 1 and value & (value - 1) == 0
        assert tma or not config.tma
        if config.kind == "gemv":
            assert m == config.block_m == 1
            continue
        assert 16 <= config.block_m <= (2 * MAX_BLOCK_M if tma else MAX_BLOCK_M)
        assert config.block_n >= (64 if config.kind == "wx" else 16)
        in_registers = config.kind == "xw" and config.block_m < 64
        stages = max(config.num_stages - in_registers, 1)
        assert stages * config.stage_bytes(itemsize, swiglu=swiglu) <= shared_bytes
        if config.split_k > 1:
            assert -(-m // config.block_m) * -(-n // config.block_n) <= 2**16
