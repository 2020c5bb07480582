"""The KV write in Triton against index_put. On a CPU it runs under Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.attention.kv_write import kv_write
from tests.kernels.devices import DEVICES

pytest.importorskip("triton", reason="needs triton")
FP8 = torch.float8_e4m3fn


def kv_write_reference(
    key_THd: Tensor,
    value_THd: Tensor,
    keys_NSHd: Tensor,
    values_NSHd: Tensor,
    slots_T: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """`kv_write` in plain torch."""
    written_T = slots_T >= 0
    slots_T = slots_T[written_T]
    place_T = slots_T // keys_NSHd.shape[1], slots_T % keys_NSHd.shape[1]
    for rows_THd, cache_NSHd, scale in (
        (key_THd, keys_NSHd, key_scale),
        (value_THd, values_NSHd, value_scale),
    ):
        rows_THd = rows_THd[written_T]
        if cache_NSHd.dtype.itemsize == 1:
            limit = torch.finfo(cache_NSHd.dtype).max
            rows_THd = (rows_THd.float() * (1.0 / scale)).clamp(-limit, limit)
            # torch does not index 8-bit floats on every device.
            cache_NSHd.view(torch.uint8)[place_T] = rows_THd.to(cache_NSHd.dtype).view(torch.uint8)
        else:
            cache_NSHd[place_T] = rows_THd.to(cache_NSHd.dtype)


def bits(x: Tensor) -> Tensor:
    """Compared as bits, so that NaN equals NaN."""
    return x.view(torch.uint8)


def make(
    num_tokens: int,
    heads: int,
    size: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, both caches full of NaN, and slots with holes."""
    torch.manual_seed(num_tokens + size)
    num_blocks = -(-num_tokens // block_size) + 3
    key, value = (torch.randn(num_tokens, heads, size).to(device, dtype) for _ in range(2))
    cache = torch.full((num_blocks, block_size, heads, size), torch.nan, device=device)
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.3] = -1
    keys, values = cache.to(cache_dtype), cache.clone().to(cache_dtype)
    return key, value, keys, values, slots.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "size", "block_size"),
    [(1, 1, 64, 16), (17, 2, 80, 16), (9, 3, 128, 1), (33, 8, 96, 8), (5, 5, 256, 7)],
)
def test_equals_the_reference(
    num_tokens: int, heads: int, size: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    key, value, *caches, slots = make(num_tokens, heads, size, block_size, dtype, dtype, device)
    expected = [cache.clone() for cache in caches]
    kv_write_reference(key, value, *expected, slots)
    for cache, rows in zip(expected, (key, value)):
        assert torch.equal(cache.flatten(0, 1)[slots[slots >= 0]], rows[slots >= 0])
    kv_write(key, value, *caches, slots)
    for cache, other in zip(caches, expected):
        assert torch.equal(bits(cache), bits(other))


@pytest.mark.parametrize("device", DEVICES)
def test_padding_writes_nothing(device: str) -> None:
    key, value, *caches, slots = make(6, 2, 64, 16, torch.float32, torch.float32, device)
    before = [cache.clone() for cache in caches]
    kv_write(key, value, *caches, torch.full_like(slots, -1))
    kv_write(key[:0], value[:0], *caches, slots[:0])
    for cache, other in zip(caches, before):
        assert torch.equal(bits(cache), bits(other))


@pytest.mark.parametrize("device", DEVICES)
def test_strides_as_models_hand_them_over(device: str) -> None:
    """Heads outermost, or parts of one fused projection."""
    key, value, *caches, slots = make(11, 2, 64, 8, torch.float32, torch.float32, device)
    expected = [cache.clone() for cache in caches]
    kv_write(key, value, *expected, slots)
    outer_key, outer_value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    fused = torch.cat((key, value, key), dim=1)
    for some_key, some_value in ((outer_key, outer_value), (fused[:, :2], fused[:, 2:4])):
        found = [torch.full_like(cache, torch.nan) for cache in caches]
        kv_write(some_key, some_value, *found, slots)
        for cache, other in zip(found, expected):
            assert torch.equal(bits(cache), bits(other))


def test_the_reference_cuts_8bit_values_to_their_range() -> None:
    key, value, *caches, slots = make(8, 2, 64, 16, torch.bfloat16, FP8, "cpu")
    key[0], slots[0] = 1e4, caches[0].shape[0] * 16 - 1  # a slot of its own
    kv_write_reference(key, value, *caches, slots, key_scale=0.5, value_scale=2.0)
    assert bool((caches[0].float()[-1, -1] == 448).all())
    at = int((slots >= 0).nonzero()[-1])
    place = divmod(int(slots[at]), 16)
    torch.testing.assert_close(
        caches[1].float()[place] * 2.0, value[at].float(), rtol=0.07, atol=0.01
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.013, 0.4)])
def test_8bit_equals_the_reference(
    scales: tuple[float, float], dtype: torch.dtype, device: str
) -> None:
    key, value, *caches, slots = make(100, 8, 128, 16, dtype, FP8, device)
    key[5] *= 1e4
    value[7] *= 1e-3
    expected = [cache.clone() for cache in caches]
    given = {"key_scale": scales[0], "value_scale": scales[1]}
    kv_write_reference(key, value, *expected, slots, **given)
    kv_write(key, value, *caches, slots, **given)
    for cache, other in zip(caches, expected):
        assert torch.equal(bits(cache), bits(other))


@pytest.mark.parametrize("device", DEVICES)
def test_every_8bit_number_and_what_lies_between(device: str) -> None:
    """Also ties, which go to the even one, and numbers beyond the largest."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = [torch.nextafter(middles, torch.full_like(middles, s * 1e4)) for s in (-1.0, 1.0)]
    row = torch.cat((numbers, middles, *around, torch.tensor([449.0, -1e30, 1e-30])))
    row = torch.nn.functional.pad(row, (0, 1024 - len(row))).view(4, 1, 256).to(device)
    caches = [torch.zeros(1, 4, 1, 256, device=device).to(FP8) for _ in range(4)]
    slots = torch.arange(4, device=device)
    kv_write_reference(row, -row, *caches[:2], slots)
    kv_write(row, -row, *caches[2:], slots)
    for cache, other in zip(caches[:2], caches[2:]):
        assert torch.equal(cache.float(), other.float())  # 0 equals -0
