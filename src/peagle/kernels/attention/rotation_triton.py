"""The Triton kernel of `rotation`."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.overlap_triton import wait_for_inputs


@triton.jit(do_not_specialize=["eps"])
def rotate_heads_kernel(
    queries_ptr,  # [T, H, d], contiguous
    keys_ptr,  # [T, G, d], contiguous
    qkv_ptr,  # [T, W], contiguous
    cos_ptr,  # [T, d], contiguous; sin too
    sin_ptr,
    q_weight_ptr,  # [d]; k too; not looked at without HAS_NORM
    k_weight_ptr,
    width,  # W
    num_heads,  # H
    num_key_heads,  # G
    eps,
    HEADS: tl.constexpr,  # of a program: all queries, or all keys
    HALF: tl.constexpr,  # d / 2
    HAS_NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm and rotate HEADS heads of one token."""
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    is_key = head >= num_heads
    i = tl.arange(0, HALF)
    place = (head + tl.arange(0, HEADS))[:, None] * (2 * HALF) + i[None, :]
    x_ptrs = qkv_ptr + token * width + place
    low = tl.load(x_ptrs).to(tl.float32)
    high = tl.load(x_ptrs + HALF).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        factor = 1.0 / tl.sqrt(mean + eps)
        weight_ptr = q_weight_ptr
        if is_key:
            weight_ptr = k_weight_ptr
        low *= factor[:, None] * tl.load(weight_ptr + i).to(tl.float32)[None, :]
        high *= factor[:, None] * tl.load(weight_ptr + HALF + i).to(tl.float32)[None, :]
    of_token = token * (2 * HALF) + i
    cos_low = tl.load(cos_ptr + of_token).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + of_token).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + of_token + HALF).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + of_token + HALF).to(tl.float32)[None, :]
    out_ptrs = queries_ptr + token * num_heads * (2 * HALF) + place
    if is_key:
        place -= num_heads * (2 * HALF)
        out_ptrs = keys_ptr + token * num_key_heads * (2 * HALF) + place
    dtype = queries_ptr.dtype.element_ty
    tl.store(out_ptrs, (low * cos_low - high * sin_low).to(dtype))
    tl.store(out_ptrs + HALF, (high * cos_high + low * sin_high).to(dtype))
