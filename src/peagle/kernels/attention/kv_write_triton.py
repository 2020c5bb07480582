"""Triton kernel of the KV write; `kv_write` launches it and documents its result."""

import triton
import triton.language as tl

from peagle.kernels.attention.fp8_cache_triton import as_stored


@triton.jit
def kv_write_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    key_factor,
    value_factor,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_block,
    stride_slot,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest number of an 8-bit cache; 0: copy as it is
):
    """Write the keys and values of one token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_KV_HEADS) & (offs_d < HEAD_DIM)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    target = target + head * stride_head + offs_d
    key = tl.load(key_ptr + row * stride_key_row + head * stride_key_head + offs_d, mask=mask)
    value = tl.load(
        value_ptr + row * stride_value_row + head * stride_value_head + offs_d, mask=mask
    )
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + target, as_stored(key, key_factor, dtype, LIMIT), mask=mask)
    tl.store(values_ptr + target, as_stored(value, value_factor, dtype, LIMIT), mask=mask)
