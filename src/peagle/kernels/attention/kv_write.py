"""Write keys and values of packed tokens into the paged cache.

The attention kernel writes those of a pass itself where each sequence has few (`paged_attention`).

Shapes: T packed tokens, N blocks, S slots of a block, Hkv key/value heads, d head size.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_E4M3_CAPABILITY = (8, 9)  # the first one whose cards convert e4m3


def kernel_view(cache_NSHd: Tensor) -> Tensor:
    """Return a cache as kernels get it: as its bytes where they convert e4m3 by its bits."""
    if cache_NSHd.dtype.itemsize > 1 or _converts_e4m3(cache_NSHd.device):
        return cache_NSHd
    assert cache_NSHd.dtype == torch.float8_e4m3fn
    return cache_NSHd.view(torch.uint8)


@cache
def _converts_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


def kv_write(
    key_THd: Tensor,
    value_THd: Tensor,
    keys_NSHd: Tensor,
    values_NSHd: Tensor,
    slots_T: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """keys[slot_t] = key_t, values[slot_t] = value_t in Triton; slot -1 writes nothing.

    Changes only the cache and needs no synchronisation, so that a CUDA graph can hold it.

    Args:
        key_THd, value_THd: [T, Hkv, d], the last dimension contiguous.
        keys_NSHd, values_NSHd: the cache of one layer, [N, S, Hkv, d] with equal strides.
        slots_T: block * S + place in the block, different for all tokens that write.
        key_scale, value_scale: an 8-bit cache holds x / scale, cut to its largest number; others
            take no scale.
    """
    import triton

    from peagle.kernels.attention import kv_write_triton

    num_tokens, num_kv_heads, head_dim = key_THd.shape
    assert keys_NSHd.stride() == values_NSHd.stride() and keys_NSHd.stride(3) == 1
    assert key_THd.stride(2) == value_THd.stride(2) == 1
    is_8bit = keys_NSHd.dtype.itemsize == 1
    assert is_8bit or key_scale == value_scale == 1.0, "only an 8-bit cache is scaled"
    if num_tokens == 0:
        return
    kernels: Any = kv_write_triton
    kernels.kv_write_kernel[(num_tokens,)](
        key_THd,
        value_THd,
        kernel_view(keys_NSHd),
        kernel_view(values_NSHd),
        slots_T,
        1.0 / key_scale,
        1.0 / value_scale,
        *key_THd.stride()[:2],
        *value_THd.stride()[:2],
        *keys_NSHd.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys_NSHd.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        LIMIT=torch.finfo(keys_NSHd.dtype).max if is_8bit else 0.0,
    )
