"""The Triton kernel of `fp8_activations`.

Shapes: M rows of x, K inputs, a multiple of 128.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.overlap_triton import wait_for_inputs

BLOCK = tl.constexpr(128)  # inputs that share a scale


@triton.jit(do_not_specialize=["num_blocks"])
def quantise_kernel(
    q_ptr,  # float8e4nv [M, K], contiguous
    scale_ptr,  # float32 [K / 128, stride_scale]
    x_ptr,  # [M, K], or with GATED [M, 2K], contiguous
    num_blocks,  # M * K / 128
    num_k,
    stride_scale,
    BLOCKS: tl.constexpr,  # of one program
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    GATED: tl.constexpr,  # quantise silu(gate) * up, all gates of a row first
    TILED: tl.constexpr,  # store numbers in the order of `fp8_activations.tiled_inputs`
    OVERLAPS: tl.constexpr,
):
    """q = x / scale, where scale is the largest magnitude of a row's 128 inputs over LARGEST."""
    wait_for_inputs(OVERLAPS)
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = number < num_blocks
    row, block = number // (num_k // BLOCK), number % (num_k // BLOCK)
    place = tl.arange(0, BLOCK)[None, :]
    first = number * BLOCK
    if GATED:
        first += row * num_k
    x_ptrs = x_ptr + first[:, None] + place
    x = tl.load(x_ptrs, mask=is_block[:, None], other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptrs + num_k, mask=is_block[:, None], other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    scale = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST) / LARGEST
    q = x / scale[:, None]
    if TILED:  # of tiles of 64: groups, pairs, threads, places
        words = q.reshape([BLOCKS, 2, 4, 2, 4, 2]).permute([0, 1, 4, 2, 5, 3])
        low, high = tl.split(words)
        q = tl.join(high, low).reshape([BLOCKS, 128])
    q_ptrs = q_ptr + number[:, None] * BLOCK + place
    tl.store(q_ptrs, q.to(q_ptr.dtype.element_ty), mask=is_block[:, None])
    tl.store(scale_ptr + block * stride_scale + row, scale, mask=is_block)


@triton.jit(do_not_specialize=["eps"])
def quantise_normed_kernel(
    q_ptr,  # float8e4nv [M, K], contiguous
    scale_ptr,  # float32 [K / 128, stride_scale]
    x_ptr,  # [M, K], contiguous
    weight_ptr,  # [K]
    num_k,
    stride_scale,
    eps,
    BLOCKS: tl.constexpr,  # a power of two, at least K / 128
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Quantise one row of x / sqrt(mean(x^2) + eps) * weight as `quantise_kernel` does."""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_input = place < num_k
    x = tl.load(x_ptr + row * num_k + place, mask=is_input, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, 1), 0) / num_k
    weight = tl.load(weight_ptr + place, mask=is_input, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt(mean + eps)) * weight
    scale = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST) / LARGEST
    q = (x / scale[:, None]).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + row * num_k + place, q, mask=is_input)
    tl.store(scale_ptr + block * stride_scale + row, scale, mask=block < num_k // BLOCK)
